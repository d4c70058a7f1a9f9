"""Defaults of a new store, from its own documents: k, temperature, a fixed λ, and a λ that adapts.

A store is asked for two kinds of text. New text of its domain is measured by positions of its documents, each searched
for without its whole document. Text that it holds is measured by passages that are read again without what stands
before them, as a prompt is. A fixed λ is chosen for new text. An adaptive λ is fitted to both: where the nearest
neighbor is as near as an entry is to itself, memory is right, whatever its worth on new text. It is kept if it is no
worse on new text than the fixed one, by more than noise.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass

import numpy as np
from jaxtyping import Bool, Float64, Int64

from memlm.index.neighbors import Neighbors
from memlm.index.store.manifest import KnnDefaults
from memlm.indexing.passages import Passages
from memlm.indexing.quality import neighbors_elsewhere
from memlm.indexing.tune import Evidence, gain_of, grid_search, knn_probabilities
from memlm.retrieval.adaptive import AdaptiveLam, features_of, fit
from memlm.retrieval.interpolation import neighbor_logweights
from memlm.retrieval.store import ModelStore

LARGEST_K = 64
LEAST_POSITIONS = 64  # below which nothing can be fitted
OWN_SHARE = 0.1  # of the weight in the adaptive fit, that of text that the store holds (docs/log, 2026-11-25)


@dataclass(frozen=True, slots=True)
class SelfTuning:
    """The chosen defaults, and the gain in nats per token over the model alone, with its standard error: on `tokens`
    positions of the store's documents, each without its own document, with the λ that was kept. `own_gain` is the gain
    on text that the store holds.
    """

    k: int
    lam: float
    temperature: float
    is_adaptive: bool
    tokens: int
    gain: float
    gain_error: float
    own_gain: float


def tune_on_itself(store: ModelStore, new: Passages, own: Passages) -> SelfTuning | None:
    """Tunes a store on passages of its documents and saves the result as its defaults. `new` are searched for without
    their documents, `own` with them. Returns None, without a change, for too few positions.
    """
    snapshot, before = store.snapshot, store.snapshot.defaults
    if min(len(new.ids_Q), len(own.ids_Q)) < LEAST_POSITIONS:
        return None
    k = min(LARGEST_K, snapshot.num_entries)
    new_text = _evidence(new, neighbors_elsewhere(snapshot, new.queries(snapshot), k))
    own_text = _evidence(own, snapshot.search(own.keys_QD, k))
    k, temperature, lam = grid_search(new_text, before.temperature)
    new_trial, own_trial = (_Trial.of(each, k, temperature) for each in (new_text, own_text))
    adaptive, cross_fitted_Q = _fit(new_trial, own_trial, lam), _cross_fitted(new_trial, own_trial, lam)
    loss, loss_error = gain_of(new_trial.mixed(lam), cross_fitted_Q, new_trial.windows_Q)
    keeps = loss <= loss_error
    mixed_Q = cross_fitted_Q if keeps else new_trial.mixed(lam)
    gain, gain_error = gain_of(mixed_Q, new_trial.lm_Q, new_trial.windows_Q)
    own_gain, _ = gain_of(own_trial.mixed(adaptive if keeps else lam), own_trial.lm_Q, own_trial.windows_Q)
    result = SelfTuning(k, lam, temperature, keeps, len(new.ids_Q), gain, gain_error, own_gain)
    store.datastore.save_defaults(
        KnnDefaults(
            k=k,
            lam=lam,
            temperature=temperature,
            tuned_on=f"its own documents ({len(new.ids_Q)} tokens)",
            gain=gain,
            gain_error=gain_error,
            adaptive=asdict(adaptive) if keeps else None,
            nprobe=before.nprobe,
        )
    )
    return result


@dataclass(frozen=True, slots=True)
class _Trial:
    """Q positions at one k and temperature: features of λ, probabilities of the target, and numbers of passages."""

    features_QF: Float64[np.ndarray, "Q F"]
    lm_Q: Float64[np.ndarray, " Q"]
    knn_Q: Float64[np.ndarray, " Q"]
    windows_Q: Int64[np.ndarray, " Q"]

    @classmethod
    def of(cls, evidence: Evidence, k: int, temperature: float) -> _Trial:
        """Weighs the first k neighbors."""
        found = evidence.found.first(k)
        logweights_QK = neighbor_logweights(found.distances_QK, temperature)
        return cls(
            features_of(found, logweights_QK, temperature, evidence.max_logprobs_Q),
            np.exp(evidence.lm_logprobs_Q.astype(np.float64)),
            dict(knn_probabilities(evidence, temperature))[k],
            evidence.windows_Q,
        )

    def mixed(self, lam: float | AdaptiveLam) -> Float64[np.ndarray, " Q"]:
        """Returns the mixture's probability of each target."""
        lams_Q = lam.lams(self.features_QF) if isinstance(lam, AdaptiveLam) else lam
        return lams_Q * self.knn_Q + (1 - lams_Q) * self.lm_Q

    def part(self, rows_Q: Bool[np.ndarray, " Q"]) -> _Trial:
        """Returns some of the positions."""
        return _Trial(self.features_QF[rows_Q], self.lm_Q[rows_Q], self.knn_Q[rows_Q], self.windows_Q[rows_Q])


def _fit(new: _Trial, own: _Trial, start: float) -> AdaptiveLam:
    """Fits an adaptive λ to both kinds of text."""
    shares = ((new, 1 - OWN_SHARE), (own, OWN_SHARE))
    shares_Q = np.concatenate([np.full(len(trial.lm_Q), share / len(trial.lm_Q)) for trial, share in shares])
    features_QF, lm_Q, knn_Q = (
        np.concatenate([getattr(trial, name) for trial in (new, own)]) for name in ("features_QF", "lm_Q", "knn_Q")
    )
    return fit(features_QF, lm_Q, knn_Q, start, shares_Q)


def _cross_fitted(new: _Trial, own: _Trial, start: float) -> Float64[np.ndarray, " Q"]:
    """Returns the mixture's probability of each target of new text, by a λ that was fitted to the other half of it."""
    mixed_Q, half_Q = new.mixed(start), new.windows_Q % 2 == 0
    for fitted_Q, held_out_Q in ((half_Q, ~half_Q), (~half_Q, half_Q)):
        if fitted_Q.any() and held_out_Q.any():  # not if there is one passage alone
            mixed_Q[held_out_Q] = new.part(held_out_Q).mixed(_fit(new.part(fitted_Q), own, start))
    return mixed_Q


def _evidence(passages: Passages, found: Neighbors) -> Evidence:
    return Evidence(
        lm_logprobs_Q=passages.lm_logprobs_Q,
        max_logprobs_Q=passages.max_logprobs_Q,
        windows_Q=passages.passages_Q,
        found=found,
        agrees_QK=found.values_QK == passages.targets_Q[:, None],
    )
