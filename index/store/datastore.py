"""An open datastore: a reference to its newest snapshot, which commits and refreshes replace.

    with Datastore.open("store") as datastore:
        snapshot = datastore.snapshot                 # pinned: it stays as it is
        neighbors = snapshot.search(queries_QD, k=8)
        snapshot.locate(neighbors.ids_QK[0])
        datastore.delete(["doc-17"])                  # datastore.snapshot is another one from here on

The reference moves only on `refresh`, or with a commit made through this object. `refresh` moves to whichever store is
at the path then: a later commit, an earlier state that was restored, or another store that was put there.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import TracebackType
from typing import Any, TypeVar

import numpy as np
from jaxtyping import Float32

from memlm.base.figures import counted
from memlm.base.files import storage
from memlm.base.lists import items_of
from memlm.errors import Corrupt, InvalidInput, Locked, check_path
from memlm.index.factory import FLAT
from memlm.index.neighbors import Neighbors
from memlm.index.store.journal import forget_done
from memlm.index.store.lock import StoreLock, commit_lock, write_lock
from memlm.index.store.manifest import (
    KnnDefaults,
    Manifest,
    SegmentRecord,
    StoreSpec,
    check_unchanged,
    commit_manifest,
    read_manifest,
    sweep,
)
from memlm.index.store.segment import KEYS
from memlm.index.store.small_segments import NewEntries, check_new, merge_segments, to_merge, write_documents
from memlm.index.store.snapshot import Place, Snapshot, next_read
from memlm.index.store.tombstones import Deletion, write_tombstones

T = TypeVar("T")

__all__ = ["Datastore", "Deletion", "KnnDefaults", "PendingDelete", "Place", "StoreSpec"]


@dataclass(frozen=True, slots=True)
class PendingDelete:
    """A committed deletion that `datastore` does not show yet. `snapshot` is the store without the documents."""

    datastore: Datastore
    snapshot: Snapshot
    deletion: Deletion

    def apply(self) -> Deletion:
        """Moves the datastore to `snapshot`, unless it has moved to a later one. One assignment, so any thread may."""
        self.datastore.switch_to(self.snapshot)
        return self.deletion


@dataclass(frozen=True, slots=True)
class PendingRemember:
    """Documents that were committed in a segment, which a datastore may not show yet. `snapshot` has them."""

    snapshot: Snapshot
    record: SegmentRecord


class Datastore:
    """A store at one snapshot, which later ones replace. Any thread may search and may pin `snapshot`. The other
    methods are for one thread at a time.
    """

    def __init__(self, snapshot: Snapshot) -> None:
        self.path, self.snapshot = snapshot.path, snapshot
        self._check: Callable[[Manifest], None] = lambda manifest: None

    def __repr__(self) -> str:
        snapshot = self.snapshot
        documents = counted(snapshot.num_documents, "document")
        return f"<Datastore {self.path}: {counted(snapshot.num_entries, 'entry')} of {documents}>"

    @classmethod
    def open(cls, path: str | Path) -> Datastore:
        """Opens the store at its newest manifest.

        Raises NotFound if there is none or only an unfinished build, Corrupt for a damaged file, and Incompatible for
        another version of the format.
        """
        check_path("store", path, "the folder of a datastore")
        path = Path(path)
        return cls(_retry_if_superseded(path, lambda manifest, read: Snapshot(path, manifest, read=read)))

    @property
    def manifest(self) -> Manifest:
        """The manifest of the snapshot in use."""
        return self.snapshot.manifest

    def search(self, queries_QD: Float32[np.ndarray, "Q D"], k: int, *, nprobe: int | None = None) -> Neighbors:
        """Searches the snapshot in use, as `Snapshot.search`."""
        return self.snapshot.search(queries_QD, k, nprobe=nprobe)

    def require(self, check: Callable[[Manifest], None]) -> None:
        """Calls `check` with the manifest in use, and with each later one before the store moves to it. An exception
        keeps the store where it is.
        """
        check(self.manifest)
        self._check = check

    def delete(self, document_ids: Sequence[str]) -> Deletion:
        """Deletes documents: from the commit on they contribute to no answer, here and in every process that opens or
        refreshes later.

        Raises NotFound, naming it, for a missing document, and then deletes none. Raises InvalidInput as
        `prepare_delete` does. Other processes may add to the store
        or compact it meanwhile: the deletion outlasts their commits.
        """
        return self.prepare_delete(document_ids).apply()

    def prepare_delete(self, document_ids: Sequence[str]) -> PendingDelete:
        """Commits a deletion in any thread, while others search. Searches of this object find the documents until
        `PendingDelete.apply`. The documents are those of the store that is at the path now. Raises InvalidInput for
        one text in place of a list: its characters may be ids too.
        """
        document_ids = items_of("document_ids", document_ids, expected="ids of documents")
        with commit_lock(self.path) as lock:
            return self._commit_deletion(self._open_current(), document_ids, lock)

    def remember(self, documents: Sequence[NewEntries], *, replace: bool = False) -> SegmentRecord:
        """Adds documents in one small segment, as `prepare_remember`, and moves to the commit. Returns its record."""
        pending = self.prepare_remember(documents, self.manifest.spec, replace=replace)
        self.switch_to(pending.snapshot)
        return pending.record

    def prepare_remember(
        self, documents: Sequence[NewEntries], spec: StoreSpec, *, replace: bool = False
    ) -> PendingRemember:
        """Commits documents whose entries were made for a store of `spec`, in any thread, also while another process
        adds to the store or compacts it. With `replace`, a document replaces the one with its id.

        Raises AlreadyExists for an id that is taken, InvalidInput for documents without an entry, and Locked if a store
        of another spec has come to the path.
        """
        with commit_lock(self.path) as lock, storage(self.path):
            snapshot = self._open_current()
            if snapshot.manifest.spec != spec:
                raise Locked(
                    f"{self.path} was replaced by another store while the text was read; nothing was changed: try again"
                )
            replaced = check_new(snapshot, documents, replace=replace)
            forget_done(self.path, snapshot.manifest)
            record = write_documents(self.path, snapshot.manifest, documents)
            kept = write_tombstones(self.path, snapshot.segments, replaced, snapshot.manifest.number + 1)
            newer = self._commit(snapshot.manifest.next(segments=(*kept, record)), snapshot, lock)
        return PendingRemember(newer, record)

    def merge_small(self) -> bool:
        """Commits one merge of small segments, if there are enough of a size. Returns whether there were. This object
        stays at its snapshot.
        """
        with commit_lock(self.path) as lock, storage(self.path):
            snapshot = self._open_current()
            forget_done(self.path, snapshot.manifest)
            if not (segments := to_merge(self.path, snapshot)):
                return False
            self._commit(merge_segments(self.path, snapshot, segments), snapshot, lock)
            return True

    def delete_where(self, where: Mapping[str, str]) -> Deletion:
        """Deletes the documents that `Snapshot.matching` lists, possibly none, as `delete`. Raises InvalidInput for an
        empty `where`.
        """
        if not where:
            raise InvalidInput("no field is given, which would delete everything; give field=value", field="where")
        with commit_lock(self.path) as lock:
            self.refresh()
            return self._commit_deletion(self.snapshot, self.snapshot.matching(where), lock).apply()

    def save_defaults(self, defaults: KnnDefaults) -> None:
        """Commits other defaults."""
        with commit_lock(self.path) as lock:
            self.refresh()
            self.switch_to(self._commit(self.manifest.next(defaults=defaults), self.snapshot, lock))

    def save_quality(self, quality: Mapping[str, Any]) -> None:
        """Commits the measured quality of the index."""
        with commit_lock(self.path) as lock:
            self.refresh()
            self.switch_to(self._commit(self.manifest.next(quality=dict(quality)), self.snapshot, lock))

    def drop_keys(self) -> None:
        """Removes the stored keys of all segments whose index answers without them. Exact search, re-ranking and
        compaction are refused from then on. Raises Locked while another process writes, because it may need the keys.
        """
        with write_lock(self.path), commit_lock(self.path) as lock:
            self.refresh()
            segments = tuple(
                record
                if record.index == FLAT
                else replace(record, files={name: file for name, file in record.files.items() if name != KEYS})
                for record in self.manifest.segments
            )
            if segments != self.manifest.segments:
                self.switch_to(self._commit(self.manifest.next(segments=segments), self.snapshot, lock))

    def refresh(self) -> bool:
        """Moves to the newest snapshot. Returns whether that is another one. On an error of `open`, or of the check
        given to `require`, the store keeps its snapshot.
        """
        newer = self.open_latest()
        return newer is not None and self.switch_to(newer)

    def open_latest(self) -> Snapshot | None:
        """Opens the newest snapshot, in any thread while others search. None if it is the one in use."""
        if read_manifest(self.path).pointer == self.manifest.pointer:
            return None
        return self._open_current()

    def switch_to(self, snapshot: Snapshot) -> bool:
        """Moves to a snapshot of this path, unless `CURRENT` was read later for the one in use. Returns whether the
        store moved.
        """
        if snapshot.read <= self.snapshot.read:
            return False
        self.snapshot = snapshot
        return True

    def close(self) -> None:
        """Closes the files of the snapshot in use."""
        self.snapshot.close()

    def __enter__(self) -> Datastore:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def _open_current(self) -> Snapshot:
        """Opens the snapshot that `CURRENT` names, also if it is the one in use."""

        def open_checked(manifest: Manifest, read: int) -> Snapshot:
            self._check(manifest)
            return Snapshot(self.path, manifest, self.snapshot.segments, read=read)

        return _retry_if_superseded(self.path, open_checked)

    def _commit(self, manifest: Manifest, after: Snapshot, lock: StoreLock) -> Snapshot:
        """Commits a manifest that follows the one of `after`, and opens it."""
        manifest = commit_manifest(self.path, manifest, after=after.manifest, lock=lock)
        snapshot = Snapshot(self.path, manifest, after.segments)
        check_unchanged(self.path, manifest, lock)
        sweep(self.path, manifest)
        return snapshot

    def _commit_deletion(self, snapshot: Snapshot, document_ids: Sequence[str], lock: StoreLock) -> PendingDelete:
        """Commits a deletion from the newest snapshot. Without documents there is no commit."""
        rows = snapshot.find_each(document_ids)
        deletion = Deletion(len(rows), sum(int(segment.sizes[row]) for segment, row in rows))
        if rows:
            check_unchanged(self.path, snapshot.manifest, lock)
            records = write_tombstones(self.path, snapshot.segments, rows, snapshot.manifest.number + 1)
            snapshot = self._commit(snapshot.manifest.next(segments=records), snapshot, lock)
        return PendingDelete(self, snapshot, deletion)


def _retry_if_superseded(path: Path, open_manifest: Callable[[Manifest, int], T]) -> T:
    """Opens the newest manifest, and again if a commit removed its files in the meantime."""
    while True:
        read = next_read()
        manifest = read_manifest(path)
        try:
            return open_manifest(manifest, read)
        except (Corrupt, OSError):
            if read_manifest(path).pointer == manifest.pointer:
                raise
