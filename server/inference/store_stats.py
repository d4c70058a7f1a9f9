"""The figures of a worker's datastores, which its heartbeats carry."""

from __future__ import annotations

from memlm.generation.loaded_stores import LoadedStore, LoadedStores
from memlm.server.telemetry.datastores import StoreStats


def store_stats(stores: LoadedStores) -> tuple[StoreStats, ...]:
    """Describes all datastores, with their searches since the last call."""
    return tuple(map(_stats, stores))


def _stats(store: LoadedStore) -> StoreStats:
    if store.opened is None:
        return StoreStats(store.name, 0, 0, 0, 0.0, usable=False)
    snapshot = store.opened.snapshot
    num_indexed = sum(segment.num_indexed for segment in snapshot.segments)
    return StoreStats(
        store.name,
        snapshot.num_entries,
        snapshot.num_documents,
        snapshot.bytes_on_disk,
        1 - snapshot.num_entries / num_indexed if num_indexed else 0.0,
        usable=store.problem is None,
        searches=store.opened.counter.take(),
    )
