"""Things that are made of a datastore's segments, as indexes of their words, kept as long as the segments are in it."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Generic, TypeVar

from memlm.index.store.datastore import Datastore
from memlm.index.store.segment import Segment

Derived = TypeVar("Derived")


class SegmentCache(Generic[Derived]):
    """One thing for each segment of the snapshot in use. Any thread may call the methods."""

    def __init__(self, datastore: Datastore) -> None:
        self._datastore, self._lock = datastore, threading.Lock()
        self._made = dict[object, Derived]()

    def get(self, segment: Segment, make: Callable[[], Derived]) -> Derived:
        """Returns the thing that was made of a segment, or makes it. One of a segment that is gone is not kept."""
        if (known := self._made.get(segment.core)) is not None:
            return known
        made = make()
        with self._lock:
            known = self._made.setdefault(segment.core, made)
            self._drop_gone()
        return known

    def drop_gone(self) -> None:
        """Drops the things of segments that are gone. They keep removed files open and mapped, and so their text
        readable and their room on the disk taken.
        """
        with self._lock:
            self._drop_gone()

    def clear(self) -> None:
        """Drops everything."""
        with self._lock:
            self._made = {}

    def _drop_gone(self) -> None:
        current = {each.core for each in self._datastore.snapshot.segments}
        if not current.issuperset(self._made):
            self._made = {core: each for core, each in self._made.items() if core in current}
