"""Evidence -> k, temperature, a fixed λ, and a λ that adapts: the arithmetic of tuning.

A store is asked for two kinds of text: new text of its domain, and text that it holds, which a prompt quotes. k and the
temperature serve both, each with the λ that is best for it. The fixed λ is that of new text. An adaptive λ is fitted to
both: where the nearest neighbor is as near as an entry is to itself, memory is right, whatever its worth on new text.
Text that the store holds has the largest weight with which new text, on passages that were not fitted to, is predicted
as well as by the model alone, but for half a percent of its perplexity.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from jaxtyping import Bool, Float, Float32, Float64, Int64

from memlm.index.neighbors import Neighbors
from memlm.indexing.option_trials import EncodedText
from memlm.retrieval.adaptive import AdaptiveLam, features_of, fit
from memlm.retrieval.interpolation import neighbor_logweights

WORTH_MORE_K = 0.01  # nats per token below which more neighbors are not worth their time
TEMPERATURE_STEPS = tuple(2.0 ** (step / 2) for step in range(-10, 7))
OWN_SHARES = (0.1, 0.05, 0.03, 0.01)  # weights of text that the store holds (benchmarks/log, 2026-11-25-tiny-stores)
SMALL_LOSS = 0.005  # nats per token that new text may lose over the model alone
PRICE = 0.03  # nats per token that new text may lose over the fixed λ, for right prompts and safety on foreign text
FOLDS = 4
LEAST_START = 0.1  # of a fit with stored text: from a smaller λ the search may end where no gradient is left
NEAR = 0.5  # of the temperature: a neighbor so near is taken to follow the same context
NEAR_LOSS = 0.001  # nats per token that new text may lose by sharper weights there
NEAR_SHARE = 0.9  # of new text is nearer to the store than the farthest neighbor that counts


@dataclass(frozen=True, slots=True)
class Evidence:
    """Q positions of the text: the model's log-probability of the target and of the likeliest token, the number of the
    window, the neighbors, and whether each of these names the target. `texts` are the first ones, for trials.
    """

    lm_logprobs_Q: Float32[np.ndarray, " Q"]
    max_logprobs_Q: Float32[np.ndarray, " Q"]
    windows_Q: Int64[np.ndarray, " Q"]
    found: Neighbors
    agrees_QK: Bool[np.ndarray, "Q K"]
    texts: tuple[EncodedText, ...] = ()


def nats_of(probabilities_Q: Float[np.ndarray, " Q"]) -> float:
    """Returns nats per token."""
    return -float(np.log(np.maximum(probabilities_Q, 1e-300)).mean())


def gain_of(
    new_Q: Float[np.ndarray, " Q"], old_Q: Float[np.ndarray, " Q"], windows_Q: Int64[np.ndarray, " Q"]
) -> tuple[float, float]:
    """Returns the nats per token that are saved, and the standard error over windows."""
    saved_Q = np.log(np.maximum(new_Q, 1e-300)) - np.log(np.maximum(old_Q, 1e-300))
    mean, count = float(saved_Q.mean()), int(windows_Q.max()) + 1
    spread_W = np.bincount(windows_Q, saved_Q - mean, minlength=count)
    return mean, float(np.sqrt((spread_W**2).sum() * count / max(1, count - 1)) / len(saved_Q))


def best_lam(lm_Q: Float[np.ndarray, " Q"], knn_Q: Float[np.ndarray, " Q"]) -> float:
    """Returns the λ that maximizes the mean of log(λ knn + (1 - λ) lm), to 1e-6, by bisection on its derivative."""
    low, high = 0.0, 1.0
    with np.errstate(divide="ignore", invalid="ignore"):
        while high - low > 1e-6:
            lam = (low + high) / 2
            slope = np.mean((knn_Q - lm_Q) / (lam * knn_Q + (1 - lam) * lm_Q))
            low, high = (lam, high) if slope > 0 else (low, lam)
    return round((low + high) / 2, 4)


@dataclass(frozen=True, slots=True)
class Trial:
    """Q positions at one k and temperature: features of λ, probabilities of the target, and numbers of windows."""

    features_QF: Float64[np.ndarray, "Q F"]
    lm_Q: Float64[np.ndarray, " Q"]
    knn_Q: Float64[np.ndarray, " Q"]
    windows_Q: Int64[np.ndarray, " Q"]

    @classmethod
    def of(cls, evidence: Evidence, k: int, temperature: float, adaptive: AdaptiveLam | None = None) -> Trial:
        """Weighs the first k neighbors, as an adaptive λ sharpens their weights if there is one."""
        found = evidence.found.first(k)
        temperatures = temperature if adaptive is None else adaptive.temperatures(found.distances_QK, temperature)
        logweights_QK = neighbor_logweights(found.distances_QK, temperatures)
        return cls(
            features_of(found, logweights_QK, temperature, evidence.max_logprobs_Q),
            np.exp(evidence.lm_logprobs_Q.astype(np.float64)),
            dict(knn_probabilities(evidence, temperatures))[k],
            evidence.windows_Q,
        )

    @classmethod
    def joined(cls, parts: Sequence[Trial]) -> Trial:
        """The positions of some trials, one behind another."""
        names = ("features_QF", "lm_Q", "knn_Q", "windows_Q")
        return cls(*(np.concatenate([getattr(part, name) for part in parts]) for name in names))

    def mixed(self, lam: float | AdaptiveLam) -> Float64[np.ndarray, " Q"]:
        """Returns the mixture's probability of each target."""
        lams_Q = lam.lams(self.features_QF) if isinstance(lam, AdaptiveLam) else lam
        return lams_Q * self.knn_Q + (1 - lams_Q) * self.lm_Q

    def part(self, rows_Q: Bool[np.ndarray, " Q"]) -> Trial:
        """Returns some of the positions."""
        return Trial(self.features_QF[rows_Q], self.lm_Q[rows_Q], self.knn_Q[rows_Q], self.windows_Q[rows_Q])


@dataclass(frozen=True, slots=True)
class LamFit:
    """An adaptive λ, the mixture's probability of each target of new text by λs that were fitted to other windows, and
    whether it is to be kept.
    """

    adaptive: AdaptiveLam
    mixed_Q: Float64[np.ndarray, " Q"]
    kept: bool


def fit_lam(new: Trial, own: Trial | None, lam: float) -> LamFit:
    """Fits an adaptive λ to new text and, if there is any, text that the store holds. With it, λ is kept at the largest
    weight of this text with which new text loses next to nothing over the model alone, and little over the fixed λ.
    Without it, λ is kept if it is better than the fixed one by more than twice the standard error.
    """
    if own is None or not len(own.lm_Q):
        mixed_Q = _cross_fitted(new, None, lam, 0.0)
        gain, error = gain_of(mixed_Q, new.mixed(lam), new.windows_Q)
        return LamFit(_fit(new, None, lam, 0.0), mixed_Q, bool(gain > 2 * error))
    for share in OWN_SHARES:
        mixed_Q = _cross_fitted(new, own, lam, share)
        loss, error = gain_of(new.mixed(lam), mixed_Q, new.windows_Q)
        if kept := nats_of(mixed_Q) <= nats_of(new.lm_Q) + SMALL_LOSS and loss <= PRICE + error:
            break
    return LamFit(_fit(new, own, lam, share), mixed_Q, kept)


def sharpened(adaptive: AdaptiveLam, evidence: Evidence, k: int, temperature: float) -> AdaptiveLam:
    """An adaptive λ that sharpens the weights where the nearest neighbor follows the same context, as that of a taught
    fact does, if new text loses next to nothing by it. Else the given one.
    """
    near = replace(adaptive, near=NEAR * temperature)
    nats, nats_near = (nats_of(Trial.of(evidence, k, temperature, each).mixed(each)) for each in (adaptive, near))
    return near if nats_near <= nats + NEAR_LOSS else adaptive


def find_threshold(new: Trial, adaptive: AdaptiveLam, keep: float) -> tuple[float, float, float]:
    """Finds the largest threshold of λ with which new text keeps the share `keep` of its gain over the model alone.

    Text of another domain then gets the model alone at more of its positions. Returns the threshold, the share of the
    positions of new text that it leaves to the model alone, and the share of the gain that stays. 0, 0 and 1 where
    there is no gain.
    """
    lams_Q = adaptive.lams(new.features_QF).astype(np.float64)
    saved_Q = np.log(np.maximum(new.mixed(adaptive), 1e-300)) - np.log(np.maximum(new.lm_Q, 1e-300))
    order_Q = np.argsort(lams_Q, kind="stable")
    kept_Q = saved_Q[order_Q][::-1].cumsum()[::-1]  # what the positions from here on save
    is_first_Q = np.diff(lams_Q[order_Q], prepend=-1.0) > 0  # of equal λ, all or none
    enough_Q = np.flatnonzero(is_first_Q & (kept_Q >= keep * kept_Q[0]))
    if kept_Q[0] <= 0 or not len(enough_Q):
        return 0.0, 0.0, 1.0
    first = int(enough_Q[-1])
    return float(lams_Q[order_Q[first]]), first / len(lams_Q), float(kept_Q[first] / kept_Q[0])


def _fit(new: Trial, own: Trial | None, start: float, share: float) -> AdaptiveLam:
    """Fits an adaptive λ. It trusts no neighbor that is farther than most of new text's are, unless that costs much."""
    weighted = [(new, 1 - share), *([(own, share)] if own is not None else [])]
    shares_Q = np.concatenate([np.full(len(trial.lm_Q), weight / len(trial.lm_Q)) for trial, weight in weighted])
    features_QF, lm_Q, knn_Q = (
        np.concatenate([getattr(trial, name) for trial, _ in weighted]) for name in ("features_QF", "lm_Q", "knn_Q")
    )
    begin = start if own is None else max(start, LEAST_START)
    fitted = fit(features_QF, lm_Q, knn_Q, begin, shares_Q)
    near = replace(fitted, reach=float(np.quantile(new.features_QF[:, 0], NEAR_SHARE)))
    return near if nats_of(new.mixed(near)) <= nats_of(new.mixed(fitted)) + PRICE else fitted


def _cross_fitted(new: Trial, own: Trial | None, start: float, share: float) -> Float64[np.ndarray, " Q"]:
    """Returns the mixture's probability of each target of new text, by a λ that was fitted to other windows of it."""
    mixed_Q, numbers = new.mixed(start), np.unique(new.windows_Q)
    fold_Q = np.searchsorted(numbers, new.windows_Q) % FOLDS
    for fold in range(min(FOLDS, len(numbers)) if len(numbers) > 1 else 0):
        held_out_Q = fold_Q == fold
        mixed_Q[held_out_Q] = new.part(held_out_Q).mixed(_fit(new.part(~held_out_Q), own, start, share))
    return mixed_Q


def grid_search(evidence: Evidence, scale: float, own: Evidence | None = None) -> tuple[int, float, float]:
    """Returns the best k, temperature and λ, with the smallest k that is nearly as good. Temperatures are multiples of
    `scale`. `own` text counts for k and temperature, with a λ of its own.
    """
    texts = [(evidence, 1.0)] if own is None else [(evidence, 1 - OWN_SHARES[0]), (own, OWN_SHARES[0])]
    best: dict[int, tuple[float, float, float]] = {}
    for step in TEMPERATURE_STEPS:
        temperature = scale * step
        trials = [_best_mixtures(each, temperature) for each, _ in texts]
        for number, (k, _, lam) in enumerate(trials[0]):
            nats = sum(weight * trial[number][1] for trial, (_, weight) in zip(trials, texts, strict=True))
            best[k] = min(best.get(k, (math.inf, 0.0, 0.0)), (nats, temperature, lam))
    least = min(nats for nats, _, _ in best.values())
    k = min(k for k, (nats, _, _) in best.items() if nats <= least + WORTH_MORE_K)
    _, temperature, lam = best[k]
    return k, temperature, lam


def _best_mixtures(evidence: Evidence, temperature: float) -> Sequence[tuple[int, float, float]]:
    """Returns each k with its nats per token and its best λ."""
    lm_Q, results = np.exp(evidence.lm_logprobs_Q.astype(np.float64)), []
    for k, knn_Q in knn_probabilities(evidence, temperature):
        lam = best_lam(lm_Q, knn_Q)
        results.append((k, nats_of(lam * knn_Q + (1 - lam) * lm_Q), lam))
    return results


def knn_probabilities(
    evidence: Evidence, temperature: float | Float64[np.ndarray, "Q 1"]
) -> list[tuple[int, Float[np.ndarray, " Q"]]]:
    """Returns p_kNN of every target for each k, from cumulative sums over the neighbors."""
    nearest_Q1 = evidence.found.distances_QK[:, :1]
    with np.errstate(invalid="ignore"):
        weights_QK = np.exp((nearest_Q1 - evidence.found.distances_QK) / np.asarray(temperature, np.float32))
    weights_QK = np.where(np.isfinite(evidence.found.distances_QK), weights_QK, 0.0).astype(np.float64)
    total_QK = weights_QK.cumsum(axis=1)
    agreeing_QK = np.where(evidence.agrees_QK, weights_QK, 0.0).cumsum(axis=1)
    width = weights_QK.shape[1]
    sizes = sorted({min(2**power, width) for power in range(width.bit_length() + 1)})
    lm_Q = np.exp(evidence.lm_logprobs_Q.astype(np.float64))
    return [
        (k, np.where(total_QK[:, k - 1] > 0, agreeing_QK[:, k - 1] / np.maximum(total_QK[:, k - 1], 1e-300), lm_Q))
        for k in sizes
    ]
