"""k-means for the lists of an inverted file.

A round puts each point of a sample to its nearest centroid, and moves the centroids into the middle of their points.
The first rounds go by a part of the sample, which is hardly worse than four rounds by all of it, for less of the time.
Once the centroids are near their places, points find them by groups of centroids (`ListFinder`): at two million
entries training takes half as long, and its lists are as good (docs/log.md, 2026-11-23).
"""

from __future__ import annotations

from typing import Any

import faiss
import numpy as np
from jaxtyping import Float32, Int64

from memlm.index.list_finder import ListFinder, table_of
from memlm.index.threads import Rows, shares, side_by_side

POINTS_PER_LIST = 39  # Faiss warns below that and drops what is above 256
FIRST_POINTS, FIRST_ROUNDS = 10, 2  # points a list, and rounds with so many, each point compared with all centroids
ROUNDS = ((10, 1), (20, 2), (POINTS_PER_LIST, 1))  # and then by groups
BLOCK_ROWS = 32_768  # in work at a time, shared out among the cores


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
    finder, nlist = ListFinder(table), len(centroids_LD)

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
    for _, (sums_LD, counts_L) in side_by_side(added_up, shares(len(points_ND), BLOCK_ROWS)):
        total_LD += sums_LD
        totals_L1[:, 0] += counts_L
    return np.where(totals_L1 > 0, total_LD / np.maximum(totals_L1, 1), centroids_LD)
