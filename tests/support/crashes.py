"""Crashes and full disks on purpose: every sync, move and removal of a commit is counted, and one of them fails."""

import errno
import os
import shutil
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from memlm.base import files


class Crash(BaseException):
    """Stands for the end of the process. No `except Exception` catches it."""


@contextmanager
def calling_at(step: int, action: Callable[[], object]) -> Iterator[list[int]]:
    """Calls `action` before the n-th durable operation, and before each one after it."""
    count = [0]

    def counted(work: Callable) -> Callable:
        def run(*args, **kwargs):
            count[0] += 1
            if count[0] >= step:
                action()
            return work(*args, **kwargs)

        return run

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(files.os, "fsync", counted(os.fsync))
        patch.setattr(files.os, "link", counted(os.link))
        patch.setattr(Path, "replace", counted(Path.replace))
        patch.setattr(Path, "unlink", counted(Path.unlink))
        yield count


@contextmanager
def failing_at(step: int, failure: BaseException) -> Iterator[list[int]]:
    """Makes the n-th durable operation fail, and each one after it: a dead process does nothing more."""

    def fail() -> None:
        raise failure

    with calling_at(step, fail) as count:
        yield count


def is_killed_at(step: int, work: Callable[[], object]) -> bool:
    """Does work in a process that is killed before the n-th durable operation. Returns whether it came so far."""
    pid = os.fork()
    if pid == 0:
        try:
            with calling_at(step, lambda: os.kill(os.getpid(), signal.SIGKILL)):
                work()
            os._exit(0)
        finally:
            os._exit(1)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == -signal.SIGKILL


def count_of(work: Callable[[], object]) -> int:
    with failing_at(10**9, Crash()) as count:
        work()
    return count[0]


def crash_at_every_step(
    change: Callable[[Path], object], original: Path | None, folder: Path, *, every: int = 1
) -> Iterator[tuple[int, Path]]:
    """Yields each durable step of a change, and a copy of the store `original` in which the change crashed there.

    Without an original the change starts from nothing. `every` skips steps; the last step is always among them.
    """
    for step, path in _steps_of(change, original, folder, every):
        with pytest.raises(Crash), failing_at(step, Crash()):
            change(path)
        yield step, path


def fill_disk_at_every_step(
    change: Callable[[Path], object], original: Path, folder: Path
) -> Iterator[tuple[int, Path, BaseException]]:
    """Yields each durable step of a change, a copy in which the disk was full from there on, and the error raised."""
    for step, path in _steps_of(change, original, folder, every=1):
        with failing_at(step, OSError(errno.ENOSPC, "No space left on device")), pytest.raises(Exception) as raised:  # noqa: PT011
            change(path)
        yield step, path, raised.value


def _steps_of(
    change: Callable[[Path], object], original: Path | None, folder: Path, every: int
) -> Iterator[tuple[int, Path]]:
    def copy(name: str) -> Path:
        return folder / name if original is None else Path(shutil.copytree(original, folder / name))

    counted = copy("counted")
    steps = count_of(lambda: change(counted))
    assert steps > 3
    for step in range((steps - 1) % every + 1, steps + 1, every):
        yield step, copy(f"step-{step}")
