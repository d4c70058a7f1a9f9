"""How neighbors are found and weighed: k, λ and temperature, as a request and the datastores want them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
from jaxtyping import Float32, Float64

from memlm.api.params import RetrievalParams
from memlm.index.neighbors import Neighbors
from memlm.retrieval.adaptive import AdaptiveLam, features_of
from memlm.retrieval.gate import SpalmGate, load_gate
from memlm.retrieval.interpolation import neighbor_logweights
from memlm.retrieval.store import ModelStore

_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class KnnSettings:
    """k neighbors, of `nprobe` lists, the softmax temperature over their squared distances, and λ, or one that adapts.
    A `gate` (SPALM) mixes before λ does.
    """

    k: int = 0
    lam: float = 0.0
    temperature: float = 0.0
    nprobe: int | None = None
    gate: SpalmGate | None = None
    adaptive: AdaptiveLam | None = None

    @classmethod
    def of(cls, stores: Sequence[ModelStore], params: RetrievalParams) -> KnnSettings:
        """What a request leaves open comes from the defaults of the first store. An adaptive λ applies only to a
        request that searches one store and sets none of k, λ and temperature.
        """
        defaults = stores[0].snapshot.defaults
        lam = 0.0 if params.spalm else defaults.lam  # the gate already mixes: interpolation comes only when asked for
        return cls(
            k=_given(params.k, defaults.k),
            lam=float(_given(params.lam, lam)),
            temperature=float(_given(params.knn_temperature, defaults.temperature)),
            nprobe=_given(params.nprobe, defaults.nprobe),
            gate=load_gate(stores[0].model_folder) if params.spalm else None,
            adaptive=_adaptive_of(stores, params),
        )

    @property
    def changes_output(self) -> bool:
        """Whether neighbors can change the distribution: λ = 0 is the model alone."""
        return bool(self.lam or self.adaptive or self.gate)

    def weigh(
        self, neighbors: Neighbors, max_logprobs_Q: Float32[np.ndarray, " Q"] | None
    ) -> tuple[Float32[np.ndarray, "Q K"], Float64[np.ndarray, " Q"]]:
        """The log-weights of neighbors of one store, and λ, which adapts where `max_logprobs_Q` are given."""
        if self.adaptive is None:
            lams_Q = np.full(len(neighbors.ids_QK), self.lam)
            return neighbor_logweights(neighbors.distances_QK, self.temperature), lams_Q
        temperatures = self.adaptive.temperatures(neighbors.distances_QK, self.temperature)
        logweights_QK = neighbor_logweights(neighbors.distances_QK, temperatures)
        if max_logprobs_Q is None:
            return logweights_QK, np.full(len(neighbors.ids_QK), self.lam)
        features_QF = features_of(neighbors, logweights_QK, self.temperature, max_logprobs_Q)
        return logweights_QK, self.adaptive.lams(features_QF).astype(np.float64)


def _given(value: _T | None, default: _T) -> _T:
    return default if value is None else value


def _adaptive_of(stores: Sequence[ModelStore], params: RetrievalParams) -> AdaptiveLam | None:
    """The adaptive λ that the only store was tuned with, if the request sets nothing that it was tuned along with."""
    adaptive = stores[0].snapshot.defaults.adaptive
    is_as_tuned = not params.spalm and params.lam is params.k is params.knn_temperature is None
    return AdaptiveLam.of(adaptive) if adaptive is not None and is_as_tuned and len(stores) == 1 else None
