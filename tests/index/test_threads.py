"""Rows are cut into blocks that keep all cores equally busy."""

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from memlm.index import threads
from memlm.index.threads import MIN_BLOCK_ROWS, even_blocks, rows_per_core


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
