"""Tombstones: for each segment a file with the rows of its deleted documents, written for the next manifest.

Documents that a new segment takes from others, as compaction, a move or new keys do it, are deleted in these.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeAlias

import numpy as np

from memlm.base.files import checksum, move, temporary_beside
from memlm.index.arrays import GrowingArray
from memlm.index.store.manifest import FileRecord, SegmentRecord
from memlm.index.store.segment import Segment
from memlm.index.store.snapshot import Snapshot

# The rows that are taken from segments, given by their numbers. None: all.
Sources: TypeAlias = Mapping[int, frozenset[int] | None]


@dataclass(frozen=True, slots=True)
class Deletion:
    """The number of deleted documents and entries."""

    num_documents: int
    num_entries: int


def write_tombstones(
    store: Path, segments: Sequence[Segment], places: Iterable[tuple[Segment, int]], number: int
) -> tuple[SegmentRecord, ...]:
    """Writes the rows of deleted documents, old and new, for the manifest of a number. Returns the segment records that
    name the files. They take effect with that manifest.
    """
    rows: dict[int, list[int]] = {}
    for segment, row in places:
        rows.setdefault(segment.record.number, []).append(row)
    return tuple(
        _write_tombstones(store, segment, rows[segment.record.number], number)
        if segment.record.number in rows
        else segment.record
        for segment in segments
    )


def replacing(
    store: Path, now: Snapshot, sources: Sources, taken: SegmentRecord, number: int
) -> tuple[SegmentRecord, ...]:
    """The records of all segments of `now` for the manifest of a number: without the documents that were taken, and
    with the segment that has them now before the rest of the first source. A source without live documents goes.
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


def _write_tombstones(store: Path, segment: Segment, rows: list[int], number: int) -> SegmentRecord:
    deleted_mask = segment.deleted_mask.copy()
    deleted_mask[rows] = True
    name = f"deleted-{number:06d}.npy"
    path = store / segment.record.folder / name
    temporary = temporary_beside(path)
    with closing(GrowingArray(temporary, "<i8", None)) as array:
        array.append(np.flatnonzero(deleted_mask))
        array.sync()
    move(temporary, path)
    files = {kept: file for kept, file in segment.record.files.items() if kept != segment.record.deleted}
    files[name] = FileRecord(path.stat().st_size, checksum(path))
    return replace(segment.record, deleted=name, files=files)
