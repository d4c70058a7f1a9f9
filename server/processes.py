"""Where the processes of a server come from: all are forked from one that has loaded torch and Faiss, and done nothing.

So a worker that dies is soon back, a job begins at once, and what was loaded lies in memory once. That one goes with
the front. Where forking is not safe, as under macOS, each loads for itself.
"""

from __future__ import annotations

import multiprocessing
import os
import resource
import sys
from contextlib import suppress
from multiprocessing import forkserver
from multiprocessing.context import ForkServerContext, SpawnContext

PRELOADED = "memlm.server.preload"
# How often OpenMP's threads (libgomp's) look for more to do before they sleep. It would be 300,000 times, and where
# another process wants the core 16 streams took seven times as long as they do so (docs/log, 2026-11-24).
OPENMP_SPIN_COUNT = 20_000


def process_context() -> ForkServerContext | SpawnContext:
    """What starts processes, and makes the pipes to them. The first call begins to load, and does not wait for it.

    Their OpenMP threads wait for `OPENMP_SPIN_COUNT`, unless the environment says how they are to wait.
    """
    raise_file_limit()  # they inherit it
    if sys.platform == "darwin":
        return multiprocessing.get_context("spawn")
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", str(OPENMP_SPIN_COUNT))  # is read once, as a process loads OpenMP
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([PRELOADED])
    forkserver.ensure_running()
    return context


def raise_file_limit() -> None:
    """Raises the soft limit of open files, often 1,024, to the hard one: each connection and upload takes a file."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with suppress(ValueError, OSError):  # macOS has no number for "unlimited"
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def file_limit() -> int:
    """How many files this process may have open."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return sys.maxsize if soft == resource.RLIM_INFINITY else soft
