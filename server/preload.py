"""What the process loads from which the server's others are forked: what these would load, and nothing is done with it.

No thread is started here, and nothing is searched or multiplied: OpenMP does not survive a fork.
"""

import gc
import signal

import memlm.indexing.build
import memlm.server.inference.worker
import memlm.server.jobs.worker  # noqa: F401

# A terminal and a service manager signal the whole group; it is for the front to say what that means.
signal.signal(signal.SIGTERM, signal.SIG_IGN)
gc.freeze()  # what is never collected is never written to, and stays one copy
