"""Held-out text -> k, λ and temperature: retrieves once, then searches a grid over the neighbors.

For every temperature of a geometric grid and every k of a doubling one, the mean log-likelihood is a concave function
of λ, whose maximum bisection finds. An adaptive λ is fitted as a build fits it (`memlm.indexing.fitting`), to this text
and to text that the store holds. The number of lists is chosen on a part of the held-out text, because stored positions
need fewer lists than new ones. The store keeps the result as its defaults, with the name of the text.

Errors are standard errors over windows of the text, because the tokens of a window are not independent.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from itertools import groupby
from pathlib import Path

import numpy as np

from memlm.api.params import RetrievalParams
from memlm.base.progress import Progress, silent
from memlm.data.corpus import Corpus, Texts, corpus_of
from memlm.data.windows import blocks_of
from memlm.errors import InvalidInput, check_range
from memlm.index.neighbors import Neighbors
from memlm.index.store.datastore import Datastore
from memlm.index.store.manifest import KnnDefaults
from memlm.indexing.fitting import (
    Evidence,
    Trial,
    find_threshold,
    fit_lam,
    gain_of,
    grid_search,
    nats_of,
    sharpened,
)
from memlm.indexing.option_trials import EncodedText, try_lists
from memlm.indexing.passages import sample_prompts
from memlm.model.files.checkpoint import Checkpoint, load_checkpoint
from memlm.retrieval.adaptive import AdaptiveLam
from memlm.retrieval.encoder import BLOCK_WINDOWS, Encoder, text_windows
from memlm.retrieval.retriever import Retriever
from memlm.retrieval.store import ModelStore

LARGEST_K = 512
RETRIEVE_LISTS = 64  # are searched at least for the neighbors that everything is chosen from
TRIAL_TOKENS = 8192  # of the text, on which lists are tried


@dataclass(frozen=True, slots=True)
class TuneReport:
    """The chosen settings, and nats per token on `tokens` tokens: of the model alone (`base_nats`), with one λ
    (`knn_nats`), and with an adaptive λ on text that it was not fitted to (`adaptive_nats`). `gain` is over the model
    alone, `adaptive_gain` over one λ.

    `nprobe` lists lose `nprobe_loss` nats against the most that were tried (None for a store without lists).

    λ is 0 below `threshold`, which is the case at the share `left_alone` of positions, and the share `gain_left` of
    the gain with an adaptive λ over the model alone stays. The threshold is 0 where none was asked for or found.
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
    nprobe: int | None
    nprobe_loss: float
    threshold: float
    left_alone: float
    gain_left: float
    tuned_on: str


def tune(
    model: str | Path | Checkpoint,
    store: str | Path,
    texts: Texts,
    *,
    max_tokens: int = 50_000,
    largest_k: int = LARGEST_K,
    keep_gain: float | None = None,
    progress: Progress = silent,
) -> TuneReport:
    """Tunes a datastore on text that neither it nor the model has seen, and keeps the result as the store's defaults.

    Reads at most `max_tokens` tokens, and pieces of the store's documents. Keeps an adaptive λ if it costs these tokens
    at most half a percent over the model alone, and 3 % over one λ. With `keep_gain`, an adaptive λ is 0 below the
    largest threshold that keeps this share of its gain over the model alone, so that text of other domains is left to
    the model. Raises InvalidInput for texts without a token and for a store without entries, and Incompatible for one
    without keys.
    """
    check_range("keep_gain", keep_gain, above=0, most=1)
    texts = corpus_of(texts)
    checkpoint = model if isinstance(model, Checkpoint) else load_checkpoint(model)
    with Datastore.open(store) as datastore:
        model_store = ModelStore(datastore, checkpoint)
        datastore.snapshot.check_searchable()
        if not datastore.snapshot.keyed.num_entries:
            raise InvalidInput(
                f"every document of {store} is deleted, so there is nothing to tune; add documents first", field="store"
            )
        largest = RetrievalParams(k=min(largest_k, max(1, datastore.snapshot.keyed.num_entries)))
        start = Retriever.of([model_store], largest)
        evidence = _retrieve(checkpoint, start, texts, max_tokens, progress)
        own = _own_text(model_store, checkpoint, start.knn.k, progress)
        k, temperature, lam = grid_search(evidence, start.knn.temperature, own)
        tuned_on = texts.label + f" ({len(evidence.lm_logprobs_Q)} tokens)"
        report, adaptive = _fit_adaptive(evidence, own, k, temperature, lam, keep_gain, tuned_on)
        chosen = replace(start, knn=replace(start.knn, k=k, lam=lam, temperature=temperature))
        nprobe, nprobe_loss = try_lists(evidence.texts, chosen, progress)
        report = replace(report, nprobe=nprobe, nprobe_loss=nprobe_loss)
        datastore.save_defaults(
            KnnDefaults(
                k=k,
                lam=lam,
                temperature=temperature,
                tuned_on=tuned_on,
                gain=report.gain,
                gain_error=report.gain_error,
                adaptive=asdict(adaptive) if report.adaptive_kept else None,
                nprobe=nprobe,
                tuned_entries=datastore.snapshot.keyed.num_entries,
            )
        )
    return report


def _fit_adaptive(
    evidence: Evidence,
    own: Evidence | None,
    k: int,
    temperature: float,
    lam: float,
    keep_gain: float | None,
    tuned_on: str,
) -> tuple[TuneReport, AdaptiveLam]:
    """Fits an adaptive λ, and evaluates it and one λ."""
    new = Trial.of(evidence, k, temperature)
    fitted = fit_lam(new, None if own is None else Trial.of(own, k, temperature), lam)
    lm_Q, fixed_Q, adapted_Q, kept = new.lm_Q, new.mixed(lam), fitted.mixed_Q, fitted.kept
    gain, gain_error = gain_of(fixed_Q, lm_Q, evidence.windows_Q)
    adaptive_gain, adaptive_gain_error = gain_of(adapted_Q, fixed_Q, evidence.windows_Q)
    adaptive, found = sharpened(fitted.adaptive, evidence, k, temperature), (0.0, 0.0, 1.0)
    if kept and keep_gain is not None:
        found = find_threshold(Trial.of(evidence, k, temperature, adaptive), adaptive, keep_gain)
        adaptive = replace(adaptive, threshold=found[0])
    report = TuneReport(
        k=k,
        lam=lam,
        temperature=temperature,
        tokens=len(lm_Q),
        base_nats=-float(np.log(lm_Q).mean()),
        knn_nats=nats_of(fixed_Q),
        gain=gain,
        gain_error=gain_error,
        adaptive_nats=nats_of(adapted_Q),
        adaptive_gain=adaptive_gain,
        adaptive_gain_error=adaptive_gain_error,
        adaptive_kept=kept,
        nprobe=None,
        nprobe_loss=0.0,
        threshold=found[0],
        left_alone=found[1],
        gain_left=found[2],
        tuned_on=tuned_on,
    )
    return report, adaptive


def _own_text(store: ModelStore, checkpoint: Checkpoint, k: int, progress: Progress) -> Evidence | None:
    """Reads pieces of the store's documents as prompts. Returns None for documents that are too short."""
    snapshot = store.snapshot.keyed
    prompts = sample_prompts(snapshot, checkpoint, seed=snapshot.manifest.spec.seed, progress=progress)
    return prompts.evidence(snapshot.search(prompts.keys_QD, k)) if len(prompts.ids_Q) else None


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
            found = snapshot.search(prediction.keys_ND, retriever.knn.k, nprobe=nprobe)
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
