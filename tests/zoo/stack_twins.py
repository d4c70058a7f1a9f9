"""The twins of joins and stacks: float64, token by token, from the papers' definitions alone."""

from __future__ import annotations

import numpy as np

from memlm.zoo.dense import Dense
from memlm.zoo.gated import Gated
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


JOINS = {Gated: gated}
STACKS = {Dense: averaged_over_depth, Universal: halting, Looped: looped}
