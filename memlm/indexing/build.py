"""Corpus -> datastore: tokens -> windows -> keys -> a committed segment.

Work goes on in blocks of windows, in the order of the corpus: while one is written, the next is read, and after each
what is done is made to survive a kill. An interrupted build reads the corpus again from its start, checks it against
what is on disk, and computes only what is missing; since blocks are cut at the same places, it ends with the same
entries as one that was never interrupted.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import time
from collections.abc import Generator, Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Bool, Float

from memlm.base.progress import Progress, silent
from memlm.data.corpus import Corpus, Document
from memlm.data.windows import Window, blocks_of, check_stride
from memlm.errors import InvalidInput
from memlm.index.ivf import resolve_index
from memlm.index.selection import codes_within
from memlm.index.store.compaction import CompactionResult, compact
from memlm.index.store.datastore import Datastore
from memlm.index.store.manifest import JOURNAL, StoreSpec
from memlm.index.store.writer import StoreWriter
from memlm.indexing.estimate import estimate_build
from memlm.indexing.quality import KeyCheck, Quality, check_keys, measure_quality, sample_trial, scale_free_temperature
from memlm.model.checkpoint import Checkpoint, load_checkpoint
from memlm.retrieval.encoder import Encoder, default_stride, document_windows
from memlm.retrieval.store import ModelStore

CHECKPOINT_WINDOWS, CHECKPOINT_TOKENS = 128, 32_768  # at most: after so much of reading it survives a kill
TOKENIZED_DOCUMENTS, TOKENIZED_CHARACTERS = 64, 1 << 18
TARGET, TARGET_IN_MEMORY = 0.95, 0.99


@dataclass(frozen=True, slots=True)
class BuildReport:
    """What a build or an addition made. `seconds` and `tokens_per_s` run from the first token to the commit, index
    included; `check_seconds` is the check against exact search that follows. `resumed_entries` were there already.
    `tried` are the indexes that were tried on a sample, the one that was chosen last; `distances` as
    `Datastore.distances`; `pruned` is the share of the entries that the index leaves out. `quality` is None where the
    keys of earlier entries were not kept: there is no exact search then to compare with.
    """

    path: Path
    entries: int
    resumed_entries: int
    documents: int
    index: str
    bytes_per_entry: float
    seconds: float
    check_seconds: float
    tokens_per_s: float
    quality: Quality | None
    key_check: KeyCheck
    distances: str
    pruned: float
    tried: tuple[Mapping[str, Any], ...]


def build_index(
    model: str | Path | Checkpoint,
    corpus: Corpus,
    out: str | Path,
    *,
    index: str = "auto",
    target: float | None = None,
    max_ram_bytes: int | None = None,
    keep_keys: bool = True,
    prune: float | None = None,
    stride: int | None = None,
    seed: int = 0,
    dtype: str = "float32",
    progress: Progress = silent,
) -> BuildReport:
    """Builds a datastore with one entry per token of the corpus, or goes on with an interrupted build of it.

    `index` is "auto" or a Faiss factory string; `target` the share of the softmax mass that it should find: if not
    given, 0.95, beyond which searches cost more and nats hardly change. Given `max_ram_bytes`, the bytes that searching
    may want in memory, "auto" takes the smallest codes that find the target, then 0.99. Without `keep_keys`, keys go
    when the index is built: half the disk or less, and no re-ranking, exact search or compaction. With `prune`, entries
    whose token the model alone gives that probability or more are left out of the index (after arXiv 2211.04052), which
    takes the model's whole pass instead of the cheaper one for keys alone. `stride` is how many
    tokens each further window adds (half the context if not given); `dtype` what a model given by its path computes
    in. Raises AlreadyExists where there is a store, StorageFull where the disk will not hold it.
    """
    checkpoint = _loaded(model, dtype)
    context = checkpoint.decoder.config.context_length
    stride = default_stride(checkpoint.decoder) if stride is None else stride
    check_stride(context, stride)
    if checkpoint.decoder.config.is_segmented and stride != context:
        raise InvalidInput(
            f"stride is {stride}; a model with memory reads its segments of {context} tokens one after another:"
            " leave stride out",
            field="stride",
        )
    spec = StoreSpec(
        dim=checkpoint.decoder.config.dim,
        model_fingerprint=checkpoint.fingerprint,
        tokenizer_fingerprint=checkpoint.tokenizer.fingerprint,
        start_id=checkpoint.tokenizer.start_id,
        context=context,
        stride=stride,
        index=index,
        seed=seed,
        target=target or (TARGET if max_ram_bytes is None else TARGET_IN_MEMORY),
        max_ram_bytes=max_ram_bytes,
        keep_keys=keep_keys,
        prune=_checked(prune),
    )
    if not (Path(out) / JOURNAL).exists():  # an interrupted build was weighed when it began
        resolve_index(index, 0)
        told = estimate_build(checkpoint, corpus, out, index=index, stride=stride, measure=False)
        told.check(out)
        if max_ram_bytes is not None and index == "auto":
            codes_within(max_ram_bytes, told.entries, spec.dim)
    with StoreWriter.create(out, spec) as writer:
        return _fill(writer, checkpoint, corpus, spec, progress=progress)


def add_to_index(
    model: str | Path | Checkpoint,
    corpus: Corpus,
    store: str | Path,
    *,
    replace: bool = False,
    dtype: str = "float32",
    progress: Progress = silent,
) -> BuildReport:
    """Adds documents to a datastore as one more segment, read as the store's others were.

    With `replace`, a document whose id the store has takes the place of the old one, at the commit. Raises
    AlreadyExists for such an id otherwise, Incompatible for a store of another model.
    """
    checkpoint = _loaded(model, dtype)
    with Datastore.open(store) as existing:
        ModelStore(existing, checkpoint)
        spec = existing.manifest.spec
    with StoreWriter.extend(store, spec) as writer:
        return _fill(writer, checkpoint, corpus, spec, replace=replace, progress=progress)


def compact_index(
    store: str | Path,
    model: str | Path | Checkpoint | None = None,
    *,
    purge: bool = False,
    dtype: str = "float32",
    progress: Progress = silent,
) -> CompactionResult:
    """Merges a datastore's segments into one without what was deleted; with a model, its new index is measured too.
    With `purge`, no file of the datastore holds a deleted document afterwards.

    Raises Incompatible for a model that did not build the store, and what `memlm.index.store.compaction` raises.
    """
    checkpoint = None if model is None else _loaded(model, dtype)
    if checkpoint:
        with Datastore.open(store) as existing:
            ModelStore(existing, checkpoint)
    done = compact(store, progress, purge=purge)
    if checkpoint:
        with Datastore.open(store) as datastore:
            _judge(datastore, checkpoint, seed=datastore.manifest.spec.seed, progress=progress)
    return done


def finish_build(
    store: str | Path, model: str | Path | Checkpoint, *, dtype: str = "float32", progress: Progress = silent
) -> bool:
    """Does what a build or an addition that was killed behind its commit did not come to: the measure of the index,
    and giving up keys that are not to be kept. Tells whether there was anything to do. Raises Incompatible for a model
    that did not build the store.
    """
    with Datastore.open(store) as datastore:
        spec, begun = datastore.manifest.spec, datastore.manifest.number
        if datastore.manifest.quality is None:
            _judge(datastore, _loaded(model, dtype), seed=spec.seed, progress=progress)
        if not spec.keep_keys:
            datastore.drop_keys()
        return datastore.manifest.number > begun


def _checked(prune: float | None) -> float | None:
    if prune is None or 0 < prune < 1:
        return prune
    raise InvalidInput(f"prune is {prune}; expected a probability between 0 and 1", field="prune")


def _loaded(model: str | Path | Checkpoint, dtype: str) -> Checkpoint:
    """The model, as it was given or as it is to be loaded."""
    return model if isinstance(model, Checkpoint) else load_checkpoint(model, dtype=dtype)


def _fill(
    writer: StoreWriter,
    checkpoint: Checkpoint,
    corpus: Corpus,
    spec: StoreSpec,
    *,
    replace: bool = False,
    progress: Progress,
) -> BuildReport:
    begin, resumed = time.perf_counter(), writer.num_resumed_entries
    entries = _write_entries(writer, checkpoint, corpus, spec, replace=replace, progress=progress)
    with writer.commit(progress) as datastore:
        seconds = time.perf_counter() - begin
        key_check = check_keys(datastore.snapshot, checkpoint, seed=spec.seed, progress=progress)
        quality = _judge(datastore, checkpoint, seed=spec.seed, progress=progress)
        if not spec.keep_keys:
            datastore.drop_keys()
        check_seconds = time.perf_counter() - begin - seconds
        snapshot = datastore.snapshot
        return BuildReport(
            path=datastore.path,
            entries=entries,
            resumed_entries=resumed,
            documents=snapshot.num_documents,
            index=snapshot.index_kind,
            bytes_per_entry=snapshot.bytes_on_disk / max(1, snapshot.num_entries),
            seconds=seconds,
            check_seconds=check_seconds,
            tokens_per_s=(entries - resumed) / seconds,
            quality=quality,
            key_check=key_check,
            distances=snapshot.distances,
            pruned=snapshot.num_pruned_entries / max(1, entries),
            tried=snapshot.manifest.segments[-1].tried,
        )


def _write_entries(
    writer: StoreWriter,
    checkpoint: Checkpoint,
    corpus: Corpus,
    spec: StoreSpec,
    *,
    replace: bool = False,
    progress: Progress,
) -> int:
    """Streams the corpus through the model into the writer; gives the number of entries."""
    entries, bytes_read, total = 0, 0, corpus.num_bytes
    blocks, ahead = itertools.tee(blocks_of(_placed_windows(checkpoint, corpus, spec), windows_at_once(spec.context)))
    with closing(_read(Encoder(checkpoint.decoder), ahead, writer.num_resumed_entries, spec.prune)) as reads:
        for block, read in zip(blocks, reads, strict=True):
            for placed, new in zip(block, read, strict=True):
                _begin(placed, writer, replace=replace)
                if new is None:
                    writer.verify_resumed(placed.window.targets_N)
                else:
                    writer.append(new.keys_ND, placed.window.targets_N, new.pruned_N)
            if read[-1] is not None:
                writer.checkpoint()
            entries += _size(block)
            bytes_read += sum(placed.starts.num_bytes for placed in block if placed.starts)
            progress("read", bytes_read, max(total, bytes_read), f"{entries:,} entries")
    return entries


def windows_at_once(context: int) -> int:
    """How many windows of a model a block has."""
    return max(1, min(CHECKPOINT_WINDOWS, CHECKPOINT_TOKENS // context))


@dataclass(frozen=True, slots=True)
class _Placed:
    """A window, and the document that it is the first one of."""

    window: Window
    starts: Document | None


def _placed_windows(checkpoint: Checkpoint, corpus: Corpus, spec: StoreSpec) -> Iterator[_Placed]:
    tokenizer = checkpoint.tokenizer
    for documents in _together(corpus):
        texts = [document.text for document in documents]
        for document, tokens_n in zip(documents, tokenizer.encode_batch(texts), strict=True):
            windows = document_windows(checkpoint.decoder, tokens_n, tokenizer.start_id, spec.stride)
            for number, window in enumerate(windows):
                yield _Placed(window, document if number == 0 else None)


def _together(corpus: Corpus) -> Iterator[list[Document]]:
    """Documents to be tokenized together, on all cores: some text's worth, in their order."""
    documents: list[Document] = []
    for document in corpus:
        documents.append(document)
        if len(documents) == TOKENIZED_DOCUMENTS or sum(len(each.text) for each in documents) >= TOKENIZED_CHARACTERS:
            yield documents
            documents = []
    if documents:
        yield documents


class _New(NamedTuple):
    """The keys of a window, and which of its entries are pruned, where any are to be."""

    keys_ND: Float[np.ndarray, "N D"]
    pruned_N: Bool[np.ndarray, " N"] | None


def _read(
    encoder: Encoder, blocks: Iterator[list[_Placed]], num_resumed_entries: int, prune: float | None
) -> Generator[list[_New] | list[None], None, None]:
    """What is new of each window, block by block: nothing where an interrupted build has left the entries."""
    entries = 0
    for block in blocks:
        entries += _size(block)
        if entries > num_resumed_entries:
            blocks = itertools.chain([block], blocks)
            break
        encoder.skip([placed.window for placed in block])
        yield [None] * len(block)
    windows = ([placed.window for placed in block] for block in blocks)
    if prune is None:
        for keys in encoder.keys_of_blocks(windows):
            yield [_New(keys_ND, None) for keys_ND in keys]
        return
    for predictions in map(encoder.predictions, windows):
        yield [_New(read.keys_ND, read.logprobs_N >= np.float32(math.log(prune))) for read in predictions]


def _size(block: list[_Placed]) -> int:
    """How many entries a block makes."""
    return sum(len(placed.window.targets_N) for placed in block)


def _begin(placed: _Placed, writer: StoreWriter, *, replace: bool) -> None:
    """Tells the writer of a document before its first window."""
    if document := placed.starts:
        writer.begin_document(document.id, title=document.title, metadata=document.metadata, replace=replace)


def _judge(datastore: Datastore, checkpoint: Checkpoint, *, seed: int, progress: Progress) -> Quality | None:
    """Measures the index against exact search, and gives a store that was never tuned a temperature of the scale that
    its model's reading finds. Without all keys, or without entries, there is nothing to measure, and nothing changes.
    """
    if not (datastore.snapshot.has_keys and datastore.snapshot.num_entries):
        return None
    memory = ModelStore(datastore, checkpoint)
    trial = sample_trial(memory, checkpoint, seed=seed, progress=progress)
    if datastore.snapshot.defaults.tuned_on is None:
        datastore.save_defaults(
            dataclasses.replace(datastore.snapshot.defaults, temperature=scale_free_temperature(memory, trial))
        )
    quality = measure_quality(memory, trial)
    datastore.save_quality(quality.as_dict())
    return quality
