"""The number of cores that this process may use. Importing this module does not import Faiss."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

# How often libgomp's threads look for work before they sleep. The default is 300,000: where another process wants the
# core, 16 streams took seven times as long as with this number (benchmarks/log, 2026-11-24).
OPENMP_SPIN_COUNT = 20_000

_cores: int | None = None


def use_cores(number: int) -> None:
    """Limits this process to a number of cores. 0 removes the limit."""
    global _cores
    _cores = number or None


def num_cores() -> int:
    """How many cores this process may use."""
    if _cores is not None:
        return _cores
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


@contextmanager
def threads(number: int) -> Iterator[None]:
    """Computes the block's tensors on `number` threads.

    torch keeps the number for each thread, and gives a new thread the one that was set last anywhere. So it is set
    again at the end even where this thread's own number did not change.
    """
    import torch  # here, because most importers of this module need no torch

    before = torch.get_num_threads()
    torch.set_num_threads(number)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@contextmanager
def one_core() -> Iterator[None]:
    """Computes the block's tensors and searches on one thread."""
    global _cores
    before, _cores = _cores, 1
    try:
        with threads(1):
            yield
    finally:
        _cores = before


def spin_briefly() -> None:
    """Makes the OpenMP threads of processes that start from now on, and of this one if it has loaded no OpenMP yet,
    spin for `OPENMP_SPIN_COUNT`, unless the environment sets how they wait.
    """
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", str(OPENMP_SPIN_COUNT))  # read once, when a process loads OpenMP
