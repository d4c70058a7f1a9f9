"""The twin of exits: losses, halting and oracles of the Depth-Adaptive Transformer, token by token in float64."""

import math

import numpy as np
from zoo.twins import ZooTwin

POWERS = {"uniform": lambda n: 1.0, "sqrt": math.sqrt, "linear": float}


class ExitTwin(ZooTwin):
    """Reads one text with the weights of a decoder with exits."""

    def __init__(self, decoder, tokens, targets):
        super().__init__(decoder)
        self.targets, part = targets, self.config.stack
        self.layers = sorted({*(part.layers or range(1, self.config.num_layers + 1)), self.config.num_layers})
        self.logits(tokens)  # leaves the streams of all layers

    def scores(self, layer, stream):
        """Logits behind a layer: the exit's norm and the model's head."""
        name = "norm" if layer == self.config.num_layers else f"stack.norms.{layer}"
        return self.norm(name, stream) @ self.w["embedding.weight"].T

    def likelihood(self, layer, t):
        scores = self.scores(layer, self.streams[layer][t])
        return scores[self.targets[t]] - scores.max() - math.log(sum(math.exp(s - scores.max()) for s in scores))

    def aligned(self):
        total, weights = 0.0, 0.0
        for layer in self.layers:
            weight = POWERS[self.config.stack.weighting](layer)
            nats = [-self.likelihood(layer, t) for t in range(len(self.targets))]
            total, weights = total + weight * sum(nats) / len(nats), weights + weight
        return total / weights

    def best_exit(self, t):
        """The exit of the oracle, as a layer."""
        part, score = self.config.stack, {}
        for layer in self.layers:
            score[layer] = -part.depth_cost * layer
            for s in range(len(self.targets)):
                if s != t and not part.smoothing:
                    continue
                kernel = math.exp(-((t - s) ** 2) / part.smoothing) if part.smoothing else 1.0
                is_right = int(np.argmax(self.scores(layer, self.streams[layer][s]))) == self.targets[s]
                score[layer] += kernel * (is_right if part.oracle == "correctness" else self.likelihood(layer, s))
        return max(self.layers, key=lambda layer: (score[layer], -layer))

    def halts(self, t):
        """q(n) by layer."""
        weight, bias = self.w["stack.halt.weight"], self.w["stack.halt.bias"]

        def read(layer):
            stream = self.streams[layer][t]
            return weight @ (stream / np.sqrt((stream**2).mean() + np.finfo(np.float64).eps)) + bias

        if self.config.stack.halt == "multinomial":
            scores = np.exp(read(1) - read(1).max())
            return dict(zip(self.layers, scores / scores.sum(), strict=True))
        q, goes_on = {}, 1.0
        for number, layer in enumerate(self.layers[:-1]):
            stop = 1 / (1 + math.exp(-read(layer)[number]))
            q[layer], goes_on = goes_on * stop, goes_on * (1 - stop)
        return {**q, self.layers[-1]: goes_on}

    def halting_loss(self):
        return -sum(math.log(self.halts(t)[self.best_exit(t)]) for t in range(len(self.targets))) / len(self.targets)
