"""The twin of infinity-former: integrals by quadrature, and fits by least squares."""

from __future__ import annotations

import math

import numpy as np
from memory_twins import softmax

from memlm.zoo.infinite import Infinite

GRID = np.linspace(-3, 4, 14001)


def normal(t, mean, variance):
    return np.exp(-((t - mean) ** 2) / (2 * variance)) / math.sqrt(2 * math.pi * variance)


def bumps(part, t):
    """The value of each bump at some places (N, places)."""
    each = part.bumps // len(part.widths)
    return np.stack([normal(t, center, width**2) for width in part.widths for center in np.linspace(0, 1, each)])


def middles(count):
    return [(place + 0.5) / count for place in range(count)]


def fitted(part, places, values):
    """The ridge regression as least squares, with a row for each bump's penalty."""
    basis = np.concatenate([bumps(part, np.array(places)).T, math.sqrt(part.ridge) * np.eye(part.bumps)])
    aims = np.concatenate([np.stack(values), np.zeros((part.bumps, len(values[0])))])
    return np.linalg.lstsq(basis, aims, rcond=None)[0]


def quantiles(part, densities):
    """The places under which equal shares of the densities lie, each bin having an even one."""
    edges = np.linspace(0, 1, part.bins + 1)
    mass = np.zeros(part.bins)
    for mean, variance in densities:
        below = [math.erf((edge - mean) / math.sqrt(2 * variance)) / 2 for edge in edges]
        mass += np.diff(below)
    return np.interp(middles(part.samples), np.concatenate([[0], mass.cumsum()]) / mass.sum(), edges)


def refitted(part, signal, densities, leaving):
    """The signal behind a border, after some vectors left."""
    if signal is None:
        return fitted(part, middles(len(leaving)), leaving)
    sampled = quantiles(part, densities) if part.sticky else np.array(middles(part.samples))
    squeezed = [part.squeeze * t for t in sampled]
    behind = [part.squeeze + (1 - part.squeeze) * t for t in middles(len(leaving))]
    return fitted(part, [*squeezed, *behind], [*(bumps(part, sampled).T @ signal), *leaving])


def attend(twin, part, layer, x):
    c, prefix = twin.config, f"blocks.{layer}.attention."
    out, on_grid = np.zeros((len(x), c.num_heads, c.head_dim)), bumps(part, GRID)
    signal, floor, densities = None, 0, []
    for t in range(len(x)):
        before, floor = floor, twin.floor_at(t)[0]
        if floor > before:
            signal, densities = refitted(part, signal, densities, list(x[before:floor])), []
        for h in range(c.num_heads):
            q, _, _ = twin.heads(prefix, x[t], h)
            pairs = [(s, *twin.heads(prefix, x[s], h)[1:]) for s in range(floor, t + 1)]
            weights = softmax([twin.score(layer, h, q, k, t, s) for s, k, _ in pairs])
            out[t, h] = sum(w * v for w, (_, _, v) in zip(weights, pairs, strict=True))
            if signal is None:
                continue
            keys, values = zip(*(twin.heads(prefix, row, h)[1:] for row in signal), strict=True)
            scores = np.stack(keys) @ q / math.sqrt(c.head_dim)
            mean = 1 / (1 + math.exp(-(twin.w[prefix + "mean.weight"][0] @ scores)))
            variance = math.log1p(math.exp(twin.w[prefix + "variance.weight"][0] @ scores))
            densities.append((mean, variance))
            shares = np.trapezoid(normal(GRID, mean, variance) * on_grid, GRID, axis=1)
            out[t, h] += shares @ np.stack(values)
    return twin.linear(prefix + "out", out.reshape(len(x), -1))


MIXERS = {Infinite: attend}
