"""Narrow numbers made wide for a moment, a part at a time, where products of narrow ones would take longer."""

from __future__ import annotations

import threading

import torch
from torch import Tensor

WIDENED_BYTES = 8 << 20  # what stays in a processor's cache


class _Widened(threading.local):
    """Numbers in a wider type, until the next ones. Each thread keeps the memory that they lie in: new memory the
    system would have to clear every time.
    """

    def __init__(self) -> None:
        self._kept = torch.empty(0, dtype=torch.uint8)

    def __call__(self, some: Tensor, wide: torch.dtype) -> Tensor:
        size = some.numel() * wide.itemsize
        if self._kept.numel() < size:
            self._kept = torch.empty(max(WIDENED_BYTES, 1 << size.bit_length()), dtype=torch.uint8)
        return self._kept[:size].view(wide).view(some.shape).copy_(some)


widened = _Widened()
