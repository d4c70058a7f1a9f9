"""Keys -> neighbors with their weights in p_kNN, and the weight λ of p_kNN in the mixture.

A retriever searches one datastore or several at once. The neighbors of several stores share one softmax, in which a
store of weight w counts as if each of its entries were stored w times. With all weights 1, the result equals that of
one store with all the documents. Datastores without keys are not searched: they give drafts.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, TypeAlias, TypeVar

import numpy as np
from jaxtyping import Float32, Int64

from memlm.api.generation import Neighbor
from memlm.api.params import RetrievalParams
from memlm.data.windows import WindowSize
from memlm.errors import InvalidInput, NotFound, Unavailable
from memlm.index.neighbors import Neighbors
from memlm.index.store.exclusion import Exclusion
from memlm.index.store.filters import DocumentFilter
from memlm.index.store.snapshot import Snapshot
from memlm.retrieval.interpolation import neighbor_logweights
from memlm.retrieval.knn import KnnSettings
from memlm.retrieval.passages import SHORTEST_PASSAGE, Passage
from memlm.retrieval.result import RetrievalResult
from memlm.retrieval.store import ModelStore

# Takes a snapshot, the ids of N entries and a count C. Returns C tokens beside each entry, (N, C).
TokensAround: TypeAlias = Callable[[Snapshot, np.ndarray, int], np.ndarray]
_T = TypeVar("_T")


@dataclass(frozen=True, eq=False, slots=True, weakref_slot=True)
class Retriever:
    """Datastores and how their neighbors are found and weighed.

    Retrievers are compared by identity: sequences of one batch that share a retriever share a search. `settings` are
    equal for two that would give equal results.

    `draft_stores` have no keys: they give passages and never neighbors. Without other `stores`, nothing is retrieved.
    `views` are those of `stores`, and behind them those of `draft_stores`.

    One that is `excluding` documents sees the stores as if these were deleted. It is `shared` with all others that
    differ in nothing else: one search with `views` finds the neighbors of all.
    """

    stores: tuple[ModelStore, ...]
    weights: tuple[float, ...]
    knn: KnnSettings
    draft_stores: tuple[ModelStore, ...] = ()
    exclusion: Exclusion | None = None
    unrestricted: Retriever | None = None  # the one that this one is with an exclusion

    @classmethod
    def of(cls, stores: Sequence[ModelStore], params: RetrievalParams) -> Retriever:
        """Settings are made by `KnnSettings.of`, and documents are excluded by `excluding`. Raises InvalidInput for a
        weight of a store without keys.
        """
        draft_stores = tuple(store for store in stores if not store.snapshot.is_keyed)
        searched = tuple(store for store in stores if store not in draft_stores)
        weights = _weights_of(searched, draft_stores, params)
        knn = KnnSettings.of(searched, params) if searched else KnnSettings()
        return cls(searched, weights, knn, draft_stores)

    def excluding(self, names: Sequence[str], as_of: str | None = None) -> Retriever:
        """The retriever without some documents: ids, folders of ids, or globs, and without those that do not hold at
        the time `as_of`. May run in another thread.

        Raises NotFound for a name that stands for no document of any of its stores.
        """
        if not names and as_of is None:
            return self
        exclusion = exclusion_of(names, self.all_stores, as_of)
        return replace(self, exclusion=exclusion, unrestricted=self.shared)

    @property
    def shared(self) -> Retriever:
        """The retriever that excludes nothing. It searches for all that differ in their exclusions alone."""
        return self.unrestricted or self

    @property
    def all_stores(self) -> tuple[ModelStore, ...]:
        """The stores that are searched, and behind them those without keys."""
        return self.stores + self.draft_stores

    @property
    def views(self) -> tuple[Snapshot, ...]:
        """The snapshots in use of all stores, without the excluded documents."""
        snapshots = tuple(store.snapshot for store in self.all_stores)
        return snapshots if self.exclusion is None else tuple(map(self.exclusion.view_of, snapshots))

    @property
    def keyed_share(self) -> float:
        """The share of the stores' entries that have keys. 0 of none."""
        views = self.views
        return sum(view.keyed.num_entries for view in views) / max(1, sum(view.num_entries for view in views))

    @property
    def settings(self) -> tuple[Any, ...]:
        """The fields' values, hashable."""
        return tuple(getattr(self, field.name) for field in fields(self))

    @property
    def window_size(self) -> WindowSize:
        """The windows of the first searched store, which a text is read in to be scored."""
        spec = self.stores[0].snapshot.manifest.spec
        return WindowSize(spec.context, spec.stride)

    @property
    def name(self) -> str:
        """The names of the stores that are searched."""
        return " + ".join(store.name for store in self.stores)

    def is_needed(self, num_shown: int) -> bool:
        """Whether neighbors can change the distribution, or are part of an answer that shows `num_shown` a token."""
        return self.knn.changes_output or bool(self.stores and num_shown)

    def search(
        self,
        keys_QD: Float32[np.ndarray, "Q D"],
        max_logprobs_Q: Float32[np.ndarray, " Q"] | None = None,
        views: Sequence[tuple[Snapshot, ...]] = (),
        only: DocumentFilter | None = None,
        *,
        may_be_partial: bool = False,
    ) -> RetrievalResult:
        """Finds the neighbors of Q keys and weighs them.

        `max_logprobs_Q` are the model's largest log-probabilities. Without them λ does not adapt. `views`, one for each
        key, are those of the retriever that it is for. `only` chooses documents of equal views. Raises Unavailable
        where a shard of a store does not answer, unless its shards may be missing and the result `may_be_partial`,
        because the caller tells of it.
        """
        begin_s = time.perf_counter()
        views = views or [self.views] * len(keys_QD)
        found = [
            store.search([each[number] for each in views], keys_QD, self.knn.k, nprobe=self.knn.nprobe, only=only)
            for number, store in enumerate(self.stores)
        ]
        result = self._weighed(found[0], max_logprobs_Q) if len(found) == 1 else self._union(found)
        self._count(result)
        if result.share < 1 and not may_be_partial:
            raise Unavailable(
                f"a shard does not answer, and only {result.share:.1%} of the entries of {self.name!r} could be"
                " searched; this answer has no place to say so: try again in a moment"
            )
        return replace(result, took_ms=1000 * (time.perf_counter() - begin_s))

    def tokens_before(
        self, ids_E: Int64[np.ndarray, " E"], stores_E: Int64[np.ndarray, " E"], count: int
    ) -> Int64[np.ndarray, "E C"]:
        """The tokens before each of E entries in its document, given the number of its store. -1 before the first."""
        return self._around(Snapshot.tokens_before, ids_E, stores_E, count)

    def tokens_after(
        self, ids_E: Int64[np.ndarray, " E"], stores_E: Int64[np.ndarray, " E"], count: int
    ) -> Int64[np.ndarray, "E C"]:
        """The tokens after each of E entries in its document, given the number of its store. -1 past the last."""
        return self._around(Snapshot.tokens_after, ids_E, stores_E, count)

    def _around(
        self, tokens_around: TokensAround, ids_E: Int64[np.ndarray, " E"], stores_E: Int64[np.ndarray, " E"], count: int
    ) -> Int64[np.ndarray, "E C"]:
        around_EC = np.full((len(ids_E), count), -1)
        for number, store in enumerate(self.stores):
            if (mask_E := stores_E == number).any():
                around_EC[mask_E] = tokens_around(store.snapshot, ids_E[mask_E], count)
        return around_EC

    def passage_after(self, text: Sequence[int]) -> Passage | None:
        """Finds the longest end of a text, of 3 to 16 tokens, that stands in a document of the views and goes on there.
        The first of several as long ones counts. Needs some 0.1 ms for each 4 million tokens.
        """
        best: Passage | None = None
        for store, view in zip(self.all_stores, self.views, strict=True):
            least = SHORTEST_PASSAGE if best is None else best.length + 1
            best = store.passage_after(view, text, least) or best
        return best

    def follow(self, passage: Passage, tokens: Sequence[int]) -> Passage | None:
        """The passage behind further tokens of the text, without a search. None if its document goes on with others, or
        was deleted meanwhile.
        """
        is_there = any(passage.segment is segment for view in self.views for segment in view.segments)
        return passage.after(tokens) if is_there else None

    def describe(self, result: RetrievalResult, count: int) -> tuple[Neighbor, ...]:
        """Describes the first `count` neighbors of a result of one key: document, line, and the text around each."""
        described = self.describe_columns(result, count)
        return tuple(described[column] for column in sorted(described))

    def describe_columns(self, result: RetrievalResult, count: int) -> dict[int, Neighbor]:
        """Describes those of the first `count` neighbors of a key that come from datastores, by their columns."""
        near = result.neighbors
        parts = (near.ids_QK, near.distances_QK, result.logweights_QK, near.values_QK)
        ids_K, distances_K, logweights_K, values_K = (part_QK[0, :count] for part_QK in parts)
        described: dict[int, Neighbor] = {}
        for number, store in enumerate(self.stores):
            columns = np.flatnonzero((result.stores_QK[0, :count] == number) & (ids_K >= 0))
            neighbors = store.describe(ids_K[columns], distances_K[columns], logweights_K[columns], values_K[columns])
            described |= dict(zip(columns.tolist(), neighbors, strict=True))
        return described

    def _weighed(self, found: Neighbors, max_logprobs_Q: Float32[np.ndarray, " Q"] | None) -> RetrievalResult:
        """The neighbors in the only store."""
        logweights_QK, lams_Q = self.knn.weigh(found, max_logprobs_Q)
        return RetrievalResult(found, logweights_QK, lams_Q, np.zeros_like(found.ids_QK), shares_Q=found.shares_Q)

    def _union(self, parts: Sequence[Neighbors]) -> RetrievalResult:
        """Finds the k entries of largest weight in one softmax over all stores. A store's weight is a shift of its
        distances by -temperature log(weight).
        """
        shifts = [np.float32(-self.knn.temperature * np.log(weight)) for weight in self.weights]
        shifted_QM = np.concatenate(
            [part.distances_QK + shift for part, shift in zip(parts, shifts, strict=True)], axis=1
        )
        order_QK = np.argsort(shifted_QM, axis=1, kind="stable")[:, : self.knn.k]
        arrays = [
            (part.distances_QK, part.ids_QK, part.values_QK, np.full_like(part.ids_QK, number))
            for number, part in enumerate(parts)
        ]
        distances_QK, ids_QK, values_QK, stores_QK = (
            np.take_along_axis(np.concatenate(each, axis=1), order_QK, axis=1) for each in zip(*arrays, strict=True)
        )
        logweights_QK = neighbor_logweights(np.take_along_axis(shifted_QM, order_QK, axis=1), self.knn.temperature)
        neighbors = Neighbors(distances_QK, ids_QK, values_QK)
        partial = [part.shares_Q for part in parts if part.shares_Q is not None]
        shares_Q = np.minimum.reduce(partial) if partial else None
        lams_Q = np.full(len(order_QK), self.knn.lam)
        return RetrievalResult(neighbors, logweights_QK, lams_Q, stores_QK, shares_Q=shares_Q)

    def _count(self, result: RetrievalResult) -> None:
        """Counts the contexts of each store, with its weights in their mixtures."""
        if len(self.stores) == 1:
            weights = [float(result.lams_Q[result.neighbors.ids_QK[:, 0] >= 0].sum())]
        else:
            shares_QK = np.exp(result.logweights_QK)
            shares_S = np.bincount(result.stores_QK.ravel(), shares_QK.ravel(), minlength=len(self.stores))
            weights = (self.knn.lam * shares_S).tolist()
        for store, weight in zip(self.stores, weights, strict=True):
            store.counter.add_contexts(len(result.lams_Q), weight)


def _weights_of(
    stores: Sequence[ModelStore], draft_stores: Sequence[ModelStore], params: RetrievalParams
) -> tuple[float, ...]:
    """The weight of each searched store. Raises InvalidInput for one of a store without keys."""
    weight_of = {each.name: each.weight for each in params.stores}
    for store in draft_stores:
        if weight_of.get(store.name, 1.0) != 1.0:
            raise InvalidInput(
                f"the datastore {store.name!r} has no keys, so it is not mixed in and has no weight; leave its weight"
                " out",
                field="stores",
            )
    return tuple(weight_of.get(store.name, 1.0) for store in stores)


def exclusion_of(names: Sequence[str], stores: Sequence[ModelStore], as_of: str | None = None) -> Exclusion:
    """Makes the exclusion of documents, and of those that do not hold at a time. Raises NotFound for a name that stands
    for no document of any store.
    """
    exclusion = Exclusion(names, as_of)
    for store in stores:
        exclusion.view_of(store.snapshot)
    if exclusion.unknown:
        name, searched = exclusion.unknown[0], " and ".join(repr(store.name) for store in stores)
        raise NotFound(
            f"no document {name!r} to exclude in the datastore {searched}; expected an id, a folder of ids or a glob"
            " (`memlm index search` shows ids)",
            kind="document",
            name=name,
        )
    return exclusion
