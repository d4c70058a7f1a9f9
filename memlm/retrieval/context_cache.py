"""A text's own past as a memory: the keys of the positions that were read, each with the token that follows it.

A continuous cache (arXiv 1612.04426, equations 2 and 3) without a bound (1711.02604), by the distances of kNN-LM
(1911.00172). It needs no training and no datastore, and reaches beyond the model's context. Up to 4,096 positions are
searched exactly, more by an inverted file.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from jaxtyping import Float, Float32, Int64

from memlm.index.exact import SPARE, exact_distances, to_float32
from memlm.index.neighbors import Neighbors
from memlm.retrieval.position_lists import FIRST_SIZE, GROWTH, PositionLists

ROWS = 1024  # that the arrays begin with
SCORES_AT_ONCE = 1 << 22  # of queries times positions, 16 MB
POSITION_BYTES = 4 + 4 + 12  # of a position beside its key: norm, value, place in a list


class ContextCache:
    """The positions of one text. Position n has the key after n + 1 tokens, and the value is the token that follows.

    Keys are rounded to float16, as those of a datastore, and held in float32, which spares each search the conversion.
    """

    def __init__(self, width: int) -> None:
        self._keys_ND = np.empty((ROWS, width), np.float32)
        self._norms_N = np.empty(ROWS, np.float32)  # infinite where a position was forgotten
        self._values_N = np.empty(ROWS, np.int32)
        self._size = 0
        self._lists: list[PositionLists] = []  # the latest, and those before, which serve earlier positions

    def __len__(self) -> int:
        return self._size

    def num_bytes(self, size: int) -> int:
        """RAM in bytes of so many positions, but for the centroids of lists."""
        return (4 * self._keys_ND.shape[1] + POSITION_BYTES) * _places_for(size)

    def append(self, keys_ND: Float[np.ndarray, "N D"], next_ids_N: Int64[np.ndarray, " N"]) -> None:
        """Adds the next N positions of the text."""
        end = self._size + len(keys_ND)
        if end > len(self._values_N):
            self._grow(end)
        new = slice(self._size, end)
        self._keys_ND[new] = rounded = to_float32(np.asarray(keys_ND, np.float16))
        self._norms_N[new] = np.einsum("nd,nd->n", rounded, rounded)
        self._values_N[new] = next_ids_N
        self._size = end
        self._fill_lists()

    def follow(self, token_ids: Sequence[int]) -> None:
        """Sets the token that follows the last position: the first of some, if there is any."""
        if self._size and len(token_ids):
            self._values_N[self._size - 1] = token_ids[0]

    def crop(self, size: int) -> None:
        """Keeps the first positions alone."""
        self._size = min(self._size, size)
        self._lists = [lists for lists in self._lists if lists.made_at <= size]
        for lists in self._lists:
            lists.crop(size)
        self._fill_lists()  # those of the first positions were dropped for later ones

    def forget(self, start: int, stop: int) -> None:
        """Erases the positions from `start` up to `stop`. No search finds them again."""
        gone = slice(start, min(stop, self._size))
        self._keys_ND[gone], self._norms_N[gone], self._values_N[gone] = 0.0, np.inf, -1

    def copy(self, size: int | None = None) -> ContextCache:
        """A cache of its own with the first positions, by default with all. The last value is left to be read."""
        copy, size = ContextCache(self._keys_ND.shape[1]), self._size if size is None else size
        copy._grow(size)
        for name in ("_keys_ND", "_norms_N", "_values_N"):
            getattr(copy, name)[:size] = getattr(self, name)[:size]
        copy._values_N[max(0, size - 1) : size] = -1
        copy._size = size
        copy._lists = [lists.copy(size) for lists in self._lists if lists.made_at <= size]
        copy._fill_lists()
        return copy

    def save(self, size: int) -> dict[str, np.ndarray]:
        """The first positions as arrays by name, to be restored. The last value is left to be read."""
        values_N = self._values_N[:size].copy()
        values_N[-1:] = -1
        arrays: dict[str, np.ndarray] = {"keys": self._keys_ND[:size].astype(np.float16), "values": values_N}
        if (lists := self._lists_for(size)) is not None:
            made_at = np.array([lists.made_at])
            arrays |= {"centroids": lists.centroids_CD, "made_at": made_at, "list_of": lists.list_of(size)}
        return arrays

    @classmethod
    def restored(cls, arrays: Mapping[str, np.ndarray]) -> ContextCache:
        """The positions that `save` gave."""
        keys_ND, values_N = arrays["keys"], arrays["values"]
        size, width = keys_ND.shape
        cache = cls(width)
        if "centroids" in arrays:
            made_at = int(arrays["made_at"][0])
            cache._lists = [PositionLists.restored(arrays["centroids"], made_at, arrays["list_of"])]
        cache.append(keys_ND, values_N)
        cache._norms_N[:size][(values_N < 0) & ~keys_ND.any(axis=1)] = np.inf  # forgotten
        return cache

    def search(
        self, queries_QD: Float[np.ndarray, "Q D"], k: int, sizes_Q: Int64[np.ndarray, " Q"], most: int | None = None
    ) -> Neighbors:
        """Finds the k nearest of the first `sizes_Q` positions to each query, or of the last `most` of these. Ids are
        positions.

        Distances are sums of squared differences of float16-rounded keys. They do not depend on the other queries.
        """
        queries_QD = to_float32(np.asarray(queries_QD, np.float16))
        found, starts_Q = Neighbors.none(len(queries_QD), k), np.maximum(0, sizes_Q - (most or len(self)))
        exactly = list[int]()
        for row, size in enumerate(sizes_Q.tolist()):
            if (lists := self._lists_for(size)) is None:
                exactly.append(row)
            else:
                found.put(np.array([row]), self._nearest_listed(lists, queries_QD[row], k, int(starts_Q[row]), size))
        num_scores = len(exactly) * int(sizes_Q[exactly].max(initial=0))
        for rows_R in np.array_split(np.array(exactly, np.int64), 1 + num_scores // SCORES_AT_ONCE):
            if (starts_Q[rows_R] < sizes_Q[rows_R]).any():
                found.put(rows_R, self._nearest(queries_QD[rows_R], k, starts_Q[rows_R], sizes_Q[rows_R]))
        return found

    def _lists_for(self, size: int) -> PositionLists | None:
        """The lists for a key after so many positions. None where all of them are compared."""
        return next((lists for lists in reversed(self._lists) if lists.made_at <= size), None)

    def _nearest(
        self,
        queries_RD: Float32[np.ndarray, "R D"],
        k: int,
        starts_R: Int64[np.ndarray, " R"],
        sizes_R: Int64[np.ndarray, " R"],
    ) -> Neighbors:
        """Compares all positions."""
        first, end = int(starts_R.min()), int(sizes_R.max())
        scores_RN = self._norms_N[first:end] - 2 * (queries_RD @ self._keys_ND[first:end].T)
        places_N = np.arange(first, end)
        if len(starts_R) > 1:
            scores_RN[(places_N < starts_R[:, None]) | (places_N >= sizes_R[:, None])] = np.inf
        return self._ranked(queries_RD, k, places_N, scores_RN)

    def _nearest_listed(
        self, lists: PositionLists, query_D: Float32[np.ndarray, " D"], k: int, start: int, size: int
    ) -> Neighbors:
        """Compares the positions in the nearest lists."""
        places_N = lists.rows_near(query_D)
        places_N = places_N[slice(*np.searchsorted(places_N, (start, size)))]
        if not len(places_N):
            return Neighbors.none(1, k)
        scores_N = self._norms_N[places_N] - 2 * (self._keys_ND[places_N] @ query_D)
        return self._ranked(query_D[None], k, places_N, scores_N[None])

    def _ranked(
        self,
        queries_RD: Float32[np.ndarray, "R D"],
        k: int,
        places_N: Int64[np.ndarray, " N"],
        scores_RN: Float32[np.ndarray, "R N"],
    ) -> Neighbors:
        """Takes more than k positions of the least scores, which products have rounded, and orders them by their
        distances. Of equal ones, the earlier position stands first. An infinite score is no position.
        """
        count = min(k + SPARE, len(places_N))
        columns_RC = np.argpartition(scores_RN, count - 1, axis=1)[:, :count]
        columns_RC.sort(axis=1)
        ids_RC = places_N[columns_RC]
        distances_RC = exact_distances(queries_RD, self._keys_ND, ids_RC)
        distances_RC[np.isinf(np.take_along_axis(scores_RN, columns_RC, axis=1))] = np.inf
        order_RK = np.argsort(distances_RC, axis=1, kind="stable")[:, :k]
        distances_RK, ids_RK = (np.take_along_axis(each, order_RK, axis=1) for each in (distances_RC, ids_RC))
        is_found_RK = np.isfinite(distances_RK)
        values_RK = np.where(is_found_RK, self._values_N[ids_RK], -1).astype(np.int64)
        return Neighbors(distances_RK, np.where(is_found_RK, ids_RK, -1), values_RK)

    def _fill_lists(self) -> None:
        """Adds new positions to the lists, and makes new lists where it is time."""
        made_at = GROWTH * self._lists[-1].made_at if self._lists else FIRST_SIZE
        while made_at <= self._size:
            for lists in self._lists[-1:]:
                lists.add(self._keys_ND[len(lists) : made_at])
            self._lists = [*self._lists[-1:], PositionLists.made_of(self._keys_ND[:made_at])]
            made_at *= GROWTH
        for lists in self._lists[-1:]:
            lists.add(self._keys_ND[len(lists) : self._size])

    def _grow(self, size: int) -> None:
        places = _places_for(size)
        for name in ("_keys_ND", "_norms_N", "_values_N"):
            old = getattr(self, name)
            new = np.empty((places, *old.shape[1:]), old.dtype)
            new[: self._size] = old[: self._size]
            setattr(self, name, new)


def _places_for(size: int) -> int:
    return max(ROWS, 1 << max(0, size - 1).bit_length())
