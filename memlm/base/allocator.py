"""Returns freed memory to the system. glibc keeps it for the process, up to the highest use so far."""

from __future__ import annotations

import ctypes

_trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # glibc's alone


def trim_heap() -> None:
    """Returns unused pages to the system, in milliseconds. Does nothing without glibc."""
    if _trim is not None:
        _trim(0)
