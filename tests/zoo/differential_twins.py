"""The twins of differential attention: float64, one query, pair and key at a time."""

import numpy as np
from memory_twins import softmax

from memlm.zoo.differential import Differential, DifferentialV2


def places(twin, layer, t):
    """The tokens that t sees."""
    floor, window, sinks = twin.floor_at(t)[0], twin.config.window_of(layer), twin.config.num_sinks
    return [s for s in range(floor, t + 1) if s < sinks or not window or t - s < window]


def weights(twin, layer, x, t, h):
    """The softmax of one head, and the values of the places that it is over."""
    prefix, seen = f"blocks.{layer}.attention.", places(twin, layer, t)
    q, _, _ = twin.heads(prefix, x[t], h)
    pairs = [twin.heads(prefix, x[s], h)[1:] for s in seen]
    scores = [twin.score(layer, h, q, k, t, s) for s, (k, _) in zip(seen, pairs, strict=True)]
    values = [v + twin.value_shift(prefix, t, s) for s, (_, v) in zip(seen, pairs, strict=True)]
    return softmax(scores), np.stack(values)


def differential(twin, part, layer, x):
    """(softmax of head h - share * softmax of head h + H / 2) times both heads' values, normed (arXiv 2410.05258)."""
    prefix, c = f"blocks.{layer}.attention.", twin.config
    P, first = c.num_heads // 2, 0.8 - 0.6 * np.exp(-0.3 * layer)
    vector = {name: twin.w[f"{prefix}{name}_d"] for name in ("first_query", "first_key", "second_query", "second_key")}
    share = np.exp(vector["first_query"] @ vector["first_key"]) - np.exp(vector["second_query"] @ vector["second_key"])
    share += first
    out = np.zeros((len(x), 2 * P, c.head_dim))
    for t in range(len(x)):
        for p in range(P):
            (w1, v1), (w2, v2) = weights(twin, layer, x, t, p), weights(twin, layer, x, t, p + P)
            read = (w1 - share * w2) @ np.concatenate([v1, v2], axis=1)
            read = read / np.sqrt((read**2).mean() + 1e-5) * twin.w[prefix + "pair_norm.weight"] * (1 - first)
            out[t, p], out[t, p + P] = np.split(read, 2)
    return twin.linear(prefix + "out", out.reshape(len(x), -1))


def differential_v2(twin, part, layer, x):
    """Head 2p less sigmoid(w x) times head 2p + 1 (microsoft/unilm, Diff-Transformer-V2)."""
    prefix, c = f"blocks.{layer}.attention.", twin.config
    out = np.zeros((len(x), c.num_heads // 2, c.head_dim))
    for t in range(len(x)):
        shares = 1 / (1 + np.exp(-twin.linear(prefix + "share", x[t])))
        for p, share in enumerate(shares):
            (w1, v), (w2, _) = weights(twin, layer, x, t, 2 * p), weights(twin, layer, x, t, 2 * p + 1)
            out[t, p] = w1 @ v - share * (w2 @ v)
    return twin.linear(prefix + "out", out.reshape(len(x), -1))


MIXERS = {Differential: differential, DifferentialV2: differential_v2}
