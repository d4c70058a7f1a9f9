"""How many threads Faiss gets, said around each search and never left to chance."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import faiss

from memlm.index.cores import num_cores

PARALLEL_QUERIES = 8
BY_PRODUCTS_FROM = 800  # queries times dimensions times threads (facebookresearch/faiss pull request 5109)
_FAISS_DEFAULT = faiss.cvar.distance_compute_blas_threshold


@contextmanager
def faiss_threads(num_queries: int, *, shared: bool = False) -> Iterator[None]:
    """One thread for a few queries, all cores for many, and for one whose work is `shared`; afterwards what was before.

    The number is put back because torch would go by it too, where nobody has told torch its own: a search would leave
    all of torch on one thread.
    """
    before = faiss.omp_get_max_threads()
    faiss.omp_set_num_threads(num_cores() if shared or num_queries >= PARALLEL_QUERIES else 1)
    try:
        yield
    finally:
        faiss.omp_set_num_threads(before)


@contextmanager
def matrix_products() -> Iterator[None]:
    """Brute force by matrix products as soon as they pay on these cores.

    Since 1.15 Faiss goes by queries times dimensions and takes products from 128,000 on, which is right for dozens of
    cores; on two, 128 queries take four times as long without. Products round otherwise: only for who refines.
    """
    if _FAISS_DEFAULT == 128_000:
        faiss.cvar.distance_compute_blas_threshold = BY_PRODUCTS_FROM * num_cores()
    try:
        yield
    finally:
        faiss.cvar.distance_compute_blas_threshold = _FAISS_DEFAULT
