"""The two locks of a store: one for the writer of a segment, and one for a commit, which takes a moment.

Each is held on a file and on a folder. So removing a lock file that looks stale does not admit a second process. On a
network file system without locks on folders, the file alone counts.
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
    """A lock that this process holds on a store."""

    def __init__(self, path: Path, folder: int) -> None:
        self._path, self._folder = path, folder

    def check(self) -> None:
        """Raises Locked if the path has become another folder, which this process has not locked."""
        held = os.fstat(self._folder)
        try:
            found = os.stat(self._path)
        except FileNotFoundError:
            found = None
        if found is None or (found.st_dev, found.st_ino) != (held.st_dev, held.st_ino):
            raise Locked(
                f"{self._path} was moved or replaced while it was being changed; the folder that is there now was left"
                " as it is: run the same command again"
            )


@contextmanager
def write_lock(path: Path) -> Iterator[StoreLock]:
    """Locks a store for writing a segment, for any length of time. Raises Locked at once if another process holds the
    lock, and NotFound if there is no folder.

    The system releases the locks of a process at its end, also after a kill.
    """
    problem = f"another process is writing to {path}; wait until it is done, and try again"
    with _held(path, LOCK, path / "segments", 0.0, problem) as lock:
        yield lock


@contextmanager
def commit_lock(path: Path) -> Iterator[StoreLock]:
    """Locks a store for a change of its manifest. Another process may be writing a segment meanwhile, and commits it
    after this change. Raises Locked if other commits take too long, and NotFound if there is no folder.
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
    """Locks an open file or folder. Returns False if another process holds it."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno in _HELD_ELSEWHERE:
            return False
        if error.errno not in (errno.EBADF, errno.ENOLCK, errno.EOPNOTSUPP):  # as NFS says of a folder
            raise
    return True
