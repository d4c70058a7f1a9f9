"""What was freed, given back: glibc keeps it for the process, up to the most that was ever used at once."""

from __future__ import annotations

import ctypes

_trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # glibc's alone


def trim_heap() -> None:
    """Gives the system the pages that nothing lives in; a matter of milliseconds. Elsewhere than on glibc, nothing."""
    if _trim is not None:
        _trim(0)
