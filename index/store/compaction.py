"""Compaction: merges all segments into one without deleted documents, which frees disk space and speeds up searches.

Keys are copied, not computed. Where some documents have none, these stay in a segment of their own. The result equals,
entry for entry, a store built from the remaining documents. Readers
keep their snapshots. A kill leaves the store unchanged, and the next run resumes.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from memlm.base.progress import Progress, silent
from memlm.errors import check_path
from memlm.index.store.datastore import Datastore
from memlm.index.store.journal import is_being_extended, rollback
from memlm.index.store.segment import Segment
from memlm.index.store.writer import StoreWriter

BLOCK_ROWS = 65_536
CHECKPOINT_ROWS = 1 << 20


@dataclass(frozen=True, slots=True)
class CompactionResult:
    """The result of a compaction, which does nothing to a store with one segment at most and no deleted document.

    `left_documents` were deleted during the copy and still take room. `rolled_back_addition` is true if a purge removed
    the documents of an interrupted addition. `linked_files` counts the removed files with deleted documents that
    another hard link keeps, as in a copy of the store. `was_tuned` if it was tuned on its own documents afterwards, and
    `outgrown` says how far it has outgrown its tuning, if it has.
    """

    segments_before: int
    deleted_documents: int
    entries: int
    bytes_before: int
    bytes_after: int
    left_documents: int = 0
    rolled_back_addition: bool = False
    linked_files: int = 0
    was_tuned: bool = False
    outgrown: str | None = None


def compact(path: str | Path, progress: Progress = silent, *, purge: bool = False) -> CompactionResult:
    """Merges all segments of a store into one, without the deleted documents, or into two where some have keys and some
    have none. Without live documents, the store has no segment afterwards.

    With `purge`, no file of the store holds a deleted document afterwards: compaction repeats until no document was
    deleted meanwhile, and an interrupted addition is rolled back. The file system may keep the blocks of removed files.

    Needs disk space for the new segment beside the old ones. Raises NotFound if there is no store, Locked while another
    process writes, and Incompatible if an interrupted addition waits or keys were not kept.
    """
    check_path("store", path, "the folder of a datastore")
    path = Path(path)
    rolled_back_addition = False
    if purge:
        rolled_back_addition = is_being_extended(path)
        rollback(path)
    done = _compacted(path, progress)
    while purge and done.left_documents:
        again = _compacted(path, progress)
        deleted = done.deleted_documents + again.deleted_documents
        linked = done.linked_files + again.linked_files
        done = replace(
            again, segments_before=done.segments_before, deleted_documents=deleted, bytes_before=done.bytes_before,
            linked_files=linked,
        )  # fmt: skip
    return replace(done, rolled_back_addition=rolled_back_addition)


def _compacted(path: Path, progress: Progress) -> CompactionResult:
    """Merges the segments with keys, and those without."""
    with Datastore.open(path) as datastore:
        before = datastore.snapshot
        deleted, linked = 0, 0
        for keyed in (True, False):
            gone = _merge(path, progress, keyed=keyed)
            deleted, linked = deleted + gone[0], linked + gone[1]
        datastore.refresh()
        after = datastore.snapshot
        return CompactionResult(
            len(before.segments), deleted, after.num_entries, before.bytes_on_disk, after.bytes_on_disk,
            after.num_deleted_documents, linked_files=linked,
        )  # fmt: skip


def _merge(path: Path, progress: Progress, *, keyed: bool) -> tuple[int, int]:
    """Merges the segments with keys, or those without. Returns the numbers of deleted documents that they lost, and of
    files with some that another hard link keeps.
    """
    with StoreWriter.compacting(path, keyed=keyed) as writer:
        assert writer.base is not None
        merged = [segment for segment in writer.base.segments if segment.record.is_keyed == keyed]
        deleted = sum(int(segment.deleted_mask.sum()) for segment in merged)
        if len(merged) <= 1 and not deleted:
            writer.discard()
            return 0, 0
        linked = sum(segment.num_linked_files for segment in merged if segment.any_deleted)
        total, done = sum(segment.num_kept_entries for segment in merged), 0
        for segment in merged:
            done = copy_documents(segment, writer, done, total, progress)
        (writer.commit(progress) if total else writer.commit_empty()).close()
        return deleted, linked


def copy_documents(
    segment: Segment,
    writer: StoreWriter,
    done: int,
    total: int,
    progress: Progress,
    rows: range | None = None,
) -> int:
    """Copies the live documents of a segment, all or those in some `rows`. Returns the entries copied so far."""
    for document in segment.documents:
        if segment.deleted_mask[document.row] or (rows is not None and document.row not in rows):
            continue
        writer.begin_document(document.id, title=document.title, metadata=document.metadata)
        first, last = segment.starts[document.row : document.row + 2].tolist()
        for begin in range(first, last, BLOCK_ROWS):
            end = min(begin + BLOCK_ROWS, last)
            values_N = segment.values_N[begin:end].astype("int64")
            if writer.is_resumed(end - begin):
                writer.verify_resumed(values_N)
            else:
                pruned_N = None if segment.pruned_N is None else np.array(segment.pruned_N[begin:end])
                keys_ND = segment.stored_keys()[begin:end] if writer.keyed else None
                writer.append(keys_ND, values_N, pruned_N)
                if done // CHECKPOINT_ROWS < (done + end - begin) // CHECKPOINT_ROWS:
                    writer.checkpoint()
            done += end - begin
        progress("copy", done, total)
    return done
