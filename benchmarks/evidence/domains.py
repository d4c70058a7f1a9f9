"""A domain's datastore and context cache, both tuned, and the nats of its test documents with each memory.

A document is read once, and each memory is searched once. All ways of mixing come from that.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jaxtyping import Bool, Float, Float32

from benchmarks.evidence.texts import Domain, Sizes, text_hash
from benchmarks.per_token import per_token
from benchmarks.sources import known_source, note_source, source_of
from memlm.api.params import RetrievalParams
from memlm.base.progress import Progress, silent
from memlm.data.corpus import Corpus, Document
from memlm.data.windows import WindowSize
from memlm.errors import InvalidInput
from memlm.index.store.datastore import Datastore
from memlm.index.store.journal import is_datastore
from memlm.indexing.build import build_index
from memlm.indexing.option_trials import EncodedText
from memlm.indexing.tune import tune
from memlm.indexing.tune_context import fit_past, read_past
from memlm.model.files.checkpoint import Checkpoint
from memlm.retrieval.context_cache import ContextCache
from memlm.retrieval.encoder import Encoder, text_windows, window_size
from memlm.retrieval.own_past import ContextSettings, OwnPast, with_past
from memlm.retrieval.result import RetrievalResult
from memlm.retrieval.retriever import Retriever
from memlm.retrieval.store import ModelStore

WINDOW = 512  # tokens of a window of the datastore and of the texts, fewer where the model's context is shorter
ALONE, ONE_LAM, ADAPTIVE, CACHE, BOTH = "alone", "one_lam", "adaptive_lam", "context_cache", "both"
WAYS = (ONE_LAM, ADAPTIVE, CACHE, BOTH)


@dataclass(frozen=True, slots=True)
class Prepared:
    """A domain with its datastore and the tuned settings of both memories. `store_s` are the seconds of `work_clock`
    for the datastore and its tuning, 0 if an earlier run left it.
    """

    domain: Domain
    folder: Path
    past: ContextSettings
    sizes: Sizes
    store_s: float = 0.0

    @property
    def store(self) -> Path:
        """The folder of the datastore."""
        return self.folder / "store"


@dataclass(frozen=True, slots=True)
class ReadText:
    """A held-out document as the model read it, with the log-probability of each token in each way, `alone` too."""

    document: Document
    read: EncodedText
    logprobs: Mapping[str, Float32[np.ndarray, " N"]]


def prepare(
    checkpoint: Checkpoint, domain: Domain, folder: Path, sizes: Sizes, progress: Progress = silent
) -> Prepared:
    """Builds the datastore of a domain and tunes both memories. Takes those that an earlier run left in the folder.

    Raises InvalidInput for a folder of another model, number type or texts.
    """
    folder.mkdir(parents=True, exist_ok=True)
    source = source_of(checkpoint, text_hash([*domain.stored, *domain.held_out]))
    if known_source(folder, source, f"the datastore of {domain.name}") is None:
        if any(folder.iterdir()):
            raise InvalidInput(f"{folder} has files that no bench noted the source of; give another", field="work")
        note_source(folder, source)
    past, store_s = ContextSettings.load(folder), 0.0
    if past is None:
        clock = work_clock(checkpoint.decoder.device)
        begin = clock()
        make_store(checkpoint, domain, folder / "store", progress)
        store_s = clock() - begin
        evidence = read_past(
            checkpoint, domain.tuning, max_tokens=_num_tokens(checkpoint, domain.tuning),
            document_tokens=sizes.document_tokens, size=windows_for(checkpoint), progress=progress,
        )  # fmt: skip
        past = fit_past(evidence, domain.name).settings
        past.save(folder)  # the last step: a folder with this file is complete
    return Prepared(domain, folder, past, sizes, store_s)


def work_clock(device: torch.device) -> Callable[[], float]:
    """The clock for work on a device, in seconds: that of the processor, which other processes do not lengthen, but the
    time that passes for a GPU, whose work no clock of the processor counts.
    """
    return time.process_time if device.type == "cpu" else time.perf_counter


def make_store(checkpoint: Checkpoint, domain: Domain, store: Path, progress: Progress = silent) -> None:
    """Builds the datastore of a domain and tunes it on the domain's tuning documents, as far as it is not done yet."""
    if not is_datastore(store):
        size = windows_for(checkpoint)
        build_index(
            checkpoint, Corpus(domain.stored), store, window=size.window, stride=size.stride, check="none", keys="now",
            progress=progress,
        )  # fmt: skip
    with Datastore.open(store) as datastore:
        is_tuned = datastore.snapshot.defaults.tuned_on is not None
    if not is_tuned:
        most = _num_tokens(checkpoint, domain.tuning)
        tune(checkpoint, store, Corpus(domain.tuning), max_tokens=most, progress=progress)


def _num_tokens(checkpoint: Checkpoint, documents: Sequence[Document]) -> int:
    return sum(len(checkpoint.tokenizer.encode(each.text)) for each in documents)


def read_test(checkpoint: Checkpoint, prepared: Prepared, progress: Progress = silent) -> list[ReadText]:
    """Reads the test documents once, and searches both memories once for all ways."""
    texts = []
    with Datastore.open(prepared.store) as datastore:
        retriever = Retriever.of([ModelStore(datastore, checkpoint)], RetrievalParams())
        for number, document in enumerate(prepared.domain.test):
            read = read_document(checkpoint, document, windows_for(checkpoint))
            ways = {way: logprobs_of(read, found) for way, found in searched(read, retriever, prepared.past).items()}
            texts.append(ReadText(document, read, {ALONE: read.lm_logprobs_N, **ways}))
            progress("score", number + 1, len(prepared.domain.test))
    return texts


def read_document(checkpoint: Checkpoint, document: Document, size: WindowSize) -> EncodedText:
    """Reads a document: keys, tokens and the model's log-probabilities."""
    windows = list(text_windows(checkpoint, document.text, size))
    predictions = Encoder(checkpoint.decoder).predictions(windows)
    return EncodedText.joined([EncodedText.of(*each) for each in zip(windows, predictions, strict=True)])


def searched(read: EncodedText, retriever: Retriever, settings: ContextSettings) -> dict[str, RetrievalResult]:
    """Searches the datastore and the document's own past. One λ and adaptive λ share the neighbors."""
    adaptive = retriever.search(read.keys_ND, read.max_logprobs_N)
    past = OwnPast(settings, ContextCache(read.keys_ND.shape[1]))
    past.cache.append(read.keys_ND, read.targets_N)
    own = past.search(read.keys_ND, read.max_logprobs_N)
    logweights_NK, lams_N = replace(retriever.knn, adaptive=None).weigh(adaptive.neighbors, None)
    one = replace(adaptive, logweights_QK=logweights_NK, lams_Q=lams_N)
    return {ONE_LAM: one, ADAPTIVE: adaptive, CACHE: own, BOTH: with_past(adaptive, own)}


def logprobs_of(read: EncodedText, found: RetrievalResult) -> Float32[np.ndarray, " N"]:
    """The log-probability of each token in the mixture of the model and its neighbors."""
    return found.mix_targets(read.lm_logprobs_N, read.targets_N)[1]


def nats_less(
    texts: Sequence[ReadText], way: str, chosen: Sequence[Bool[np.ndarray, " N"]] | None = None
) -> dict[str, float]:
    """Nats per token of the model alone and how many fewer one way has, with standard errors over documents. `chosen`
    marks the tokens of each document that count.
    """
    masks = chosen or [np.ones(len(text.read.targets_N), bool) for text in texts]
    sums = {name: nats_of(texts, name, masks) for name in (ALONE, way)}
    sizes_D = np.array([mask_N.sum() for mask_N in masks])
    alone, alone_error = per_token(sums[ALONE], sizes_D)
    less, error = per_token(sums[ALONE] - sums[way], sizes_D)
    return {
        "nats_per_token": alone, "nats_per_token_error": alone_error, "nats_less": less, "nats_less_error": error,
    }  # fmt: skip


def nats_of(
    texts: Sequence[ReadText], way: str, chosen: Sequence[Bool[np.ndarray, " N"]] | None = None
) -> Float[np.ndarray, " D"]:
    """Nats of each document in one way, of all its tokens or of those that are chosen."""
    masks = chosen or [np.ones(len(text.read.targets_N), bool) for text in texts]
    parts = [text.logprobs[way][mask_N] for text, mask_N in zip(texts, masks, strict=True)]
    return -np.array([part.sum(dtype=np.float64) for part in parts])


def differences(
    table: str,
    text: str,
    sums: Mapping[str, Float[np.ndarray, " D"]],
    sizes_D: Float[np.ndarray, " D"],
    pairs: Sequence[tuple[str, str]],
) -> list[dict[str, Any]]:
    """A row of another table for each pair of ways: how much less the first one has of a figure than the second one,
    by token, with the standard error of the difference over documents. `sums` has the figure's sum of each document.

    Each document is read in both ways, so the error is smaller than that of two figures of different documents.
    """
    rows = []
    for one, other in pairs:
        less, error = per_token(sums[other] - sums[one], sizes_D)
        words = {"table": f"{table}-differences", "text": text, "way": f"{one} against {other}"}
        rows.append({**words, "documents": len(sizes_D), "less": less, "less_error": error})
    return rows


def windows_for(checkpoint: Checkpoint) -> WindowSize:
    """The windows of a datastore and of the texts, each of which adds three quarters of its tokens."""
    window = min(WINDOW, checkpoint.decoder.config.context_length)
    return window_size(checkpoint.decoder, window, max(1, 3 * window // 4))
