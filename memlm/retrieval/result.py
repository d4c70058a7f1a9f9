"""The neighbors of keys with their weights: the result of a search of memories, and the mixture that is made of it.

All that reads a text (generation, scores, likelihoods, tuning, measurements) mixes here, and nowhere else.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from jaxtyping import Float, Float32, Float64, Int64
from torch import Tensor

from memlm.index.neighbors import Neighbors
from memlm.retrieval.interpolation import (
    KnnLogprobs,
    knn_logprobs,
    mix,
    mix_targets,
    neighbor_logweights,
    target_logprobs,
)


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

    @classmethod
    def of(cls, found: Neighbors, temperature: float, lam: float, store: int = 0) -> RetrievalResult:
        """Weighs the neighbors of one store by one temperature, with one λ."""
        logweights_QK = neighbor_logweights(found.distances_QK, temperature)
        stores_QK = np.full_like(found.ids_QK, store)
        return cls(found, logweights_QK, np.full(len(stores_QK), lam), stores_QK, shares_Q=found.shares_Q)

    @property
    def share(self) -> float:
        """The smallest share of the live entries that a search of a key could reach."""
        return 1.0 if self.shares_Q is None else float(self.shares_Q.min(initial=1.0))

    def mix_targets(
        self, lm_logprobs_Q: Float32[np.ndarray, " Q"], targets_Q: Int64[np.ndarray, " Q"]
    ) -> tuple[Float32[np.ndarray, " Q"], Float32[np.ndarray, " Q"]]:
        """The log-probabilities of one given token for each key: under p_kNN, -inf where no neighbor has it, and in the
        mixture.
        """
        knn_Q = target_logprobs(self.logweights_QK, self.neighbors.values_QK, targets_Q)
        found_Q = (self.neighbors.ids_QK >= 0).any(axis=1)
        return knn_Q, mix_targets(lm_logprobs_Q, knn_Q, found_Q, self.lams_Q)

    def row(self, number: int) -> RetrievalResult:
        """Returns the result of one key."""
        one = slice(number, number + 1)
        found = self.neighbors
        parts: list[np.ndarray] = [found.distances_QK[one], found.ids_QK[one], found.values_QK[one]]
        rest = (self.logweights_QK[one], self.lams_Q[one], self.stores_QK[one], self.took_ms)
        shares_1 = None if self.shares_Q is None else self.shares_Q[one]
        return RetrievalResult(Neighbors(*parts), *rest, shares_1)


class Mixed(NamedTuple):
    """The log-probabilities of the next token, those of p_kNN (None without a neighbor), the λ between them, and the
    neighbors of all memories.
    """

    logprobs_V: Float[Tensor, " V"]
    knn: KnnLogprobs | None
    lam: float
    memory: RetrievalResult | None


def mix_memory(lm_logprobs_V: Float[Tensor, " V"], memory: RetrievalResult | None, row: int = 0) -> Mixed:
    """Mixes the neighbors of one key, in a row of a result, into the model's distribution."""
    knn, lam = None, 0.0
    if memory is not None:
        knn = knn_logprobs(memory.logweights_QK[row], memory.neighbors.values_QK[row])
        lam = 0.0 if knn is None else float(memory.lams_Q[row])
    return Mixed(mix(lm_logprobs_V, knn, lam), knn, lam, memory)
