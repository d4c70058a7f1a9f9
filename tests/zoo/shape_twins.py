"""The twins of models of other shapes: float64, from the papers' definitions, one vector at a time."""

import numpy as np
from zoo.twins import ZooTwin


class VectorTwin(ZooTwin):
    """A decoder's twin that reads vectors in the place of tokens. `text` stands for them where a part asks."""

    def hidden(self, vectors):
        c = self.config
        x = np.array(vectors)
        if c.positions == "learned":
            x = x + self.w["positions.weight"][np.arange(len(x)) % c.context_length]
        x = self.stack(x)
        return x if c.norm_order == "post" else self.norm("norm", x)

    def scores(self, hidden):
        return hidden @ self.w["embedding.weight" if self.config.tied_embeddings else "head.weight"].T


def numbers(module):
    return {name: parameter.detach().double().numpy() for name, parameter in module.named_parameters()}


def decision_logits(model, returns, states, actions):
    """Scores (T, A) of the actions of one episode."""
    w, twin, read = numbers(model), VectorTwin(model.decoder), []

    def embed(vector, step):
        x = vector + w["of_step.weight"][step]
        x = (x - x.mean()) / np.sqrt(x.var() + 1e-5)
        return x * w["norm.weight"] + w["norm.bias"]

    for step in range(len(actions)):
        asked = returns[step] / model.config.return_scale
        read.append(embed(w["of_return.weight"][:, 0] * asked + w["of_return.bias"], step))
        read.append(embed(w["of_state.weight"] @ states[step] + w["of_state.bias"], step))
        read.append(embed(twin.w["embedding.weight"][actions[step]], step))
    hidden = twin.hidden(read)
    return np.array([twin.scores(hidden[3 * step + 1]) for step in range(len(actions))])
