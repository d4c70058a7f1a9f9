"""Measured limits of the machine: bandwidth of RAM, speed of matrix products."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

from memlm.model.cpu import has_fast_bfloat16
from memlm.model.linear import Linear


def multiplied_dtypes() -> dict[str, torch.dtype]:
    """The dtypes that this processor multiplies in hardware. Emulated ones are too slow to be used."""
    return {"float32": torch.float32} | ({"bfloat16": torch.bfloat16} if has_fast_bfloat16() else {})


def measured_bandwidth() -> float:
    """Bytes per second that all cores read together: the best of five sums over 400 MB."""
    numbers = torch.ones(100_000_000)
    return numbers.nbytes / min(seconds(numbers.sum) for _ in range(5))


def measured_peak(dtype: torch.dtype) -> float:
    """Multiplications and additions per second in products of large packed matrices: the best of five."""
    layer = Linear(2048, 2048, bias=False).to(dtype)
    layer.pack()
    x = torch.randn(2048, 2048, dtype=dtype)
    with torch.inference_mode():
        return 2 * 2048**3 / min(seconds(lambda: layer(x)) for _ in range(5))


def seconds(work: Callable[[], object]) -> float:
    """Seconds that some work takes."""
    begin = time.perf_counter()
    work()
    return time.perf_counter() - begin
