"""Files that are made from a segment's own, and can be made anew: indexes of its words and of its passages.

They lie in the segment's folder, where no manifest names them. A store is whole without them, a missing or foreign one
is made anew, and they go with their segment. Deleted documents stay in them until their segment is compacted, so that
readers filter.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from memlm.base.files import remove, sync_file, temporary_beside
from memlm.errors import MemlmError
from memlm.index.store.lock import commit_lock
from memlm.index.store.manifest import DERIVED, SegmentRecord, read_manifest
from memlm.index.store.segment import DOCUMENTS, VALUES, Segment
from memlm.index.store.snapshot import Snapshot
from memlm.index.store.tombstones import Sources


class DerivedFile:
    """The name of a derived file, and the temporary name under which it is made."""

    def __init__(self, store: Path, segment: Segment, name: str) -> None:
        self._store, self._segment = store, segment
        self.path = store / segment.record.folder / name
        self.temporary = temporary_beside(self.path)  # the next commit sweeps it away where a kill leaves it

    @contextmanager
    def begun(self) -> Iterator[Path]:
        """Holds the commit lock while the temporary file is created, so that no purge of the segment misses it.

        Raises MemlmError or OSError where the folder cannot be written, or the segment is not in the store any more.
        """
        with commit_lock(self._store):
            self._check_current()
            yield self.temporary

    def publish(self) -> None:
        """Gives the file its name, if the segment is still one of the store. Otherwise only its open user keeps it."""
        with suppress(MemlmError, OSError):
            sync_file(self.temporary)
            with commit_lock(self._store):
                self._check_current()
                self.temporary.replace(self.path)
                return
        self.discard()

    def discard(self) -> None:
        """Removes the temporary file."""
        with suppress(OSError):
            remove(self.temporary)

    def _check_current(self) -> None:
        current = read_manifest(self._store).segments
        if self._segment.core not in [(each.number, each.files[VALUES], each.files[DOCUMENTS]) for each in current]:
            raise FileNotFoundError(self._segment.record.folder)


def take_derived(store: Path, before: Snapshot, sources: Sources, taken: SegmentRecord) -> None:
    """Moves the files that were derived from the text of the only source to the segment that has the very same text."""
    if len(sources) != 1:
        return
    for source in (segment.record for segment in before.segments if segment.record.number in sources):
        if (source.files[VALUES], source.documents) == (taken.files[VALUES], taken.documents):
            for name in set(DERIVED) - set(taken.files):
                with suppress(FileNotFoundError):
                    (store / source.folder / name).replace(store / taken.folder / name)
