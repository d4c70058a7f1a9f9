"""How a server's processes start, and the system's limits on them.

All are forked from a fork server that has loaded torch and Faiss and done nothing else (server/preload.py). So a worker
that dies is soon replaced, a job starts at once, and the libraries lie in RAM once. The fork server exits with the
front end. Where forking is not safe, as on macOS, each process loads for itself.
"""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import resource
import sys
import tempfile
import time
from contextlib import suppress
from multiprocessing import forkserver, util
from multiprocessing.context import ForkServerContext, SpawnContext

from memlm.base.cpu import spin_briefly
from memlm.base.machine import raise_file_limit
from memlm.server.config import IDLE

PRELOADED = "memlm.server.preload"
THREAD_POLL_S = 0.005
LONGEST_SOCKET_FOLDER = 75  # bytes: a socket's path has at most 107, of which multiprocessing takes 32 in TMPDIR

_malloc_trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # glibc only


def process_context() -> ForkServerContext | SpawnContext:
    """The context that starts processes and makes the pipes to them.

    The first call starts the fork server and does not wait until it has loaded. The processes' OpenMP threads spin as
    `spin_briefly` says.
    """
    raise_file_limit()  # child processes inherit it
    if sys.platform == "darwin":
        return multiprocessing.get_context("spawn")
    spin_briefly()
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([PRELOADED])
    _make_folder_of_sockets()
    forkserver.ensure_running()
    return context


def _make_folder_of_sockets() -> None:
    """Makes the folder of multiprocessing's socket, in /tmp where TMPDIR is too long. Later calls change nothing."""
    chosen = tempfile.gettempdir()
    try:
        if len(os.fsencode(chosen)) > LONGEST_SOCKET_FOLDER:
            tempfile.tempdir = "/tmp"
        util.get_temp_dir()
    finally:
        tempfile.tempdir = chosen


def lower_priority(nice: int | str) -> None:
    """Adds to the niceness of this process, or puts it into the idle class."""
    with suppress(OSError):
        if nice == IDLE:
            os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
        else:
            os.nice(int(nice))


def is_single_threaded(timeout_s: float = 1.0) -> bool:
    """Whether this process has one thread, so that a fork of it is whole. Linux only. Threads take a moment to end."""
    deadline_s = time.monotonic() + timeout_s
    while len(os.listdir("/proc/self/task")) > 1:
        if time.monotonic() > deadline_s:
            return False
        time.sleep(THREAD_POLL_S)
    return True


def trim_heap() -> None:
    """Returns free pages to the system, in milliseconds. glibc would keep the most that was ever used at once."""
    if _malloc_trim is not None:
        _malloc_trim(0)


def file_limit() -> int:
    """The number of files that this process may open."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return sys.maxsize if soft == resource.RLIM_INFINITY else soft
