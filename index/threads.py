"""How many threads Faiss gets, said around each search and never left to chance; long work, a part for each core."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import TypeVar

import faiss

from memlm.base.cpu import num_cores

PARALLEL_QUERIES = 8
BY_PRODUCTS_FROM = 800  # queries times dimensions times threads (facebookresearch/faiss pull request 5109)
LEAST_SHARES = 2  # the memory of larger parts is new each time, and its pages cost a fifth of the time
LEAST_ROWS = 1024  # of a part: fewer take hardly less time
MOST_SHARES = 8  # smaller parts would take longer; with more cores more rows are in work
_FAISS_DEFAULT = faiss.cvar.distance_compute_blas_threshold

Rows = tuple[int, int]  # the first, and the one behind the last
Done = TypeVar("Done")


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


def run_in_threads(work: Callable[[Rows], Done], parts: Iterable[Rows]) -> Iterator[tuple[Rows, Done]]:
    """What each part's work gives, in their order. Each core has a part of its own, which takes less time than sharing
    one; no more of them are in memory than that, and one besides.
    """

    def alone(part: Rows) -> Done:
        with faiss_threads(1):
            return work(part)

    def told(begun: tuple[Rows, Future[Done]]) -> tuple[Rows, Done]:
        return begun[0], begun[1].result()

    with ThreadPoolExecutor(num_cores()) as pool:
        ahead: deque[tuple[Rows, Future[Done]]] = deque()
        for part in parts:
            ahead.append((part, pool.submit(alone, part)))
            if len(ahead) > num_cores():
                yield told(ahead.popleft())
        while ahead:
            yield told(ahead.popleft())


def share(rows: int) -> int:
    """How many rows each core has in work at a time."""
    return max(1, rows // min(max(num_cores(), LEAST_SHARES), MOST_SHARES))


def shares(num_rows: int, in_work: int) -> Iterator[Rows]:
    """All rows, a part for each core in turn, no larger than its share of what may be in work: parts of one size, so
    that no core is left to wait while another has the last.
    """
    most = share(in_work)
    parts = num_cores() * -(-num_rows // (most * num_cores()))
    return blocks(num_rows, max(-(-num_rows // max(1, parts)), min(most, LEAST_ROWS)))


def blocks(num_rows: int, size: int) -> Iterator[Rows]:
    """All rows, so many at a time."""
    for begin in range(0, num_rows, size):
        yield begin, min(begin + size, num_rows)
