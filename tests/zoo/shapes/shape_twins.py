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


def megabyte_logits(model, text):
    """Scores (T, V) of each byte of a text from those before it."""
    w, of_patches, of_bytes = numbers(model), VectorTwin(model.global_model), VectorTwin(model.local_model)
    P = model.config.patch
    D, scores = model.config.global_model.dim // P, []
    patches = [of_patches.w["embedding.weight"][0]]  # the one before the first
    for begin in range(0, len(text), P):
        made, read = of_patches.hidden(patches)[-1], []
        for place in range(min(P, len(text) - begin)):
            before = of_bytes.w["embedding.weight"][text[begin + place - 1]] if place else w["start_L"]
            read.append(w["to_local.weight"] @ made[place * D : (place + 1) * D] + before)
            scores.append(of_bytes.scores(of_bytes.hidden(read)[-1]))
        patches.append(np.concatenate([w["embedding.weight"][byte] for byte in text[begin : begin + P]]))
    return np.array(scores)
