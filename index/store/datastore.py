"""A store, open: search it, locate what it found, delete from it.

    with Datastore.open("store") as datastore:
        found = datastore.search(queries_QD, k=8)
        datastore.locate(found.ids_QK[0])
        datastore.delete(["doc-17"])

A reader keeps the snapshot it opened until `refresh`, or until it commits one itself. `refresh` moves to whatever store
is at the path then: a later commit, an earlier state that was restored, or another store that was put there.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Any, TypeVar

from memlm.errors import Corrupt, InvalidInput
from memlm.index.factory import FLAT
from memlm.index.store.lock import StoreLock, commit_lock, write_lock
from memlm.index.store.manifest import (
    KnnDefaults,
    Manifest,
    StoreSpec,
    check_unchanged,
    commit_manifest,
    read_manifest,
    sweep,
)
from memlm.index.store.segment import KEYS, Segment
from memlm.index.store.snapshot import Place, Snapshot, next_read
from memlm.index.store.tombstones import Deletion, write_tombstones

T = TypeVar("T")

__all__ = ["Datastore", "Deletion", "KnnDefaults", "Place", "StoreSpec"]


class Datastore(Snapshot):
    """A store at one snapshot, which moves to others and makes them. Searching is safe from several threads; the rest
    is for one at a time.
    """

    def __init__(
        self, path: Path, manifest: Manifest, known: Sequence[Segment] = (), *, read: int | None = None
    ) -> None:
        """See `Snapshot`."""
        super().__init__(path, manifest, known, read=read)
        self._check: Callable[[Manifest], None] = lambda manifest: None

    @classmethod
    def open(cls, path: str | Path) -> Datastore:
        """Opens the store at its newest manifest.

        Raises NotFound where there is none or only an unfinished build, Corrupt for a damaged file, Incompatible
        for another version of the format.
        """
        return _retry_if_superseded(Path(path), lambda manifest, read: cls(Path(path), manifest, read=read))

    def require(self, check: Callable[[Manifest], None]) -> None:
        """Has `check` look at the manifest in use, and at each one that is to be moved to; what it raises keeps the
        store where it is.
        """
        check(self.manifest)
        self._check = check

    def delete(self, document_ids: Sequence[str]) -> Deletion:
        """Deletes documents: from the commit on they contribute to no answer, here and in whatever opens or refreshes
        later.

        Raises NotFound, naming them, where some are not there; then none is deleted. Another process may be adding to
        the store, or compacting it, meanwhile: what is deleted stays deleted.
        """
        deleted, newer = self.prepare_delete(document_ids)
        self.switch_to(newer)
        return deleted

    def prepare_delete(self, document_ids: Sequence[str]) -> tuple[Deletion, Snapshot]:
        """Commits a deletion, in any thread, while others search, and gives the view of it for `switch_to`. Until then
        searches here find the documents. The documents are those of the store that is at the path now.
        """
        with commit_lock(self.path) as lock:
            return self._deleted(self._now(), document_ids, lock)

    def delete_where(self, where: Mapping[str, str]) -> Deletion:
        """Deletes the documents that `matching` tells, which may be none; see `delete`. Raises InvalidInput where no
        field is given.
        """
        if not where:
            raise InvalidInput("no field is given, which would delete everything; give field=value", field="where")
        with commit_lock(self.path) as lock:
            self.refresh()
            deleted, newer = self._deleted(self, self.matching(where), lock)
            self.switch_to(newer)
            return deleted

    def save_defaults(self, defaults: KnnDefaults) -> None:
        """Commits other defaults."""
        with commit_lock(self.path) as lock:
            self.refresh()
            self.switch_to(self._committed(self.manifest.next(defaults=defaults), self, lock))

    def save_quality(self, quality: Mapping[str, Any]) -> None:
        """Commits what was measured of the index."""
        with commit_lock(self.path) as lock:
            self.refresh()
            self.switch_to(self._committed(self.manifest.next(quality=dict(quality)), self, lock))

    def drop_keys(self) -> None:
        """Gives up the stored keys where an index answers without them: no exact search, no re-ranking, no compaction
        from then on. Raises Locked while another writes, who may need them.
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
                self.switch_to(self._committed(self.manifest.next(segments=segments), self, lock))

    def refresh(self) -> bool:
        """Moves to the snapshot that counts now; tells whether that is another one. Raises what `open` raises, and what
        `require` was given, and then stays where it is.
        """
        newer = self.open_latest()
        return newer is not None and self.switch_to(newer)

    def open_latest(self) -> Snapshot | None:
        """The snapshot that counts now, opened, where it is not the one in use: in any thread, while others search."""
        if read_manifest(self.path).pointer == self.manifest.pointer:
            return None
        return self._now()

    def switch_to(self, newer: Snapshot) -> bool:
        """Moves to another snapshot of this path, unless `CURRENT` was read later for the one in use."""
        if newer.read <= self.read:
            return False
        self._segments, self.manifest, self.read = list(newer.segments), newer.manifest, newer.read
        return True

    def __enter__(self) -> Datastore:
        """Closes at the end of the block."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Closes."""
        self.close()

    def _now(self) -> Snapshot:
        """The snapshot that counts, opened."""

        def opened(manifest: Manifest, read: int) -> Snapshot:
            self._check(manifest)
            return Snapshot(self.path, manifest, self._segments, read=read)

        return _retry_if_superseded(self.path, opened)

    def _committed(self, manifest: Manifest, now: Snapshot, lock: StoreLock) -> Snapshot:
        """What follows `now`: a manifest that counts from here on, opened."""
        manifest = commit_manifest(self.path, manifest, after=now.manifest, lock=lock)
        newer = Snapshot(self.path, manifest, now.segments)
        check_unchanged(self.path, manifest, lock)
        sweep(self.path, manifest)
        return newer

    def _deleted(self, now: Snapshot, document_ids: Sequence[str], lock: StoreLock) -> tuple[Deletion, Snapshot]:
        """Deletes documents of the snapshot that counts, and gives the one that follows."""
        places = now.find_each(document_ids)
        deleted = Deletion(len(places), sum(int(segment.sizes[row]) for segment, row in places))
        if not places:
            return deleted, now
        check_unchanged(self.path, now.manifest, lock)
        records = write_tombstones(self.path, now.segments, places, now.manifest.number + 1)
        return deleted, self._committed(now.manifest.next(segments=records), now, lock)


def _retry_if_superseded(path: Path, use: Callable[[Manifest, int], T]) -> T:
    """Uses the manifest that counts; again where a commit took its files away in the meantime."""
    while True:
        read = next_read()
        manifest = read_manifest(path)
        try:
            return use(manifest, read)
        except (Corrupt, OSError):
            if read_manifest(path).pointer == manifest.pointer:
                raise
