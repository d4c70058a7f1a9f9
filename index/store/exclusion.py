"""Documents that one request leaves out, as if they had been deleted: those that it names, and of the others those that
do not hold at its time.

An exclusion turns each snapshot into a view: the same files, with more documents deleted. A view reads as a store from
which the documents were deleted.
"""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy
from weakref import WeakKeyDictionary

import numpy as np
from jaxtyping import Bool, Float32

from memlm.index.neighbors import Neighbors
from memlm.index.store.filters import DocumentFilter, moment_of
from memlm.index.store.segment import Segment, search_segments
from memlm.index.store.snapshot import Snapshot


class Exclusion:
    """Names of documents, each an id, a folder or a glob, and the time at which the others have to hold: `as_of` is a
    date, or a date and a time, and None stands for any. For one thread at a time.

    Names are looked up once in each segment. `unknown` are those that stood for no live document so far. Versions are
    of one store: its documents supersede none of another.
    """

    def __init__(self, names: Sequence[str], as_of: str | None = None) -> None:
        self.names, self._moment = tuple(names), None if as_of is None else moment_of(as_of)
        self.unknown = list(dict.fromkeys(names))
        self._masks: dict[object, Bool[np.ndarray, " docs"]] = {}
        self._views: WeakKeyDictionary[Snapshot, Snapshot] = WeakKeyDictionary()

    def view_of(self, snapshot: Snapshot) -> Snapshot:
        """The snapshot without the documents."""
        if (view := self._views.get(snapshot)) is None:
            view = copy(snapshot)
            vars(view).pop("keyed", None)
            masks = [self._mask_of(segment) for segment in snapshot.segments]
            if self._moment is not None:
                segments = zip(snapshot.segments, masks, strict=True)
                live = [~(segment.deleted_mask | mask) for segment, mask in segments]
                masks = [~holding for holding in snapshot.versions.holding(self._moment, live)]
            view.segments = tuple(map(Segment.without, snapshot.segments, masks))
            self._views[snapshot] = view
            in_use = {segment.core for view in self._views.values() for segment in view.segments}
            self._masks = {core: mask for core, mask in self._masks.items() if core in in_use}
        return view

    def _mask_of(self, segment: Segment) -> Bool[np.ndarray, " docs"]:
        """Whether each document of a segment is excluded. Later snapshots have the same segments, mostly."""
        if (mask := self._masks.get(segment.core)) is None:
            mask = np.zeros(segment.record.documents, bool)
            for name in self.names:
                named = segment.named([name])
                if name in self.unknown and (named & ~segment.deleted_mask).any():
                    self.unknown.remove(name)
                mask |= named
            self._masks[segment.core] = mask
        return mask


def search_views(
    views_Q: Sequence[Snapshot],
    queries_QD: Float32[np.ndarray, "Q D"],
    k: int,
    *,
    nprobe: int | None = None,
    only: DocumentFilter | None = None,
) -> Neighbors:
    """Finds the k nearest entries to each query in its own view of one snapshot, as a search of each view would.
    `only` chooses documents of equal views.
    """
    if not views_Q:
        return Neighbors.none(0, k)
    queries_QD = views_Q[0].rounded(queries_QD, k)
    return search_segments([view.segments for view in views_Q], queries_QD, k, nprobe, only)
