"""The cost model of a datastore: bytes and seconds as sums of physical terms, fitted to measurements of small stores.

A term is a count that the cost is proportional to, such as entries, lists, or bytes of scanned codes. Its coefficient
is the cost of one of them on this machine, and is never negative. A law is fitted by the least squares of its relative
errors, so that a store of 10^5 entries weighs as much as one of 10^7. `divided` spreads a store over machines.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from jaxtyping import Float64

from memlm.errors import InvalidInput

BYTE_TERMS = ("an entry", "a list", "an index")
BUILD_TERMS = ("a build", "an entry", "a number of a centroid compared with an entry")
SEARCH_TERMS = (
    "a search",
    "a probed list",
    "a byte of scanned codes",
    "a scanned byte beyond the cache",
    "a list byte",
)
EXACT = 1e-18  # a sum of squared relative errors that is rounding alone
QUERY_BYTES_PER_NUMBER = 2  # float16, as in `ShardSearch.encode`
NEIGHBOR_BYTES = 16  # float32 distance, int64 id and int32 value, as in `ShardAnswer.encode`

# 0.975 quantiles of Student's t for 1, 2, ... degrees of freedom, for intervals of 95 %.
T_QUANTILES = (
    12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160, 2.145, 2.131, 2.120,
    2.110, 2.101, 2.093, 2.086, 2.080, 2.074, 2.069, 2.064, 2.060, 2.056, 2.052, 2.048, 2.045, 2.042,
)  # fmt: skip
T_BEYOND = 1.960


@dataclass(frozen=True)
class Prediction:
    """A predicted cost with its interval of 95 %."""

    value: float
    low: float
    high: float

    def times(self, factor: float) -> Prediction:
        """The cost of so many, or in another unit."""
        return Prediction(self.value * factor, self.low * factor, self.high * factor)

    def plus(self, more: float) -> Prediction:
        """The cost with a known one added."""
        return Prediction(self.value + more, self.low + more, self.high + more)


@dataclass(frozen=True)
class Law:
    """A fitted law: coefficients of P terms, of which some may be 0.

    `spread` is the standard deviation of the relative errors of the fit. `covariance_PP` is the covariance of the
    coefficients for a spread of 1, and `freedom` the measurements beyond the terms in use. With none, intervals have no
    width, because nothing contradicts the fit.
    """

    names: tuple[str, ...]
    coefficients_P: Float64[np.ndarray, " P"]
    spread: float
    covariance_PP: Float64[np.ndarray, "P P"]
    freedom: int

    def predict(self, terms_P: Float64[np.ndarray, " P"], *, drift: float = 0.0) -> Prediction:
        """The cost for counts of the terms, and an interval of 95 % for a single measurement.

        `drift` is a relative error that the law is known to make at such a distance, beyond the spread of its fit.
        """
        value = float(terms_P @ self.coefficients_P)
        if value <= 0:
            return Prediction(0.0, 0.0, 0.0)
        relative_P = terms_P / value
        variance = self.spread**2 * (1 + float(relative_P @ self.covariance_PP @ relative_P))
        width = math.hypot(t_quantile(self.freedom) * math.sqrt(variance), drift) if self.freedom else drift
        return Prediction(value, value * max(0.0, 1 - width), value * (1 + width))


def t_quantile(freedom: int) -> float:
    """The 0.975 quantile of Student's t. From 31 degrees of freedom on it is that of the normal distribution."""
    return T_QUANTILES[freedom - 1] if freedom <= len(T_QUANTILES) else T_BEYOND


def fit_law(names: Sequence[str], terms_NP: Float64[np.ndarray, "N P"], measured_N: Float64[np.ndarray, " N"]) -> Law:
    """Fits coefficients of at least 0 by the least squares of the relative errors.

    The best coefficients are the plain least squares of the terms that are not 0. There are few terms, so every choice
    of them is tried. Raises InvalidInput without measurements, or with one that is not a positive number.
    """
    if not len(measured_N) or not (np.isfinite(measured_N) & (measured_N > 0)).all():
        raise InvalidInput("a law is fitted to positive costs, and to one at least; measure again", field="measured")
    relative_NP = terms_NP / measured_N[:, None]
    scale_P = np.maximum(np.abs(relative_NP).max(axis=0), np.finfo(float).tiny)
    scaled_NP = relative_NP / scale_P  # columns of one size, because a list byte costs 10^-12 and a search 10^-5
    best: tuple[float, tuple[int, ...], np.ndarray] | None = None
    for count in range(1, min(len(names), len(measured_N)) + 1):
        for chosen in itertools.combinations(range(len(names)), count):
            part_NC = scaled_NP[:, chosen]
            coefficients_C, _, rank, _ = np.linalg.lstsq(part_NC, np.ones(len(measured_N)), rcond=1e-10)
            if rank < count or (coefficients_C < 0).any():
                continue
            error = float(((part_NC @ coefficients_C - 1) ** 2).sum())
            if best is None or error < best[0] - EXACT:  # of several exact fits, the first terms are taken
                best = error, chosen, coefficients_C
    assert best is not None  # a single term that is not 0 fits with a positive coefficient
    error, chosen, coefficients_C = best
    coefficients_P, covariance_PP = np.zeros(len(names)), np.zeros((len(names), len(names)))
    coefficients_P[list(chosen)] = coefficients_C / scale_P[list(chosen)]
    inverse_CC = np.linalg.inv(scaled_NP[:, chosen].T @ scaled_NP[:, chosen])
    covariance_PP[np.ix_(chosen, chosen)] = inverse_CC / np.outer(scale_P[list(chosen)], scale_P[list(chosen)])
    freedom = len(measured_N) - len(chosen)
    spread = math.sqrt(error / freedom) if freedom else 0.0
    return Law(tuple(names), coefficients_P, spread, covariance_PP, freedom)


@dataclass(frozen=True)
class Shape:
    """The sizes of a store that its costs depend on. `code_bytes` are those of one key, without its id."""

    entries: float
    lists: float
    code_bytes: int
    dim: int

    def byte_terms(self) -> Float64[np.ndarray, " P"]:
        """Counts for the bytes of an index: codes and ids of entries, centroids and sizes of lists, and codebooks."""
        return np.array([self.entries, self.lists, 1.0])

    def build_terms(self) -> Float64[np.ndarray, " P"]:
        """Counts for the seconds of a build: itself, with the training of codes on a fixed number of keys, entries, and
        the comparison of each entry with each centroid. Training of the lists is among the entries: it compares a fixed
        number of keys a list with each centroid, and there are twice as many lists as the square root of the entries.
        """
        return np.array([1.0, self.entries, self.entries * self.lists * self.dim])

    def search_terms(self, nprobe: float, cache_bytes: int) -> Float64[np.ndarray, " P"]:
        """Counts for the seconds of a search: itself, probed lists, bytes of codes in them, those that the processor's
        cache cannot hold, and bytes of all centroids, with which the query is compared.
        """
        scanned = nprobe * self.entries / self.lists * self.code_bytes
        beyond = max(0.0, 1 - cache_bytes / (self.entries * self.code_bytes))
        return np.array([1.0, nprobe, scanned, scanned * beyond, 4 * self.lists * self.dim])


@dataclass(frozen=True)
class PowerLaw:
    """`scale * entries ** exponent`, for the number of lists to probe."""

    scale: float
    exponent: float

    @classmethod
    def fit(cls, entries: Sequence[int], nprobes: Sequence[float]) -> PowerLaw:
        """Fits in logarithms. The exponent is between 0, for a fixed number of lists, and 1/2, for a fixed share of
        them, because an index has twice the square root of its entries as lists.
        """
        logs_N, probes_N = np.log(np.array(entries, float)), np.log(np.array(nprobes, float))
        away_N = logs_N - logs_N.mean()
        slope = float(away_N @ (probes_N - probes_N.mean()) / max(float(away_N @ away_N), 1e-12))
        exponent = min(max(slope, 0.0), 0.5)
        return cls(float(np.exp(probes_N.mean() - exponent * logs_N.mean())), exponent)

    def at(self, entries: float) -> float:
        """The number of lists for a store."""
        return float(self.scale * entries**self.exponent)


@dataclass(frozen=True)
class Division:
    """A store over machines of equal shards. Every shard searches each query, and one hop merges their answers.

    `network_bytes` are those of a query to all shards and of their answers.
    """

    shards: int
    shard_entries: float
    network_bytes: int


def divided(entries: float, bytes_per_entry: float, ram_bytes: float, *, dim: int, k: int) -> Division:
    """Spreads a store over as few machines as hold its index in `ram_bytes` of RAM each.

    Raises InvalidInput for RAM that holds no entry.
    """
    if ram_bytes < bytes_per_entry:
        raise InvalidInput(
            f"shard_ram is {ram_bytes:,.0f} bytes; an entry takes {bytes_per_entry:,.0f}: give more", field="shard_ram"
        )
    shards = max(1, math.ceil(entries * bytes_per_entry / ram_bytes))
    hop = QUERY_BYTES_PER_NUMBER * dim + NEIGHBOR_BYTES * k
    return Division(shards, entries / shards, shards * hop if shards > 1 else 0)
