"""Exact search over stored keys: the oracle of every index, and the index of small stores.

Keys are read in blocks, so that memory stays bounded whatever the store's size. Candidates come from Faiss' brute
force; their distances are then computed anew as sums of squared differences, which do not cancel.
"""

from __future__ import annotations

import faiss
import numpy as np
from jaxtyping import Float, Float32, Int64

from memlm.index.arrays import Picked
from memlm.index.neighbours import Neighbours, nearest_of
from memlm.index.threads import faiss_threads, matrix_products

BLOCK_ROWS = 65_536
SPARE = 8  # candidates beyond k, for near ties that rounding may swap


def exact_neighbours(
    queries_QD: Float32[np.ndarray, "Q D"],
    keys_ND: Float[np.ndarray, "N D"] | Picked,
    values_N: np.ndarray,
    k: int,
) -> Neighbours:
    """The k nearest rows of `keys_ND`; ids are row numbers."""
    best = Neighbours.none(len(queries_QD), k)
    for begin in range(0, len(keys_ND), BLOCK_ROWS):
        block_ND = widened(keys_ND[begin : begin + BLOCK_ROWS])
        wanted = min(k + SPARE, len(block_ND))
        with faiss_threads(len(queries_QD)), matrix_products():
            _, rows_QK = faiss.knn(queries_QD, block_ND, wanted)
        distances_QK = refined(queries_QD, block_ND, rows_QK)
        ids_QK = rows_QK + begin
        best = nearest_of([best, Neighbours(distances_QK, ids_QK, values_N[ids_QK].astype(np.int64))], k)
    return best


def widened(keys_ND: Float[np.ndarray, "N D"]) -> Float32[np.ndarray, "N D"]:
    """Keys in float32. From float16 by Faiss, three times as fast as by numpy and the same."""
    if keys_ND.dtype != np.float16:
        return np.asarray(keys_ND, np.float32)
    codes: np.ndarray = np.ascontiguousarray(keys_ND).view(np.uint8)
    return faiss.ScalarQuantizer(keys_ND.shape[1], faiss.ScalarQuantizer.QT_fp16).decode(codes)


def refined(
    queries_QD: Float32[np.ndarray, "Q D"], keys_ND: Float[np.ndarray, "N D"], rows_QK: Int64[np.ndarray, "Q K"]
) -> Float32[np.ndarray, "Q K"]:
    """Squared L2 distances of some rows, as sums of squared differences."""
    distances_QK = np.empty(rows_QK.shape, np.float32)
    for query, (query_D, rows_K) in enumerate(zip(queries_QD, rows_QK, strict=True)):
        difference_KD = np.asarray(keys_ND[rows_K], np.float32) - query_D
        np.einsum("kd,kd->k", difference_KD, difference_KD, out=distances_QK[query])
    return distances_QK
