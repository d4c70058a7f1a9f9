"""A watch that keeps the weights of attention."""

import torch

from memlm.model.attention.watch import Watch


class Weights(Watch):
    """Keeps the weights of each layer, and changes no head."""

    def __init__(self):
        self.of_layer = {}

    def weights(self, layer, weights_BHTE, mask):
        self.of_layer[layer] = weights_BHTE

    def heads(self, layer, mixed_BHTd):
        return mixed_BHTd


def weights_of(decoder, tokens):
    """The weights of each layer while it reads a text."""
    watch = Weights()
    with torch.inference_mode():
        decoder(torch.tensor([tokens]), watch=watch)
    return list(watch.of_layer.values())
