"""Where the processes of a server come from: all are forked from one that has loaded torch and Faiss, and done nothing.

So a worker that dies is soon back, a job begins at once, and what was loaded lies in memory once. That one goes with
the front.
"""

from __future__ import annotations

import multiprocessing
from multiprocessing import forkserver
from multiprocessing.context import ForkServerContext

PRELOADED = "memlm.server.preloaded"


def forking() -> ForkServerContext:
    """What starts processes, and makes the pipes to them. The first call begins to load, and does not wait for it."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([PRELOADED])
    forkserver.ensure_running()
    return context
