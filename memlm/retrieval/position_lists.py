"""An inverted file over the positions of a text that grows: keys lie in lists, and a search reads the nearest lists.

The lists are made once, from the positions so far. Later positions join them, until the text is four times as long and
new ones are made. So the lists that serve a position follow from the text before it alone.
"""

from __future__ import annotations

from array import array

import faiss
import numpy as np
from jaxtyping import Float32, Int32, Int64

FIRST_SIZE, GROWTH = 4096, 4  # positions that the first lists are made from, and between one making and the next
ROWS_READ = 2048  # positions, or as many more as the last list that is read has
TRAINED_ON, ITERATIONS = 16, 4  # keys for each list, and rounds of k-means


class PositionLists:
    """The lists of the positions so far. Each position is in one list."""

    def __init__(self, centroids_CD: Float32[np.ndarray, "C D"], made_at: int) -> None:
        """Lists around some centroids, empty. `made_at` is the number of positions that the centroids were made of."""
        self.centroids_CD, self.made_at = centroids_CD, made_at
        self._norms_C = np.einsum("cd,cd->c", centroids_CD, centroids_CD)
        self._rows = [array("q") for _ in centroids_CD]
        self._list_of = array("i")

    @classmethod
    def made_of(cls, keys_ND: Float32[np.ndarray, "N D"]) -> PositionLists:
        """Makes 4 sqrt(N) lists by k-means on a part of the keys, and adds all."""
        count, width = keys_ND.shape
        num_lists = round(4 * count**0.5)
        step = max(1, count // (TRAINED_ON * num_lists))
        clusters = faiss.Kmeans(width, num_lists, niter=ITERATIONS, seed=1, min_points_per_centroid=1)
        clusters.train(np.ascontiguousarray(keys_ND[::step]))
        lists = cls(np.array(clusters.centroids), count)
        lists.add(keys_ND)
        return lists

    @classmethod
    def restored(
        cls, centroids_CD: Float32[np.ndarray, "C D"], made_at: int, list_of_N: Int32[np.ndarray, " N"]
    ) -> PositionLists:
        """The lists as they were saved."""
        lists = cls(centroids_CD, made_at)
        lists._put(list_of_N)
        return lists

    def __len__(self) -> int:
        return len(self._list_of)

    def list_of(self, size: int) -> Int32[np.ndarray, " N"]:
        """The list of each of the first positions."""
        return np.array(self._list_of[:size], np.int32)

    def add(self, keys_ND: Float32[np.ndarray, "N D"]) -> None:
        """Adds the next positions, each to the list of the nearest centroid."""
        scores_NC = self._norms_C - 2 * (keys_ND @ self.centroids_CD.T)
        self._put(scores_NC.argmin(axis=1).astype(np.int32))

    def crop(self, size: int) -> None:
        """Keeps the first positions alone."""
        while len(self._list_of) > size:
            self._rows[self._list_of.pop()].pop()

    def copy(self, size: int) -> PositionLists:
        """Lists of their own with the first positions."""
        return PositionLists.restored(self.centroids_CD, self.made_at, self.list_of(size))

    def rows_near(self, query_D: Float32[np.ndarray, " D"]) -> Int64[np.ndarray, " N"]:
        """The positions in the lists nearest to a key, in ascending order."""
        scores_C = self._norms_C - 2 * (self.centroids_CD @ query_D)
        nearest: list[array[int]] = []
        count = 0
        for number in np.argsort(scores_C, kind="stable").tolist():
            nearest.append(self._rows[number])
            count += len(nearest[-1])
            if count >= ROWS_READ:
                break
        rows_N = np.concatenate([np.frombuffer(each, np.int64) for each in nearest])
        rows_N.sort()
        return rows_N

    def _put(self, list_of_N: Int32[np.ndarray, " N"]) -> None:
        for position, number in enumerate(list_of_N.tolist(), start=len(self._list_of)):
            self._list_of.append(number)
            self._rows[number].append(position)
