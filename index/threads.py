"""How many threads Faiss gets, said before each search and never left to chance."""

from __future__ import annotations

import os

import faiss

PARALLEL_QUERIES = 8


def use_threads(num_queries: int) -> None:
    """Tells Faiss how many threads a search gets: one for a few queries, all cores for many.

    A second thread saves a single query nothing, and while it spins after its work it keeps torch's own from
    running: the two libraries bring an OpenMP runtime each.
    """
    faiss.omp_set_num_threads(1 if num_queries < PARALLEL_QUERIES else os.cpu_count() or 1)
