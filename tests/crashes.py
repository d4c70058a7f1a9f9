"""Crashes and full disks on purpose: every sync, move and removal of a commit is counted, and one of them fails."""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from memlm.base import files


class Crash(BaseException):
    """Stands for the end of the process: nobody catches it."""


@contextmanager
def failing_at(step: int, failure: BaseException) -> Iterator[list[int]]:
    """Makes the n-th durable operation fail, and each one after it: a dead process does nothing more."""
    count = [0]

    def counted(work: Callable) -> Callable:
        def run(*args, **kwargs):
            count[0] += 1
            if count[0] >= step:
                raise failure
            return work(*args, **kwargs)

        return run

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(files.os, "fsync", counted(os.fsync))
        patch.setattr(Path, "replace", counted(Path.replace))
        patch.setattr(Path, "unlink", counted(Path.unlink))
        yield count


def count_of(work: Callable[[], object]) -> int:
    with failing_at(10**9, Crash()) as count:
        work()
    return count[0]
