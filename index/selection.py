"""Selects the smallest index that finds enough of the exact neighbors, by trials on a sample of the store's keys.

A trial finds the neighbors of stored positions in other documents than their own, exactly and through an index. Two
numbers compare them: recall@k, the share of the exact neighbors that were found, and the softmax mass, the share of
p_kNN that they carry, at half the median distance to the nearest neighbor. If RAM is limited, smaller codes are tried
in turn, re-ranked by the stored keys where these are kept.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from jaxtyping import Bool, Float16, Float32, Int64

from memlm.base.progress import Progress, silent
from memlm.errors import InvalidInput
from memlm.index.arrays import RowSubset, rows_of
from memlm.index.exact import exact_neighbors
from memlm.index.factory import FLAT
from memlm.index.ivf import (
    PROBES,
    VALUE_BITS,
    Ivf,
    add,
    code_bytes,
    is_lossless,
    is_searched_exactly,
    lists_for,
    nlist_of,
    train_ivf,
)
from memlm.index.neighbors import Neighbors

NUM_QUERIES, TRIAL_K, SPARE = 128, 32, 4
SAMPLE_ROWS = 200_000
RERANKS = (1, 2, 4, 8)
ID_BYTES = 8


@dataclass(frozen=True, slots=True)
class IndexTrial:
    """The result of a trial of an index. `bytes_per_entry` counts RAM of a search. The errors are standard errors over
    queries.
    """

    index: str
    bytes_per_entry: int
    nprobe: int
    rerank: int
    recall: float
    recall_error: float
    softmax_mass: float
    softmax_mass_error: float

    def __str__(self) -> str:
        """Formats the result as one line."""
        again = f", {self.rerank} times k re-ranked" if self.rerank else ""
        return (
            f"{self.index}: {self.bytes_per_entry:,.0f} bytes an entry, {self.nprobe} lists{again};"
            f" softmax mass {self.softmax_mass:.4f} ± {self.softmax_mass_error:.4f}, recall {self.recall:.3f}"
        )


@dataclass(frozen=True, slots=True)
class TrialQueries:
    """Stored positions with their exact neighbors in other documents. `keys_QKD` are the keys of the neighbors."""

    queries_QD: Float32[np.ndarray, "Q D"]
    documents_Q: Int64[np.ndarray, " Q"]
    exact: Neighbors
    keys_QKD: Float16[np.ndarray, "Q K D"]
    temperature: float
    starts: Int64[np.ndarray, " E"]

    @classmethod
    def of(
        cls,
        keys_ND: Float16[np.ndarray, "N D"] | RowSubset,
        values_N: np.ndarray,
        starts: np.ndarray,
        *,
        seed: int,
    ) -> TrialQueries:
        """Samples keys and finds their exact neighbors. Ids are rows on disk, as in `starts`."""
        rng = np.random.default_rng(seed + 1)
        rows_Q = np.sort(rng.choice(len(keys_ND), min(NUM_QUERIES, len(keys_ND)), replace=False))
        queries_QD = keys_ND[rows_Q].astype(np.float32)
        documents_Q = np.searchsorted(starts, rows_of(keys_ND, rows_Q), side="right") - 1
        near = exact_neighbors(queries_QD, keys_ND, values_N, min(SPARE * TRIAL_K, len(keys_ND)))
        found = Neighbors(near.distances_QK, rows_of(keys_ND, near.ids_QK), near.ids_QK)
        exact = _elsewhere(found, documents_Q, starts)
        nearest_Q = exact.distances_QK[:, 0]
        nearest_Q = nearest_Q[np.isfinite(nearest_Q) & (nearest_Q > 0)]
        temperature = float(np.median(nearest_Q)) / 2 if len(nearest_Q) else 1.0
        keys_QKD = keys_ND[np.maximum(exact.values_QK, 0).ravel()].reshape(*exact.ids_QK.shape, -1)
        return cls(queries_QD, documents_Q, exact, keys_QKD, temperature, starts)

    def elsewhere(self, found: Neighbors) -> Neighbors:
        """Keeps the neighbors in other documents than the query's own. With a single document, keeps all."""
        return _elsewhere(found, self.documents_Q, self.starts)

    def evaluate(self, index: Ivf, nprobe: int, rerank: int) -> IndexTrial:
        """Compares an index with exact search, for one setting."""
        k = min(SPARE * TRIAL_K, index.ntotal)
        found = self.elsewhere(index.search(self.queries_QD, k, nprobe, rerank))
        recall_Q, mass_Q = agreement(found, self.exact, self.temperature)
        return IndexTrial(
            index.factory, code_bytes(index.factory, index.dim) + ID_BYTES, nprobe, rerank,
            *mean_and_error(recall_Q), *mean_and_error(mass_Q),
        )  # fmt: skip

    def tune_nprobe(self, index: Ivf, target: float) -> IndexTrial:
        """Finds the cheapest setting that finds `target` of the softmax mass, or the setting that finds most."""
        rerank = 0 if is_lossless(index.factory) or index.keys_ND is None else RERANKS[-1]
        best: IndexTrial | None = None
        probes, enough = self._worth_trying(index, target)
        for nprobe in probes:
            tried = self.evaluate(index, nprobe, rerank)
            if best is None or tried.softmax_mass > best.softmax_mass:
                best = tried
            if tried.softmax_mass >= enough:
                break
        assert best is not None
        for fewer in RERANKS[:-1] if rerank else ():
            tried = self.evaluate(index, best.nprobe, fewer)
            if tried.softmax_mass >= min(target, best.softmax_mass):
                return tried
        return best

    def _worth_trying(self, index: Ivf, target: float) -> tuple[list[int], float]:
        """The numbers of lists to try, ascending, and the mass to reach. A number is left out if its lists hold less of
        the exact neighbors' mass, because codes find only entries of probed lists. The mass is the target, or the
        most that any number holds.
        """
        probes = sorted({min(nprobe, index.nlist) for nprobe in PROBES})
        places_QK = index.places_of_lists(self.queries_QD, self.keys_QKD, probes[-1])
        shares = (_shares(places_QK < nprobe, self.exact, self.temperature) for nprobe in probes)
        held = [mean_and_error(mass_Q)[0] for _, mass_Q in shares]
        enough = min(target, max(held))
        return [nprobe for nprobe, mass in zip(probes, held, strict=True) if mass >= enough], enough


def _elsewhere(found: Neighbors, documents_Q: Int64[np.ndarray, " Q"], starts: Int64[np.ndarray, " E"]) -> Neighbors:
    if len(starts) <= 2:
        return found.first(min(TRIAL_K, found.ids_QK.shape[1]))
    documents_QK = np.searchsorted(starts, np.maximum(found.ids_QK, 0), side="right") - 1
    kept = found.keep((found.ids_QK >= 0) & (documents_QK != documents_Q[:, None]))
    return kept.first(min(TRIAL_K, found.ids_QK.shape[1]))


def agreement(
    found: Neighbors, exact: Neighbors, temperature: float
) -> tuple[Float32[np.ndarray, " Q"], Float32[np.ndarray, " Q"]]:
    """Recall@k and the share of the exact softmax mass that was found, for each query that has a neighbor."""
    pairs = zip(exact.ids_QK, found.ids_QK, strict=True)
    return _shares(np.stack([np.isin(exact_K, found_K) for exact_K, found_K in pairs]), exact, temperature)


def _shares(
    hit_QK: Bool[np.ndarray, "Q K"], exact: Neighbors, temperature: float
) -> tuple[Float32[np.ndarray, " R"], Float32[np.ndarray, " R"]]:
    any_Q = np.isfinite(exact.distances_QK[:, 0])
    distances_RK, there_RK = exact.distances_QK[any_Q], exact.ids_QK[any_Q] >= 0
    hit_RK = hit_QK[any_Q] & there_RK
    beyond_RK = np.where(there_RK, distances_RK, np.inf) - distances_RK[:, :1]
    weights_RK = np.exp(-beyond_RK / np.float32(temperature))
    mass_R = np.where(hit_RK, weights_RK, 0).sum(axis=1) / weights_RK.sum(axis=1)
    return (hit_RK.sum(axis=1) / there_RK.sum(axis=1)).astype(np.float32), mass_R.astype(np.float32)


def mean_and_error(each_Q: Float32[np.ndarray, " Q"]) -> tuple[float, float]:
    """The mean and its standard error. Without values, 1 and 0."""
    if not len(each_Q):
        return 1.0, 0.0
    return float(each_Q.mean()), float(each_Q.std(ddof=min(1, len(each_Q) - 1)) / np.sqrt(len(each_Q)))


def select_index(
    keys_ND: Float16[np.ndarray, "N D"] | RowSubset,
    values_N: np.ndarray,
    starts: Int64[np.ndarray, " E"],
    *,
    target: float,
    max_ram_bytes: int,
    keep_keys: bool,
    seed: int,
    progress: Progress,
) -> tuple[str, list[IndexTrial]]:
    """Selects the index with the smallest codes that finds `target` of the softmax mass within `max_ram_bytes`, or else
    the index that finds most. Returns its factory string and the results of all trials.

    Raises InvalidInput, with the smallest sufficient size, if no index fits.
    """
    entries, dim = keys_ND.shape
    if is_searched_exactly(entries, dim) and entries * 4 * dim <= max_ram_bytes:
        return FLAT, []
    rows = np.sort(np.random.default_rng(seed).choice(entries, min(SAMPLE_ROWS, entries), replace=False))
    sample_ND, sample_N = np.asarray(keys_ND[rows]), np.asarray(values_N[rows])
    documents_N = np.searchsorted(starts, rows_of(keys_ND, rows), side="right") - 1
    ends = np.flatnonzero(np.diff(documents_N)) + 1
    trial = TrialQueries.of(sample_ND, sample_N, np.array([0, *ends, len(rows)]), seed=seed)
    lists, tried = lists_for(entries), []
    fitting = codes_within(max_ram_bytes, entries, dim)
    for number, code in enumerate(fitting):
        progress("try indexes", number, len(fitting))
        small = f"IVF{lists_for(len(rows))},{code}"
        index = _filled(small, sample_ND, sample_N, keep_keys=keep_keys, seed=seed)
        tried.append(trial.tune_nprobe(index, target))
        if tried[-1].softmax_mass >= target:
            break
    progress("try indexes", len(fitting), len(fitting))
    best = next((each for each in tried if each.softmax_mass >= target), max(tried, key=lambda each: each.softmax_mass))
    return f"IVF{lists}," + best.index.partition(",")[2], tried


def codes_within(max_ram_bytes: int, entries: int, dim: int) -> list[str]:
    """The codes of all indexes that fit into `max_ram_bytes`, smallest first. Raises InvalidInput, with the smallest
    sufficient size, if there are none.
    """
    lists = lists_for(entries)
    codes = sorted(_codes(dim), key=lambda code: code_bytes(f"IVF1,{code}", dim))
    fitting = [code for code in codes if _memory(f"IVF{lists},{code}", entries, dim) <= max_ram_bytes]
    if not fitting and not (is_searched_exactly(entries, dim) and entries * 4 * dim <= max_ram_bytes):
        least = _memory(f"IVF{lists},{codes[0]}", entries, dim)
        raise InvalidInput(
            f"max_ram_bytes is {max_ram_bytes:,}; the smallest index of {entries:,} entries takes {least:,}: give that,"
            " or fewer documents",
            field="max_ram_bytes",
        )
    return fitting


def _codes(dim: int) -> list[str]:
    """The codes worth a trial, from precise to coarse."""
    return ["SQfp16", "SQ8", "RaBitQ", *(f"PQ{dim // width}" for width in (2, 4, 8) if dim % width == 0)]


def _memory(factory: str, entries: int, dim: int) -> int:
    """Bytes that searching an index wants in memory: codes, ids and the centroids of the lists."""
    return entries * (code_bytes(factory, dim) + ID_BYTES) + nlist_of(factory) * dim * 4


def _filled(
    factory: str, keys_ND: Float16[np.ndarray, "N D"], values_N: np.ndarray, *, keep_keys: bool, seed: int
) -> Ivf:
    """A small index in RAM."""
    index = train_ivf(factory, keys_ND, seed=seed, progress=silent)
    add(index, keys_ND, (np.arange(len(keys_ND)) << VALUE_BITS) | values_N.astype(np.int64))
    return Ivf(index, factory, keys_ND if keep_keys else None)
