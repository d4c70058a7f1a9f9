"""The neighbors of keys with their weights: what a search of memories gives a mixture."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from jaxtyping import Float, Float32, Float64, Int64

from memlm.index.neighbors import Neighbors


@dataclass(frozen=True, slots=True)
class RetrievalResult:
    """The neighbors of Q keys, largest weight first, with the logarithms of their weights in p_kNN, the store each
    comes from, and the λ of each key. `took_ms` is the time of the whole retrieval. `shares_Q` are the shares of the
    live entries that the searches could reach, of several stores the smallest one. None: all entries.
    """

    neighbors: Neighbors
    logweights_QK: Float32[np.ndarray, "Q K"]
    lams_Q: Float[np.ndarray, " Q"]
    stores_QK: Int64[np.ndarray, "Q K"]
    took_ms: float = 0.0
    shares_Q: Float64[np.ndarray, " Q"] | None = None

    @property
    def share(self) -> float:
        """The smallest share of the live entries that a search of a key could reach."""
        return 1.0 if self.shares_Q is None else float(self.shares_Q.min(initial=1.0))

    def row(self, number: int) -> RetrievalResult:
        """Returns the result of one key."""
        one = slice(number, number + 1)
        found = self.neighbors
        parts: list[np.ndarray] = [found.distances_QK[one], found.ids_QK[one], found.values_QK[one]]
        rest = (self.logweights_QK[one], self.lams_Q[one], self.stores_QK[one], self.took_ms)
        shares_1 = None if self.shares_Q is None else self.shares_Q[one]
        return RetrievalResult(Neighbors(*parts), *rest, shares_1)
