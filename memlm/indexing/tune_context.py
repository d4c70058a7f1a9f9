"""Held-out documents -> how their own past is to be weighed: k, temperature and λ, saved with the model.

Every position of a document is searched for among the earlier ones of the same document, once for all settings. An
adaptive λ is fitted as that of a datastore (`memlm.indexing.fitting`), and kept if it is better than one λ on documents
that it was not fitted to.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from memlm.base.progress import Progress, silent
from memlm.data.corpus import Corpus, Document
from memlm.data.windows import WindowSize, blocks_of
from memlm.errors import InvalidInput
from memlm.index.neighbors import Neighbors
from memlm.indexing.fitting import Evidence, Trial, fit_lam, gain_of, grid_search, nats_of
from memlm.model.files.checkpoint import Checkpoint, load_checkpoint
from memlm.retrieval.context_cache import ContextCache
from memlm.retrieval.encoder import BLOCK_WINDOWS, Encoder, text_windows
from memlm.retrieval.own_past import ContextSettings

LARGEST_K = 256
LEAST_DOCUMENTS = 4


@dataclass(frozen=True, slots=True)
class ContextTuning:
    """The settings, the tokens and documents that they were tuned on, nats per token of the model alone and with the
    past, and whether the settings are worth keeping: the gain exceeds twice its standard error.
    """

    settings: ContextSettings
    tokens: int
    documents: int
    base_nats: float
    nats: float
    kept: bool


def tune_context(
    model: str | Path | Checkpoint,
    texts: Corpus,
    *,
    max_tokens: int = 50_000,
    document_tokens: int = 8192,
    size: WindowSize | None = None,
    progress: Progress = silent,
) -> ContextTuning:
    """Tunes the weight of a text's own past on documents that the model has not seen. Saves it with the model if it is
    worth keeping.

    Reads the first `document_tokens` of each document, and `max_tokens` in all. Raises InvalidInput for fewer than four
    documents.
    """
    checkpoint = model if isinstance(model, Checkpoint) else load_checkpoint(model)
    evidence = read_past(
        checkpoint, texts, max_tokens=max_tokens, document_tokens=document_tokens, size=size, progress=progress
    )
    tuning = fit_past(evidence, texts.label)
    if tuning.kept:
        tuning.settings.save(checkpoint.path)
    return tuning


def fit_past(evidence: Evidence, label: str) -> ContextTuning:
    """Fits k, temperature and λ to the neighbors in the documents called `label`.

    Raises InvalidInput for fewer than four documents.
    """
    documents = len(np.unique(evidence.windows_Q))
    if documents < LEAST_DOCUMENTS:
        raise InvalidInput(
            f"the documents to tune on are {documents}; give {LEAST_DOCUMENTS} of held-out text at least, or raise"
            " max_tokens",
            field="texts",
        )
    nearest_Q = evidence.found.distances_QK[:, 0]
    apart = nearest_Q[np.isfinite(nearest_Q) & (nearest_Q > 0)]
    scale = float(np.median(apart)) if len(apart) else 1.0  # a text of one token has equal keys
    k, temperature, lam = grid_search(evidence, scale)
    trial = Trial.of(evidence, k, temperature)
    fitted = fit_lam(trial, None, lam)
    mixed_Q = fitted.mixed_Q if fitted.kept else trial.mixed(lam)
    gain, gain_error = gain_of(mixed_Q, trial.lm_Q, evidence.windows_Q)
    settings = ContextSettings(
        k=k,
        temperature=temperature,
        lam=lam,
        adaptive=fitted.adaptive if fitted.kept else None,
        tuned_on=f"{label} ({len(trial.lm_Q)} tokens)",
        gain=gain,
        gain_error=gain_error,
    )
    base_nats = nats_of(trial.lm_Q)
    return ContextTuning(settings, len(trial.lm_Q), documents, base_nats, base_nats - gain, gain > 2 * gain_error)


def read_past(
    checkpoint: Checkpoint,
    texts: Iterable[Document],
    *,
    max_tokens: int,
    document_tokens: int,
    size: WindowSize | None,
    progress: Progress,
) -> Evidence:
    """Reads documents, and finds for each position the nearest earlier ones of its document."""
    encoder, num_tokens = Encoder(checkpoint.decoder), 0
    logprobs, max_logprobs, numbers = list[np.ndarray](), list[np.ndarray](), list[np.ndarray]()
    founds, agrees = list[Neighbors](), list[np.ndarray]()
    for number, document in enumerate(texts):
        if num_tokens >= max_tokens:
            break
        cache, most = ContextCache(checkpoint.decoder.config.dim), min(document_tokens, max_tokens - num_tokens)
        for block in blocks_of(text_windows(checkpoint, document.text, size), BLOCK_WINDOWS):
            for window, read in zip(block, encoder.predictions(block), strict=True):
                first, room = len(cache), most - len(cache)
                targets_N, keys_ND = window.targets_N[:room], read.keys_ND[:room]
                cache.append(keys_ND, targets_N)
                found = cache.search(keys_ND, LARGEST_K, first + np.arange(len(targets_N)))
                founds.append(found)
                agrees.append(found.values_QK == targets_N[:, None])
                logprobs.append(read.logprobs_N[:room])
                max_logprobs.append(read.max_logprobs_N[:room])
                numbers.append(np.full(len(targets_N), number))
            if len(cache) >= most:
                break
        num_tokens += len(cache)
        progress("read texts", num_tokens, max(max_tokens, num_tokens))
    if not num_tokens:
        raise InvalidInput("there is no token to tune on; give some held-out text", field="texts")
    return Evidence(
        lm_logprobs_Q=np.concatenate(logprobs),
        max_logprobs_Q=np.concatenate(max_logprobs),
        windows_Q=np.concatenate(numbers),
        found=Neighbors(
            np.concatenate([found.distances_QK for found in founds]),
            np.concatenate([found.ids_QK for found in founds]),
            np.concatenate([found.values_QK for found in founds]),
        ),
        agrees_QK=np.concatenate(agrees),
    )
