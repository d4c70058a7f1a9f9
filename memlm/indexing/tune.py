"""Held-out text -> k, lam and temperature: retrieves once, then searches over what was retrieved.

For every temperature of a geometric grid and every k of a doubling one, the mean log-likelihood is a concave
function of lam, whose best value bisection finds. Then a lam that differs from position to position is fitted to one
half of the text and judged by the other, and the other way round; and it is told what would be lost if the memory
were not asked where the model is sure, or if pointers were followed in place of searches. How many lists are searched
is settled on a part of the text: stored positions find with a few what others take many for. What is chosen is kept
in the store as its defaults, with what it was tuned on.

Errors are standard errors over windows of the text, whose tokens are not independent.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, fields, replace
from itertools import groupby
from pathlib import Path

import numpy as np
from jaxtyping import Bool, Float, Float32, Int64

from memlm.api.params import RetrievalParams
from memlm.base.progress import Progress, silent
from memlm.data.corpus import Corpus
from memlm.data.windows import Window, blocks_of
from memlm.errors import InvalidInput
from memlm.index.ivf import PROBES
from memlm.index.neighbors import Neighbors
from memlm.index.store.datastore import Datastore
from memlm.index.store.manifest import KnnDefaults
from memlm.model.checkpoint import Checkpoint, load_checkpoint
from memlm.retrieval.adaptive import AdaptiveLam, features_of, fit
from memlm.retrieval.encoder import BLOCK_WINDOWS, Encoder, Prediction, text_windows
from memlm.retrieval.interpolation import mix_targets, neighbor_logweights, target_logprobs
from memlm.retrieval.retriever import Retriever
from memlm.retrieval.skipping import find_skip_threshold
from memlm.retrieval.store import ModelStore

LARGEST_K = 512
FREE = 0.001  # nats per token that skipping is shown for where nobody says how much may be lost
WORTH_MORE_K = 0.01  # nats per token below which more neighbors are not worth their time
WORTH_MORE_LISTS = 0.0005  # the same of searching more lists
GATHER_LISTS = 64  # at least so many are searched for what everything is chosen from
TRIAL_TOKENS = 8192  # of the text, on which lists and pointers are tried
TEMPERATURE_STEPS = tuple(2.0 ** (step / 2) for step in range(-10, 7))


@dataclass(frozen=True, slots=True)
class TuneReport:
    """What was chosen, on how many tokens, and the nats per token of the model alone (`base`), with one lam (`knn`) and
    with one that adapts, on text that it was not fitted to. Gains are over what stands before: the model alone, and
    one lam. `skipped` is the share of positions at which the memory is not asked, for `skip_loss` nats per token: those
    where the model gives its likeliest token a log-probability of `skip_retrieval_above` or more;
    `pointer_share` that at which `min_pointers` pointers or more replace a search, for `pointer_loss`. `nprobe` lists
    are searched, for `nprobe_loss` nats against the most that were tried; None where there are none.
    """

    k: int
    lam: float
    temperature: float
    tokens: int
    base_nats: float
    knn_nats: float
    gain: float
    gain_error: float
    adaptive_nats: float
    adaptive_gain: float
    adaptive_gain_error: float
    adaptive_kept: bool
    skipped: float
    skip_loss: float
    skip_retrieval_above: float | None
    skip_kept: bool
    min_pointers: int | None
    pointer_share: float
    pointer_loss: float
    pointers_kept: bool
    nprobe: int | None
    nprobe_loss: float
    tuned_on: str


@dataclass(frozen=True, slots=True)
class _Evidence:
    """What tuning looks at: the model's log-probability of each target and of the likeliest token, the window it
    stands in, and its neighbors, nearest first.
    """

    lm_logprobs_Q: Float32[np.ndarray, " Q"]
    max_logprobs_Q: Float32[np.ndarray, " Q"]
    windows_Q: Int64[np.ndarray, " Q"]
    found: Neighbors
    agrees_QK: Bool[np.ndarray, "Q K"]
    trial: tuple[Read, ...] = ()


@dataclass(frozen=True, slots=True)
class Read:
    """One document of the text, or a part of one: what was read of it."""

    keys_ND: Float32[np.ndarray, "N D"]
    lm_logprobs_N: Float32[np.ndarray, " N"]
    max_logprobs_N: Float32[np.ndarray, " N"]
    targets_N: Int64[np.ndarray, " N"]

    @classmethod
    def of(cls, window: Window, read: Prediction) -> Read:
        """What was read of one window."""
        return cls(read.keys_ND, read.logprobs_N, read.max_logprobs_N, window.targets_N)


def tune(
    model: str | Path | Checkpoint,
    store: str | Path,
    texts: Corpus,
    *,
    max_tokens: int = 50_000,
    largest_k: int = LARGEST_K,
    skip_loss: float | None = None,
    pointer_loss: float | None = None,
    progress: Progress = silent,
) -> TuneReport:
    """Tunes a datastore on text that neither it nor the model has seen, and keeps the result as the store's defaults.

    Reads at most `max_tokens` tokens. A lam that adapts is kept where it is better by twice the error of that; with
    `skip_loss`, the memory is not asked where that costs no more than so many nats per token in all; with
    `pointer_loss`, pointers are followed in place of searches where that costs no more. Raises InvalidInput where the
    texts are empty, or the store.
    """
    checkpoint = model if isinstance(model, Checkpoint) else load_checkpoint(model)
    with Datastore.open(store) as datastore:
        memory = ModelStore(datastore, checkpoint)
        if not datastore.snapshot.num_entries:
            raise InvalidInput(
                f"every document of {store} is deleted, so there is nothing to tune; add documents first", field="store"
            )
        start = Retriever.of([memory], RetrievalParams(k=min(largest_k, max(1, datastore.snapshot.num_entries))))
        evidence = _gather(checkpoint, start, texts, max_tokens, progress)
        k, temperature, lam, _ = _search(evidence, start.temperature)
        tuned_on = ", ".join(Path(path).name for path in texts.paths) + f" ({len(evidence.lm_logprobs_Q)} tokens)"
        report, adaptive = _judge(evidence, k, temperature, lam, skip_loss, tuned_on)
        chosen = replace(start, k=k, lam=lam, temperature=temperature, skip_retrieval_above=None, min_pointers=None)
        nprobe, lost = _try_lists(evidence.trial, chosen, progress)
        report = replace(report, nprobe=nprobe, nprobe_loss=lost)
        chosen = replace(chosen, nprobe=nprobe, adaptive=adaptive if report.adaptive_kept else None)
        if pointer_loss is not None and datastore.snapshot.has_keys:  # asked one by one, which takes its time
            report = _try_pointers(evidence.trial, chosen, report, pointer_loss, progress)
        datastore.save_defaults(
            KnnDefaults(
                k=k,
                lam=lam,
                temperature=temperature,
                tuned_on=tuned_on,
                gain=report.gain,
                gain_error=report.gain_error,
                adaptive=asdict(adaptive) if report.adaptive_kept else None,
                skip_retrieval_above=report.skip_retrieval_above if report.skip_kept else None,
                min_pointers=report.min_pointers if report.pointers_kept else None,
                nprobe=nprobe,
            )
        )
    return report


def _judge(
    evidence: _Evidence, k: int, temperature: float, lam: float, skip_loss: float | None, tuned_on: str
) -> tuple[TuneReport, AdaptiveLam]:
    """What one lam, and one that adapts, are worth; and what may be skipped."""
    lm_Q = np.exp(evidence.lm_logprobs_Q.astype(np.float64))
    knn_Q = dict(_memory_probabilities(evidence, temperature))[k]
    found = evidence.found.first(k)
    features_QF = features_of(
        found, neighbor_logweights(found.distances_QK, temperature), temperature, evidence.max_logprobs_Q
    )
    fixed_Q = lam * knn_Q + (1 - lam) * lm_Q
    adapted_Q, half_Q = np.empty_like(fixed_Q), evidence.windows_Q % 2 == 0
    for fitted, judged in ((half_Q, ~half_Q), (~half_Q, half_Q)):
        if not (fitted.any() and judged.any()):  # one window alone cannot be judged by another
            adapted_Q = fixed_Q
            break
        lams_Q = fit(features_QF[fitted], lm_Q[fitted], knn_Q[fitted], lam).lams(features_QF[judged])
        adapted_Q[judged] = lams_Q * knn_Q[judged] + (1 - lams_Q) * lm_Q[judged]
    adaptive = fit(features_QF, lm_Q, knn_Q, lam)
    gain, gain_error = _gain(fixed_Q, lm_Q, evidence.windows_Q)
    more, more_error = _gain(adapted_Q, fixed_Q, evidence.windows_Q)
    kept = more > 2 * more_error
    threshold, share, loss = find_skip_threshold(
        lm_Q, adapted_Q if kept else fixed_Q, evidence.max_logprobs_Q, skip_loss or FREE
    )
    report = TuneReport(
        k=k,
        lam=lam,
        temperature=temperature,
        tokens=len(lm_Q),
        base_nats=-float(np.log(lm_Q).mean()),
        knn_nats=_nats(fixed_Q),
        gain=gain,
        gain_error=gain_error,
        adaptive_nats=_nats(adapted_Q),
        adaptive_gain=more,
        adaptive_gain_error=more_error,
        adaptive_kept=bool(kept),
        skipped=share,
        skip_loss=loss,
        skip_retrieval_above=threshold,
        skip_kept=skip_loss is not None and threshold is not None,
        min_pointers=None,
        pointer_share=0.0,
        pointer_loss=0.0,
        pointers_kept=False,
        nprobe=None,
        nprobe_loss=0.0,
        tuned_on=tuned_on,
    )
    return report, adaptive


def _try_lists(trial: tuple[Read, ...], retriever: Retriever, progress: Progress) -> tuple[int | None, float]:
    """The fewest lists that lose next to nothing against the most, and what they lose."""
    nlist = retriever.stores[0].snapshot.nlist
    if not nlist:
        return None, 0.0
    numbers = sorted({min(nprobe, nlist) for nprobe in PROBES})
    nats = []
    for done, nprobe in enumerate(numbers, start=1):
        nats.append(_asked(trial, replace(retriever, nprobe=nprobe))[0])
        progress("try lists", done, len(numbers))
    place = next(place for place, each in enumerate(nats) if each <= nats[-1] + WORTH_MORE_LISTS)
    return numbers[place], nats[place] - nats[-1]


def _try_pointers(
    trial: tuple[Read, ...], retriever: Retriever, report: TuneReport, pointer_loss: float | None, progress: Progress
) -> TuneReport:
    """How many pointers may take the place of a search: the number that saves most searches for what may be lost."""
    always, _ = _asked(trial, retriever)
    allowed = FREE if pointer_loss is None else pointer_loss
    best: tuple[float, int | None, float] = (0.0, None, 0.0)
    numbers = [2**power for power in range(retriever.k.bit_length())]
    for done, min_pointers in enumerate(reversed(numbers), start=1):
        nats, searched = _asked(trial, replace(retriever, min_pointers=min_pointers))
        progress("try pointers", done, len(numbers))
        if nats - always > allowed:
            progress("try pointers", len(numbers), len(numbers))
            break
        if 1 - searched > best[0]:
            best = 1 - searched, min_pointers, nats - always
    pointer_share, number, lost = best
    kept = pointer_loss is not None and number is not None
    return replace(report, min_pointers=number, pointer_share=pointer_share, pointer_loss=lost, pointers_kept=kept)


def _asked(trial: tuple[Read, ...], retriever: Retriever) -> tuple[float, float]:
    """Nats per token when the store is asked in some way, and the share of positions that it was searched for."""
    nats, searches, count = 0.0, 0, 0
    for read in trial:
        found = retriever.search_in_order(read.keys_ND, read.max_logprobs_N, read.targets_N, retriever.new_policy())
        knn_N = target_logprobs(found.logweights_QK, found.neighbors.values_QK, read.targets_N)
        there_N = (found.neighbors.ids_QK >= 0).any(axis=1)
        nats -= float(mix_targets(read.lm_logprobs_N, knn_N, there_N, found.lams_Q).sum(dtype=np.float64))
        searches, count = searches + int(found.searched_Q.sum()), count + len(read.targets_N)
    return nats / count, searches / count


def _nats(probabilities_Q: Float[np.ndarray, " Q"]) -> float:
    return -float(np.log(np.maximum(probabilities_Q, 1e-300)).mean())


def _gain(
    new_Q: Float[np.ndarray, " Q"], old_Q: Float[np.ndarray, " Q"], windows_Q: Int64[np.ndarray, " Q"]
) -> tuple[float, float]:
    """Nats per token that are saved, and the standard error over windows."""
    saved_Q = np.log(np.maximum(new_Q, 1e-300)) - np.log(np.maximum(old_Q, 1e-300))
    mean, count = float(saved_Q.mean()), int(windows_Q[-1]) + 1
    spread_W = np.bincount(windows_Q, saved_Q - mean, minlength=count)
    return mean, float(np.sqrt((spread_W**2).sum() * count / max(1, count - 1)) / len(saved_Q))


def best_lam(lm_Q: Float[np.ndarray, " Q"], knn_Q: Float[np.ndarray, " Q"]) -> float:
    """The weight that maximises mean log(lam knn + (1 - lam) lm), to 1e-6: bisection on its falling derivative."""
    low, high = 0.0, 1.0
    with np.errstate(divide="ignore", invalid="ignore"):
        while high - low > 1e-6:
            lam = (low + high) / 2
            slope = np.mean((knn_Q - lm_Q) / (lam * knn_Q + (1 - lam) * lm_Q))
            low, high = (lam, high) if slope > 0 else (low, lam)
    return round((low + high) / 2, 4)


def _gather(
    checkpoint: Checkpoint, retriever: Retriever, texts: Corpus, max_tokens: int, progress: Progress
) -> _Evidence:
    reads, founds, agrees, num_tokens = [], [], [], 0
    windows_Q: list[np.ndarray] = []
    windows = (
        (number, window) for number, document in enumerate(texts) for window in text_windows(checkpoint, document.text)
    )
    datastore = retriever.stores[0].datastore
    lists = max([GATHER_LISTS, *(segment.record.nprobe for segment in datastore.snapshot.segments)])
    encoder, trial = Encoder(checkpoint.decoder), list[tuple[int, Read]]()
    for block in blocks_of(windows, BLOCK_WINDOWS):
        for (number, window), read in zip(block, encoder.predictions([each for _, each in block]), strict=True):
            if num_tokens < TRIAL_TOKENS:
                trial.append((number, Read.of(window, read)))
            found = datastore.search(read.keys_ND, retriever.k, nprobe=lists)
            agrees.append(found.values_QK == window.targets_N[:, None])
            windows_Q.append(np.full(len(window.targets_N), len(windows_Q)))
            reads.append(read)
            founds.append(found)
            num_tokens += len(window.targets_N)
        progress("retrieve", min(num_tokens, max_tokens), max_tokens)
        if num_tokens >= max_tokens:
            break
    if not num_tokens:
        raise InvalidInput("there is no token to tune on; give some held-out text", field="texts")
    neighbors = Neighbors(
        np.concatenate([found.distances_QK for found in founds]),
        np.concatenate([found.ids_QK for found in founds]),
        np.concatenate([found.values_QK for found in founds]),
    )
    return _Evidence(
        np.concatenate([read.logprobs_N for read in reads]),
        np.concatenate([read.max_logprobs_N for read in reads]),
        np.concatenate(windows_Q),
        neighbors,
        np.concatenate(agrees),
        tuple(joined([read for _, read in group]) for _, group in groupby(trial, key=lambda each: each[0])),
    )


def joined(reads: list[Read]) -> Read:
    """The windows of one document as one."""
    return Read(*(np.concatenate([getattr(read, field.name) for read in reads]) for field in fields(Read)))


def _search(evidence: _Evidence, scale: float) -> tuple[int, float, float, float]:
    """k, temperature, lam and their nats per token: the best, with the smallest k that is nearly as good."""
    lm_Q = np.exp(evidence.lm_logprobs_Q.astype(np.float64))
    best: dict[int, tuple[float, float, float]] = {}
    for step in TEMPERATURE_STEPS:
        temperature = scale * step
        for k, knn_Q in _memory_probabilities(evidence, temperature):
            lam = best_lam(lm_Q, knn_Q)
            nats = -float(np.mean(np.log(np.maximum(lam * knn_Q + (1 - lam) * lm_Q, 1e-300))))
            best[k] = min(best.get(k, (math.inf, 0.0, 0.0)), (nats, temperature, lam))
    least = min(nats for nats, _, _ in best.values())
    k = min(k for k, (nats, _, _) in best.items() if nats <= least + WORTH_MORE_K)
    nats, temperature, lam = best[k]
    return k, temperature, lam, nats


def _memory_probabilities(evidence: _Evidence, temperature: float) -> list[tuple[int, Float[np.ndarray, " Q"]]]:
    """p_kNN of every target for every k at once, from running sums over the neighbors."""
    nearest_Q1 = evidence.found.distances_QK[:, :1]
    with np.errstate(invalid="ignore"):
        weights_QK = np.exp((nearest_Q1 - evidence.found.distances_QK) / np.float32(temperature))
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
