"""Rows are cut into blocks that keep all cores equally busy."""

import faiss
import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from memlm.base.progress import silent
from memlm.index import exact, ivf, threads
from memlm.index.threads import MIN_BLOCK_ROWS, PARALLEL_NUMBERS, even_blocks, faiss_threads, rows_per_core


@pytest.mark.parametrize("cores", [1, 2, 3, 8, 64])
def test_every_row_has_its_turn_once_and_the_cores_have_as_many(cores):
    @given(num_rows=st.integers(0, 300_000), in_work=st.sampled_from([64, 1000, 32_768, 131_072]))
    @example(num_rows=113_568, in_work=32_768)
    def check(num_rows: int, in_work: int) -> None:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(threads, "num_cores", lambda: cores)
            parts, most = list(even_blocks(num_rows, in_work)), rows_per_core(in_work)
        ends = [0, *(end for _, end in parts)]
        assert [begin for begin, _ in parts] == ends[:-1]
        assert ends[-1] == num_rows
        sizes = [end - begin for begin, end in parts]
        assert all(0 < size <= most for size in sizes)
        busiest, turns = sum(sizes[::cores]), -(-len(sizes) // cores)
        assert busiest <= num_rows / cores + max(turns, min(most, MIN_BLOCK_ROWS))

    check()


CORES, DIM = 3, 64


@pytest.fixture
def used(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The threads that Faiss had in each search."""
    used, knn, search = list[int](), faiss.knn, faiss.IndexIVFFlat.search
    monkeypatch.setattr(threads, "num_cores", lambda: CORES)

    def noted(call):
        return lambda *args, **options: (used.append(faiss.omp_get_max_threads()), call(*args, **options))[1]

    monkeypatch.setattr(exact.faiss, "knn", noted(knn))
    monkeypatch.setattr(faiss.IndexIVFFlat, "search", noted(search))
    return used


@pytest.mark.parametrize(
    ("num_queries", "numbers", "shared", "expected"),
    [
        (8, PARALLEL_NUMBERS / 8, False, CORES),
        (8, PARALLEL_NUMBERS / 8 - 1, False, 1),
        (7, PARALLEL_NUMBERS, False, 1),  # as long as each, by its query
        (1, 1, True, CORES),
    ],
)
def test_many_queries_with_much_to_read_have_all_cores(used, num_queries, numbers, shared, expected):
    before = faiss.omp_get_max_threads()
    with faiss_threads(num_queries, numbers, shared=shared):
        assert faiss.omp_get_max_threads() == expected
    assert faiss.omp_get_max_threads() == before
    with faiss_threads(8):
        assert faiss.omp_get_max_threads() == CORES


def test_exact_searches_take_threads_by_their_work(used):
    keys_ND = np.random.default_rng(0).normal(size=(PARALLEL_NUMBERS // (8 * DIM), DIM)).astype(np.float32)
    exact.exact_neighbors(keys_ND[:8], keys_ND[:64], np.arange(64), 4)
    exact.exact_neighbors(keys_ND[:8], keys_ND, np.arange(len(keys_ND)), 4)
    exact.exact_neighbors(keys_ND[:7], keys_ND, np.arange(len(keys_ND)), 4)
    assert used == [1, CORES, 1]


def test_lists_are_searched_by_threads_as_many_entries_are_probed(used):
    keys_ND = np.random.default_rng(0).normal(size=(16_384, DIM)).astype(np.float16)
    index = ivf.train_ivf("IVF16,Flat", keys_ND, seed=0, progress=silent)
    ivf.add(index, keys_ND, np.arange(len(keys_ND)) << ivf.VALUE_BITS)
    for nprobe in (1, 16):
        assert (ivf.search_ivf(index, keys_ND[:8].astype(np.float32), 4, nprobe).ids_QK[:, 0] == np.arange(8)).all()
    assert used == [1, CORES]
