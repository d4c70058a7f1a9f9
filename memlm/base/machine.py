"""What the machine gives a process: memory, open files, and an end with its parent. No torch here."""

from __future__ import annotations

import ctypes
import os
import resource
import signal
import sys
from contextlib import suppress
from pathlib import Path

CGROUPS = Path("/sys/fs/cgroup")
MOST_FILES = 10_240  # that macOS gives a process
PR_SET_PDEATHSIG = 1  # sys/prctl.h


def ram_bytes() -> int:
    """Bytes of the machine's RAM, or the limit of the container or service if that is lower."""
    machine = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return min([machine, *_limits(CGROUPS, _own_cgroup())])


def _own_cgroup() -> str:
    with suppress(OSError):
        for line in Path("/proc/self/cgroup").read_text(encoding="ascii", errors="replace").splitlines():
            if line.startswith("0::"):
                return line.removeprefix("0::/")
    return ""


def _limits(root: Path, own: str) -> list[int]:
    """The limits of a control group and of those above it."""
    limits = list[int]()
    for folder in (root / own, *(root / own).parents):
        with suppress(OSError, ValueError):  # none here; "max" is no number
            limits.append(int((folder / "memory.max").read_text(encoding="ascii")))
        if folder == root:
            break
    return limits


def raise_file_limit() -> None:
    """Raises the soft limit of open files, often 1,024 or 256, to the hard one: each file of a datastore, each
    connection and each upload takes one.
    """
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    for limit in (hard, MOST_FILES):
        with suppress(ValueError, OSError):  # macOS has no number for "unlimited"
            resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))
            return


def die_with_parent(parent: int) -> None:
    """Makes the system kill this process when the thread of its parent that started it ends. Linux only."""
    if sys.platform != "linux":
        return
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it ended before
        os._exit(1)
