"""Metrics of the loaded datastores. Their labels are bounded by what is loaded, and go with it."""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from memlm.base.search_counts import BOUNDS_S, SearchCounts

LABEL = ["store"]
GAUGES = (
    ("entries", "Entries that searches can find."),
    ("documents", "Documents that are not deleted."),
    ("bytes", "Size of the datastore's files on disk."),
    ("deleted_share", "Share of the entries that belongs to deleted documents, which a compaction removes."),
    ("usable", "1 if the datastore's folder can be used, else 0."),
)


@dataclass(frozen=True, slots=True)
class StoreStats:
    """The figures of a loaded datastore in a worker, and its searches since the worker's last heartbeat."""

    name: str
    entries: int
    documents: int
    bytes: int
    deleted_share: float
    usable: bool
    searches: SearchCounts = field(default_factory=SearchCounts)


class DatastoreMetrics(Collector):
    """Adds up what the workers report. Any thread may collect."""

    def __init__(self) -> None:
        self._lock, self._stores = threading.Lock(), dict[str, StoreStats]()
        self._loaded: Callable[[], Collection[str]] = tuple

    def watch(self, loaded: Callable[[], Collection[str]]) -> None:
        """Registers a function that returns the names of the loaded datastores. Others are forgotten."""
        self._loaded = loaded

    def add(self, reported: Sequence[StoreStats]) -> None:
        """Takes the figures of a worker's heartbeat."""
        with self._lock:
            loaded = self._forget()
            for store in reported:
                if store.name in loaded:
                    before = self._stores.get(store.name)
                    searches = store.searches if before is None else before.searches + store.searches
                    self._stores[store.name] = replace(store, searches=searches)

    def _forget(self) -> Collection[str]:
        """Forgets the datastores that are not loaded, and returns the names of those that are."""
        loaded = self._loaded()
        self._stores = {name: store for name, store in self._stores.items() if name in loaded}
        return loaded

    def collect(self) -> Iterator[Metric]:
        with self._lock:
            self._forget()
            stores = tuple(self._stores.values())
        for name, help_ in GAUGES:
            gauge = GaugeMetricFamily(f"memlm_datastore_{name}", help_, labels=LABEL)
            for store in stores:
                gauge.add_metric([store.name], float(getattr(store, name)))
            yield gauge
        contexts = CounterMetricFamily(
            "memlm_datastore_contexts", "Contexts for which the datastore was asked.", labels=LABEL
        )
        weight = CounterMetricFamily(
            "memlm_datastore_weight",
            "Sum over these contexts of the datastore's weight in the mixture: lam times its share of p_kNN.",
            labels=LABEL,
        )
        partial = CounterMetricFamily(
            "memlm_datastore_partial_searches",
            "Searches that did not reach all entries, because a shard did not answer.",
            labels=LABEL,
        )
        seconds = HistogramMetricFamily(
            "memlm_datastore_search_seconds", "Duration of a search, for the contexts of one step.", labels=LABEL
        )
        for store in stores:
            searches = store.searches
            contexts.add_metric([store.name], searches.contexts)
            weight.add_metric([store.name], searches.weight)
            partial.add_metric([store.name], searches.partial)
            bounds = [*map(str, BOUNDS_S), "+Inf"]
            buckets = list(zip(bounds, map(float, accumulate(searches.by_duration)), strict=True))
            seconds.add_metric([store.name], buckets, searches.total_s)
        yield from (contexts, weight, partial, seconds)
