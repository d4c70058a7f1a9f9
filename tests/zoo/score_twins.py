"""The twins of mixers that change the scores of attention."""

from __future__ import annotations

import numpy as np
from memory_twins import softmax

from memlm.zoo.adaptive_span import AdaptiveSpan
from memlm.zoo.selective import Selective


def visible_scores(twin, layer: int, x: np.ndarray) -> tuple[dict, dict]:
    """The scores {(h, t, s)} of plain attention where t sees s, and the values {(h, s)}."""
    prefix, c = f"blocks.{layer}.attention.", twin.config
    projected = {(t, h): twin.heads(prefix, x[t], h) for t in range(len(x)) for h in range(c.num_heads)}
    scores = {}
    for t, h in projected:
        for s, _ in twin.local_places(layer, t, h, twin.floor_at(t)[0], x, []):
            scores[h, t, s] = twin.score(layer, h, projected[t, h][0], projected[s, h][1], t, s)
    return scores, {(h, s): projected[s, h][2] for s, h in projected}


def mixed(twin, layer: int, x: np.ndarray, scores: dict, values: dict) -> np.ndarray:
    """Softmax over the scores {(h, t, s)}."""
    prefix, c = f"blocks.{layer}.attention.", twin.config
    out = np.zeros((len(x), c.num_heads, c.head_dim))
    for t in range(len(x)):
        for h in range(c.num_heads):
            places = [s for s in range(t + 1) if (h, t, s) in scores]
            weights = softmax([scores[h, t, s] for s in places])
            out[t, h] = sum(
                w * (values[h, s] + twin.value_shift(prefix, t, s)) for w, s in zip(weights, places, strict=True)
            )
    return twin.linear(prefix + "out", out.reshape(len(x), -1))


def selected(twin, part, layer: int, x: np.ndarray) -> np.ndarray:
    """Selective attention (2410.02703), by the sum over all queries between."""
    scores, values = visible_scores(twin, layer, x)
    less = {}
    for h, t, s in scores:
        hides = [scores[0, m, s] for m in range(s + 1, t) if (0, m, s) in scores] if s > 0 else []
        hidden = sum(max(0.0, score) for score in hides)
        if not part.forget_at or hidden <= part.forget_at:
            less[h, t, s] = scores[h, t, s] - hidden
    return mixed(twin, layer, x, less, values)


def spanned(twin, part, layer: int, x: np.ndarray) -> np.ndarray:
    """Adaptive spans (1905.07799): scores plus log m, and no place with m = 0."""
    c, (scores, values) = twin.config, visible_scores(twin, layer, x)
    shares, longest = twin.w[f"blocks.{layer}.attention.share_H"], part.longest or c.context_length
    changed = {}
    for (h, t, s), score in scores.items():
        span = min(max(shares[h], 0), 1) * longest
        m = 1.0 if s < c.num_sinks else min(max((part.ramp + span - (t - s)) / part.ramp, 0), 1)
        if m > 0:
            changed[h, t, s] = score + np.log(m)
    return mixed(twin, layer, x, changed, values)


MIXERS = {AdaptiveSpan: spanned, Selective: selected}
