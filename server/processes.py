"""Where the processes of a server come from: all are forked from one that has loaded torch and Faiss, and done nothing.

So a worker that dies is soon back, a job begins at once, and what was loaded lies in memory once. That one goes with
the front. Where forking is not safe, as under macOS, each loads for itself.
"""

from __future__ import annotations

import multiprocessing
import sys
from multiprocessing import forkserver
from multiprocessing.context import ForkServerContext, SpawnContext

PRELOADED = "memlm.server.preloaded"


def forking() -> ForkServerContext | SpawnContext:
    """What starts processes, and makes the pipes to them. The first call begins to load, and does not wait for it."""
    if sys.platform == "darwin":
        return multiprocessing.get_context("spawn")
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([PRELOADED])
    forkserver.ensure_running()
    return context
