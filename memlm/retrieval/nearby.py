"""Entries near the keys of one text, to guess its next searches from (RaLMSpec, arXiv 2401.14021, section 3).

The next key of a text mostly has neighbors that an earlier search returned, or the entries behind these in their
documents. Their keys are read once and compared in this process, which takes a fraction of the time of a search in a
large index or on other machines. The result is only a guess: a search decides.
"""

from __future__ import annotations

from collections import deque

import numpy as np
from jaxtyping import Float32, Int64

from memlm.index.exact import SPARE, exact_distances
from memlm.index.neighbors import Neighbors
from memlm.index.store.snapshot import Snapshot
from memlm.retrieval.result import RetrievalResult
from memlm.retrieval.retriever import Retriever

MOST_ENTRIES = 2048  # of a store
SEARCHES = 8  # the latest, whose neighbors are read
NEAREST = 256  # neighbors of a search that are read
FOLLOWED = 8  # entries behind a neighbor that named the right token


class _Entries:
    """The latest entries of one store, in a ring."""

    def __init__(self, dim: int) -> None:
        self._keys_ND = np.empty((MOST_ENTRIES, dim), np.float32)
        self._norms_N = np.empty(MOST_ENTRIES, np.float32)
        self._ids_N, self._values_N = np.full(MOST_ENTRIES, -1), np.full(MOST_ENTRIES, -1)
        self._size = self._next = 0

    def add(self, view: Snapshot, ids_N: Int64[np.ndarray, " N"]) -> None:
        """Reads the keys of entries that are new."""
        ids_N = ids_N[np.isin(ids_N, self._ids_N, invert=True)][:MOST_ENTRIES]
        if not len(ids_N):
            return
        places_N = (self._next + np.arange(len(ids_N))) % MOST_ENTRIES
        self._keys_ND[places_N] = keys_ND = view.keys(ids_N)
        self._norms_N[places_N] = np.einsum("nd,nd->n", keys_ND, keys_ND)
        self._ids_N[places_N], self._values_N[places_N] = ids_N, view.values(ids_N)
        self._next = (self._next + len(ids_N)) % MOST_ENTRIES
        self._size = min(MOST_ENTRIES, self._size + len(ids_N))

    def nearest(self, key_1D: Float32[np.ndarray, "1 D"], k: int) -> Neighbors:
        """The k nearest entries to a key that was rounded as the entries' keys were. Equal ones stand in the order of
        their ids.
        """
        scores_N = self._norms_N[: self._size] - 2 * (self._keys_ND[: self._size] @ key_1D[0])
        count = min(k + SPARE, self._size)
        places_1C = np.argpartition(scores_N, count - 1)[None, :count]
        distances_1C = exact_distances(key_1D, self._keys_ND, places_1C)
        order_K = np.lexsort((self._ids_N[places_1C[0]], distances_1C[0]))[:k]
        places_K = places_1C[0, order_K]
        return Neighbors(distances_1C[:, order_K], self._ids_N[None, places_K], self._values_N[None, places_K])


class NearbyEntries:
    """The entries near the latest keys of one text, by store. Nothing is read before `update`."""

    def __init__(self, retriever: Retriever) -> None:
        self._retriever = retriever
        self._views: tuple[Snapshot, ...] = ()  # that the neighbors were found in
        self._results = deque[tuple[RetrievalResult, int]](maxlen=SEARCHES)  # that were not read yet
        self._entries: dict[int, _Entries] = {}

    def observe(self, result: RetrievalResult, token_id: int) -> None:
        """Notes the neighbors of one key, and the token that followed."""
        self._follow_views()
        self._results.append((result, token_id))

    def update(self) -> None:
        """Reads the neighbors that were noted, and the entries behind those that named the token that followed."""
        self._follow_views()
        for number, view in enumerate(self._views[: len(self._retriever.stores)]):
            ids = [_near(result, token_id, number, view) for result, token_id in reversed(self._results)]
            if not ids:
                continue
            _, first_N = np.unique(near_N := np.concatenate(ids), return_index=True)
            ids_N = near_N[np.sort(first_N)][:MOST_ENTRIES]  # the latest search first, and its nearest
            # After a change between a search and its note, some may be of documents that were deleted.
            if len(ids_N := view.live(ids_N)):
                self._entries.setdefault(number, _Entries(view.dim)).add(view, ids_N)
        self._results.clear()

    def search(self, number: int, key_1D: Float32[np.ndarray, "1 D"], k: int) -> Neighbors:
        """Finds the k nearest of the entries of the store of this number, as a search of it would."""
        found = Neighbors.none(1, k)
        if (entries := self._entries.get(number)) is not None:
            rounded_1D = self._views[number].rounded(key_1D, k)
            found.put(np.zeros(1, np.int64), entries.nearest(rounded_1D, k))
        return found

    def _follow_views(self) -> None:
        """Forgets all entries after a change of a store, since documents may have been deleted."""
        if self._views != (views := self._retriever.views):
            self._views, self._entries = views, {}
            self._results.clear()


def _near(result: RetrievalResult, token_id: int, number: int, view: Snapshot) -> Int64[np.ndarray, " N"]:
    """The nearest neighbors of one key in a store, and the entries behind those that named the token that followed."""
    near, is_of_store_K = result.neighbors, result.stores_QK[0] == number
    ids_K, values_K = (each_QK[0, is_of_store_K][:NEAREST] for each_QK in (near.ids_QK, near.values_QK))
    named_M = ids_K[values_K == token_id]
    behind_MC = named_M[:, None] + np.arange(1, FOLLOWED + 1)
    return np.concatenate([ids_K, behind_MC[view.tokens_after(named_M, FOLLOWED) >= 0]])
