"""Counts of searches, against their plain sums."""

from concurrent.futures import ThreadPoolExecutor

from hypothesis import given
from hypothesis import strategies as st

from memlm.base.search_counts import BOUNDS_S, SearchCounter, SearchCounts

durations = st.lists(st.floats(0, 5) | st.sampled_from(BOUNDS_S), max_size=40)


@given(durations, durations)
def test_durations_are_counted_by_the_lowest_bound_that_they_do_not_exceed(
    first: list[float], then: list[float]
) -> None:
    counter, total = SearchCounter(), SearchCounts()
    for part in (first, then):
        for took_s in part:
            counter.add_search(took_s)
        total += counter.take()
    bounds = [*BOUNDS_S, float("inf")]
    lowest = [min(bound for bound in bounds if took_s <= bound) for took_s in first + then]
    assert total.by_duration == tuple(lowest.count(bound) for bound in bounds)
    assert abs(total.total_s - sum(first + then)) < 1e-9
    assert counter.take() == SearchCounts()


def test_no_count_of_any_thread_is_lost_or_taken_twice() -> None:
    counter, total = SearchCounter(), SearchCounts()
    with ThreadPoolExecutor(4) as threads:
        adding = [threads.submit(lambda: [counter.add_contexts(2, 0.5) for _ in range(2000)]) for _ in range(3)]
        while not all(each.done() for each in adding):
            total += counter.take()
    total += counter.take()
    assert (total.contexts, total.weight) == (12000, 3000)


def test_partial_searches_are_counted_beside_all() -> None:
    counter = SearchCounter()
    for is_partial in (False, True, True):
        counter.add_search(0.001, is_partial=is_partial)
    counts = counter.take() + SearchCounts(partial=1)
    assert (counts.partial, sum(counts.by_duration)) == (3, 3)
