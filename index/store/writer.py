"""Writes a segment and commits it: the first of a store, one more, or one that takes documents from others.

    with StoreWriter.create(path, spec) as writer:
        writer.begin_document("a.txt")
        writer.append(keys_ND, values_N)      # or writer.verify_resumed(values_N) for entries of an interrupted build
        writer.checkpoint()
        datastore = writer.commit()

Files lie in `building/` until the commit moves them into place. `building.json` records the task, and the entries that
survive a kill. To resume, the caller streams the whole corpus again. Entries on disk are compared, the rest appended.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import asdict, dataclass, field
from pathlib import Path
from shlex import quote
from types import TracebackType
from typing import Any

import numpy as np
from jaxtyping import Bool, Float, Int64

from memlm.base.files import checksum_of, make_folder, move, remove, storage, write_atomic
from memlm.base.progress import Progress, silent
from memlm.errors import AlreadyExists, Corrupt, Incompatible, InvalidInput, Locked
from memlm.index.arrays import HEADER_BYTES
from memlm.index.ivf import resolve_index
from memlm.index.store.datastore import Datastore
from memlm.index.store.derived.files import take_derived
from memlm.index.store.documents import DocumentTable
from memlm.index.store.journal import (
    ADD,
    BUILD,
    BUILDING,
    COMPACT,
    KEYS,
    MOVE,
    Journal,
    next_segment,
    reserved_segment,
)
from memlm.index.store.lock import COMMIT_LOCK, LOCK, StoreLock, commit_lock, write_lock
from memlm.index.store.manifest import (
    CURRENT,
    JOURNAL,
    SEGMENTS,
    KnnDefaults,
    Manifest,
    SegmentRecord,
    StoreSpec,
    check_unchanged,
    commit_manifest,
    lost_store,
    read_manifest,
    sweep,
)
from memlm.index.store.segment import DOCUMENTS, PRUNED, VALUES, Segment
from memlm.index.store.segment import KEYS as KEYS_FILE
from memlm.index.store.segment_writer import SegmentWriter
from memlm.index.store.snapshot import Snapshot
from memlm.index.store.tombstones import Sources, replacing, write_tombstones

UNTUNED_K, UNTUNED_LAM = 64, 0.25
ABOUT_INDEX = ("index", "seed", "target", "max_ram_bytes", "keep_keys")
OWN_FILES = re.compile(
    rf"({CURRENT}|{JOURNAL}|manifest-\d+\.json)((\.[0-9a-f]{{8}})?\.tmp)?|{SEGMENTS}|{BUILDING}|{LOCK}|{COMMIT_LOCK}"
)


@dataclass(frozen=True, slots=True)
class _Work:
    """The things that a writer writes: whether the entries have keys, the rows that it takes from other segments, and
    whether it begins `anew`, also after a kill.
    """

    spec: StoreSpec
    keyed: bool = True
    anew: bool = False
    sources: Sources = field(default_factory=dict)


class StoreWriter:
    """The only writer of a store. Closing it without a commit keeps the checkpointed entries, for a resume."""

    def __init__(
        self, path: Path, work: _Work, manifest: Manifest | None, held: ExitStack, task: str, lock: StoreLock
    ) -> None:
        self.path, self.spec, self._held, self._task, self._lock = path, work.spec, held, task, lock
        self.keyed, self._sources = work.keyed, work.sources
        self._anew = work.anew
        self._work = path / BUILDING
        self.base = held.enter_context(closing(Snapshot(path, manifest))) if manifest else None
        self._replaced: list[str] = []
        self._document = ""
        self._replaces = False
        self._number = (reserved_segment(path, manifest) or next_segment(path, manifest)) if manifest else 1
        self.num_resumed_entries = self._recover()
        if manifest is not None:  # above all segments of `base`, which no merge takes from under it then
            self._number = next_segment(path, manifest)
        with storage(path):
            make_folder(self._work)
        rows = self.num_resumed_entries
        self._segment = held.enter_context(closing(SegmentWriter(self._work, self.spec, keyed=self.keyed, rows=rows)))
        self._resumed_values = np.load(self._work / VALUES, mmap_mode="r") if rows else np.empty(0, np.uint32)
        self.checkpoint()

    @staticmethod
    def check_new(path: str | Path) -> None:
        """Raises AlreadyExists if a path has a store, or anything else than an interrupted build. Raises Corrupt for a
        store that has lost its `CURRENT`.
        """
        path = Path(path)
        if (path / CURRENT).exists():
            manifest = read_manifest(path)
            raise AlreadyExists(
                f"there is a datastore at {path} already; choose another folder, or `memlm index add` to it"
                f"{_unfinished(path, manifest)}"
            )
        if path.exists() and (not path.is_dir() or any(not OWN_FILES.fullmatch(file.name) for file in path.iterdir())):
            raise AlreadyExists(f"{path} is there and is no unfinished datastore; choose another folder")
        if lost := lost_store(path):
            raise Corrupt(
                f"{path} has no {CURRENT}, but {lost} of a datastore, which a build would remove; `memlm index verify"
                f" {quote(str(path))} --repair` makes it whole again, or choose another folder"
            )

    @classmethod
    def create(cls, path: str | Path, spec: StoreSpec, *, keyed: bool = True, anew: bool = False) -> StoreWriter:
        """Starts a store, or resumes the interrupted build of a store with the same spec, unless `anew`. Unless
        `keyed`, its entries get no keys.

        Raises AlreadyExists if the path has a store or anything else, Corrupt for a store that has lost its `CURRENT`,
        Incompatible if the interrupted build differs, and Locked while another process writes.
        """
        path = Path(path)
        resolve_index(spec.index, 0, spec.dim)
        cls.check_new(path)
        with storage(path.parent):
            make_folder(path / SEGMENTS)
        return cls._holding(path, _Work(spec, keyed, anew), BUILD)

    @classmethod
    def extend(cls, path: str | Path, spec: StoreSpec, *, keyed: bool = True, anew: bool = False) -> StoreWriter:
        """Starts one more segment of a store, or resumes an interrupted one. One that begins `anew` gives up an
        interrupted one of its kind, as any other writer does.

        Raises Incompatible, with the differences, if the store was built with another spec, and for one `anew` if
        another interrupted addition waits.
        """
        path = Path(path)
        manifest = read_manifest(path)
        _check_same(manifest.spec, spec, path)
        return cls._holding(path, _Work(spec, keyed, anew), ADD)

    @classmethod
    def compacting(cls, path: str | Path, *, keyed: bool = True) -> StoreWriter:
        """Starts a segment that replaces all others with keys, or all without, or resumes an interrupted one.

        Raises Incompatible if an interrupted addition waits.
        """
        manifest = read_manifest(Path(path))
        sources = {record.number: None for record in manifest.segments if record.is_keyed == keyed}
        return cls._holding(Path(path), _Work(manifest.spec, keyed, sources=sources), f"{COMPACT} {keyed}")

    @classmethod
    def moving(cls, path: str | Path, segment: int, rows: range) -> StoreWriter:
        """Starts a segment that takes some documents from another one, given by its number, or resumes an interrupted
        one. The commit removes the other segment if these were its last live documents.

        Raises Incompatible if an interrupted addition waits.
        """
        manifest = read_manifest(Path(path))
        keyed = all(record.is_keyed for record in manifest.segments if record.number == segment)
        work = _Work(manifest.spec, keyed, sources={segment: frozenset(rows)})
        return cls._holding(Path(path), work, f"{MOVE} {segment} {rows.start}-{rows.stop}")

    @classmethod
    def keying(cls, path: str | Path, spec: StoreSpec, rows: Mapping[int, Sequence[int]]) -> StoreWriter:
        """Starts a segment that gives keys to documents without, some rows of segments by their numbers, or resumes an
        interrupted one. The first keys of a store may be of another `spec` than the store's, with its tokenizer.

        Raises Incompatible for another spec than that of the keys that are there, and if an interrupted addition waits.
        """
        manifest = read_manifest(Path(path))
        if manifest.is_keyed:
            _check_same(manifest.spec, spec, Path(path))
        sources = {number: frozenset(chosen) for number, chosen in rows.items()}
        chosen = sorted((number, sorted(each)) for number, each in sources.items())
        digest = checksum_of(repr((spec.model_fingerprint, chosen)).encode())  # another model begins anew
        return cls._holding(Path(path), _Work(spec, sources=sources), f"{KEYS} {digest}")

    @classmethod
    def _holding(cls, path: Path, work: _Work, task: str) -> StoreWriter:
        with ExitStack() as held:
            lock = held.enter_context(write_lock(path))
            with commit_lock(path):  # so that nobody sweeps away what is being opened, or brought back
                manifest = None if task == BUILD else read_manifest(path)  # what counts now that nobody else writes
                if manifest and task != ADD:
                    task = f"{task} {manifest.number}"  # a later change overtakes what was copied
                writer = cls(path, work, manifest, held, task, lock)
            writer._held = held.pop_all()
            return writer

    def begin_document(
        self, document_id: str, *, title: str = "", metadata: Mapping[str, Any] | None = None, replace: bool = False
    ) -> None:
        """Starts a document, which owns all entries until the next one. With `replace`, the commit deletes an earlier
        document of that id. Raises AlreadyExists for an id that is taken.
        """
        self._replaces |= replace
        if self._task == ADD and self.base and self.base.has_document(document_id):
            if not replace:
                raise AlreadyExists(
                    f"the datastore has a document {document_id!r} already; replace it (--replace), delete it first,"
                    " or leave it out"
                )
            self._replaced.append(document_id)
        self._segment.begin_document(document_id, title, metadata or {})
        self._document = document_id

    def is_resumed(self, num_entries: int) -> bool:
        """Whether the next `num_entries` entries are on disk from the interrupted build."""
        return self._segment.num_entries + num_entries <= self.num_resumed_entries

    def verify_resumed(self, values_N: Int64[np.ndarray, " N"]) -> None:
        """Compares entries with those on disk. Raises Incompatible if the corpus differs from that of the interrupted
        build.
        """
        begin = self._segment.num_entries
        stored_N = self._resumed_values[begin : begin + len(values_N)]
        if not np.array_equal(stored_N, values_N):
            raise self._other_corpus(f"document {self._document!r} differs")
        self._segment.num_entries += len(values_N)

    def append(
        self,
        keys_ND: Float[np.ndarray, "N D"] | None,
        values_N: Int64[np.ndarray, " N"],
        pruned_N: Bool[np.ndarray, " N"] | None = None,
    ) -> None:
        """Appends entries to the current document, as `SegmentWriter.append`."""
        self._segment.append(keys_ND, values_N, pruned_N)

    def repeat(self, first: int, count: int) -> None:
        """Appends entries again to the current document, as `SegmentWriter.repeat`."""
        self._segment.repeat(first, count)

    def checkpoint(self) -> None:
        """Syncs the appended entries, so that they survive a kill. Raises Locked if the folder was replaced."""
        self._lock.check()
        self._segment.sync()
        journal = Journal(self._task, self._number, self._segment.rows, self.spec, self.keyed, self._anew)
        write_atomic(self.path / JOURNAL, journal.encode())

    def commit(self, progress: Progress = silent, *, defaults: KnnDefaults | None = None) -> Datastore:
        """Builds the index and commits the segment. Returns the store, open.

        The first keys of a store give it `defaults`, or else untuned ones with a temperature of their own scale. Others
        keep the store's defaults, and all commits of other processes since the start. Raises InvalidInput if there is
        no entry, and Incompatible if a resumed corpus ended early.
        """
        if not self._segment.num_entries or self._segment.num_entries < self._segment.rows:
            raise self._nothing_to_commit()
        self.checkpoint()
        is_first = self.base is None or not self.base.is_keyed
        record, scale = self._segment.finish(self._number, self.spec, is_first=is_first, progress=progress)
        with commit_lock(self.path) as lock:
            self._lock.check()
            now = self._latest()
            if now is not None and self.base is not None and self._task == ADD:
                self._replaced += self._remembered_meanwhile(now, self.base)
            move(self._work, self.path / record.folder)
            after = None if now is None else now.manifest
            manifest = commit_manifest(
                self.path, self._next_manifest(now, record, defaults, scale), after=after, lock=lock
            )
            check_unchanged(self.path, manifest, lock)
            if self.base is not None:
                take_derived(self.path, self.base, self._sources, record)
            remove(self.path / JOURNAL)
            sweep(self.path, manifest)
        self._held.close()
        return Datastore.open(self.path)

    def commit_empty(self) -> Datastore:
        """Commits the store without the segments of a compaction, which have no live documents. Returns it, open."""
        with commit_lock(self.path) as lock:
            self._lock.check()
            now = self._latest()
            assert now is not None  # only a store that is there is compacted
            assert self.base is not None
            kept = tuple(record for record in now.manifest.segments if record.number not in self._sources)
            manifest = now.manifest.next(segments=kept, quality=None, emptied=now.manifest.last_segment)
            manifest = commit_manifest(self.path, manifest, after=now.manifest, lock=lock)
            check_unchanged(self.path, manifest, lock)
            self.discard()
            sweep(self.path, manifest)
        self._held.close()
        return Datastore.open(self.path)

    def discard(self) -> None:
        """Removes the files of this writer without a commit."""
        self._lock.check()
        remove(self._work)
        remove(self.path / JOURNAL)

    def close(self) -> None:
        """Closes the files and releases the lock."""
        self._held.close()

    def __enter__(self) -> StoreWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def _recover(self) -> int:
        """Counts the entries that an interrupted build left. Restores its folder if only the commit was missing."""
        journal, moved = self.path / JOURNAL, self.path / SEGMENTS / f"{self._number:06d}"
        left = Journal.decode(journal) if journal.exists() else None
        left = None if left and left.anew else left
        is_other = self._task != ADD or self._anew
        if left and left.segment == self._number and left.task == ADD and is_other and left.entries:
            raise Incompatible(
                f"documents were being added to {self.path}; run the same `memlm index add` again to go on with it,"
                f" or give it up with `memlm index compact {quote(str(self.path))} --purge`"
            )
        for file in self.path.glob(f"{JOURNAL}.*tmp"):
            remove(file)
        is_same = left and (left.segment, left.task, left.keyed) == (self._number, self._task, self.keyed)
        if left is None or not is_same or self._anew:
            remove(journal)  # of a commit that was done, or of a compaction that another change has overtaken
            remove(self._work)
            remove(moved)
            return 0
        if left.entries:
            _check_same(left.spec, self.spec, self.path, but=ABOUT_INDEX)  # which is built at the end
        if moved.exists() and not self._work.exists():
            move(moved, self._work)
        if not self._work.exists():
            remove(journal)  # a kill before the next checkpoint leaves a folder with fewer entries than it says
            return 0
        row_bytes_of = {VALUES: 4}
        if self.keyed:
            row_bytes_of[KEYS_FILE] = 2 * self.spec.dim
        if self.keyed and self.spec.prune is not None:
            row_bytes_of[PRUNED] = 1
        for name, row_bytes in row_bytes_of.items():
            size, expected = (self._work / name).stat().st_size, HEADER_BYTES + left.entries * row_bytes
            if left.entries and size < expected:
                raise Corrupt(
                    f"{self._work / name} has {size} bytes, expected at least {expected}; remove {journal} to start"
                    " the build anew"
                )
        return left.entries

    def _latest(self) -> Snapshot | None:
        """The newest snapshot, which the commit follows. None for a new store. Raises Locked if it does not follow from
        the snapshot at the start, but is another store's or an earlier one.
        """
        if self.base is None:
            return None
        now = Datastore.open(self.path).snapshot
        if not self.base.is_continued_by(now):
            raise Locked(
                f"{self.path} was replaced by another store, or by an earlier state of it, while it was being written;"
                " what is there now was left as it is: run the same command again"
            )
        return now

    def _next_manifest(
        self, now: Snapshot | None, record: SegmentRecord, defaults: KnnDefaults | None, scale: float
    ) -> Manifest:
        """The manifest that follows that of `now`. `scale` is the temperature of untuned defaults, for first keys."""
        k, lam = (UNTUNED_K, UNTUNED_LAM) if self.keyed else (0, 0.0)
        first = defaults or KnnDefaults(k=k, lam=lam, temperature=scale, tuned_on=None)
        if self.base is None or now is None:
            return Manifest(1, self.spec, (record,), first)
        number = now.manifest.number + 1
        changed: dict[str, Any] = {"quality": None}
        if self.keyed and not now.is_keyed:
            changed |= {"defaults": first, "spec": self.spec}
        if self._task == ADD:
            replaced = now.find_each([name for name in self._replaced if now.has_document(name)])
            old = write_tombstones(self.path, now.segments, replaced, number)
            return now.manifest.next(segments=(*old, record), **changed)
        with closing(Segment(self.path, record, self.spec.dim)) as copied:
            rows = [copied.documents.row_of(name) for name in self.base.deleted_between(now)]
            copies = [(copied, row) for row in rows if row is not None]
            (taken,) = write_tombstones(self.path, [copied], copies, number)
        return now.manifest.next(segments=replacing(self.path, now, self._sources, taken, number), **changed)

    def _remembered_meanwhile(self, now: Snapshot, base: Snapshot) -> list[str]:
        """The ids of new documents that others have given to a document since the start, to be replaced. Raises
        AlreadyExists where nothing is to be replaced.
        """
        with closing(DocumentTable(self._work / DOCUMENTS)) as added:
            taken = [name for name in now.names_added_since(base) if added.row_of(name) is not None]
        if taken and not self._replaces:
            raise AlreadyExists(
                f"a document {taken[0]!r} came into the datastore meanwhile; replace it (--replace), or delete it first"
            )
        return taken

    def _nothing_to_commit(self) -> Exception:
        if not self._segment.num_entries and not self._segment.rows:
            return InvalidInput("there is no entry to commit; the corpus has no token", field="corpus")
        return self._other_corpus("it ended before")

    def _other_corpus(self, difference: str) -> Incompatible:
        task = "addition to" if self._task == ADD else "build of"
        return Incompatible(
            f"the corpus is not the one of the interrupted {task} {self.path} ({difference}); with the files as they"
            " were, the same command goes on; to begin anew with those of now, run it again after: rm -r"
            f" {quote(str(self._work))}"
        )


def _unfinished(path: Path, manifest: Manifest) -> str:
    """What is left to do of a store that is there, to be put behind an error. Empty if there is nothing."""
    to = f"{quote(str(path))} --model MODEL`"
    if not all(record.is_keyed for record in manifest.segments):
        return f"; `memlm index keys {to} makes the keys of documents without"
    unmeasured = manifest.quality is None and all(KEYS_FILE in record.files for record in manifest.segments)
    return f"; its index was not measured: `memlm index verify {to} does it" * unmeasured


def _check_same(built: StoreSpec, requested: StoreSpec, path: Path, but: tuple[str, ...] = ()) -> None:
    old, new = asdict(built), asdict(requested)
    differing = [
        f"{name} {old[name]!r}, not {new[name]!r}"
        for name in new
        if new[name] != old[name] and name not in ("model", *but)  # a moved model is the same, by its fingerprint
    ]
    if differing:
        raise Incompatible(f"{path} was built with {'; '.join(differing)}: use the same, or another folder")
