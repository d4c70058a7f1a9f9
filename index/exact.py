"""Exact search over stored keys: the oracle of every index, and the index of small stores.

Keys are read in blocks, so that memory stays bounded whatever the store's size, and each core has a block of its own.
Candidates come from Faiss' brute force; their distances are then computed anew as sums of squared differences, which
do not cancel.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any, TypeAlias

import faiss
import numpy as np
from jaxtyping import Float, Float16, Float32, Int64

from memlm.base.cpu import num_cores
from memlm.index.arrays import RowSubset
from memlm.index.neighbors import Neighbors, merge_nearest
from memlm.index.threads import PARALLEL_QUERIES, Rows, faiss_threads, matrix_products, run_in_threads, share, shares

BLOCK_ROWS = 65_536  # in work at a time, shared out among the cores
SPARE = 8  # candidates beyond k, for near ties that rounding may swap
PART_BYTES = 4 << 20  # what it pays to share
BY_QUERIES_AND_LISTS = 2  # Faiss' parallel_mode

Candidates: TypeAlias = tuple[Float32[np.ndarray, "Q X"], Int64[np.ndarray, "Q X"]]


def exact_neighbors(
    queries_QD: Float32[np.ndarray, "Q D"],
    keys_ND: Float[np.ndarray, "N D"] | RowSubset,
    values_N: np.ndarray,
    k: int,
) -> Neighbors:
    """The k nearest rows of `keys_ND`; ids are row numbers."""

    def search(rows: Rows) -> Neighbors:
        return _nearest(queries_QD, to_float32(keys_ND[slice(*rows)]), values_N, k, rows[0])

    if len(keys_ND) <= share(BLOCK_ROWS):
        return _nearest_by_all(queries_QD, to_float32(keys_ND[:]), values_N, k)
    best = Neighbors.none(len(queries_QD), k)
    with matrix_products():
        for _, found in run_in_threads(search, shares(len(keys_ND), BLOCK_ROWS)):
            best = merge_nearest([best, found], k)
    return best


class FlatIndex:
    """Keys in memory, in float32, for exact search. They lie in parts, so that cores share even a single query: Faiss'
    brute force shares none, and takes twice as long for it on two threads as on one (1.15).
    """

    def __init__(self, keys_ND: Float16[np.ndarray, "N D"] | RowSubset, values_N: np.ndarray) -> None:
        """Copies the keys."""
        self._keys_ND, self._values_N = keys_ND, values_N
        num_keys, dim = keys_ND.shape
        parts = max(1, min(num_cores(), 4 * dim * num_keys // PART_BYTES))
        self._quantizer = faiss.IndexFlatL2(dim)  # Faiss wants one; nobody asks it
        self._index: Any = faiss.IndexIVFFlat(self._quantizer, dim, parts)
        self._index.is_trained, self._index.parallel_mode = True, BY_QUERIES_AND_LISTS
        self._parts: list[tuple[int, Float32[np.ndarray, "P D"]]] = []
        self._norms: list[Float32[np.ndarray, " P"]] = []  # which Faiss would compute anew for each search
        lists: Any = self._index.invlists
        for part, (begin, end) in enumerate(pairwise(np.linspace(0, num_keys, parts + 1).astype(int).tolist())):
            rows_P, codes = np.arange(begin, end), to_float32(keys_ND[begin:end]).view(np.uint8)
            lists.add_entries(part, len(rows_P), faiss.swig_ptr(rows_P), faiss.swig_ptr(codes))
            held_PD = faiss.rev_swig_ptr(lists.get_codes(part), codes.size).view(np.float32).reshape(-1, dim)
            self._parts.append((begin, held_PD))
            self._norms.append(np.einsum("pd,pd->p", held_PD, held_PD))
        self._index.ntotal = num_keys

    def search(self, queries_QD: Float32[np.ndarray, "Q D"], k: int) -> Neighbors:
        """The same as `exact_neighbors`."""
        if len(self._parts) == 1:
            return _nearest_by_all(queries_QD, self._parts[0][1], self._values_N, k)
        wanted = min(k + SPARE, len(self._keys_ND))
        by_products = len(queries_QD) >= PARALLEL_QUERIES
        distances_QX, rows_QX = (self._by_products if by_products else self._by_parts)(queries_QD, wanted)
        order_QK = np.argsort(distances_QX, axis=1, kind="stable")[:, :wanted]
        found = _found(queries_QD, self._keys_ND, np.take_along_axis(rows_QX, order_QK, axis=1), self._values_N)
        return merge_nearest([Neighbors.none(len(queries_QD), k), found], k)

    def _by_products(self, queries_QD: Float32[np.ndarray, "Q D"], wanted: int) -> Candidates:
        with faiss_threads(len(queries_QD)), matrix_products():
            found = [
                _knn(queries_QD, part_PD, norms_P, min(wanted, len(part_PD)))
                for (_, part_PD), norms_P in zip(self._parts, self._norms, strict=True)
            ]
        rows = [rows_QK + begin for (begin, _), (_, rows_QK) in zip(self._parts, found, strict=True)]
        return np.concatenate([distances_QK for distances_QK, _ in found], axis=1), np.concatenate(rows, axis=1)

    def _by_parts(self, queries_QD: Float32[np.ndarray, "Q D"], wanted: int) -> Candidates:
        """Each query once for each part: of equal entries, threads that filled one list of nearest together would keep
        those that came first.
        """
        queries, parts = len(queries_QD), len(self._parts)
        parts_X1 = np.tile(np.arange(parts), queries)[:, None]
        with faiss_threads(queries, shared=True):
            found = self._index.search_preassigned(np.repeat(queries_QD, parts, axis=0), wanted, parts_X1, None)
        return found[0].reshape(queries, -1), found[1].reshape(queries, -1)


def _knn(
    queries_QD: Float32[np.ndarray, "Q D"],
    keys_PD: Float32[np.ndarray, "P D"],
    norms_P: Float32[np.ndarray, " P"],
    k: int,
) -> Candidates:
    """What `faiss.knn` gives, which takes no norms of the keys."""
    distances_QK = np.empty((len(queries_QD), k), np.float32)
    rows_QK = np.empty((len(queries_QD), k), np.int64)
    arrays = (np.ascontiguousarray(queries_QD), keys_PD, distances_QK, rows_QK, norms_P)
    queries, keys, distances, rows, norms = (faiss.swig_ptr(array) for array in arrays)
    faiss.knn_L2sqr(queries, keys, keys_PD.shape[1], len(queries_QD), len(keys_PD), k, distances, rows, norms, None)
    return distances_QK, rows_QK


def _nearest_by_all(
    queries_QD: Float32[np.ndarray, "Q D"], keys_ND: Float32[np.ndarray, "N D"], values_N: np.ndarray, k: int
) -> Neighbors:
    """The k nearest rows, which all cores look for together."""
    with faiss_threads(len(queries_QD)), matrix_products():
        return _nearest(queries_QD, keys_ND, values_N, k)


def _nearest(
    queries_QD: Float32[np.ndarray, "Q D"],
    keys_ND: Float32[np.ndarray, "N D"],
    values_N: np.ndarray,
    k: int,
    first: int = 0,
) -> Neighbors:
    """The k nearest rows of some keys, the first of which is row `first` of all."""
    _, rows_QK = faiss.knn(queries_QD, keys_ND, min(k + SPARE, len(keys_ND)))
    return merge_nearest([Neighbors.none(len(queries_QD), k), _found(queries_QD, keys_ND, rows_QK, values_N, first)], k)


def _found(
    queries_QD: Float32[np.ndarray, "Q D"],
    keys_ND: Float[np.ndarray, "N D"] | RowSubset,
    rows_QK: Int64[np.ndarray, "Q K"],
    values_N: np.ndarray,
    first: int = 0,
) -> Neighbors:
    """Some rows of keys, the first of which is row `first` of all, with their exact distances."""
    ids_QK = rows_QK + first
    return Neighbors(exact_distances(queries_QD, keys_ND, rows_QK), ids_QK, values_N[ids_QK].astype(np.int64))


def to_float32(keys_ND: Float[np.ndarray, "N D"]) -> Float32[np.ndarray, "N D"]:
    """Keys in float32. From float16 by Faiss, three times as fast as by numpy and the same."""
    if keys_ND.dtype != np.float16:
        return np.asarray(keys_ND, np.float32)
    codes: np.ndarray = np.ascontiguousarray(keys_ND).view(np.uint8)
    return faiss.ScalarQuantizer(keys_ND.shape[1], faiss.ScalarQuantizer.QT_fp16).decode(codes)


def exact_distances(
    queries_QD: Float32[np.ndarray, "Q D"],
    keys_ND: Float[np.ndarray, "N D"] | RowSubset,
    rows_QK: Int64[np.ndarray, "Q K"],
) -> Float32[np.ndarray, "Q K"]:
    """Squared L2 distances of some rows, as sums of squared differences."""
    distances_QK = np.empty(rows_QK.shape, np.float32)
    for query, (query_D, rows_K) in enumerate(zip(queries_QD, rows_QK, strict=True)):
        difference_KD = to_float32(keys_ND[rows_K]) - query_D
        np.einsum("kd,kd->k", difference_KD, difference_KD, out=distances_QK[query])
    return distances_QK
