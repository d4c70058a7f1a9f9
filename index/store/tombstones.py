"""Tombstones: for each segment a file with the rows of its deleted documents, written for the next manifest."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from memlm.base.files import checksum, move, temporary_beside
from memlm.index.arrays import GrowingArray
from memlm.index.store.manifest import FileRecord, SegmentRecord
from memlm.index.store.segment import Segment


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
