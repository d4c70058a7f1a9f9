"""The note of work that has not been committed: what for, and how much of it a kill leaves standing."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path

from memlm.base.files import read_signed, remove, sign
from memlm.errors import Corrupt, Incompatible, MemlmError
from memlm.index.store.lock import commit_lock, write_lock
from memlm.index.store.manifest import JOURNAL, StoreSpec, check_unchanged, read_manifest, sweep

BUILDING = "building"
BUILD, ADD, COMPACT = "build", "add", "compact"


@dataclass(frozen=True, slots=True)
class Journal:
    """What work is going on, for which segment, and how many entries of it are safely on the disk."""

    task: str
    segment: int
    entries: int
    spec: StoreSpec

    def encode(self) -> bytes:
        """As JSON, with its own checksum."""
        return sign(asdict(self))

    @classmethod
    def decode(cls, path: Path) -> Journal:
        """Raises Corrupt for what `encode` did not write."""
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


def is_being_extended(path: Path) -> bool:
    """Whether documents of an addition, running or interrupted, lie beside a store and are not in it yet."""
    try:
        journal, manifest = Journal.decode(path / JOURNAL), read_manifest(path)
    except (OSError, MemlmError):
        return False
    return journal.task == ADD and journal.segment not in {segment.number for segment in manifest.segments}


def rollback(path: str | Path) -> bool:
    """Removes what an interrupted addition or compaction left, and tells whether there was any: where it was committed
    already, there is not, and it stays. Raises Locked while somebody writes.
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
