"""The inverted lists of an index: k-means finds their centroids, and a search by groups of lists assigns each key.

A key belongs to the list with the nearest centroid. To compare every key with every centroid, of which there are
2 sqrt(N), takes longest of all that filling an index does. So centroids that are near each other form a group, and a
key is compared with those of the few groups whose middle is nearest to it. One or two keys of a hundred come into
another list than the nearest, one that is hardly farther away, and are searched for there with the same centroids
(docs/log, 2026-11-22).

A round puts each point of a sample to its nearest centroid, and moves the centroids into the middle of their points.
The first rounds go by a part of the sample, which is hardly worse than four rounds by all of it, for less of the time.
Once the centroids are near their places, points find them by groups of centroids (`ListAssigner`): at two million
entries training takes half as long, and its lists are as good (docs/log, 2026-11-23).
"""

from __future__ import annotations

from typing import Any

import faiss
import numpy as np
from jaxtyping import Float32, Int64

from memlm.index.threads import Rows, run_in_threads, shares

LOOKED_AT = 4  # groups
GROUPING = 300  # putting keys in the order of groups takes as long as comparing them with so many centroids
KMEANS_ROUNDS = 10

POINTS_PER_LIST = 39  # Faiss warns below that and drops what is above 256
FIRST_POINTS, FIRST_ROUNDS = 10, 2  # points a list, and rounds with so many, each point compared with all centroids
ROUNDS = ((10, 1), (20, 2), (POINTS_PER_LIST, 1))  # and then by groups
BLOCK_ROWS = 32_768  # in work at a time, shared out among the cores


def num_compared(nlist: int) -> int:
    """With how many centroids a key is compared, or what takes as long, where groups are about the same size."""
    return min(nlist, GROUPING + round((LOOKED_AT + 1) * nlist**0.5))


class ListAssigner:
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


def centroids_of(sample_ND: Float32[np.ndarray, "N D"], nlist: int, *, seed: int) -> Float32[np.ndarray, "L D"]:
    """The middles of `nlist` lists, from a sample in which each has POINTS_PER_LIST points, or fewer."""
    points_ND = sample_ND[np.random.default_rng(seed).permutation(len(sample_ND))]
    centroids_LD = _first_centroids(points_ND[: FIRST_POINTS * nlist], nlist, seed)
    for points, rounds in ROUNDS:
        for _ in range(rounds):
            centroids_LD = moved(centroids_LD, points_ND[: points * nlist])
    return centroids_LD


def _first_centroids(points_ND: Float32[np.ndarray, "N D"], nlist: int, seed: int) -> Float32[np.ndarray, "L D"]:
    """A few rounds of Faiss, which halves large lists to fill those that no point is nearest to."""
    clustering = faiss.Clustering(points_ND.shape[1], nlist)
    clustering.seed, clustering.niter, clustering.min_points_per_centroid = seed, FIRST_ROUNDS, 1
    clustering.train(points_ND, faiss.IndexFlatL2(points_ND.shape[1]))
    centroids: np.ndarray = faiss.vector_to_array(clustering.centroids)
    return centroids.reshape(nlist, -1)


def moved(
    centroids_LD: Float32[np.ndarray, "L D"], points_ND: Float32[np.ndarray, "N D"]
) -> Float32[np.ndarray, "L D"]:
    """Each centroid in the middle of the points that it is nearest to; one that has none stays."""
    table: Any = table_of(centroids_LD)
    finder, nlist = ListAssigner(table), len(centroids_LD)

    def added_up(rows: Rows) -> tuple[Float32[np.ndarray, "L D"], Int64[np.ndarray, " L"]]:
        """The sum of the points that come into each list, and their number."""
        some_ND = points_ND[slice(*rows)]
        lists_N = finder.find(some_ND)
        order_N = np.argsort(lists_N.astype(np.min_scalar_type(nlist)), kind="stable")  # short numbers sort fastest
        sorted_ND, counts_L = some_ND.take(order_N, axis=0), np.bincount(lists_N, minlength=nlist)
        sums_LD, ends_L = np.zeros_like(centroids_LD), counts_L.cumsum()
        for number in np.flatnonzero(counts_L):  # np.add.reduceat takes twice as long
            sorted_ND[ends_L[number] - counts_L[number] : ends_L[number]].sum(axis=0, out=sums_LD[number])
        return sums_LD, counts_L

    total_LD, totals_L1 = np.zeros_like(centroids_LD), np.zeros((nlist, 1), np.float32)
    for _, (sums_LD, counts_L) in run_in_threads(added_up, shares(len(points_ND), BLOCK_ROWS)):
        total_LD += sums_LD
        totals_L1[:, 0] += counts_L
    return np.where(totals_L1 > 0, total_LD / np.maximum(totals_L1, 1), centroids_LD)
