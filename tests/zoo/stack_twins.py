"""The twins of joins and stacks: float64, token by token, from the papers' definitions alone."""

from __future__ import annotations

import numpy as np
from memory_twins import softmax

from memlm.model.exits import Exits
from memlm.zoo.dense import Dense
from memlm.zoo.gated import Gated
from memlm.zoo.reversible import Reversible
from memlm.zoo.simplified import Shaped, Skipless
from memlm.zoo.universal import Looped, Universal


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


def layer_by_layer(twin, part, x):
    twin.streams = [x]
    for layer in range(twin.config.num_layers):
        twin.streams.append(twin.layer(layer, twin.streams[-1]))
    return twin.streams[-1]


def averaged_over_depth(twin, part, x):
    """DenseFormer's equations: Y_i = sum of a_ij X_j, X_{i+1} = block(Y_i)."""
    L, X, Y = twin.config.num_layers, [x], x
    for i in range(1, L + 1):
        X.append(twin.layer(i - 1, Y))
        Y = X[i]
        if i % part.period == 0:
            a = twin.w[f"stack.weights.{i}"]
            sources = [j for j in range(i + 1) if (i - j) % part.dilation == 0]
            assert len(a) == len(sources)
            Y = sum(a[n] * X[j] for n, j in enumerate(sources))
    return Y


def looped(twin, part, x):
    z = np.zeros_like(x) if part.injects else x
    for _ in range(twin.config.num_layers // part.blocks):
        z = z + x if part.injects else z
        for block in range(part.blocks):
            z = twin.layer(block, z)
    return z


def halting(twin, part, x):
    """Adaptive computation time, token by token. A token's state stops where it halts."""
    T, rounds = len(x), twin.config.num_layers // part.blocks
    state, result, spent, has_halted = x.copy(), np.zeros_like(x), np.zeros(T), [False] * T
    twin.rounds = [0] * T
    for n in range(rounds):
        y = state + twin.w["stack.signals.weight"][n] if part.signals else state.copy()
        for block in range(part.blocks):
            made = twin.layer(block, y)
            for t in range(T):
                if not has_halted[t]:
                    y[t] = made[t]
        for t in range(T):
            if has_halted[t]:
                continue
            state[t], twin.rounds[t] = y[t], n + 1
            p = sigmoid(twin.w["stack.halt.weight"][0] @ y[t] + twin.w["stack.halt.bias"][0])
            has_halted[t] = spent[t] + p >= 1 - part.epsilon or n == rounds - 1
            result[t] += (1 - spent[t] if has_halted[t] else p) * y[t]
            spent[t] += p
    return result


def in_two_streams(twin, part, x):
    first, second = x, x
    for block in range(twin.config.num_layers):
        prefix = f"blocks.{block}."
        first = first + twin.attend(block, twin.norm(prefix + "attention_norm", second))
        second = second + twin.feed_forward(prefix, twin.norm(prefix + "ff_norm", first))
    return (first + second) / 2


def shaped(twin, part, layer, x):
    """alpha I + beta softmax - gamma C on slices of the input, entry by entry."""
    c, prefix = twin.config, f"blocks.{layer}.attention."
    alpha, beta, gamma = (twin.w[prefix + name] for name in ("alpha_H", "beta_H", "gamma_H"))
    H, d = c.num_heads, c.head_dim
    pairs, out = twin.linear(prefix + "qkv", x).reshape(len(x), 2 * H, d), np.zeros((len(x), H, d))
    if c.qk_norm:
        queries, keys = (twin.rms(prefix + name, half) for name, half in
                         (("query_norm", pairs[:, :H]), ("key_norm", pairs[:, H:])))  # fmt: skip
        pairs = np.concatenate([queries, keys], axis=1)
    for t in range(len(x)):
        for h in range(H):
            seen = [s for s, _ in twin.local_places(layer, t, h, twin.floor_at(t)[0], x, [])]
            weights = softmax([twin.score(layer, h, pairs[t, h], pairs[s, H + h], t, s) for s in seen])
            for s, weight in zip(seen, weights, strict=True):
                entry = alpha[h] * (s == t) + beta[h] * weight - gamma[h] / len(seen)
                out[t, h] += entry * x[s, h * d : (h + 1) * d]
    return out.reshape(len(x), -1)


def without_skips(twin, part, block, sublayer, stream, change):
    prefix = f"blocks.{block}.{sublayer}_join."
    scaled = twin.w[prefix + "gain_1"] * change
    return scaled if sublayer == "attention" else scaled + twin.w.get(prefix + "skip_1", 1.0) * stream


MIXERS = {Shaped: shaped}
JOINS = {Gated: gated, Skipless: without_skips}
STACKS = {
    Exits: layer_by_layer,
    Dense: averaged_over_depth,
    Universal: halting,
    Looped: looped,
    Reversible: in_two_streams,
}
