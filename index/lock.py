"""One writer at a time: the lock of a store."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from filelock import FileLock, Timeout

from memlm.index.errors import Locked

LOCK = "lock"


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Holds the store's lock, which the system lets go of when the process ends, however it ends. Raises Locked at
    once.
    """
    lock = FileLock(path / LOCK)
    try:
        lock.acquire(timeout=0)
    except Timeout:
        raise Locked(f"another process is writing to {path}; wait until it is done, and try again") from None
    try:
        yield
    finally:
        lock.release()
