"""The neighbors of keys with their weights: what a search of memories gives a mixture."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from jaxtyping import Bool, Float, Float32, Float64, Int64

from memlm.index.neighbors import Neighbors


@dataclass(frozen=True, slots=True)
class RetrievalResult:
    """The neighbors of Q keys, largest weight first, with the logarithms of their weights in p_kNN, the store each
    comes from, the λ of each key, and whether an index was searched. `took_ms` is the time of the whole retrieval.
    `shares_Q` are the shares of the live entries that the searches could reach, of several stores the smallest one.
    None: all entries.
    """

    neighbors: Neighbors
    logweights_QK: Float32[np.ndarray, "Q K"]
    lams_Q: Float[np.ndarray, " Q"]
    stores_QK: Int64[np.ndarray, "Q K"]
    searched_Q: Bool[np.ndarray, " Q"]
    took_ms: float = 0.0
    shares_Q: Float64[np.ndarray, " Q"] | None = None

    @property
    def share(self) -> float:
        """The smallest share of the live entries that a search of a key could reach."""
        return 1.0 if self.shares_Q is None else float(self.shares_Q.min(initial=1.0))

    @property
    def followed(self) -> Neighbors:
        """The neighbors that shortcuts may go on from: none after a search that did not reach all entries, or later
        searches would be as partial, and say nothing of it.
        """
        return self.neighbors if self.share == 1 else Neighbors.none(*self.neighbors.ids_QK.shape)

    @classmethod
    def joined(cls, rows: Sequence[RetrievalResult]) -> RetrievalResult:
        """Concatenates the results of several keys in their order."""
        found = [row.neighbors for row in rows]
        parts: list[list[np.ndarray]] = [
            [each.distances_QK for each in found], [each.ids_QK for each in found], [each.values_QK for each in found],
            [row.logweights_QK for row in rows], [row.lams_Q for row in rows], [row.stores_QK for row in rows],
            [row.searched_Q for row in rows],
        ]  # fmt: skip
        distances_QK, ids_QK, values_QK, logweights_QK, lams_Q, stores_QK, searched_Q = map(np.concatenate, parts)
        near, took_ms = Neighbors(distances_QK, ids_QK, values_QK), sum(row.took_ms for row in rows)
        shares_Q = None
        if any(row.shares_Q is not None for row in rows):
            whole = [np.ones(len(row.lams_Q)) if row.shares_Q is None else row.shares_Q for row in rows]
            shares_Q = np.concatenate(whole)
        return cls(near, logweights_QK, lams_Q, stores_QK, searched_Q, took_ms, shares_Q)

    def row(self, number: int) -> RetrievalResult:
        """Returns the result of one key."""
        one = slice(number, number + 1)
        found = self.neighbors
        parts: list[np.ndarray] = [found.distances_QK[one], found.ids_QK[one], found.values_QK[one]]
        rest = (self.logweights_QK[one], self.lams_Q[one], self.stores_QK[one], self.searched_Q[one], self.took_ms)
        shares_1 = None if self.shares_Q is None else self.shares_Q[one]
        return RetrievalResult(Neighbors(*parts), *rest, shares_1)
