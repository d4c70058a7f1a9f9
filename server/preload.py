"""Imports for the fork server: torch, Faiss and the workers' modules.

A module of its own, because the fork server imports it by name. It starts no thread and multiplies nothing: OpenMP does
not survive a fork.
"""

import gc
import signal

import memlm.indexing.build
import memlm.server.inference.startup
import memlm.server.jobs.worker  # noqa: F401

# A terminal and a service manager signal the whole process group; only the front end acts on it.
signal.signal(signal.SIGTERM, signal.SIG_IGN)
gc.freeze()  # the collector writes to objects that it looks at, and a page that is written to is copied to each worker
