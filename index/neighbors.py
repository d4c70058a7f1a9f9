"""The search seam: queries -> neighbors. Exact search and every Faiss index implement it, on one segment or on many.

    search(queries_QD, k) -> Neighbors(distances_QK, ids_QK, values_QK)

Distances are squared L2 between float16-rounded vectors, in float32, nearest first. A missing neighbor has id -1,
distance +inf and value -1, and comes last. A search has no side effects.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeAlias, runtime_checkable

import numpy as np
from jaxtyping import Bool, Float32, Float64, Int64


@dataclass(frozen=True)
class Neighbors:
    """The K nearest entries to each of Q queries. The module describes missing ones.

    `shares_Q` are the shares of the live entries that a search could reach. None: all of them. Only the result of a
    whole search has them, and no reordered, filtered or merged one.
    """

    distances_QK: Float32[np.ndarray, "Q K"]
    ids_QK: Int64[np.ndarray, "Q K"]
    values_QK: Int64[np.ndarray, "Q K"]
    shares_Q: Float64[np.ndarray, " Q"] | None = None

    @classmethod
    def none(cls, num_queries: int, k: int) -> Neighbors:
        """All neighbors missing."""
        shape = (num_queries, k)
        return cls(np.full(shape, np.inf, np.float32), np.full(shape, -1), np.full(shape, -1))

    def take(self, order_QK: Int64[np.ndarray, "Q K"]) -> Neighbors:
        """Reorders the columns of each row."""
        arrays = (self.distances_QK, self.ids_QK, self.values_QK)
        return Neighbors(*(np.take_along_axis(array, order_QK, axis=1) for array in arrays))

    def keep(self, wanted_QK: Bool[np.ndarray, "Q K"]) -> Neighbors:
        """Removes the neighbors that are not kept, and fills up each row with missing ones."""
        order_QK = np.argsort(~wanted_QK, axis=1, kind="stable")
        kept_QK = np.take_along_axis(wanted_QK, order_QK, axis=1)
        moved = self.take(order_QK)
        return Neighbors(
            np.where(kept_QK, moved.distances_QK, np.float32(np.inf)),
            np.where(kept_QK, moved.ids_QK, -1),
            np.where(kept_QK, moved.values_QK, -1),
        )

    def first(self, k: int) -> Neighbors:
        """The first k columns."""
        if k == self.ids_QK.shape[1]:
            return self
        return Neighbors(self.distances_QK[:, :k], self.ids_QK[:, :k], self.values_QK[:, :k])

    def put(self, rows_R: Int64[np.ndarray, " R"], other: Neighbors) -> None:
        """Overwrites rows with those of `other`, which may be narrower, in place."""
        width = other.ids_QK.shape[1]
        self.distances_QK[rows_R, :width] = other.distances_QK
        self.ids_QK[rows_R, :width] = other.ids_QK
        self.values_QK[rows_R, :width] = other.values_QK


@runtime_checkable
class Searcher(Protocol):
    """Finds neighbors: a snapshot, an exact search or an index."""

    def search(self, queries_QD: Float32[np.ndarray, "Q D"], k: int) -> Neighbors:
        """Finds the k nearest entries to each query."""


RawSearch: TypeAlias = Callable[[Float32[np.ndarray, "Q D"], int], Neighbors]
# Takes the ids that a search found for some of the queries, and the numbers of these queries.
Keep: TypeAlias = Callable[[Int64[np.ndarray, "R K"], Int64[np.ndarray, " R"]], Bool[np.ndarray, "R K"]]


def merge_nearest(parts: Sequence[Neighbors], k: int) -> Neighbors:
    """The k nearest of several searches of the same queries."""
    if len(parts) == 1:
        return parts[0].first(k)
    distances_QM = np.concatenate([part.distances_QK for part in parts], axis=1)
    ids_QM = np.concatenate([part.ids_QK for part in parts], axis=1)
    values_QM = np.concatenate([part.values_QK for part in parts], axis=1)
    order_QK = np.argsort(distances_QM, axis=1, kind="stable")[:, :k]
    return Neighbors(distances_QM, ids_QM, values_QM).take(order_QK)


def deeper(k: int, most: int) -> Iterator[int]:
    """Yields a few more than k, and then four times as many each time, up to `most`."""
    depth = min(most, k + max(8, k // 4))
    yield depth
    while depth < most:
        depth = min(most, depth * 4)
        yield depth


def search_filtered(
    search: RawSearch, queries_QD: Float32[np.ndarray, "Q D"], k: int, keep: Keep, depths: Iterable[int]
) -> Neighbors:
    """Finds the k nearest entries that `keep` accepts.

    Queries with fewer than k accepted neighbors are searched again for the next number of `depths`, unless there are no
    more entries to find.
    """
    found, rows_R = Neighbors.none(len(queries_QD), k), np.arange(len(queries_QD))
    for depth in depths:
        seen = search(queries_QD[rows_R], depth)
        kept_RK = (seen.ids_QK >= 0) & keep(seen.ids_QK, rows_R)
        if len(rows_R) == len(queries_QD) and depth >= k and kept_RK[:, :k].all():
            return seen.first(k)
        found.put(rows_R, seen.keep(kept_RK).first(k))
        rows_R = rows_R[(kept_RK.sum(axis=1) < k) & (seen.ids_QK[:, -1] >= 0)]
        if not len(rows_R):
            break
    return found
