"""The twins of joins and stacks: float64, token by token, from the papers' definitions alone."""

from __future__ import annotations

import numpy as np


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


def gated(twin, part, block, sublayer, stream, change):
    """GTrXL's GRU gates, with the weights cut into the matrices of the paper."""
    prefix = f"blocks.{block}.{sublayer}_join."
    W_r, W_z, W_g = np.split(twin.w[prefix + "change.weight"], 3)
    U_r, U_z = np.split(twin.w[prefix + "stream.weight"], 2)
    out = []
    for x, y in zip(stream, np.maximum(change, 0), strict=True):
        r = sigmoid(W_r @ y + U_r @ x)
        z = sigmoid(W_z @ y + U_z @ x - twin.w[prefix + "bias_D"])
        h = np.tanh(W_g @ y + twin.w[prefix + "reset.weight"] @ (r * x))
        out.append((1 - z) * x + z * h)
    return np.stack(out)
