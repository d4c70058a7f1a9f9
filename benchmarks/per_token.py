"""Figures per token, with the standard error over documents."""

from __future__ import annotations

from math import sqrt

import numpy as np
from jaxtyping import Float


def per_token(some_N: Float[np.ndarray, " N"], sizes_N: Float[np.ndarray, " N"]) -> tuple[float, float]:
    """Returns a figure per token, and its standard error over documents."""
    mean = some_N.sum() / sizes_N.sum()
    spread = ((some_N - mean * sizes_N) ** 2).sum() * len(sizes_N) / max(1, len(sizes_N) - 1)
    return float(mean), sqrt(spread) / float(sizes_N.sum())
