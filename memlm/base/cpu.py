"""How many cores this process may use. No Faiss here: who only shares them out loads none."""

from __future__ import annotations

import os

_cores: int | None = None


def use_cores(number: int) -> None:
    """Leaves the other cores to other processes; 0 takes all again."""
    global _cores
    _cores = number or None


def num_cores() -> int:
    """How many cores this process may use."""
    if _cores is not None:
        return _cores
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
