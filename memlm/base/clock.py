"""Elapsed time by a clock that cannot be set, for lifetimes.

A wall clock jumps when it is corrected, and a jump must not delete anything. The monotonic clock only restarts with the
machine, so a stamp (boot and time) that is kept in a file stays valid across restarts of the process.
"""

from __future__ import annotations

import time
from contextlib import suppress
from pathlib import Path
from secrets import token_hex
from typing import TypeAlias

BOOT_ID = Path("/proc/sys/kernel/random/boot_id")

Stamp: TypeAlias = tuple[str, float]


class Clock:
    """The system's monotonic clock."""

    def __init__(self) -> None:
        self._boot = token_hex(8)  # where the system names no boot, each process counts as one
        with suppress(OSError):
            self._boot = BOOT_ID.read_text().strip()

    def now_s(self) -> float:
        """Seconds since some fixed moment."""
        return time.monotonic()

    def stamp(self, at_s: float) -> Stamp:
        """A moment of `now_s` in a form that can be written to a file."""
        return self._boot, at_s

    def since_s(self, stamp: Stamp) -> float:
        """Seconds since a stamp. 0 for one of another boot: how long the machine was off, only the wall clock knows."""
        if stamp[0] != self._boot:
            return 0.0
        return max(0.0, self.now_s() - stamp[1])
