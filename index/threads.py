"""Sets Faiss' number of threads around each search, and runs long work in threads, a block of rows for each core."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import TypeVar

import faiss

from memlm.base.cpu import num_cores

PARALLEL_QUERIES = 8
PARALLEL_NUMBERS = 1 << 22  # of keys, over all queries: one thread reads them in 1 ms, and waking others takes as long
MIN_BLOCKS = 2  # larger blocks are fresh memory each time, and page faults cost a fifth of the time
MIN_BLOCK_ROWS = 1024  # smaller blocks take hardly less time
MAX_BLOCKS = 8  # smaller blocks would take longer; with more cores, more rows are processed at a time

Rows = tuple[int, int]  # the first row, and the one after the last
Result = TypeVar("Result")


@contextmanager
def faiss_threads(num_queries: int, numbers: float = math.inf, *, shared: bool = False) -> Iterator[None]:
    """Gives Faiss one thread for a few queries or for little work, and all cores for many queries or for one with
    `shared` work. `numbers` are the keys' numbers that each query is compared with.

    The earlier number is restored, because torch follows it where torch's own was never set: one search would leave all
    of torch on a single thread.
    """
    before = faiss.omp_get_max_threads()
    is_large = num_queries >= PARALLEL_QUERIES and num_queries * numbers >= PARALLEL_NUMBERS
    faiss.omp_set_num_threads(num_cores() if shared or is_large else 1)
    try:
        yield
    finally:
        faiss.omp_set_num_threads(before)


def run_in_threads(work: Callable[[Rows], Result], parts: Iterable[Rows]) -> Iterator[tuple[Rows, Result]]:
    """Yields each part with the result of `work`, in order. One core works on one part, which is faster than all cores
    on the same part. At most `num_cores() + 1` results are held.
    """

    def work_alone(part: Rows) -> Result:
        with faiss_threads(1):
            return work(part)

    with ThreadPoolExecutor(num_cores()) as pool:
        pending: deque[tuple[Rows, Future[Result]]] = deque()
        for part in parts:
            pending.append((part, pool.submit(work_alone, part)))
            if len(pending) > num_cores():
                done, future = pending.popleft()
                yield done, future.result()
        while pending:
            done, future = pending.popleft()
            yield done, future.result()


def rows_per_core(rows: int) -> int:
    """A core's share of the `rows` that are processed at a time."""
    return max(1, rows // min(max(num_cores(), MIN_BLOCKS), MAX_BLOCKS))


def even_blocks(num_rows: int, rows_at_a_time: int) -> Iterator[Rows]:
    """Cuts all rows into blocks of one size, a multiple of the cores in number, so that no core waits for the last."""
    most = rows_per_core(rows_at_a_time)
    count = num_cores() * -(-num_rows // (most * num_cores()))
    return blocks(num_rows, max(-(-num_rows // max(1, count)), min(most, MIN_BLOCK_ROWS)))


def blocks(num_rows: int, size: int) -> Iterator[Rows]:
    """Cuts all rows into blocks of `size` rows. The last may be smaller."""
    for begin in range(0, num_rows, size):
        yield begin, min(begin + size, num_rows)
