"""Takes a secret out of the command line of this process, which every user of the machine can read."""

from __future__ import annotations

import ctypes
import sys
from pathlib import Path

ARG_START, ARG_END = 48 - 3, 49 - 3  # fields of proc(5), of which the first two stand before the last parenthesis


def hide_argument(secret: str) -> None:
    """Overwrites a secret in the arguments of this process, as `curl` does. Where the system is not Linux, it stays."""
    if not any(secret in word for word in sys.orig_argv) or not sys.platform.startswith("linux"):
        return
    stat = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    begin, end = int(stat[ARG_START]), int(stat[ARG_END])
    words, wanted = ctypes.string_at(begin, end - begin), secret.encode()
    at = words.find(wanted)
    while at >= 0:
        ctypes.memset(begin + at, ord("*"), len(wanted))
        at = words.find(wanted, at + len(wanted))
