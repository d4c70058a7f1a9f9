"""A store, open: search it, locate what it found, delete from it.

    with Datastore.open("store") as datastore:
        found = datastore.search(queries_QD, k=8)
        datastore.locate(found.ids_QK[0])
        datastore.delete(["doc-17"])

A reader keeps the manifest it opened until `refresh`, or until it commits one itself.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Any, TypeVar

from memlm.index.deletion import Deleted, bury
from memlm.index.errors import Corrupt, InvalidInput
from memlm.index.ivf import FLAT
from memlm.index.lock import committing, writing
from memlm.index.manifest import KnnDefaults, Manifest, StoreSpec, commit_manifest, read_manifest, sweep
from memlm.index.segment import KEYS
from memlm.index.view import Place, View

T = TypeVar("T")

__all__ = ["Datastore", "Deleted", "KnnDefaults", "Place", "StoreSpec"]


class Datastore(View):
    """A store at one manifest, which moves to newer ones and makes them. Searching is safe from several threads; the
    rest is for one at a time.
    """

    @classmethod
    def open(cls, path: str | Path) -> Datastore:
        """Opens the store at its newest manifest.

        Raises NotFound where there is none or only an unfinished build, Corrupt for a damaged file, Incompatible
        for another version of the format.
        """
        return _settled(Path(path), lambda manifest: cls(Path(path), manifest))

    def delete(self, document_ids: Sequence[str]) -> Deleted:
        """Deletes documents: at the commit they stop speaking, here and in whatever opens or refreshes later.

        Raises NotFound, naming them, where some are not there: then none is deleted. Somebody may be adding to the
        store, or compacting it, meanwhile: what is deleted stays deleted.
        """
        deleted, newer = self.deleting(document_ids)
        self.adopt(newer)
        return deleted

    def deleting(self, document_ids: Sequence[str]) -> tuple[Deleted, View]:
        """The same, in any thread, while others search. They find the deleted until `adopt` moves to what it gives."""
        with committing(self.path):
            now = self.newer() or View(self.path, self.manifest, self._segments)
            kept = self._segments
            try:
                deleted, newer = self._deleted(now, document_ids)
                kept = [*kept, *newer.segments]
                return deleted, newer
            finally:
                now.close(but=kept)

    def delete_where(self, where: Mapping[str, str]) -> Deleted:
        """Deletes the documents that `matching` tells, which may be none; see `delete`. Raises InvalidInput where no
        field is given.
        """
        if not where:
            raise InvalidInput("no field is given, which would delete everything; give field=value", field="where")
        with committing(self.path):
            self.refresh()
            deleted, newer = self._deleted(self, self.matching(where))
            self.adopt(newer)
            return deleted

    def save_defaults(self, defaults: KnnDefaults) -> None:
        """Commits other defaults."""
        with committing(self.path):
            self.refresh()
            self._commit(self.manifest.next(defaults=defaults))

    def save_quality(self, quality: Mapping[str, Any]) -> None:
        """Commits what was measured of the index."""
        with committing(self.path):
            self.refresh()
            self._commit(self.manifest.next(quality=dict(quality)))

    def drop_keys(self) -> None:
        """Gives up the stored keys where an index answers without them: no exact search, no re-ranking, no compaction
        from then on. Raises Locked while another writes, who may need them.
        """
        with writing(self.path), committing(self.path):
            self.refresh()
            segments = tuple(
                record
                if record.index == FLAT
                else replace(record, files={name: file for name, file in record.files.items() if name != KEYS})
                for record in self.manifest.segments
            )
            if segments != self.manifest.segments:
                self._commit(self.manifest.next(segments=segments))

    def refresh(self) -> bool:
        """Moves to the newest manifest; tells whether there was a newer one."""
        newer = self.newer()
        return newer is not None and self.adopt(newer)

    def newer(self) -> View | None:
        """The newest manifest, opened, where it is newer than this one: in any thread, while others search."""
        if read_manifest(self.path).number == self.manifest.number:
            return None
        return _settled(self.path, lambda manifest: View(self.path, manifest, self._segments))

    def adopt(self, newer: View) -> bool:
        """Moves to what `newer` opened; tells whether that is still newer."""
        if newer.manifest.number <= self.manifest.number:
            newer.close(but=self._segments)
            return False
        self.close(but=newer.segments)
        self._segments, self.manifest = list(newer.segments), newer.manifest
        return True

    def __enter__(self) -> Datastore:
        """Closes at the end of the block."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Closes."""
        self.close()

    def _commit(self, manifest: Manifest) -> None:
        self.adopt(self._committed(manifest, self))

    def _committed(self, manifest: Manifest, now: View) -> View:
        """What follows `now`: a manifest that counts from here on, opened."""
        commit_manifest(self.path, manifest)
        newer = View(self.path, manifest, now.segments)
        sweep(self.path, manifest)
        return newer

    def _deleted(self, now: View, document_ids: Sequence[str]) -> tuple[Deleted, View]:
        """Deletes documents of the newest manifest, and gives the one that follows."""
        places = now.find_each(document_ids)
        deleted = Deleted(len(places), sum(int(segment.sizes[row]) for segment, row in places))
        if not places:
            return deleted, now
        records = bury(self.path, now.segments, places, now.manifest.number + 1)
        return deleted, self._committed(now.manifest.next(segments=records), now)


def _settled(path: Path, use: Callable[[Manifest], T]) -> T:
    """Uses the newest manifest; again where a commit took its files away in the meantime."""
    while True:
        manifest = read_manifest(path)
        try:
            return use(manifest)
        except (Corrupt, OSError):
            if read_manifest(path).number == manifest.number:
                raise
