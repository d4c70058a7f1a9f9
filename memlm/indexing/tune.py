"""Held-out text -> k, λ and temperature: retrieves once, then searches a grid over the neighbors.

For every temperature of a geometric grid and every k of a doubling one, the mean log-likelihood is a concave function
of λ, whose maximum bisection finds. An adaptive λ is fitted to one half of the text and evaluated on the other, and the
other way round. The number of lists is chosen on a part of the held-out text, because stored positions need fewer lists
than new ones. The store keeps the result as its defaults, with the name of the text.

Errors are standard errors over windows of the text, because the tokens of a window are not independent.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, replace
from itertools import groupby
from pathlib import Path

import numpy as np
from jaxtyping import Bool, Float, Float32, Int64

from memlm.api.params import RetrievalParams
from memlm.base.progress import Progress, silent
from memlm.data.corpus import Corpus
from memlm.data.windows import blocks_of
from memlm.errors import InvalidInput
from memlm.index.neighbors import Neighbors
from memlm.index.store.datastore import Datastore
from memlm.index.store.manifest import KnnDefaults
from memlm.indexing.option_trials import EncodedText, try_lists, try_pointers
from memlm.model.checkpoint import Checkpoint, load_checkpoint
from memlm.retrieval.adaptive import AdaptiveLam, features_of, fit
from memlm.retrieval.encoder import BLOCK_WINDOWS, Encoder, text_windows
from memlm.retrieval.interpolation import neighbor_logweights
from memlm.retrieval.retriever import Retriever
from memlm.retrieval.skipping import find_skip_threshold
from memlm.retrieval.store import ModelStore

LARGEST_K = 512
SHOWN_LOSS = 0.001  # nats per token that skipping is reported for, if no loss is allowed
WORTH_MORE_K = 0.01  # nats per token below which more neighbors are not worth their time
RETRIEVE_LISTS = 64  # are searched at least for the neighbors that everything is chosen from
TRIAL_TOKENS = 8192  # of the text, on which lists and pointers are tried
TEMPERATURE_STEPS = tuple(2.0 ** (step / 2) for step in range(-10, 7))


@dataclass(frozen=True, slots=True)
class TuneReport:
    """The chosen settings, and nats per token on `tokens` tokens: of the model alone (`base_nats`), with one λ
    (`knn_nats`), and with an adaptive λ on text that it was not fitted to (`adaptive_nats`). `gain` is over the model
    alone, `adaptive_gain` over one λ.

    Nothing is searched at the share `skipped` of positions, for `skip_loss` nats per token: those where the model's
    largest log-probability is `skip_retrieval_above` or more. At least `min_pointers` pointers replace the share
    `pointer_share` of searches, for `pointer_loss`. `nprobe` lists lose `nprobe_loss` nats against the most that were
    tried (None for a store without lists).
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

    Reads at most `max_tokens` tokens. Keeps an adaptive λ if it is better by more than twice its standard error. With
    `skip_loss`, keeps a threshold above which nothing is searched, and with `pointer_loss` a number of pointers that
    replace a search, if each costs at most so many nats per token. Raises InvalidInput for texts without a token and
    for a store without entries.
    """
    checkpoint = model if isinstance(model, Checkpoint) else load_checkpoint(model)
    with Datastore.open(store) as datastore:
        model_store = ModelStore(datastore, checkpoint)
        if not datastore.snapshot.num_entries:
            raise InvalidInput(
                f"every document of {store} is deleted, so there is nothing to tune; add documents first", field="store"
            )
        largest = RetrievalParams(k=min(largest_k, max(1, datastore.snapshot.num_entries)))
        start = Retriever.of([model_store], largest)
        evidence = _retrieve(checkpoint, start, texts, max_tokens, progress)
        k, temperature, lam = grid_search(evidence, start.temperature)
        tuned_on = texts.label + f" ({len(evidence.lm_logprobs_Q)} tokens)"
        report, adaptive = _fit_adaptive(evidence, k, temperature, lam, skip_loss, tuned_on)
        chosen = replace(start, k=k, lam=lam, temperature=temperature, skip_retrieval_above=None, min_pointers=None)
        nprobe, nprobe_loss = try_lists(evidence.texts, chosen, progress)
        report = replace(report, nprobe=nprobe, nprobe_loss=nprobe_loss)
        if pointer_loss is not None and datastore.snapshot.has_keys:
            chosen = replace(chosen, nprobe=nprobe, adaptive=adaptive if report.adaptive_kept else None)
            number, share, loss = try_pointers(evidence.texts, chosen, pointer_loss, progress)
            report = replace(
                report, min_pointers=number, pointer_share=share, pointer_loss=loss, pointers_kept=number is not None
            )
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


def _fit_adaptive(
    evidence: Evidence, k: int, temperature: float, lam: float, skip_loss: float | None, tuned_on: str
) -> tuple[TuneReport, AdaptiveLam]:
    """Fits an adaptive λ, and evaluates it, one λ, and skipping."""
    lm_Q = np.exp(evidence.lm_logprobs_Q.astype(np.float64))
    knn_Q = dict(knn_probabilities(evidence, temperature))[k]
    found = evidence.found.first(k)
    features_QF = features_of(
        found, neighbor_logweights(found.distances_QK, temperature), temperature, evidence.max_logprobs_Q
    )
    fixed_Q = lam * knn_Q + (1 - lam) * lm_Q
    adapted_Q, half_Q = np.empty_like(fixed_Q), evidence.windows_Q % 2 == 0
    for fitted, held_out in ((half_Q, ~half_Q), (~half_Q, half_Q)):
        if not (fitted.any() and held_out.any()):  # there is one window alone
            adapted_Q = fixed_Q
            break
        lams_Q = fit(features_QF[fitted], lm_Q[fitted], knn_Q[fitted], lam).lams(features_QF[held_out])
        adapted_Q[held_out] = lams_Q * knn_Q[held_out] + (1 - lams_Q) * lm_Q[held_out]
    adaptive = fit(features_QF, lm_Q, knn_Q, lam)
    gain, gain_error = gain_of(fixed_Q, lm_Q, evidence.windows_Q)
    adaptive_gain, adaptive_gain_error = gain_of(adapted_Q, fixed_Q, evidence.windows_Q)
    kept = adaptive_gain > 2 * adaptive_gain_error
    threshold, share, loss = find_skip_threshold(
        lm_Q, adapted_Q if kept else fixed_Q, evidence.max_logprobs_Q, skip_loss or SHOWN_LOSS
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
        adaptive_gain=adaptive_gain,
        adaptive_gain_error=adaptive_gain_error,
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


def _nats(probabilities_Q: Float[np.ndarray, " Q"]) -> float:
    return -float(np.log(np.maximum(probabilities_Q, 1e-300)).mean())


def gain_of(
    new_Q: Float[np.ndarray, " Q"], old_Q: Float[np.ndarray, " Q"], windows_Q: Int64[np.ndarray, " Q"]
) -> tuple[float, float]:
    """Returns the nats per token that are saved, and the standard error over windows."""
    saved_Q = np.log(np.maximum(new_Q, 1e-300)) - np.log(np.maximum(old_Q, 1e-300))
    mean, count = float(saved_Q.mean()), int(windows_Q[-1]) + 1
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


def _retrieve(
    checkpoint: Checkpoint, retriever: Retriever, texts: Corpus, max_tokens: int, progress: Progress
) -> Evidence:
    """Encodes the texts and finds the neighbors of every position, once for all settings."""
    predictions, founds, agrees, window_numbers = [], list[Neighbors](), [], list[np.ndarray]()
    num_tokens, first_windows = 0, list[tuple[int, EncodedText]]()
    windows = (
        (number, window)
        for number, document in enumerate(texts)
        for window in text_windows(checkpoint, document.text, retriever.window_size)
    )
    encoder, snapshot = Encoder(checkpoint.decoder), retriever.stores[0].snapshot
    nprobe = max([RETRIEVE_LISTS, *(segment.record.nprobe for segment in snapshot.segments)])
    for block in blocks_of(windows, BLOCK_WINDOWS):
        for (number, window), prediction in zip(block, encoder.predictions([each for _, each in block]), strict=True):
            if num_tokens < TRIAL_TOKENS:
                first_windows.append((number, EncodedText.of(window, prediction)))
            found = snapshot.search(prediction.keys_ND, retriever.k, nprobe=nprobe)
            agrees.append(found.values_QK == window.targets_N[:, None])
            window_numbers.append(np.full(len(window.targets_N), len(window_numbers)))
            predictions.append(prediction)
            founds.append(found)
            num_tokens += len(window.targets_N)
        progress("retrieve", min(num_tokens, max_tokens), max_tokens)
        if num_tokens >= max_tokens:
            break
    if not num_tokens:
        raise InvalidInput("there is no token to tune on; give some held-out text", field="texts")
    return Evidence(
        lm_logprobs_Q=np.concatenate([prediction.logprobs_N for prediction in predictions]),
        max_logprobs_Q=np.concatenate([prediction.max_logprobs_N for prediction in predictions]),
        windows_Q=np.concatenate(window_numbers),
        found=Neighbors(
            np.concatenate([found.distances_QK for found in founds]),
            np.concatenate([found.ids_QK for found in founds]),
            np.concatenate([found.values_QK for found in founds]),
        ),
        agrees_QK=np.concatenate(agrees),
        texts=tuple(
            EncodedText.joined([text for _, text in group])
            for _, group in groupby(first_windows, key=lambda each: each[0])
        ),
    )


def grid_search(evidence: Evidence, scale: float) -> tuple[int, float, float]:
    """Returns the best k, temperature and λ, with the smallest k that is nearly as good. Temperatures are multiples of
    `scale`.
    """
    lm_Q = np.exp(evidence.lm_logprobs_Q.astype(np.float64))
    best: dict[int, tuple[float, float, float]] = {}
    for step in TEMPERATURE_STEPS:
        temperature = scale * step
        for k, knn_Q in knn_probabilities(evidence, temperature):
            lam = best_lam(lm_Q, knn_Q)
            nats = -float(np.mean(np.log(np.maximum(lam * knn_Q + (1 - lam) * lm_Q, 1e-300))))
            best[k] = min(best.get(k, (math.inf, 0.0, 0.0)), (nats, temperature, lam))
    least = min(nats for nats, _, _ in best.values())
    k = min(k for k, (nats, _, _) in best.items() if nats <= least + WORTH_MORE_K)
    _, temperature, lam = best[k]
    return k, temperature, lam


def knn_probabilities(evidence: Evidence, temperature: float) -> list[tuple[int, Float[np.ndarray, " Q"]]]:
    """Returns p_kNN of every target for each k, from cumulative sums over the neighbors."""
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
