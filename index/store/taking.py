"""Documents that a new segment takes from others, as compaction, a move or new keys do it."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import TypeAlias

import numpy as np

from memlm.index.store.manifest import DERIVED, SegmentRecord
from memlm.index.store.segment import VALUES, Segment
from memlm.index.store.snapshot import Snapshot
from memlm.index.store.tombstones import write_tombstones

# The rows that are taken from segments, given by their numbers. None: all.
Sources: TypeAlias = Mapping[int, frozenset[int] | None]


def replacing(
    store: Path, now: Snapshot, sources: Sources, taken: SegmentRecord, number: int
) -> tuple[SegmentRecord, ...]:
    """The records of all segments of `now` for the manifest of a number: without the documents that were taken, and
    with the segment that has them now before what is left of the first source. A source without live documents goes.
    """
    kept, places = list[Segment](), list[tuple[Segment, int]]()
    place: int | None = None
    for segment in now.segments:
        if segment.record.number not in sources:
            kept.append(segment)
            continue
        place = len(kept) if place is None else place
        wanted = sources[segment.record.number]
        live = np.flatnonzero(~segment.deleted_mask).tolist()
        rows = live if wanted is None else [row for row in live if row in wanted]
        if len(rows) < len(live):
            kept.append(segment)
            places += [(segment, row) for row in rows]
    records = write_tombstones(store, kept, places, number)
    return (*records[:place], taken, *records[place or 0 :])


def take_derived(store: Path, before: Snapshot, sources: Sources, taken: SegmentRecord) -> None:
    """Moves the files that were derived from the text of the only source to the segment that has the very same text."""
    if len(sources) != 1:
        return
    for source in (segment.record for segment in before.segments if segment.record.number in sources):
        if (source.files[VALUES], source.documents) == (taken.files[VALUES], taken.documents):
            for name in set(DERIVED) - set(taken.files):
                with suppress(FileNotFoundError):
                    (store / source.folder / name).replace(store / taken.folder / name)
