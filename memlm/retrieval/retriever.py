"""Keys -> what memory says to them: neighbors, the logarithms of their weights in p_kNN, and how loudly they speak.

One datastore is asked, or several at once: then all neighbors share one softmax, in which a store of weight w counts
as if each of its entries stood there w times (w = 1 for all: the same as one store of all their documents).

Two ways not to search. Where the model is sure enough, memory is not asked (arXiv 2109.04212, section 4.1). And where
enough of the last neighbors named the token that then came, the entries that follow them in their documents are taken
in place of a search (RetoMaton, arXiv 2201.12431, section 3).
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from jaxtyping import Bool, Float, Float32, Int64

from memlm.api.generation import Neighbor
from memlm.api.params import RetrievalParams
from memlm.errors import InvalidInput
from memlm.index.neighbors import Neighbors
from memlm.retrieval.adaptive import AdaptiveLam, features_of
from memlm.retrieval.gate import SpalmGate, load_gate
from memlm.retrieval.interpolation import neighbor_logweights
from memlm.retrieval.store import ModelStore

NO_POINTERS = np.empty(0, np.int64)


@dataclass(frozen=True, slots=True)
class RetrievalResult:
    """What Q keys brought back: neighbors, the loudest first, the logarithms of their weights in p_kNN, how loudly
    they speak, which store each is of, and whether an index was searched. Where memory was not asked there are none.
    `took_ms` is how long all of it took.
    """

    neighbors: Neighbors
    logweights_QK: Float32[np.ndarray, "Q K"]
    lams_Q: Float[np.ndarray, " Q"]
    stores_QK: Int64[np.ndarray, "Q K"]
    searched_Q: Bool[np.ndarray, " Q"]
    took_ms: float = 0.0

    @classmethod
    def joined(cls, rows: Sequence[RetrievalResult]) -> RetrievalResult:
        """What several keys brought back, one after another."""
        found = [row.neighbors for row in rows]
        parts: list[list[np.ndarray]] = [
            [each.distances_QK for each in found], [each.ids_QK for each in found], [each.values_QK for each in found],
            [row.logweights_QK for row in rows], [row.lams_Q for row in rows], [row.stores_QK for row in rows],
            [row.searched_Q for row in rows],
        ]  # fmt: skip
        distances_QK, ids_QK, values_QK, logweights_QK, lams_Q, stores_QK, searched_Q = map(np.concatenate, parts)
        near, took_ms = Neighbors(distances_QK, ids_QK, values_QK), sum(row.took_ms for row in rows)
        return cls(near, logweights_QK, lams_Q, stores_QK, searched_Q, took_ms)

    def row(self, number: int) -> RetrievalResult:
        """What one of the keys brought back."""
        one = slice(number, number + 1)
        found = self.neighbors
        parts: list[np.ndarray] = [found.distances_QK[one], found.ids_QK[one], found.values_QK[one]]
        rest = (self.logweights_QK[one], self.lams_Q[one], self.stores_QK[one], self.searched_Q[one], self.took_ms)
        return RetrievalResult(Neighbors(*parts), *rest)


@dataclass(frozen=True, slots=True)
class Retriever:
    """Datastores and how to search them: k neighbors, softmax temperature, weight lam in the mixture, and optionally
    the gate that mixes the neighbors into the final state. `min_pointers` pointers replace a search. Nothing is
    searched where the model's largest log-probability is `skip_retrieval_above` or more.
    """

    stores: tuple[ModelStore, ...]
    weights: tuple[float, ...]
    k: int
    lam: float
    temperature: float
    nprobe: int | None
    gate: SpalmGate | None = None
    adaptive: AdaptiveLam | None = None
    skip_retrieval_above: float | None = None
    min_pointers: int | None = None

    @classmethod
    def of(cls, stores: Sequence[ModelStore], params: RetrievalParams) -> Retriever:
        """A request's settings. What it leaves open comes from the first store's defaults; what tuning found beyond
        one lam is for whoever asks one store for nothing else.

        Raises InvalidInput where pointers of several stores are to be followed, or of one without its keys.
        """
        first, defaults = stores[0], stores[0].datastore.defaults
        weight_of = {each.name: each.weight for each in params.stores}
        lam = 0.0 if params.spalm else defaults.lam  # the gate already mixes: interpolation comes only when asked for
        as_tuned = len(stores) == 1 and not params.spalm and params.lam is params.k is params.knn_temperature is None
        adaptive = AdaptiveLam.of(defaults.adaptive) if as_tuned and defaults.adaptive is not None else None
        min_pointers = defaults.min_pointers if as_tuned and first.datastore.has_keys else None
        if params.min_pointers is not None:
            min_pointers = params.min_pointers or None
        if params.min_pointers:
            _check_pointers(stores)
        return cls(
            stores=tuple(stores),
            weights=tuple(weight_of.get(store.name, 1.0) for store in stores),
            k=defaults.k if params.k is None else params.k,
            lam=lam if params.lam is None else float(params.lam),
            temperature=defaults.temperature if params.knn_temperature is None else params.knn_temperature,
            nprobe=defaults.nprobe if params.nprobe is None else params.nprobe,
            gate=load_gate(first.model_folder) if params.spalm else None,
            adaptive=adaptive,
            skip_retrieval_above=defaults.skip_retrieval_above if as_tuned else None,
            min_pointers=min_pointers,
        )

    @property
    def name(self) -> str:
        """The stores' names."""
        return " + ".join(store.name for store in self.stores)

    @property
    def needs_max_logprob(self) -> bool:
        """Whether searching goes by how sure the model is."""
        return self.adaptive is not None or self.skip_retrieval_above is not None

    def search(
        self,
        keys_QD: Float32[np.ndarray, "Q D"],
        max_logprobs_Q: Float32[np.ndarray, " Q"] | None = None,
        pointers: Sequence[Int64[np.ndarray, " _"]] | None = None,
    ) -> RetrievalResult:
        """The neighbors of some keys, with their weights. Given the model's largest log-probability at each, lam may
        differ from position to position, and those where the model is sure enough are not asked about, if the store
        was tuned so; given pointers for each (`pointers_after`), they may take the place of a search.
        """
        begin_s = time.perf_counter()
        several = len(self.stores) > 1
        retrieved = self._search_union(keys_QD) if several else self._search_one(keys_QD, max_logprobs_Q, pointers)
        return replace(retrieved, took_ms=1000 * (time.perf_counter() - begin_s))

    def _search_one(
        self,
        keys_QD: Float32[np.ndarray, "Q D"],
        max_logprobs_Q: Float32[np.ndarray, " Q"] | None,
        pointers: Sequence[Int64[np.ndarray, " _"]] | None,
    ) -> RetrievalResult:
        found, searched_Q = self._found(keys_QD, max_logprobs_Q, pointers)
        logweights_QK = neighbor_logweights(found.distances_QK, self.temperature)
        lams_Q = np.full(len(keys_QD), self.lam)
        if self.adaptive and max_logprobs_Q is not None:
            lams_Q = self.adaptive.lams(features_of(found, logweights_QK, self.temperature, max_logprobs_Q)).astype(
                np.float64
            )
        return RetrievalResult(found, logweights_QK, lams_Q, np.zeros_like(found.ids_QK), searched_Q)

    def search_in_order(
        self,
        keys_ND: Float32[np.ndarray, "N D"],
        max_logprobs_N: Float32[np.ndarray, " N"],
        targets_N: Int64[np.ndarray, " N"],
        pointers: Int64[np.ndarray, " P"],
    ) -> tuple[RetrievalResult, Int64[np.ndarray, " M"]]:
        """The same for positions of a text that follow each other, and the pointers behind the last; with pointers to
        follow, they are asked about one by one.
        """
        if not self.min_pointers:
            return self.search(keys_ND, max_logprobs_N), pointers
        rows = []
        for place, target in enumerate(targets_N.tolist()):
            one = slice(place, place + 1)
            rows.append(self.search(keys_ND[one], max_logprobs_N[one], [pointers]))
            pointers = self.pointers_after(rows[-1], target)
        return RetrievalResult.joined(rows), pointers

    def pointers_after(self, found: RetrievalResult, token: int) -> Int64[np.ndarray, " P"]:
        """The entries that follow those that named a token, given what one key brought back; none where nobody is to
        follow them.
        """
        if not self.min_pointers:
            return NO_POINTERS
        named_K = found.neighbors.values_QK[0] == token
        return self.stores[0].datastore.successors(found.neighbors.ids_QK[0, named_K])

    def describe(self, found: RetrievalResult, most: int) -> tuple[Neighbor, ...]:
        """Where the first `most` neighbors stand, given what one key brought back: document, line, and the text
        around it.
        """
        near = found.neighbors
        parts = (near.ids_QK, near.distances_QK, found.logweights_QK, near.values_QK)
        ids_K, distances_K, logweights_K, values_K = (part_QK[0, :most] for part_QK in parts)
        told: dict[int, Neighbor] = {}
        for number, store in enumerate(self.stores):
            mine = np.flatnonzero((found.stores_QK[0, :most] == number) & (ids_K >= 0))
            rows = store.describe(ids_K[mine], distances_K[mine], logweights_K[mine], values_K[mine])
            told |= dict(zip(mine.tolist(), rows, strict=True))
        return tuple(told[place] for place in sorted(told))

    def _found(
        self,
        keys_QD: Float32[np.ndarray, "Q D"],
        max_logprobs_Q: Float32[np.ndarray, " Q"] | None,
        pointers: Sequence[Int64[np.ndarray, " _"]] | None,
    ) -> tuple[Neighbors, Bool[np.ndarray, " Q"]]:
        datastore, asked_Q = self.stores[0].datastore, np.ones(len(keys_QD), bool)
        found = Neighbors.none(len(keys_QD), self.k)
        if self.skip_retrieval_above is not None and max_logprobs_Q is not None:
            asked_Q &= max_logprobs_Q < self.skip_retrieval_above
        if self.min_pointers and pointers is not None:
            for row in np.flatnonzero(asked_Q).tolist():
                there = datastore.live(pointers[row])
                if len(there) >= self.min_pointers:
                    _put(datastore.nearest_among(keys_QD[row : row + 1], there, self.k), found, np.array([row]))
                    asked_Q[row] = False
        if asked_Q.all():
            return datastore.search(keys_QD, self.k, nprobe=self.nprobe), asked_Q
        if asked_Q.any():
            _put(datastore.search(keys_QD[asked_Q], self.k, nprobe=self.nprobe), found, np.flatnonzero(asked_Q))
        return found, asked_Q

    def _search_union(self, keys_QD: Float32[np.ndarray, "Q D"]) -> RetrievalResult:
        """The k that are loudest in one softmax over all stores: a weight is so much less distance."""
        parts = [store.datastore.search(keys_QD, self.k, nprobe=self.nprobe) for store in self.stores]
        shifts = [np.float32(-self.temperature * np.log(weight)) for weight in self.weights]
        heard_QM = np.concatenate(
            [part.distances_QK + shift for part, shift in zip(parts, shifts, strict=True)], axis=1
        )
        order_QK = np.argsort(heard_QM, axis=1, kind="stable")[:, : self.k]
        arrays: list[list[np.ndarray]] = [
            [part.distances_QK for part in parts], [part.ids_QK for part in parts], [part.values_QK for part in parts],
            [np.full_like(part.ids_QK, number) for number, part in enumerate(parts)],
        ]  # fmt: skip
        distances_QK, ids_QK, values_QK, stores_QK = (
            np.take_along_axis(np.concatenate(each, axis=1), order_QK, axis=1) for each in arrays
        )
        logweights_QK = neighbor_logweights(np.take_along_axis(heard_QM, order_QK, axis=1), self.temperature)
        found = Neighbors(distances_QK, ids_QK, values_QK)
        return RetrievalResult(
            found, logweights_QK, np.full(len(keys_QD), self.lam), stores_QK, np.ones(len(keys_QD), bool)
        )


def _check_pointers(stores: Sequence[ModelStore]) -> None:
    if len(stores) > 1:
        raise InvalidInput(
            "pointers are followed within one datastore; name one, or leave min_pointers out", field="min_pointers"
        )
    if not stores[0].datastore.has_keys:
        raise InvalidInput(
            f"the datastore {stores[0].name!r} was built without keeping its keys, which following pointers needs;"
            " leave min_pointers out",
            field="min_pointers",
        )


def _put(some: Neighbors, found: Neighbors, rows_R: Int64[np.ndarray, " R"]) -> None:
    """Writes neighbors into some rows of others, which may be wider."""
    width = some.ids_QK.shape[1]
    found.distances_QK[rows_R, :width] = some.distances_QK
    found.ids_QK[rows_R, :width] = some.ids_QK
    found.values_QK[rows_R, :width] = some.values_QK
