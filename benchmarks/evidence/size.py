"""Evidence: what a datastore gains, and what a token costs, by the number of its entries."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.evidence.domains import (
    ADAPTIVE,
    ALONE,
    ONE_LAM,
    Prepared,
    ReadText,
    logprobs_of,
    make_store,
    nats_less,
    read_document,
    searched,
    windows_for,
)
from benchmarks.evidence.texts import parts_to_store
from memlm.api.handles import TokenStream
from memlm.api.params import RetrievalParams
from memlm.base.progress import Progress
from memlm.bench.texts import median_ratio, time_per_token
from memlm.index.store.datastore import Datastore
from memlm.language_model import LanguageModel
from memlm.model.files.checkpoint import Checkpoint
from memlm.retrieval.retriever import Retriever
from memlm.retrieval.store import ModelStore

MARKS = (10_000, 30_000, 100_000, 300_000, 1_000_000, 3_000_000)  # entries of the smaller datastores
REPEATS = 5


def by_size(checkpoint: Checkpoint, prepared: Prepared, progress: Progress) -> list[dict[str, Any]]:
    """Two rows for each size, of one λ and of adaptive λ: nats fewer than the model alone, and the time of a generated
    token over that without a datastore. Each datastore is tuned by itself. The smaller ones hold beginnings of the
    documents of the larger ones.
    """
    stores = [*smaller_stores(checkpoint, prepared, progress), prepared.store]
    size = windows_for(checkpoint)
    read = [read_document(checkpoint, document, size) for document in prepared.domain.test]
    rows = []
    for store, times in zip(stores, times_of(checkpoint, stores, progress), strict=True):
        texts = []
        with Datastore.open(store) as datastore:
            snapshot = datastore.snapshot
            retriever = Retriever.of([ModelStore(datastore, checkpoint)], RetrievalParams())
            for document, each in zip(prepared.domain.test, read, strict=True):
                found = searched(each, retriever, prepared.past)
                mixed = {way: logprobs_of(each, found[way]) for way in (ONE_LAM, ADAPTIVE)}
                texts.append(ReadText(document, each, {ALONE: each.lm_logprobs_N, **mixed}))
            record = snapshot.segments[0].record
            words = {"text": prepared.domain.name, "entries": snapshot.num_entries, "index": record.index}
            same = {
                "documents": len(texts), "stored_documents": snapshot.num_documents, "k": retriever.knn.k,
                "nprobe": retriever.knn.nprobe or record.nprobe,
                "bytes_per_entry": snapshot.bytes_on_disk / snapshot.num_entries, **times,
            }  # fmt: skip
        rows += [{**words, "way": way, **nats_less(texts, way), **same} for way in (ONE_LAM, ADAPTIVE)]
    return rows


def smaller_stores(checkpoint: Checkpoint, prepared: Prepared, progress: Progress) -> list[Path]:
    """The folders of the smaller datastores. Makes those that an earlier run did not leave."""
    with Datastore.open(prepared.store) as datastore:  # which has fewer entries than asked for if there is less text
        most = min(datastore.snapshot.num_entries, prepared.sizes.entries)
    stores = []
    for entries in (mark for mark in MARKS if mark < most):
        sizes = replace(prepared.sizes, entries=entries, document_start=0)  # of documents that begin there already
        stored = parts_to_store(prepared.domain.stored, checkpoint.tokenizer, sizes)
        stores.append(prepared.folder / f"store-{entries}")
        make_store(checkpoint, replace(prepared.domain, stored=stored), stores[-1], progress)
    return stores


def times_of(checkpoint: Checkpoint, stores: Sequence[Path], progress: Progress) -> list[dict[str, float]]:
    """Milliseconds a token with each datastore, and the ratio to those without. In each of the turns, whose median,
    least and most are given, all generate texts of one seed.
    """
    with ExitStack() as open_stores:
        models = [open_stores.enter_context(LanguageModel(checkpoint, [store])) for store in stores]
        calls: list[Callable[..., TokenStream]] = [partial(models[0].generate, use_store=False)]
        calls += [lm.generate for lm in models]
        turns = list[list[float]]()
        for seed in range(1 + REPEATS):
            turns.append([time_per_token(generate, seed, context_cache=0) for generate in calls])
            progress("generate", seed, REPEATS)
    return ratios_of(turns[1:])  # the first one warms up


def ratios_of(turns: Sequence[Sequence[float]]) -> list[dict[str, float]]:
    """The figures of each datastore from the milliseconds of turns, of which the first are without one."""
    alone, *with_store = map(list, zip(*turns, strict=True))
    rows = []
    for times in with_store:
        ratio, least, most = median_ratio(times, alone)
        over = {"over_alone": ratio, "over_alone_least": least, "over_alone_most": most, "over_alone_n": len(turns)}
        rows.append({"token_ms": median(times), "token_ms_alone": median(alone), **over})
    return rows
