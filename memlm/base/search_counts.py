"""Counts of a datastore's searches, which other threads and processes add up."""

from __future__ import annotations

import threading
from bisect import bisect_left
from dataclasses import dataclass

BOUNDS_S = (0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5)


@dataclass(frozen=True, slots=True)
class SearchCounts:
    """Counts of searches, each for one or more contexts.

    `weight` is the sum of the datastore's weights in the contexts' mixtures: lam times its share of p_kNN.
    `by_duration[i]` searches took at most `BOUNDS_S[i]`, and more than the bound before. The last took longer than
    all bounds. `partial` searches did not reach all entries, because a shard did not answer.
    """

    contexts: int = 0
    weight: float = 0.0
    total_s: float = 0.0
    by_duration: tuple[int, ...] = (0,) * (len(BOUNDS_S) + 1)
    partial: int = 0

    def __add__(self, other: SearchCounts) -> SearchCounts:
        durations = tuple(map(sum, zip(self.by_duration, other.by_duration, strict=True)))
        return SearchCounts(
            self.contexts + other.contexts,
            self.weight + other.weight,
            self.total_s + other.total_s,
            durations,
            self.partial + other.partial,
        )


class SearchCounter:
    """Counts searches. Thread-safe."""

    def __init__(self) -> None:
        self._lock, self._counts = threading.Lock(), SearchCounts()

    def add_search(self, took_s: float, *, is_partial: bool = False) -> None:
        """Counts a search that took `took_s`, and whether it did not reach all entries."""
        durations = [0] * (len(BOUNDS_S) + 1)
        durations[bisect_left(BOUNDS_S, took_s)] = 1
        self._add(SearchCounts(total_s=took_s, by_duration=tuple(durations), partial=int(is_partial)))

    def add_contexts(self, contexts: int, weight: float) -> None:
        """Counts contexts, with the sum of the datastore's weights in their mixtures."""
        self._add(SearchCounts(contexts, weight))

    def take(self) -> SearchCounts:
        """Returns the counts since the last call."""
        with self._lock:
            taken, self._counts = self._counts, SearchCounts()
        return taken

    def _add(self, counts: SearchCounts) -> None:
        with self._lock:
            self._counts += counts
