"""The journal: the record of an unfinished commit, with the task and the entries that survive a kill."""

from __future__ import annotations

import os
from dataclasses import asdict, dataclass
from itertools import count
from pathlib import Path

from memlm.base.files import TEMPORARY, read_signed, remove, sign
from memlm.errors import Corrupt, Incompatible, MemlmError
from memlm.index.store.lock import COMMIT_LOCK, commit_lock, write_lock
from memlm.index.store.manifest import (
    CURRENT,
    JOURNAL,
    MAX_SEGMENTS,
    SEGMENTS,
    Manifest,
    StoreSpec,
    check_unchanged,
    manifests_in,
    read_manifest,
    sweep,
)

BUILDING = "building"
BUILD, ADD, COMPACT, MOVE, KEYS = "build", "add", "compact", "move", "keys"


@dataclass(frozen=True, slots=True)
class Journal:
    """The task in progress, its segment, the number of its entries that are synced, and whether they have keys. What
    is left of a task that begins `anew` is of no use: whoever writes next removes it.
    """

    task: str
    segment: int
    entries: int
    spec: StoreSpec
    keyed: bool = True
    anew: bool = False

    def encode(self) -> bytes:
        """JSON with a checksum of itself."""
        return sign(asdict(self))

    @classmethod
    def decode(cls, path: Path) -> Journal:
        """Reads a journal. Raises Corrupt for a damaged file, and Incompatible for another version's."""
        try:
            fields = read_signed(path.read_bytes())
        except ValueError as error:
            raise Corrupt(f"{path} {error}; remove {path} to start the build anew") from error
        try:
            return cls(**{**fields, "spec": StoreSpec(**fields["spec"])})
        except (TypeError, KeyError) as error:
            raise Incompatible(
                f"{path} was written by another version of memlm ({error}); go on with that version, or remove {path}"
                " to start the build anew"
            ) from error


def is_datastore(folder: Path) -> bool:
    """Whether a folder is a datastore, or becomes one: an unfinished build, or a copy in its temporary folder."""
    if not os.path.isdir(folder / SEGMENTS):
        return False
    if TEMPORARY.fullmatch(folder.name) or any((folder / name).is_file() for name in (CURRENT, COMMIT_LOCK)):
        return True
    return any(_is_signed(file) for file in (folder / JOURNAL, *manifests_in(folder)))


def _is_signed(file: Path) -> bool:
    try:
        read_signed(file.read_bytes())
    except (OSError, ValueError):
        return False
    return True


def is_being_extended(path: Path) -> bool:
    """Whether documents of a running or interrupted addition lie beside the store, uncommitted."""
    try:
        journal, manifest = Journal.decode(path / JOURNAL), read_manifest(path)
    except (OSError, MemlmError):
        return False
    waits = journal.task == ADD and not journal.anew
    return waits and journal.segment not in {segment.number for segment in manifest.segments}


def reserved_segment(path: Path, manifest: Manifest) -> int | None:
    """The number of the segment that an unfinished addition, compaction or move will commit. None if there is none.
    Raises Corrupt and Incompatible as `Journal.decode`.
    """
    try:
        number = Journal.decode(path / JOURNAL).segment
    except FileNotFoundError:
        return None
    return None if number in {segment.number for segment in manifest.segments} else number


def next_segment(path: Path, manifest: Manifest) -> int:
    """A number for a new segment: one above all others, also above the reserved one, or the lowest free one if ids of
    its entries would be too large.
    """
    taken = {segment.number for segment in manifest.segments} | {reserved_segment(path, manifest)}
    above = 1 + max(manifest.last_segment, reserved_segment(path, manifest) or 0)
    return above if above < MAX_SEGMENTS else next(number for number in count(1) if number not in taken)


def forget_done(path: Path, manifest: Manifest) -> None:
    """Removes the journal of a commit that was done, before its segment may go. Needs the commit lock."""
    if reserved_segment(path, manifest) is None:
        remove(path / JOURNAL)


def rollback(path: str | Path) -> bool:
    """Removes the files of an interrupted addition or compaction. Returns whether there was one. A committed one stays.
    Raises Locked while another process writes.
    """
    path = Path(path)
    with write_lock(path), commit_lock(path) as lock:
        manifest, journal = read_manifest(path), path / JOURNAL
        check_unchanged(path, manifest, lock)
        committed = {segment.number for segment in manifest.segments}
        unfinished = journal.exists() and Journal.decode(journal).segment not in committed
        remove(path / BUILDING)  # first, and also without a journal: an interrupted run of this may have removed that
        remove(journal)
        sweep(path, manifest)
        return unfinished
