"""How many threads Faiss gets, said around each search and never left to chance."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

import faiss

PARALLEL_QUERIES = 8


def num_cores() -> int:
    """How many cores this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


@contextmanager
def faiss_threads(num_queries: int, *, shared: bool = False) -> Iterator[None]:
    """One thread for a few queries, all cores for many, and for one whose work is `shared`; afterwards what was before.

    The number is put back because torch would go by it too, where nobody has told torch its own: a search would leave
    all of torch on one thread.
    """
    if num_queries == 1 and not shared:  # without being told to, Faiss shares no work within a query
        yield
        return
    before = faiss.omp_get_max_threads()
    faiss.omp_set_num_threads(num_cores() if shared or num_queries >= PARALLEL_QUERIES else 1)
    try:
        yield
    finally:
        faiss.omp_set_num_threads(before)
