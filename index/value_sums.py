"""Sums over neighbors by value: all that p_kNN needs of them, in fewer bytes than the neighbors take.

p_kNN(v) is in proportion to the sum of exp(-distance/temperature) over the neighbors with the value v (arXiv
1911.00172, equation 2). Such sums add up, so that each part of a datastore may sum over its own neighbors.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from jaxtyping import Float32, Float64, Int64

from memlm.index.neighbors import Neighbors

NO_ENTRY = 1 << 62  # the id in the place of those of several entries: that of no entry


@dataclass(frozen=True, slots=True)
class ValueSums:
    """The P pairs of Q queries: a value, and the log-sum-exp of -distance/temperature over its neighbors. The first
    `counts_Q[0]` are of the first query, by ascending values, and so on.
    """

    counts_Q: Int64[np.ndarray, " Q"]
    values_P: Int64[np.ndarray, " P"]
    logsums_P: Float32[np.ndarray, " P"]

    @classmethod
    def of(cls, found: Neighbors, temperature: float) -> ValueSums:
        """Sums over the neighbors of each query."""
        rows_P, columns_P = np.nonzero(np.isfinite(found.distances_QK))
        logs_P = found.distances_QK[rows_P, columns_P].astype(np.float64) / -temperature
        rows_P, values_P, sums_P = _summed(rows_P, found.values_QK[rows_P, columns_P], logs_P)
        return cls(np.bincount(rows_P, minlength=len(found.ids_QK)), values_P, sums_P.astype(np.float32))

    @staticmethod
    def merged(parts: Sequence[ValueSums], k: int, temperature: float) -> Neighbors:
        """Adds sums of the same queries, and keeps the k largest of each. A sum is given as one neighbor with its
        weight: at a distance of -temperature log(sum), with the id NO_ENTRY. Equal sums are in the order of their
        values.
        """
        num_queries = len(parts[0].counts_Q)
        rows_P = np.concatenate([np.repeat(np.arange(num_queries), part.counts_Q) for part in parts])
        values_P, logs_P = (
            np.concatenate([getattr(part, name) for part in parts]) for name in ("values_P", "logsums_P")
        )
        rows_P, values_P, sums_P = _summed(rows_P, values_P, logs_P.astype(np.float64))
        order_P = np.lexsort((-sums_P, rows_P))
        columns_P = np.arange(len(rows_P)) - np.searchsorted(rows_P, rows_P)
        places, kept_P = (rows_P[columns_P < k], columns_P[columns_P < k]), order_P[columns_P < k]
        merged = Neighbors.none(num_queries, k)
        merged.distances_QK[places] = -temperature * sums_P[kept_P]
        merged.ids_QK[places], merged.values_QK[places] = NO_ENTRY, values_P[kept_P]
        return merged


def _summed(
    rows_P: Int64[np.ndarray, " P"], values_P: Int64[np.ndarray, " P"], logs_P: Float64[np.ndarray, " P"]
) -> tuple[Int64[np.ndarray, " U"], Int64[np.ndarray, " U"], Float64[np.ndarray, " U"]]:
    """The log-sum-exp of the numbers with equal rows and values, in the order of these."""
    pairs_U, group_P = np.unique(rows_P << 32 | values_P, return_inverse=True)
    most_U = np.full(len(pairs_U), -np.inf)
    np.maximum.at(most_U, group_P, logs_P)
    sums_U = most_U + np.log(np.bincount(group_P, np.exp(logs_P - most_U[group_P]), minlength=len(most_U)))
    return pairs_U >> 32, pairs_U & 0xFFFFFFFF, sums_U
