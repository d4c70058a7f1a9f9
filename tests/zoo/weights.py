"""A watch that keeps the weights of attention."""

from memlm.model.watch import Watch


class Weights(Watch):
    """Keeps the weights of each layer, and changes no head."""

    def __init__(self):
        self.of_layer = {}

    def weights(self, layer, weights_BHTE, mask):
        self.of_layer[layer] = weights_BHTE

    def heads(self, layer, mixed_BHTd):
        return mixed_BHTd
