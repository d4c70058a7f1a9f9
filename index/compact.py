"""Many segments -> one, without what was deleted: room is won back, and searches ask one index instead of several.

Keys are copied, not computed: what comes out equals, entry for entry, a store that was built from the documents that
are left. Readers keep what they opened; a kill leaves the store as it was, and the next run goes on.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from memlm.index.errors import InvalidInput
from memlm.index.progress import Progress, silent
from memlm.index.segment import Segment
from memlm.index.writer import StoreWriter

BLOCK_ROWS = 65_536
CHECKPOINT_ROWS = 1 << 20


@dataclass(frozen=True, slots=True)
class Compacted:
    """What a compaction won back. Nothing was done where `segments_before` is 1 and nothing was deleted."""

    segments_before: int
    deleted_documents: int
    entries: int
    bytes_before: int
    bytes_after: int


def compact(path: str | Path, progress: Progress = silent) -> Compacted:
    """Merges all segments of a store into one, and leaves out the documents that are deleted.

    Needs room on the disk for the new segment beside the old ones. Raises NotFound where there is no store, Locked
    while another writes, InvalidInput where every document is deleted.
    """
    with StoreWriter.compacting(path) as writer:
        before = writer.base
        assert before is not None
        segments, deleted, size = len(before.manifest.segments), before.num_deleted_documents, before.bytes_on_disk
        if segments == 1 and not deleted:
            writer.discard()
            return Compacted(1, 0, before.num_entries, size, size)
        if not before.num_entries:
            writer.discard()
            raise InvalidInput(f"every document of {path} is deleted; remove the folder", field="store")
        done = 0
        for segment in before.segments:
            done = _copy(segment, writer, done, before.num_entries, progress)
        with writer.commit(progress) as after:
            return Compacted(segments, deleted, after.num_entries, size, after.bytes_on_disk)


def _copy(segment: Segment, writer: StoreWriter, done: int, total: int, progress: Progress) -> int:
    """Copies the live documents of a segment; gives how many entries are copied so far."""
    for document in segment.documents:
        if segment.dead[document.row]:
            continue
        writer.begin_document(document.id, title=document.title, metadata=document.metadata)
        first, last = segment.starts[document.row : document.row + 2].tolist()
        for begin in range(first, last, BLOCK_ROWS):
            end = min(begin + BLOCK_ROWS, last)
            values_N = segment.values_N[begin:end].astype("int64")
            if writer.is_resumed(end - begin):
                writer.replay(values_N)
            else:
                pruned_N = None if segment.pruned_N is None else np.array(segment.pruned_N[begin:end])
                writer.append(segment.stored_keys()[begin:end], values_N, pruned_N)
                if done // CHECKPOINT_ROWS < (done + end - begin) // CHECKPOINT_ROWS:
                    writer.checkpoint()
            done += end - begin
        progress("copy", done, total)
    return done
