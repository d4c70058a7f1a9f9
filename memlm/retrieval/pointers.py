"""Pointers from the last neighbors replace a search (RetoMaton, arXiv 2201.12431, section 3).

Experimental: it saves few searches and no time (docs/reports/retrieval.md). Off unless a request gives `min_pointers`
or tuning kept a number (`memlm index tune --pointer-loss`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from jaxtyping import Float32, Int64

from memlm.errors import InvalidInput
from memlm.index.neighbors import Neighbors
from memlm.index.store.snapshot import Snapshot
from memlm.retrieval.store import ModelStore


class Pointers:
    """The entries behind the neighbors that had the next token as their value. At least `min_pointers` of them replace
    a search: they are ranked by their stored keys.
    """

    is_sequential = True

    def __init__(self, snapshot: Callable[[], Snapshot], *, k: int, min_pointers: int) -> None:
        """`snapshot` returns the one in use, without the documents that the sequence excludes."""
        self._snapshot, self._k, self._min_pointers = snapshot, k, min_pointers
        self.ids_P: Int64[np.ndarray, " P"] = np.empty(0, np.int64)

    def neighbors(self, key_1D: Float32[np.ndarray, "1 D"], max_logprob: float) -> Neighbors | None:
        """Returns the nearest of the entries pointed to, without those that were deleted since."""
        snapshot = self._snapshot()
        ids_P = snapshot.live(self.ids_P)
        return snapshot.nearest_among(key_1D, ids_P, self._k) if len(ids_P) >= self._min_pointers else None

    def observe(self, neighbors: Neighbors, token_id: int) -> None:
        """Moves the pointers to the entries behind the neighbors of this value."""
        named_K = neighbors.values_QK[0] == token_id
        self.ids_P = self._snapshot().successors(neighbors.ids_QK[0, named_K])


def check_pointers(stores: Sequence[ModelStore]) -> None:
    """Raises InvalidInput for several datastores, and for one that was built without keeping its keys."""
    if len(stores) > 1:
        raise InvalidInput(
            "pointers are followed within one datastore; name one, or leave min_pointers out", field="min_pointers"
        )
    if not stores[0].snapshot.has_keys:
        raise InvalidInput(
            f"the datastore {stores[0].name!r} was built without keeping its keys, which following pointers needs;"
            " leave min_pointers out",
            field="min_pointers",
        )
