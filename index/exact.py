"""Exact search over stored keys: the reference of every index, and the index of small stores.

Keys are read in blocks, one for each core, so that RAM is bounded for any size of the store. Faiss' brute force finds
candidates. Their distances are then computed as sums of squared differences, which do not cancel.
"""

from __future__ import annotations

import faiss
import numpy as np
from jaxtyping import Float, Float16, Float32, Int64

from memlm.base.cpu import num_cores
from memlm.index.arrays import RowSubset
from memlm.index.neighbors import Neighbors, merge_nearest
from memlm.index.threads import Rows, even_blocks, faiss_threads, rows_per_core, run_in_threads

BLOCK_ROWS = 65_536  # processed at a time by all cores together
SPARE = 8  # candidates beyond k, for near ties that rounding may swap
DEEPEST = 1024  # candidates at most, where many keys are equal, as those at the start of each document
ROUNDING = 2e-6  # of a squared norm, by which Faiss' products may err: 3e-7 at most was seen, of 16 to 8,192 numbers

# Faiss 1.15 searches by matrix products from 128,000 queries times dimensions on, which suits dozens of cores. On two
# cores, 128 queries take four times as long without products (facebookresearch/faiss pull request 5109).
PRODUCTS_FROM_PER_CORE = 800
if faiss.cvar.distance_compute_blas_threshold == 128_000:
    faiss.cvar.distance_compute_blas_threshold = PRODUCTS_FROM_PER_CORE * num_cores()


def exact_neighbors(
    queries_QD: Float32[np.ndarray, "Q D"],
    keys_ND: Float[np.ndarray, "N D"] | RowSubset,
    values_N: np.ndarray,
    k: int,
) -> Neighbors:
    """Finds the k nearest rows of `keys_ND`. Ids are row numbers."""

    def search(rows: Rows) -> Neighbors:
        return _nearest(queries_QD, to_float32(keys_ND[slice(*rows)]), values_N, k, rows[0])

    if not len(keys_ND):
        return Neighbors.none(len(queries_QD), k)
    if len(keys_ND) <= rows_per_core(BLOCK_ROWS):
        with faiss_threads(len(queries_QD), len(keys_ND) * queries_QD.shape[1]):
            return search((0, len(keys_ND)))
    best = Neighbors.none(len(queries_QD), k)
    for _, found in run_in_threads(search, even_blocks(len(keys_ND), BLOCK_ROWS)):
        best = merge_nearest([best, found], k)
    return best


class FlatIndex:
    """Exact search over keys held in RAM, in float32, which spares each search the conversion."""

    def __init__(self, keys_ND: Float16[np.ndarray, "N D"] | RowSubset, values_N: np.ndarray) -> None:
        self._keys_ND, self._values_N = to_float32(keys_ND[:]), values_N

    def search(self, queries_QD: Float32[np.ndarray, "Q D"], k: int) -> Neighbors:
        """Finds the k nearest keys to each query. Ids are row numbers."""
        return exact_neighbors(queries_QD, self._keys_ND, self._values_N, k)


def _nearest(
    queries_QD: Float32[np.ndarray, "Q D"],
    keys_ND: Float32[np.ndarray, "N D"],
    values_N: np.ndarray,
    k: int,
    first: int,
) -> Neighbors:
    """Finds the k nearest of the keys that begin at row `first` of all, equal ones in the order of rows.

    Faiss' own order of equal ones depends on the number of queries, so a draft would change the neighbors.
    """
    depth, most = k + SPARE, min(len(keys_ND), max(DEEPEST, k + SPARE))
    rounding_Q = rounding_of(queries_QD)
    while True:
        depth = min(depth, most)
        rows_QK = np.sort(faiss.knn(queries_QD, keys_ND, depth)[1], axis=1)
        distances_QK = exact_distances(queries_QD, keys_ND, rows_QK)
        far_Q = distances_QK.max(axis=1)
        if depth == most or (np.partition(distances_QK, k - 1)[:, k - 1] + rounding_Q < far_Q).all():
            break  # nothing that was left out is as near as the k-th
        depth *= 4
    ids_QK = rows_QK + first
    found = Neighbors(distances_QK, ids_QK, values_N[ids_QK].astype(np.int64))
    return merge_nearest([Neighbors.none(len(queries_QD), k), found], k)


def rounding_of(queries_QD: Float32[np.ndarray, "Q D"]) -> Float32[np.ndarray, " Q"]:
    """By how much, in squared distance, an entry may be nearer than the nearest that exact search finds, where more
    than `DEEPEST` entries are nearly equal.
    """
    return np.float32(ROUNDING) * np.einsum("qd,qd->q", queries_QD, queries_QD)


def to_float32(keys_ND: Float[np.ndarray, "N D"]) -> Float32[np.ndarray, "N D"]:
    """Converts keys to float32. Faiss converts float16 three times as fast as numpy, to the same numbers."""
    if keys_ND.dtype != np.float16:
        return np.asarray(keys_ND, np.float32)
    codes: np.ndarray = np.ascontiguousarray(keys_ND).view(np.uint8)
    return faiss.ScalarQuantizer(keys_ND.shape[1], faiss.ScalarQuantizer.QT_fp16).decode(codes)


def exact_distances(
    queries_QD: Float32[np.ndarray, "Q D"],
    keys_ND: Float[np.ndarray, "N D"] | RowSubset,
    rows_QK: Int64[np.ndarray, "Q K"],
) -> Float32[np.ndarray, "Q K"]:
    """Squared L2 distances of each query to K rows, as sums of squared differences."""
    distances_QK = np.empty(rows_QK.shape, np.float32)
    for query, (query_D, rows_K) in enumerate(zip(queries_QD, rows_QK, strict=True)):
        difference_KD = to_float32(keys_ND[rows_K]) - query_D
        np.einsum("kd,kd->k", difference_KD, difference_KD, out=distances_QK[query])
    return distances_QK
