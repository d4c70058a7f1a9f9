"""The two locks of a store: one writer of segments at a time, and one commit at a time, which takes a moment."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from filelock import FileLock, Timeout

from memlm.index.errors import Locked

LOCK, COMMIT_LOCK = "lock", "commit.lock"
COMMIT_S = 30.0  # more than a commit takes, even to a process that gets what others leave


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Holds a store for who writes a segment of it, however long that takes. Raises Locked at once where another does.

    The system lets go of a lock when its process ends, however it ends.
    """
    with _held(path / LOCK, 0.0, f"another process is writing to {path}; wait until it is done, and try again"):
        yield


@contextmanager
def committing(path: Path) -> Iterator[None]:
    """Holds a store for a change of its manifest: also while another writes, whose own commit then starts from there.
    Raises Locked where others' commits do not come to an end.
    """
    with _held(path / COMMIT_LOCK, COMMIT_S, f"another process has been committing to {path} for {COMMIT_S:g} s"):
        yield


@contextmanager
def _held(path: Path, patience_s: float, problem: str) -> Iterator[None]:
    lock = FileLock(path)
    try:
        lock.acquire(timeout=patience_s)
    except Timeout:
        raise Locked(problem) from None
    try:
        yield
    finally:
        lock.release()
