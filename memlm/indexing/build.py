"""Corpus -> datastore: its text, committed at once, and then the keys of that text, where they are wanted.

`keys` says whether they are: "now", "none", or "auto", which makes them where that should take less than a minute, and
of an addition where the datastore has some.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from dataclasses import replace as replaced
from pathlib import Path
from typing import Any

from memlm.api.datastores import CHECKS, KEYS
from memlm.base.progress import LOADING, Progress, silent
from memlm.data.corpus import Corpus, Texts, corpus_of
from memlm.errors import check_choice, check_path, check_range
from memlm.index.factory import check_fits
from memlm.index.ivf import resolve_index
from memlm.index.selection import codes_within
from memlm.index.store.compaction import CompactionResult, compact
from memlm.index.store.datastore import Datastore
from memlm.index.store.filters import DocumentFilter
from memlm.index.store.manifest import JOURNAL, StoreSpec, read_manifest
from memlm.index.store.snapshot import Snapshot
from memlm.index.store.writer import StoreWriter
from memlm.indexing.checks import Checked, run_checks
from memlm.indexing.encoding import BlockEncoder
from memlm.indexing.estimate import estimate_build, seconds_of_keys
from memlm.indexing.keys import ALL, KeysMade, make_keys, unkeyed
from memlm.indexing.pruning import check_prune
from memlm.indexing.quality import KeyCheck, Quality
from memlm.indexing.self_tuning import SelfTuning
from memlm.indexing.text import OnTokens, ignore, index_words, write_text
from memlm.model.files.checkpoint import Checkpoint, load_checkpoint
from memlm.retrieval.encoder import window_size
from memlm.retrieval.store import ModelStore

TARGET, TARGET_IN_MEMORY = 0.95, 0.99
QUICK_KEYS_S = 60.0  # within which keys are made without being asked for


@dataclass(frozen=True, slots=True)
class BuildReport:
    """The result of a build, an addition, or of keys that were made. `seconds` and `tokens_per_s` run from the first
    token to the last commit, with the index. `check_seconds` is the time of the checks after it, of which `check` is
    the kind.

    `entries` and `documents` are those of the corpus, also of an addition. `keyed_entries` are those that got keys, and
    `keys_s` is about how long keys would take that were not made. An interrupted build had left `resumed_entries`.
    `tried` are the indexes tried on a sample, the chosen one last.
    `distances` is that of the `Datastore`. `pruned` is the share of entries that the index leaves out. `key_check` and
    `quality` are None if they were not checked. The latter is also None if the keys of earlier entries were not kept,
    because there is no exact search then. `tuning` are the defaults of a store that was tuned on its own documents, and
    `untuned` is the reason if it was never tuned. `outgrown` says how far it has outgrown its tuning, if it has.
    `check_was_cut` if the checks took too long and ended early.
    """

    path: Path
    entries: int
    keyed_entries: int
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
    keys_s: float | None = None


def check_build(
    out: str | Path,
    *,
    keys: str,
    index: str,
    target: float | None,
    prune: float | None,
    check: str,
) -> None:
    """Raises as `build_index` for its options and its folder, without a model."""
    check_path("out", out, "a new folder")
    check_prune(prune)
    check_choice("keys", keys, KEYS)
    check_choice("check", check, CHECKS)
    check_range("target", target, above=0, most=1)
    resolve_index(index, 0, 1)
    StoreWriter.check_new(out)


def build_index(
    model: str | Path | Checkpoint,
    corpus: Texts,
    out: str | Path,
    *,
    keys: str = "auto",
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
    on_text: Callable[[], None] = lambda: None,
    on_tokens: OnTokens = ignore,
    anew: bool = False,
) -> BuildReport:
    """Builds a datastore: commits the text of the corpus, calls `on_text`, and then makes its keys, one for each token,
    as `keys` says. A store without keys serves passages, words, traces and drafts; `make_keys` goes on from there.

    All further options are of keys, at once or later. `index` is "auto" or a Faiss factory string. `target` is the
    share of the softmax mass that the index should find, by default 0.95: beyond it searches cost more and nats hardly
    change. With `max_ram_bytes`, the RAM for searching in bytes, "auto" takes the smallest codes that find the target,
    by default 0.99. Without `keep_keys`, keys are removed once the index is built, which saves half the disk or more,
    and rules out re-ranking, exact search and compaction.

    With `prune`, the index leaves out entries if the model gives their token that probability or more. `window` is the
    number of tokens that the model reads at once, by default its context, or 1,024 if that is longer, and `stride` the
    number that each further window adds, by default half a window.

    `check` is "quick", "full" or "none" (see `memlm.indexing.checks`). Unless it is "none", the store is tuned on its
    own documents, each of which is left out of the search for its neighbors. `dtype` is the data type of a model that
    is given by its path. An `encoder` reads the corpus in other processes (`memlm.distributed.encoding.RayEncoder`).
    The same call resumes a build that was interrupted before its text was committed, and one `anew` begins again
    without the rest of the earlier one. `on_tokens` gets each document with the tokens that are written. Raises
    AlreadyExists if `out` holds a store, and StorageFull if the disk will not hold it.
    """
    corpus = corpus_of(corpus)
    check_build(out, keys=keys, index=index, target=target, prune=prune, check=check)
    checkpoint = _loaded(model, dtype, device, progress, weights=False)
    size = window_size(checkpoint.decoder, window, stride)
    spec = StoreSpec(
        dim=checkpoint.decoder.config.dim,
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
    if anew or not (Path(out) / JOURNAL).exists():  # an interrupted build was checked when it began
        estimate = estimate_build(checkpoint, corpus, out, keys=keys == "now", index=index, size=size, measure=False)
        estimate.check(out)
        if max_ram_bytes is not None and index == "auto":
            codes_within(max_ram_bytes, estimate.entries, spec.dim)
        check_fits(index, estimate.entries, spec.dim)
    run = _Run(checkpoint, keys, check, encoder, progress)
    with StoreWriter.create(out, spec, keyed=False, anew=anew) as writer:
        return run.fill(writer, corpus, on_text=on_text, on_tokens=on_tokens)


def add_to_index(
    model: str | Path | Checkpoint,
    corpus: Texts,
    store: str | Path,
    *,
    replace: bool = False,
    keys: str = "auto",
    check: str = "quick",
    dtype: str = "auto",
    device: str = "auto",
    encoder: BlockEncoder | None = None,
    progress: Progress = silent,
    before_commit: Callable[[], None] = lambda: None,
    on_text: Callable[[], None] = lambda: None,
    on_tokens: OnTokens = ignore,
    anew: bool = False,
) -> BuildReport:
    """Adds documents to a datastore as one more segment of text, calls `on_text`, and makes their keys as `keys` says,
    with the store's own settings.

    With `replace`, a document replaces the one with its id at the commit. Otherwise such an id raises AlreadyExists.
    `check`, `encoder` and `on_tokens` are as of `build_index`; "quick" encodes some of the new documents again. Unless
    `check` is "none", a store that was never tuned, or has outgrown that, is tuned on its own documents.
    `before_commit` is called when all tokens are written. An addition `anew` begins without the rest of an interrupted
    one of its kind. Raises Incompatible for a store of another model.
    """
    check_choice("keys", keys, KEYS)
    check_choice("check", check, CHECKS)
    corpus = corpus_of(corpus)
    read_manifest(Path(store))
    checkpoint = _loaded(model, dtype, device, progress, weights=False)
    with Datastore.open(store) as existing:
        ModelStore(existing, checkpoint)
        spec, is_keyed = existing.manifest.spec, existing.snapshot.is_keyed
    run = _Run(checkpoint, keys if is_keyed or keys == "now" else "none", check, encoder, progress)
    with StoreWriter.extend(store, spec, keyed=False, anew=anew) as writer:
        return run.fill(
            writer, corpus, replace=replace, before_commit=before_commit, on_text=on_text, on_tokens=on_tokens
        )


def index_keys(
    store: str | Path,
    model: str | Path | Checkpoint,
    *,
    only: DocumentFilter = ALL,
    most_pieces: int | None = None,
    check: str = "quick",
    dtype: str = "auto",
    device: str = "auto",
    encoder: BlockEncoder | None = None,
    progress: Progress = silent,
) -> BuildReport:
    """Makes the keys of the documents without, as `make_keys`, and reports as a build does."""
    check_choice("check", check, CHECKS)
    read_manifest(Path(store))
    checkpoint = _loaded(model, dtype, device, progress)
    begin_s = time.perf_counter()
    made = make_keys(
        store, checkpoint, only=only, most_pieces=most_pieces, check=check, encoder=encoder, progress=progress
    )
    with Datastore.open(store) as datastore:
        return _report(datastore.snapshot, begin_s, made.entries, made.documents, 0, made, check)


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
    keys: str = "none",
    is_addition: bool = False,
    check: str = "full",
    dtype: str = "auto",
    device: str = "auto",
    progress: Progress = silent,
) -> bool:
    """Finishes a build or an addition (`is_addition`) that was killed after its commit, or not checked: makes the keys
    that `keys` asks for, measures the index, tunes a store that was never tuned, and removes keys that are not to be
    kept. Returns whether there was anything to do. Raises Incompatible for a model that did not build the store.
    """
    with Datastore.open(store) as datastore:
        spec, begun = datastore.manifest.spec, datastore.manifest.number
        lacks_keys = any(rows for _, rows in unkeyed(datastore.snapshot))
        if is_addition and keys == "auto" and not datastore.snapshot.is_keyed:
            keys = "none"
        if lacks_keys and keys != "none":
            checkpoint = _loaded(model, dtype, device, progress)
            if keys == "now" or seconds_of_keys(datastore, checkpoint) < QUICK_KEYS_S:
                make_keys(store, checkpoint, check=check, progress=progress)
                return True
        if datastore.manifest.quality is None and datastore.snapshot.is_keyed and check != "none":
            checkpoint = _loaded(model, dtype, device, progress)
            run_checks(datastore, checkpoint, check=check, worked_s=0.0, with_keys=False, progress=progress)
        if not spec.keep_keys:
            datastore.drop_keys()
        return datastore.manifest.number > begun


def _loaded(
    model: str | Path | Checkpoint, dtype: str, device: str, progress: Progress, *, weights: bool = True
) -> Checkpoint:
    if isinstance(model, Checkpoint):
        if weights:
            model.read_weights()
        return model
    progress(LOADING, 0, 1)
    checkpoint = load_checkpoint(model, dtype=dtype, device=device, weights=weights)
    progress(LOADING, 1, 1)
    return checkpoint


@dataclass(frozen=True)
class _Run:
    """The options of a build or an addition."""

    checkpoint: Checkpoint
    keys: str
    check: str
    encoder: BlockEncoder | None
    progress: Progress

    def fill(
        self,
        writer: StoreWriter,
        corpus: Corpus,
        *,
        replace: bool = False,
        before_commit: Callable[[], None] = lambda: None,
        on_text: Callable[[], None],
        on_tokens: OnTokens,
    ) -> BuildReport:
        """Streams the corpus into the writer, commits its text, and makes the keys of it."""
        begin_s, resumed, tokenizer = time.perf_counter(), writer.num_resumed_entries, self.checkpoint.tokenizer
        written = write_text(writer, tokenizer, corpus, replace=replace, progress=self.progress, on_tokens=on_tokens)
        before_commit()
        made, keys_s = None, None
        with writer.commit(self.progress) as datastore:
            number = datastore.manifest.last_segment
            index_words(datastore.snapshot, number, tokenizer, self.progress)
            on_text()
            if self.keys != "none":
                self.checkpoint.read_weights()
            if self.keys == "auto":
                keys_s = seconds_of_keys(datastore, self.checkpoint, number)
            if self.keys == "now" or (keys_s is not None and keys_s < QUICK_KEYS_S):
                made, keys_s = self._make_keys(datastore.path, number), None
                datastore.refresh()
            return _report(
                datastore.snapshot, begin_s, written.tokens, written.documents, resumed, made, self.check, keys_s
            )

    def _make_keys(self, store: Path, segment: int) -> KeysMade:
        return make_keys(
            store, self.checkpoint, segment=segment, check=self.check, encoder=self.encoder, progress=self.progress
        )


def _report(
    snapshot: Snapshot,
    begin_s: float,
    entries: int,
    documents: int,
    resumed: int,
    made: KeysMade | None,
    check: str,
    keys_s: float | None = None,
) -> BuildReport:
    passed_s, checked = time.perf_counter() - begin_s, made.checked if made else Checked()
    seconds = passed_s - (made.check_seconds if made else 0.0)
    return BuildReport(
        path=snapshot.path,
        entries=entries,
        keyed_entries=made.entries if made else 0,
        resumed_entries=resumed + (made.resumed_entries if made else 0),
        documents=documents,
        index=snapshot.index_kind,
        bytes_per_entry=snapshot.bytes_on_disk / max(1, snapshot.num_entries),
        seconds=seconds,
        check_seconds=passed_s - seconds,
        tokens_per_s=(entries - resumed) / seconds,
        quality=checked.quality,
        key_check=checked.keys,
        distances=snapshot.distances,
        pruned=snapshot.num_pruned_entries / max(1, entries),
        tried=snapshot.keyed.newest.record.tried if made and made.entries else (),
        check=check,
        keeps_keys=snapshot.has_keys,
        tuning=checked.tuning,
        check_was_cut=checked.was_cut,
        untuned=checked.untuned,
        outgrown=checked.outgrown,
        keys_s=keys_s,
    )
