"""The two locks of a store: one writer of segments at a time, and one commit at a time, which takes a moment.

Each is held twice: on a file, and on the folder that holds what is written. Removing the file while a process holds the
lock, because it looks stale, then lets nobody else in. Where a network file system has no locks on folders, the file
alone counts.
"""

from __future__ import annotations

import errno
import fcntl
import os
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from memlm.base.files import storage
from memlm.errors import Locked, NotFound

LOCK, COMMIT_LOCK = "lock", "commit.lock"
COMMIT_S = 30.0  # more than a commit takes, even to a process that gets what others leave
POLL_S = 0.02
_HELD_ELSEWHERE = {errno.EACCES, errno.EAGAIN}


class StoreLock:
    """A store that this process has locked."""

    def __init__(self, path: Path, folder: int) -> None:
        """Takes the path, and a descriptor of the folder that was there when the lock was taken."""
        self._path, self._folder = path, folder

    def check(self) -> None:
        """Raises Locked where the path has become another folder, which this process has not locked."""
        held = os.fstat(self._folder)
        try:
            there = os.stat(self._path)
        except FileNotFoundError:
            there = None
        if there is None or (there.st_dev, there.st_ino) != (held.st_dev, held.st_ino):
            raise Locked(
                f"{self._path} was moved or replaced while it was being changed; the folder that is there now was left"
                " as it is: run the same command again"
            )


@contextmanager
def write_lock(path: Path) -> Iterator[StoreLock]:
    """Locks a store for a process that writes a segment, however long that takes. Raises Locked at once where another
    process holds it, NotFound where there is no folder.

    The system releases the locks of a process that ends, however it ends.
    """
    problem = f"another process is writing to {path}; wait until it is done, and try again"
    with _held(path, LOCK, path / "segments", 0.0, problem) as lock:
        yield lock


@contextmanager
def commit_lock(path: Path) -> Iterator[StoreLock]:
    """Locks a store for a change of its manifest, also while another process writes a segment, whose own commit then
    starts from there. Raises Locked where the commits of others do not end, NotFound where there is no folder.
    """
    problem = f"another process has been committing to {path} for {COMMIT_S:g} s"
    with _held(path, COMMIT_LOCK, path, COMMIT_S, problem) as lock:
        yield lock


@contextmanager
def _held(path: Path, name: str, folder: Path, patience_s: float, problem: str) -> Iterator[StoreLock]:
    deadline_s = time.monotonic() + patience_s
    with ExitStack() as opened:
        try:
            with storage(path):
                descriptors = [
                    _opened(opened, path, os.O_RDONLY | os.O_DIRECTORY),
                    _opened(opened, path / name, os.O_RDWR | os.O_CREAT),
                    *([_opened(opened, folder, os.O_RDONLY | os.O_DIRECTORY)] if folder.is_dir() else []),
                ]
        except (FileNotFoundError, NotADirectoryError):
            raise NotFound(
                f"no datastore at {path}; build one with `memlm index build`", kind="datastore", name=str(path)
            ) from None
        lock = StoreLock(path, descriptors[0])
        for descriptor in descriptors[1:]:
            while not _lock(descriptor):
                if time.monotonic() >= deadline_s:
                    raise Locked(problem)
                time.sleep(POLL_S)
        lock.check()  # it may have been replaced while this process waited
        yield lock


def _opened(opened: ExitStack, path: Path, flags: int) -> int:
    descriptor = os.open(path, flags | os.O_CLOEXEC, 0o644)
    opened.callback(os.close, descriptor)  # which releases its lock
    return descriptor


def _lock(descriptor: int) -> bool:
    """Locks an open file or folder; False where another process holds it."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno in _HELD_ELSEWHERE:
            return False
        if error.errno not in (errno.EBADF, errno.ENOLCK, errno.EOPNOTSUPP):  # as NFS says of a folder
            raise
    return True
