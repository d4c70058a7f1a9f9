"""The twins of linear mixers: double sums over pairs of tokens, which know no recurrence."""

from __future__ import annotations

import functools
import math

import numpy as np
from memory_twins import turn
from zoo.draw_twins import normal

from memlm.zoo.performer import Performer
from memlm.zoo.rfa import RandomFeatureAttention


@functools.cache
def performer_directions(seed: int, layer: int, group: int, count: int, width: int) -> np.ndarray:
    """Gram and Schmidt's steps on Gaussian vectors, a block of `width` at a time, with lengths of other ones."""
    found: list[np.ndarray] = []
    for number in range(count):
        block, row = divmod(number, width)
        vector = np.array([normal(seed, layer, group, block, row, column) for column in range(width)])
        for other in found[block * width :]:
            vector = vector - (vector @ other) * other
        found.append(vector / np.linalg.norm(vector))
    lengths = []
    for number in range(count):
        block, row = divmod(number, width)
        longer = [normal(seed, layer, group, block, row, column) for column in range(width, 2 * width)]
        lengths.append(math.sqrt(sum(x * x for x in longer)))
    return np.array(lengths)[:, None] * np.stack(found)


@functools.cache
def rfa_directions(seed: int, layer: int, group: int, count: int, width: int) -> np.ndarray:
    return np.array([[normal(seed, layer, group, row, column) for column in range(width)] for row in range(count)])


def turned(twin, vector: np.ndarray, position: int) -> np.ndarray:
    """A query or key at its own position."""
    c = twin.config
    return turn(vector, position, c.rope_theta, c.rotary_dim) if c.positions == "rotary" else vector


def pair_sums(twin, layer: int, x: np.ndarray, kernel, weight, least: float) -> np.ndarray:
    """sum_s w_ts kernel(q_t, k_s) v_s over its sum, or over a part of the greatest weight where that is more."""
    prefix, c = f"blocks.{layer}.attention.", twin.config
    out = np.zeros((len(x), c.num_heads, c.head_dim))
    for h in range(c.num_heads):
        group = h // (c.num_heads // c.num_kv_heads)
        for t in range(len(x)):
            q = turned(twin, twin.heads(prefix, x[t], h)[0], t)
            total, divisor, greatest = np.zeros(c.head_dim), 0.0, 0.0
            for s in range(t + 1):
                _, k, v = twin.heads(prefix, x[s], h)
                share = weight(group, t, s) * kernel(group, q, turned(twin, k, s))
                total, divisor = total + share * v, divisor + share
                greatest = max(greatest, weight(group, t, s))
            out[t, h] = total / max(divisor, least * greatest)
    return twin.linear(prefix + "out", out.reshape(len(x), -1))


def by_features(twin, part, layer: int, x: np.ndarray) -> np.ndarray:
    """FAVOR+ (2009.14794): the softmax kernel's mean over positive features."""
    d = twin.config.head_dim

    def kernel(group: int, q: np.ndarray, k: np.ndarray) -> float:
        w = performer_directions(part.seed, layer, group, part.features, d)
        q, k = q / d**0.25, k / d**0.25
        return sum(math.exp(row @ q - q @ q / 2) * math.exp(row @ k - k @ k / 2) for row in w) / part.features

    return pair_sums(twin, layer, x, kernel, lambda group, t, s: 1.0, 0.0)


def by_gated_waves(twin, part, layer: int, x: np.ndarray) -> np.ndarray:
    """RFA (2103.02143): what a key entered with, times the gates of all tokens after it."""
    prefix, d = f"blocks.{layer}.attention.", twin.config.head_dim
    scales = twin.w[prefix + "scales_C"].reshape(-1, d)

    def kernel(group: int, q: np.ndarray, k: np.ndarray) -> float:
        q, k, total = q / np.linalg.norm(q), k / np.linalg.norm(k), 0.0
        for drawn in rfa_directions(part.seed, layer, group, part.draws, d):
            w = scales[group] * drawn
            total += math.sin(w @ q) * math.sin(w @ k) + math.cos(w @ q) * math.cos(w @ k)
        return total / part.draws

    def weight(group: int, t: int, s: int) -> float:
        if not part.gate:
            return 1.0
        entered = 1 - gates[s, group]
        return entered * math.prod(gates[u, group] for u in range(s + 1, t + 1))

    gates = 1 / (1 + np.exp(-twin.linear(prefix + "gate", x))) if part.gate else None
    return pair_sums(twin, layer, x, kernel, weight, 0.01)


MIXERS = {Performer: by_features, RandomFeatureAttention: by_gated_waves}
