"""The number of cores that this process may use. Importing this module does not import Faiss."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

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
