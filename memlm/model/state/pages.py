"""Tensors of zeros that take RAM page by page, as they are written.

The rows of a batch lie side by side in one tensor, each with as many places as the longest needs. Small pages keep a
short row to the RAM of its own tokens. In rows that are mostly full, huge pages hold at most twice the tokens and are
faster to read (benchmarks/log, 2026-11-24). The pool asks for them row by row.
"""

from __future__ import annotations

import math
import mmap
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from typing import TypeAlias

import numpy as np
import torch
from torch import Tensor

IS_SUPPORTED = sys.platform == "linux"
LAZY_BYTES = 1 << 20  # smaller tensors are allocated as usual
NORESERVE = getattr(mmap, "MAP_NORESERVE", 0x4000)  # of Python 3.12 and later
# Makes a tensor of zeros, given its shape, type, device and the axis of the batch's rows.
Allocate: TypeAlias = Callable[[Sequence[int], torch.dtype, torch.device, int], Tensor]
COLLAPSE = 25  # MADV_COLLAPSE, Linux 6.1: moves what small pages hold into a huge one


def zeros(shape: Sequence[int], dtype: torch.dtype, device: torch.device, row_axis: int = 0) -> Tensor:
    """Returns zeros whose pages the system maps when they are first written, where it can.

    numpy asks for huge pages. These are faster to read, but a token of each layer and head may touch a whole one. So
    this suits states that will be full. The rows of a batch use memlm/model/state/pages.py.
    """
    size = math.prod(shape) * dtype.itemsize
    if device.type != "cpu" or size < LAZY_BYTES:
        return torch.zeros(tuple(shape), dtype=dtype, device=device)
    return torch.from_numpy(np.zeros(size, np.uint8)).view(dtype).view(tuple(shape))


class Pages:
    """A tensor of zeros, and advice to the system about its byte ranges.

    The advice has no effect for small tensors, on other devices, and outside Linux.
    """

    def __init__(
        self, shape: Sequence[int], dtype: torch.dtype, device: torch.device | str = "cpu", *, row_axis: int = 0
    ) -> None:
        size = math.prod(shape) * dtype.itemsize
        self.num_parts = math.prod(shape[:row_axis])  # byte ranges of each row
        self._num_rows, self._part_bytes = shape[row_axis], math.prod(shape[row_axis + 1 :]) * dtype.itemsize
        self._map: mmap.mmap | None = None
        if torch.device(device).type != "cpu" or size < LAZY_BYTES or not IS_SUPPORTED:
            self.tensor: Tensor = torch.zeros(tuple(shape), dtype=dtype, device=device)
            return
        # Reserved is far more than is ever written, so that it must not count as committed memory.
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | NORESERVE
        self._map = mmap.mmap(-1, size, flags=flags)
        with suppress(OSError):  # a kernel without huge pages
            self._map.madvise(mmap.MADV_NOHUGEPAGE)
        self.tensor = torch.frombuffer(self._map, dtype=torch.uint8).view(dtype).view(tuple(shape))

    def parts_of_row(self, row: int) -> Iterator[tuple[int, int]]:
        """The first and last bytes of each part of a row."""
        for part in range(self.num_parts):
            begin = (part * self._num_rows + row) * self._part_bytes
            yield begin, begin + self._part_bytes

    def release(self, begin: int, end: int) -> None:
        """Frees the pages that lie wholly between two bytes. They read as zeros afterwards."""
        self._advise(mmap.MADV_DONTNEED, begin, end)

    def use_huge(self, begin: int, end: int) -> None:
        """Asks for huge pages for later writes between two bytes."""
        self._advise(mmap.MADV_HUGEPAGE, begin, end)

    def use_small(self, begin: int, end: int) -> None:
        """Asks for small pages for later writes between two bytes."""
        self._advise(mmap.MADV_NOHUGEPAGE, begin, end)

    def collapse(self, begin: int, end: int) -> None:
        """Moves written pages between two bytes into huge ones, at about 0.4 ms of processor time per MiB."""
        self.use_huge(begin, end)
        self._advise(COLLAPSE, begin, end)

    def _advise(self, advice: int, begin: int, end: int) -> None:
        begin, end = -(-begin // mmap.PAGESIZE) * mmap.PAGESIZE, end // mmap.PAGESIZE * mmap.PAGESIZE
        if self._map is not None and end > begin:
            with suppress(OSError):  # a kernel without huge pages, or without room for one
                self._map.madvise(advice, begin, end - begin)
