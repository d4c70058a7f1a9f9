"""Small segments: documents that are remembered at once, and merges that keep the number of such segments low.

Both hold the commit lock only, for a moment. So they go on while another process adds documents or compacts the store
for hours: that process's commit follows them. A killed one leaves a folder that no manifest names, which the next
commit removes.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate, takewhile
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Bool, Float16, Int64

from memlm.base.files import make_folder, remove, storage
from memlm.errors import AlreadyExists, InvalidInput
from memlm.index.factory import FLAT, NO_INDEX
from memlm.index.store.journal import next_segment, reserved_segment
from memlm.index.store.manifest import SEGMENTS, Manifest, SegmentRecord, StoreSpec
from memlm.index.store.segment import SMALL_ENTRIES, Segment
from memlm.index.store.segment_writer import SegmentWriter
from memlm.index.store.snapshot import Snapshot

SMALLEST_TIER, TIER_FACTOR = 256, 4  # entries of the lowest tier at most, and how much larger the next one's are
MERGED_AT_ONCE = 4  # segments of a tier, so that each tier has three at most


@dataclass(frozen=True, slots=True)
class NewEntries:
    """A document with the entries of its N tokens. `keys_ND` is None for entries without keys, as of all documents of
    one call. `pruned_N` is None where nothing is pruned.
    """

    id: str
    keys_ND: Float16[np.ndarray, "N D"] | None
    values_N: Int64[np.ndarray, " N"]
    pruned_N: Bool[np.ndarray, " N"] | None = None
    title: str = ""
    metadata: Mapping[str, Any] = field(default_factory=dict)


def write_documents(path: Path, manifest: Manifest, documents: Sequence[NewEntries]) -> SegmentRecord:
    """Writes and syncs a segment of some documents, for the next manifest of a store whose commit lock is held. Raises
    InvalidInput if they have no entry.
    """
    number, spec = next_segment(path, manifest), manifest.spec
    if not sum(len(each.values_N) for each in documents):
        raise InvalidInput("the documents have no token; give some text", field="documents")
    with _new_segment(path, number, spec, keyed=documents[0].keys_ND is not None) as writer:
        for document in documents:
            writer.begin_document(document.id, document.title, document.metadata)
            writer.append(document.keys_ND, document.values_N, document.pruned_N)
        return _finished(writer, number, spec)


def check_new(snapshot: Snapshot, documents: Sequence[NewEntries], *, replace: bool) -> list[tuple[Segment, int]]:
    """Returns the places of earlier documents of these ids, to be replaced. Raises AlreadyExists for an id that is
    taken, unless such documents are to be replaced.
    """
    taken = [document.id for document in documents if snapshot.has_document(document.id)]
    if taken and not replace:
        raise AlreadyExists(
            f"the datastore has a document {taken[0]!r} already; replace it (replace), delete it first, or give"
            " another id"
        )
    return snapshot.find_each(taken)


def to_merge(path: Path, snapshot: Snapshot) -> list[Segment]:
    """The small segments that one merge should join: the first of the lowest tier that has MERGED_AT_ONCE of them.

    A tier holds the segments of similar size, all with keys or all without, as in a log-structured merge tree with
    tiers. So n entries lie in O(log n) segments, and in one more for each 16,384 entries, since no larger ones merge.

    Segments that an unfinished addition or compaction counts on are left as they are. So are those whose deleted
    documents another hard link keeps, because a purge tells of them.
    """
    reserved = reserved_segment(path, snapshot.manifest) or 0
    tiers: dict[tuple[int, bool], list[Segment]] = {}
    for segment in snapshot.segments:
        if segment.record.number > reserved and _may_merge(segment):
            tier = _tier(segment.num_kept_entries), segment.record.is_keyed
            tiers.setdefault(tier, []).append(segment)
    for _, segments in sorted(tiers.items()):
        fitting = list(takewhile(lambda ends: ends[1] <= SMALL_ENTRIES, _with_totals(segments)))
        if len(fitting) >= MERGED_AT_ONCE:
            return [segment for segment, _ in fitting]
    return []


def _with_totals(segments: Sequence[Segment]) -> Iterator[tuple[Segment, int]]:
    return zip(segments, accumulate(segment.num_kept_entries for segment in segments), strict=True)


def merge_segments(path: Path, snapshot: Snapshot, merged: Sequence[Segment]) -> Manifest:
    """Writes the live documents of some segments as one, and returns the next manifest, for the holder of the commit
    lock to commit. Without live documents, the segments just go.
    """
    manifest, sources = snapshot.manifest, {segment.record.number for segment in merged}
    number, spec = next_segment(path, manifest), manifest.spec
    joined = list[SegmentRecord]()
    if any((~segment.deleted_mask).any() for segment in merged):
        with _new_segment(path, number, spec, keyed=merged[0].record.is_keyed) as writer:
            for segment in merged:
                for document in segment.live_documents():
                    writer.begin_document(document.id, document.title, document.metadata)
                    writer.append(*segment.entries_of(document.row))
            joined = [_finished(writer, number, spec)]
    first = min(place for place, record in enumerate(manifest.segments) if record.number in sources)
    before, behind = manifest.segments[:first], manifest.segments[first:]
    kept = (record for record in behind if record.number not in sources)
    return manifest.next(segments=(*before, *joined, *kept), emptied=manifest.last_segment)


def _new_segment(path: Path, number: int, spec: StoreSpec, *, keyed: bool) -> SegmentWriter:
    folder = path / SEGMENTS / f"{number:06d}"
    remove(folder)  # of a commit that was killed
    with storage(path):
        make_folder(folder)
    return SegmentWriter(folder, spec, keyed=keyed)


def _finished(writer: SegmentWriter, number: int, spec: StoreSpec) -> SegmentRecord:
    """Completes a segment without an index of lists: so few entries are searched one by one."""
    writer.sync()
    record, _ = writer.finish(number, replace(spec, index=FLAT))
    return record


def _may_merge(segment: Segment) -> bool:
    if segment.record.index not in (FLAT, NO_INDEX) or segment.record.entries > SMALL_ENTRIES:
        return False
    return not (segment.any_deleted and segment.num_linked_files)


def _tier(entries: int) -> int:
    return max(0, math.ceil(math.log(max(1, entries) / SMALLEST_TIER, TIER_FACTOR)))
