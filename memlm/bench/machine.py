"""The machine: its processor and versions, and its measured limits: bandwidth of RAM, speed of matrix products."""

from __future__ import annotations

import os
import platform
import re
import time
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from memlm.base.version import __version__
from memlm.model.kernels.cpu import has_fast_bfloat16
from memlm.model.kernels.linear import Linear

LIBRARIES = ("torch", "numpy", "faiss-cpu", "grpcio", "transformers", "llama-cpp-python", "lm_eval")
INSTRUCTION_SETS = ("avx2", "avx512f", "avx512_vnni", "avx512_bf16", "amx_bf16", "amx_int8", "asimd", "bf16", "sve")


def versions() -> dict[str, str]:
    """Versions of memlm, Python and the libraries that set its speed."""
    found = {"memlm": __version__, "python": platform.python_version()}
    for library in LIBRARIES:
        try:
            found[library] = version(library)
        except PackageNotFoundError:
            continue
    return found


def machine() -> dict[str, Any]:
    """Processor, instruction sets, cores, GPU if there is one, and the measured bandwidth and speed of products."""
    try:
        facts = Path("/proc/cpuinfo").read_text("utf-8", "replace")
    except OSError:
        facts = ""
    model = re.search(r"^model name\s*: (.*)$", facts, flags=re.MULTILINE)
    flags = re.search(r"^(?:flags|Features)\s*: (.*)$", facts, flags=re.MULTILINE)
    have = set(flags[1].split()) if flags else set()
    return {
        "processor": model[1] if model else platform.processor() or platform.machine(),
        "instruction_sets": [name for name in INSTRUCTION_SETS if name in have],
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "gigabytes_per_s": round(measured_bandwidth() / 1e9, 1),
        **{f"gigaflops_{name}": round(measured_peak(dtype) / 1e9, 1) for name, dtype in multiplied_dtypes().items()},
        **({"gpu": torch.cuda.get_device_name()} if torch.cuda.is_available() else {}),
    }


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
