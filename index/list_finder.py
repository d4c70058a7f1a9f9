"""Which list of an inverted file is a key's?

The one with the nearest centroid; and to compare every key with every centroid, of which there are 2 sqrt(N), takes
longest of all that filling an index does. So centroids that are near each other form a group, and a key is compared
with those of the few groups whose middle is nearest to it. One or two keys of a hundred come into another list than
the nearest, one that is hardly farther away, and are searched for there with the same centroids (docs/log.md,
2026-11-22).
"""

from __future__ import annotations

from typing import Any

import faiss
import numpy as np
from jaxtyping import Float32, Int64

LOOKED_AT = 4  # groups
GROUPING = 300  # putting keys in the order of groups takes as long as comparing them with so many centroids
KMEANS_ROUNDS = 10


def num_compared(nlist: int) -> int:
    """With how many centroids a key is compared, or what takes as long, where groups are about the same size."""
    return min(nlist, GROUPING + round((LOOKED_AT + 1) * nlist**0.5))


class ListFinder:
    """Finds the list of a key, the same one each time. May be asked by several threads at once."""

    def __init__(self, quantizer: Any) -> None:
        """Takes what holds the centroids, which must outlive this. It is asked itself where groups would spare nothing:
        where there are few lists, where most keys are near a few large groups, and where it is more than a table.
        """
        self._quantizer = faiss.downcast_index(quantizer)
        self._groups: list[tuple[Int64[np.ndarray, " L"], Any]] = []
        if isinstance(self._quantizer, faiss.IndexFlat) and quantizer.ntotal > GROUPING:
            self._form_groups(self._quantizer.reconstruct_n(0, quantizer.ntotal))

    @property
    def lists_of_groups(self) -> list[Int64[np.ndarray, " L"]]:
        """The numbers of the lists in each group; none where there are no groups."""
        return [lists_L for lists_L, _ in self._groups]

    def find(self, keys_ND: Float32[np.ndarray, "N D"]) -> Int64[np.ndarray, " N"]:
        """The list of each key; keys are as the inverted file sees them, behind its transforms."""
        if not self._groups:
            return self._quantizer.search(keys_ND, 1)[1][:, 0]
        _, groups_NP = self._middles.search(keys_ND, min(LOOKED_AT, len(self._groups)))
        groups_X, looked_at = groups_NP.ravel().astype(np.uint16), groups_NP.shape[1]  # numpy sorts these fastest
        order_X = np.argsort(groups_X, kind="stable")
        distances_X, lists_X = np.empty(len(order_X), np.float32), np.empty(len(order_X), np.int64)
        ends = np.cumsum(np.bincount(groups_X, minlength=len(self._groups)))
        for (numbers_L, centroids), asked_Y in zip(self._groups, np.split(order_X, ends[:-1]), strict=True):
            if len(asked_Y):
                distances_Y1, nearest_Y1 = centroids.search(keys_ND.take(asked_Y // looked_at, axis=0), 1)
                distances_X[asked_Y], lists_X[asked_Y] = distances_Y1[:, 0], numbers_L[nearest_Y1[:, 0]]
        best_N1 = distances_X.reshape(groups_NP.shape).argmin(axis=1)[:, None]
        return np.take_along_axis(lists_X.reshape(groups_NP.shape), best_N1, axis=1)[:, 0]

    def _form_groups(self, centroids_LD: Float32[np.ndarray, "L D"]) -> None:
        """As many groups as each has lists, on average; none where too many centroids would be looked at."""
        nlist, dim = centroids_LD.shape
        clustering, middles = faiss.Clustering(dim, round(nlist**0.5)), faiss.IndexFlatL2(dim)
        clustering.seed, clustering.niter, clustering.min_points_per_centroid = 1, KMEANS_ROUNDS, 1
        clustering.train(centroids_LD, middles)
        nearest_LP = middles.search(centroids_LD, min(LOOKED_AT, middles.ntotal))[1]
        sizes = np.bincount(nearest_LP[:, 0], minlength=middles.ntotal)
        looked_at = sizes[nearest_LP].sum(axis=1).mean()  # of centroids as of keys: a list has about as many as another
        if looked_at + middles.ntotal + GROUPING >= nlist:
            return
        used = np.flatnonzero(sizes)
        self._middles = table_of(middles.reconstruct_n(0, middles.ntotal)[used])
        members = [np.flatnonzero(nearest_LP[:, 0] == group) for group in used]
        self._groups = [(lists_L, table_of(centroids_LD[lists_L])) for lists_L in members]


def table_of(vectors_ND: Float32[np.ndarray, "N D"]) -> Any:
    """An index that compares with all of some vectors."""
    index = faiss.IndexFlatL2(vectors_ND.shape[1])
    index.add(vectors_ND)
    return index
