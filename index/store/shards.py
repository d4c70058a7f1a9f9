"""Shards: which of several processes searches which segments, and the cutting of large segments for them.

The shard of a segment follows from the segments before it. So every process that reads a manifest comes to the same
result, and a new segment changes nothing for those that are there.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path

import numpy as np

from memlm.base.figures import counted
from memlm.base.progress import Progress, silent
from memlm.errors import InvalidInput, check_range
from memlm.index.store.compaction import copy_documents
from memlm.index.store.datastore import Datastore
from memlm.index.store.manifest import SegmentRecord
from memlm.index.store.segment import Segment
from memlm.index.store.writer import StoreWriter

MAX_SHARDS = 4096
UNEVEN = 1.25  # times the average share, from which a segment is cut


@dataclass(frozen=True, slots=True)
class ShardNumber:
    """One of several shards, the first of four as `1/4`."""

    number: int
    of: int

    @classmethod
    def parse(cls, text: str) -> ShardNumber:
        """Reads `1/4`. Raises InvalidInput for other text."""
        found = re.fullmatch(r"(\d{1,4})/(\d{1,4})", text)
        shard = cls(int(found[1]), int(found[2])) if found else cls(0, 0)
        if not 1 <= shard.number <= shard.of <= MAX_SHARDS:
            raise InvalidInput(f"shard is {text!r}; expected I/N, as 1/4 for the first of four", field="shard")
        return shard

    def __str__(self) -> str:
        return f"{self.number}/{self.of}"


def shards_of(segments: Sequence[SegmentRecord], num_shards: int) -> list[int]:
    """The number of each segment's shard, from 1: the one with the fewest entries of the segments before."""
    entries, shards = [0] * num_shards, list[int]()
    for segment in segments:
        shard = min(range(num_shards), key=entries.__getitem__)
        entries[shard] += segment.entries if segment.is_keyed else 0  # others are not searched
        shards.append(shard + 1)
    return shards


def split(path: str | Path, num_shards: int, progress: Progress = silent) -> int:
    """Cuts each segment of a store that is larger than a shard's share, so that shards have about as many entries each.
    Returns the number of segments that were cut.

    Documents stay whole. Keys are copied, and each new segment gets an index of its own. Readers keep their snapshots.
    A kill leaves a store in which some documents have moved already, and the same call moves the others. Needs disk
    space for the new segments beside the old ones. Raises Locked while another process writes, Incompatible for a store
    whose keys were not kept or with an interrupted addition, and InvalidInput for one with too few documents.
    """
    check_range("shards", num_shards, least=1, most=MAX_SHARDS, whole=True)
    path = Path(path)
    with Datastore.open(path) as datastore:
        snapshot = datastore.snapshot
        if snapshot.num_documents < num_shards:
            raise InvalidInput(
                f"{path} has {counted(snapshot.num_documents, 'document')}, each of which stays whole; choose at most"
                " as many shards",
                field="shards",
            )
        share = max(1, -(-snapshot.keyed.num_entries // num_shards))
        large = [segment for segment in snapshot.keyed.segments if segment.num_live_entries > UNEVEN * share]
        for segment in large:
            segment.stored_keys()  # raises before anything is written
        total, done = sum(segment.num_kept_entries for segment in large), 0
        for segment in large:
            for rows in _pieces(segment, -(-segment.num_live_entries // share)):
                done = _move(path, segment.record.number, rows, done, total, progress)
    return len(large)


def _move(path: Path, number: int, rows: range, done: int, total: int, progress: Progress) -> int:
    """Moves documents of a segment to a new one. Returns the number of entries moved so far."""
    with StoreWriter.moving(path, number, rows) as writer:
        assert writer.base is not None
        source = next((each for each in writer.base.segments if each.record.number == number), None)
        places = slice(rows.start, rows.stop)
        if source is None or not source.sizes[places][~source.deleted_mask[places]].any():  # all were deleted meanwhile
            writer.discard()
            return done
        done = copy_documents(source, writer, done, total, progress, rows)
        writer.commit(progress).close()
        return done


def _pieces(segment: Segment, count: int) -> Iterator[range]:
    """Yields the rows of a segment's documents in `count` runs of about as many live entries, or fewer runs."""
    sizes = np.where(segment.deleted_mask, 0, segment.sizes)
    piece_of = ((sizes.cumsum() - sizes / 2) * count // max(1, int(sizes.sum()))).astype(int)
    for _, members in groupby(range(len(sizes)), key=piece_of.tolist().__getitem__):
        rows = list(members)
        if sizes[rows].any():
            yield range(rows[0], rows[-1] + 1)
