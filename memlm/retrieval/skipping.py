"""Nothing is searched where the model is confident (arXiv 2109.04212, section 4.1).

Experimental: few positions can be skipped without a loss (docs/reports/retrieval.md). Off unless tuning kept a
threshold (`memlm index tune --skip-loss`).
"""

from __future__ import annotations

import numpy as np
from jaxtyping import Float32, Float64

from memlm.index.neighbors import Neighbors


class SkipConfident:
    """Gives no neighbors where the model's largest log-probability is `threshold` or more."""

    is_sequential = False

    def __init__(self, threshold: float, *, k: int) -> None:
        self._threshold, self._nothing = threshold, Neighbors.none(1, k)

    def neighbors(self, key_1D: Float32[np.ndarray, "1 D"], max_logprob: float) -> Neighbors | None:
        """Returns no neighbors where the model is confident, and None elsewhere."""
        return None if max_logprob < self._threshold else self._nothing

    def observe(self, neighbors: Neighbors, token_id: int) -> None:
        """Does nothing: earlier positions do not matter."""


def find_skip_threshold(
    lm_Q: Float64[np.ndarray, " Q"],
    mixed_Q: Float64[np.ndarray, " Q"],
    max_logprobs_Q: Float32[np.ndarray, " Q"],
    most_loss: float,
) -> tuple[float | None, float, float]:
    """Finds the lowest threshold with a loss over all positions of at most `most_loss` nats per token.

    `lm_Q` and `mixed_Q` are the probabilities of the true tokens without and with retrieval. Returns the threshold
    (None where none is good enough), the share of positions that it skips, and its loss in nats per token.
    """
    order_Q = np.argsort(-max_logprobs_Q, kind="stable")
    lost_Q = (np.log(np.maximum(mixed_Q, 1e-300)) - np.log(np.maximum(lm_Q, 1e-300)))[order_Q].cumsum() / len(lm_Q)
    allowed_Q = np.flatnonzero(lost_Q <= most_loss)
    if not len(allowed_Q):
        return None, 0.0, 0.0
    threshold = float(max_logprobs_Q[order_Q[int(allowed_Q[-1])]])
    skipped = int((max_logprobs_Q >= threshold).sum())  # ties go together
    return threshold, skipped / len(lm_Q), float(lost_Q[skipped - 1])
