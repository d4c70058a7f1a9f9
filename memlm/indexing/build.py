"""Corpus -> datastore: tokens -> windows -> keys -> a committed segment.

A build encodes blocks of windows in the order of the corpus. It encodes the next block while it writes one, and each
written block survives a kill. An interrupted build reads the corpus again from its start, checks it against the entries
on disk, and encodes only the missing ones. Blocks are cut at the same places, so it ends with the same entries as a
build that was never interrupted.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass
from dataclasses import replace as replaced
from pathlib import Path
from typing import Any, NamedTuple

from memlm.api.datastores import CHECKS
from memlm.base.progress import LOADING, Progress, silent
from memlm.data.corpus import Corpus, Document, Texts, corpus_of
from memlm.data.windows import Window, WindowSize, blocks_of
from memlm.errors import InvalidInput, check_choice, check_path, check_range
from memlm.index.factory import NO_INDEX
from memlm.index.ivf import resolve_index
from memlm.index.selection import codes_within
from memlm.index.store.compaction import CompactionResult, compact
from memlm.index.store.datastore import Datastore
from memlm.index.store.manifest import JOURNAL, StoreSpec, read_manifest
from memlm.index.store.writer import StoreWriter
from memlm.indexing.checks import run_checks
from memlm.indexing.encoding import BlockEncoder, LocalEncoder
from memlm.indexing.estimate import estimate_build
from memlm.indexing.pruning import EncodedWindow, check_prune
from memlm.indexing.quality import KeyCheck, Quality
from memlm.indexing.self_tuning import SelfTuning
from memlm.model.files.checkpoint import Checkpoint, load_checkpoint
from memlm.retrieval.encoder import document_windows, window_size
from memlm.retrieval.store import ModelStore

CHECKPOINT_WINDOWS, CHECKPOINT_TOKENS = 128, 32_768  # of a block, at most
UNREAD_WINDOWS = 2048  # of a block that no model reads: a disk takes longer to sync fewer than they take to be written
TOKENIZED_DOCUMENTS, TOKENIZED_CHARACTERS = 64, 1 << 18
TARGET, TARGET_IN_MEMORY = 0.95, 0.99


@dataclass(frozen=True, slots=True)
class BuildReport:
    """The result of a build or an addition. `seconds` and `tokens_per_s` run from the first token to the commit, with
    the index. `check_seconds` is the time of the checks after it, of which `check` is the kind.

    `entries` and `documents` are those of the corpus, also of an addition. An interrupted build had left
    `resumed_entries`. `tried` are the indexes tried on a sample, the chosen one last.
    `distances` is that of the `Datastore`. `pruned` is the share of entries that the index leaves out. `key_check` and
    `quality` are None if they were not checked. The latter is also None if the keys of earlier entries were not kept,
    because there is no exact search then. `tuning` are the defaults of a store that was tuned on its own documents, and
    `untuned` is the reason if it was never tuned. `outgrown` says how far it has outgrown its tuning, if it has.
    `check_was_cut` if the checks took too long and ended early.
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
    key_check: KeyCheck | None
    distances: str
    pruned: float
    tried: tuple[Mapping[str, Any], ...]
    check: str
    keeps_keys: bool
    tuning: SelfTuning | None
    check_was_cut: bool = False
    untuned: str | None = None
    outgrown: str | None = None


def check_build(
    out: str | Path,
    *,
    index: str,
    target: float | None,
    max_ram_bytes: int | None,
    keep_keys: bool,
    prune: float | None,
    window: int | None,
    stride: int | None,
    check: str,
    encoder: BlockEncoder | None = None,
) -> None:
    """Raises what `build_index` raises for its options and its folder, without a model."""
    check_path("out", out, "a new folder")
    check_prune(prune)
    check_choice("check", check, CHECKS)
    check_range("target", target, above=0, most=1)
    if index == NO_INDEX:
        _check_no_keys(
            target=target, max_ram_bytes=max_ram_bytes, keep_keys=None if keep_keys else False, prune=prune,
            window=window, stride=stride, encoder=encoder,
        )  # fmt: skip
    resolve_index(index, 0, 1)
    StoreWriter.check_new(out)


def build_index(
    model: str | Path | Checkpoint,
    corpus: Texts,
    out: str | Path,
    *,
    index: str = "auto",
    target: float | None = None,
    max_ram_bytes: int | None = None,
    keep_keys: bool = True,
    prune: float | None = None,
    window: int | None = None,
    stride: int | None = None,
    seed: int = 0,
    check: str = "quick",
    dtype: str = "auto",
    device: str = "auto",
    encoder: BlockEncoder | None = None,
    progress: Progress = silent,
) -> BuildReport:
    """Builds a datastore with one entry per token of the corpus, or resumes an interrupted build of it.

    `index` is "auto", a Faiss factory string, or "none": a store without keys, which is built without the model in
    seconds. It serves passages, words, traces and drafts, and no neighbors. `target` is the share of the softmax mass
    that the index should find, by default 0.95: beyond it searches cost more and nats hardly change. With
    `max_ram_bytes`, the RAM for searching in bytes, "auto" takes the smallest codes that find the target, by default
    0.99. Without `keep_keys`, keys are removed once the index is built, which saves half the disk or more, and rules
    out re-ranking, exact search and compaction.

    With `prune`, the index leaves out entries if the model gives their token that probability or more. `window` is the
    number of tokens that the model reads at once, by default its context, or 1,024 if that is longer, and `stride` the
    number that each further window adds, by default half a window.

    `check` is "quick", "full" or "none" (see `memlm.indexing.checks`). Unless it is "none", the store is tuned on its
    own documents, each of which is left out of the search for its neighbors. `dtype` is the data type of a model that
    is given by its path. An `encoder` reads the corpus in other processes (`memlm.distributed.encoding.RayEncoder`).
    Raises AlreadyExists if `out` holds a store, StorageFull if the disk will not hold it, and
    InvalidInput for an option of keys beside an index of "none".
    """
    corpus = corpus_of(corpus)
    check_build(
        out, index=index, target=target, max_ram_bytes=max_ram_bytes, keep_keys=keep_keys, prune=prune, window=window,
        stride=stride, check=check, encoder=encoder,
    )  # fmt: skip
    checkpoint = _loaded(model, dtype, device, progress)
    size = window_size(checkpoint.decoder, window, stride)
    spec = StoreSpec(
        dim=0 if index == NO_INDEX else checkpoint.decoder.config.dim,
        model_fingerprint=checkpoint.fingerprint,
        tokenizer_fingerprint=checkpoint.tokenizer.fingerprint,
        start_id=checkpoint.tokenizer.start_id,
        model=checkpoint.path.name,
        context=size.window,
        stride=size.stride,
        index=index,
        seed=seed,
        target=target or (TARGET if max_ram_bytes is None else TARGET_IN_MEMORY),
        max_ram_bytes=max_ram_bytes,
        keep_keys=keep_keys,
        prune=prune,
    )
    if not (Path(out) / JOURNAL).exists():  # an interrupted build was checked when it began
        estimate = estimate_build(checkpoint, corpus, out, index=index, size=size, measure=False)
        estimate.check(out)
        if max_ram_bytes is not None and index == "auto":
            codes_within(max_ram_bytes, estimate.entries, spec.dim)
    with StoreWriter.create(out, spec) as writer:
        return _fill(writer, checkpoint, corpus, spec, encoder=encoder, check=check, progress=progress)


def add_to_index(
    model: str | Path | Checkpoint,
    corpus: Texts,
    store: str | Path,
    *,
    replace: bool = False,
    check: str = "quick",
    dtype: str = "auto",
    device: str = "auto",
    encoder: BlockEncoder | None = None,
    progress: Progress = silent,
) -> BuildReport:
    """Adds documents to a datastore as one more segment, encoded with the store's own settings.

    With `replace`, a document replaces the one with its id at the commit. Otherwise such an id raises AlreadyExists.
    `check` and `encoder` are as of `build_index`; "quick" encodes some of the new documents again. Unless `check` is
    "none", a store that was never tuned, or has outgrown that, is tuned on its own documents. Raises Incompatible for a
    store of another model.
    """
    check_choice("check", check, CHECKS)
    corpus = corpus_of(corpus)
    read_manifest(Path(store))
    checkpoint = _loaded(model, dtype, device, progress)
    with Datastore.open(store) as existing:
        ModelStore(existing, checkpoint)
        spec = existing.manifest.spec
    with StoreWriter.extend(store, spec) as writer:
        return _fill(writer, checkpoint, corpus, spec, encoder=encoder, replace=replace, check=check, progress=progress)


def compact_index(
    store: str | Path,
    model: str | Path | Checkpoint | None = None,
    *,
    purge: bool = False,
    check: str = "quick",
    dtype: str = "auto",
    device: str = "auto",
    progress: Progress = silent,
) -> CompactionResult:
    """Merges a datastore's segments into one without the deleted entries. With a model, measures the new index too, and
    tunes a store that has outgrown its tuning, unless `check` is "none". With `purge`, no file of the datastore holds a
    deleted document afterwards.

    Raises Incompatible for a model that did not build the store, and the errors of `memlm.index.store.compaction`.
    """
    check_choice("check", check, CHECKS)
    checkpoint = None if model is None or check == "none" else _loaded(model, dtype, device, progress)
    begin_s = time.perf_counter()
    if checkpoint:
        with Datastore.open(store) as existing:
            ModelStore(existing, checkpoint)
    done = compact(store, progress, purge=purge)
    with Datastore.open(store) as datastore:
        if not checkpoint:
            return replaced(done, outgrown=datastore.snapshot.outgrown)
        worked_s = time.perf_counter() - begin_s
        checked = run_checks(datastore, checkpoint, check=check, worked_s=worked_s, with_keys=False, progress=progress)
        return replaced(done, was_tuned=checked.tuning is not None, outgrown=checked.outgrown)


def finish_build(
    store: str | Path,
    model: str | Path | Checkpoint,
    *,
    check: str = "full",
    dtype: str = "auto",
    device: str = "auto",
    progress: Progress = silent,
) -> bool:
    """Finishes a build or an addition that was killed after its commit, or not checked: measures the index, tunes a
    store that was never tuned, and removes keys that are not to be kept. Returns whether there was anything to do.
    Raises Incompatible for a model that did not build the store.
    """
    with Datastore.open(store) as datastore:
        spec, begun = datastore.manifest.spec, datastore.manifest.number
        if datastore.manifest.quality is None and check != "none":
            checkpoint = _loaded(model, dtype, device, progress)
            run_checks(datastore, checkpoint, check=check, worked_s=0.0, with_keys=False, progress=progress)
        if not spec.keep_keys:
            datastore.drop_keys()
        return datastore.manifest.number > begun


def _check_no_keys(**options: object) -> None:
    """Raises InvalidInput for an option that has no effect in a store without keys."""
    for name, value in options.items():
        if value is not None:
            raise InvalidInput(
                f"{name} is {value!r}, and a store with the index 'none' has no keys; leave it out, or give another"
                " index",
                field=name,
            )


def _loaded(model: str | Path | Checkpoint, dtype: str, device: str, progress: Progress) -> Checkpoint:
    if isinstance(model, Checkpoint):
        return model
    progress(LOADING, 0, 1)
    checkpoint = load_checkpoint(model, dtype=dtype, device=device)
    progress(LOADING, 1, 1)
    return checkpoint


def windows_at_once(context: int) -> int:
    """Returns the number of windows in a block, for a model with this context."""
    return max(1, min(CHECKPOINT_WINDOWS, CHECKPOINT_TOKENS // context))


class _CorpusWindow(NamedTuple):
    """A window, with its document if it is the first one of it, and its share of the document's bytes."""

    window: Window
    starts: Document | None
    num_bytes: float


class _Reading:
    """The progress of reading a corpus, window by window, in bytes of text."""

    def __init__(self, total_bytes: int, encoder: BlockEncoder, progress: Progress) -> None:
        self.entries, self._bytes, self._total_bytes = 0, 0.0, total_bytes
        self._encoder, self._progress = encoder, progress
        self._block: list[_CorpusWindow] = []
        self._tell(0.0)

    def begin(self, block: list[_CorpusWindow]) -> None:
        """Begins a block, of which no window is encoded."""
        self._block, self._encoded_bytes = block, 0.0

    def on_window(self, place: int) -> None:
        """Notes an encoded window of the block."""
        self._encoded_bytes += self._block[place].num_bytes
        self._tell(self._bytes + self._encoded_bytes)

    def end(self) -> None:
        """Notes that the block is written."""
        self.entries += sum(len(each.window.targets_N) for each in self._block)
        self._bytes += sum(each.num_bytes for each in self._block)
        self._tell(self._bytes)

    def _tell(self, num_bytes: float) -> None:
        done = round(num_bytes)
        note = ", ".join(filter(None, (f"{self.entries:,} entries", self._encoder.note)))
        self._progress("read", done, max(self._total_bytes, done), note)


def _fill(
    writer: StoreWriter,
    checkpoint: Checkpoint,
    corpus: Corpus,
    spec: StoreSpec,
    *,
    encoder: BlockEncoder | None,
    replace: bool = False,
    check: str,
    progress: Progress,
) -> BuildReport:
    """Streams the corpus through the model into the writer, commits, and checks the result."""
    begin_s, resumed = time.perf_counter(), writer.num_resumed_entries
    encoder = encoder or LocalEncoder(checkpoint.decoder)
    reading = _Reading(corpus.num_bytes, encoder, progress)
    # The encoder reads ahead in its own copy of the blocks.
    at_once = UNREAD_WINDOWS if spec.drafts_only else windows_at_once(spec.context)
    blocks, ahead = itertools.tee(blocks_of(_windows(checkpoint, corpus, spec), at_once))
    with closing(_encode(encoder, ahead, resumed, spec, reading.on_window)) as encoded_blocks:
        for block in blocks:
            reading.begin(block)
            encoded = next(encoded_blocks)
            for (window, document, _), new in zip(block, encoded, strict=True):
                if document is not None:
                    writer.begin_document(
                        document.id, title=document.title, metadata=document.metadata, replace=replace
                    )
                if new is None:
                    writer.verify_resumed(window.targets_N)
                else:
                    writer.append(new.keys_ND, window.targets_N, new.pruned_N)
            if encoded[-1] is not None:
                writer.checkpoint()
            reading.end()
    entries = reading.entries
    with writer.commit(progress) as datastore:
        seconds = time.perf_counter() - begin_s
        checked = run_checks(
            datastore, checkpoint, check=check, worked_s=seconds, newest=writer.base is not None, progress=progress
        )
        if not spec.keep_keys:
            datastore.drop_keys()
        snapshot = datastore.snapshot
        return BuildReport(
            path=datastore.path,
            entries=entries,
            resumed_entries=resumed,
            documents=snapshot.manifest.segments[-1].documents,
            index=snapshot.index_kind,
            bytes_per_entry=snapshot.bytes_on_disk / max(1, snapshot.num_entries),
            seconds=seconds,
            check_seconds=time.perf_counter() - begin_s - seconds,
            tokens_per_s=(entries - resumed) / seconds,
            quality=checked.quality,
            key_check=checked.keys,
            distances=snapshot.distances,
            pruned=snapshot.num_pruned_entries / max(1, entries),
            tried=snapshot.manifest.segments[-1].tried,
            check=check,
            keeps_keys=snapshot.has_keys,
            tuning=checked.tuning,
            check_was_cut=checked.was_cut,
            untuned=checked.untuned,
            outgrown=checked.outgrown,
        )


def _windows(checkpoint: Checkpoint, corpus: Corpus, spec: StoreSpec) -> Iterator[_CorpusWindow]:
    """Yields the windows of all documents in order. Several documents are tokenized together, on all cores."""
    tokenizer, documents, characters = checkpoint.tokenizer, list[Document](), 0
    size = WindowSize(spec.context, spec.stride)
    for document in itertools.chain(corpus, [None]):
        if document is not None:
            documents.append(document)
            characters += len(document.text)
            if len(documents) < TOKENIZED_DOCUMENTS and characters < TOKENIZED_CHARACTERS:
                continue
        if not documents:
            break
        tokens = tokenizer.encode_batch([each.text for each in documents])
        for tokenized, tokens_n in zip(documents, tokens, strict=True):
            windows = document_windows(checkpoint.decoder, tokens_n, tokenizer.start_id, size)
            bytes_per_token = tokenized.num_bytes / max(1, len(tokens_n))
            for number, window in enumerate(windows):
                num_bytes = bytes_per_token * len(window.targets_N)
                yield _CorpusWindow(window, tokenized if number == 0 else None, num_bytes)
        documents, characters = [], 0


def _encode(
    encoder: BlockEncoder,
    blocks: Iterator[list[_CorpusWindow]],
    num_resumed_entries: int,
    spec: StoreSpec,
    on_window: Callable[[int], None],
) -> Generator[list[EncodedWindow] | list[None], None, None]:
    """Encodes block by block, unless there are no keys. Yields None for each window that an interrupted build has
    written.
    """
    entries = 0
    for block in blocks:
        entries += sum(len(each.window.targets_N) for each in block)
        if entries > num_resumed_entries:
            blocks = itertools.chain([block], blocks)
            break
        encoder.skip([each.window for each in block])
        yield [None] * len(block)
    windows = ([each.window for each in block] for block in blocks)
    if spec.drafts_only:
        yield from ([EncodedWindow(None)] * len(block) for block in windows)
    else:
        yield from encoder.encode(windows, spec.prune, on_window)
