"""The cost model: fits against slow twins, intervals by simulation, and a store over machines by hand."""

import numpy as np
import pytest

from benchmarks.scale.law import (
    NEIGHBOR_BYTES,
    QUERY_BYTES_PER_NUMBER,
    SEARCH_TERMS,
    T_QUANTILES,
    PowerLaw,
    Shape,
    divided,
    fit_law,
    t_quantile,
)
from memlm.distributed.shard_messages import ShardAnswer, ShardSearch
from memlm.errors import InvalidInput
from memlm.index.neighbors import Neighbors

CACHE = 32 << 20
SIZES = (100_000, 300_000, 1_000_000)
PROBED = (4, 16, 64, 256)


def shape_of(entries, code_bytes=128, dim=64):
    return Shape(entries, 2 * entries**0.5, code_bytes, dim)


def searches(sizes=SIZES):
    return np.array([shape_of(entries).search_terms(nprobe, CACHE) for entries in sizes for nprobe in PROBED])


def descended(terms_NP, measured_N, rounds=60_000):
    """Non-negative least squares of relative errors, a coefficient at a time until none moves: the slow twin."""
    a_NP = terms_NP / measured_N[:, None]
    norms_P = np.sqrt((a_NP**2).sum(axis=0))
    a_NP, x_P = a_NP / norms_P, np.zeros(terms_NP.shape[1])
    for _ in range(rounds):
        for place in range(len(x_P)):
            x_P[place] = max(0.0, x_P[place] + a_NP[:, place] @ (1 - a_NP @ x_P))
    return x_P / norms_P


@pytest.mark.parametrize(
    "truth",
    [(2e-5, 3e-7, 1e-10, 5e-11, 2e-11), (2e-5, 0, 1e-10, 0, 2e-11), (0, 0, 1e-10, 0, 0)],
    ids=["all", "some", "one"],
)
def test_known_constants_are_recovered(truth):
    terms_NP = searches()
    law = fit_law(SEARCH_TERMS, terms_NP, terms_NP @ np.array(truth))
    assert law.coefficients_P == pytest.approx(truth, rel=1e-5, abs=1e-16)
    beyond = shape_of(10**8).search_terms(100, CACHE)
    assert law.predict(beyond).value == pytest.approx(beyond @ np.array(truth), rel=1e-6)


def test_the_fit_is_that_of_the_slow_twins():
    rng = np.random.default_rng(0)
    terms_NP = rng.uniform(0.1, 1, (12, 3)) * [1, 1e6, 1e12]
    for truth in ([1.0, 2e-6, 3e-12], [1.0, 2e-6, 1e-13], [0.1, 2e-6, 0]):
        measured_N = terms_NP @ truth * rng.normal(1, 0.1, len(terms_NP))
        fitted = fit_law(("a", "b", "c"), terms_NP, measured_N)
        assert (fitted.coefficients_P >= 0).all()
        assert fitted.coefficients_P == pytest.approx(descended(terms_NP, measured_N, 4000), rel=1e-6, abs=1e-18)
        if (fitted.coefficients_P > 0).all():
            a_NP = terms_NP / measured_N[:, None]
            normal = np.linalg.solve(a_NP.T @ a_NP, a_NP.sum(axis=0))
            assert fitted.coefficients_P == pytest.approx(normal, rel=1e-6)


def test_a_coefficient_that_would_be_negative_is_left_out():
    terms_NP = np.array([[1.0, 1.0], [1.0, 2.0], [1.0, 4.0]])
    law = fit_law(("a", "b"), terms_NP, np.array([4.0, 2.0, 1.0]))
    assert law.coefficients_P[1] == 0
    assert law.coefficients_P[0] == pytest.approx((1 / 4 + 1 / 2 + 1) / (1 / 16 + 1 / 4 + 1))


def test_the_interval_covers_95_of_100_measurements():
    rng, covered, tries = np.random.default_rng(1), 0, 1500
    terms_NP = np.array([[1.0, entries] for entries in (1e5, 2e5, 4e5, 7e5, 1e6)])
    far_P = np.array([1.0, 1e7])
    truth_P = np.array([1.0, 1e-5])
    for _ in range(tries):
        law = fit_law(("a", "b"), terms_NP, terms_NP @ truth_P * rng.normal(1, 0.03, len(terms_NP)))
        predicted = law.predict(far_P)
        covered += predicted.low <= far_P @ truth_P * rng.normal(1, 0.03) <= predicted.high
    assert 0.93 < covered / tries < 0.97


def test_an_interval_widens_with_the_spread_the_distance_and_the_drift():
    terms_NP = np.array([[1.0, 1.0], [1.0, 2.0], [1.0, 3.0], [1.0, 4.0]])
    law = fit_law(("a", "b"), terms_NP, np.array([2.05, 2.9, 4.1, 4.95]))
    near, far = law.predict(np.array([1.0, 2.0])), law.predict(np.array([1.0, 40.0]))
    assert (far.high - far.value) / far.value > (near.high - near.value) / near.value > 0
    drifted = law.predict(np.array([1.0, 2.0]), drift=0.5)
    width = (near.high - near.value) / near.value
    assert (drifted.high - drifted.value) / drifted.value == pytest.approx((width**2 + 0.5**2) ** 0.5)
    assert law.predict(np.array([1.0, 2.0]), drift=2).low == 0  # no cost is negative


def test_a_fit_without_spare_measurements_has_no_spread():
    law = fit_law(("a", "b"), np.array([[1.0, 1.0], [1.0, 2.0]]), np.array([3.0, 5.0]))
    assert (law.freedom, law.spread) == (0, 0.0)
    predicted = law.predict(np.array([1.0, 10.0]), drift=0.1)
    assert (predicted.value, predicted.low, predicted.high) == pytest.approx((21, 18.9, 23.1))


def test_the_quantiles_are_those_of_student():
    stats = pytest.importorskip("scipy.stats")
    for freedom in (*range(1, len(T_QUANTILES) + 1), 10_000):
        assert t_quantile(freedom) == pytest.approx(stats.t.ppf(0.975, freedom), rel=3e-4)


@pytest.mark.parametrize("measured", [[], [1.0, 0.0], [1.0, float("nan")], [1.0, -2.0]])
def test_costs_that_are_not_positive_are_refused(measured):
    with pytest.raises(InvalidInput, match="positive costs"):
        fit_law(("a",), np.ones((len(measured), 1)), np.array(measured))


def test_terms_of_a_search_by_hand():
    store = Shape(entries=1000, lists=10, code_bytes=16, dim=4)
    assert store.search_terms(3, cache_bytes=4000).tolist() == [1, 3, 300 * 16, 300 * 16 * 0.75, 160]
    assert store.search_terms(3, cache_bytes=32_000).tolist() == [1, 3, 300 * 16, 0, 160]
    assert store.byte_terms().tolist() == [1000, 10, 1]
    assert store.build_terms().tolist() == [1, 1000, 40_000]


@pytest.mark.parametrize(("exponent", "fitted"), [(0.3, 0.3), (0.0, 0.0), (-0.2, 0.0), (0.9, 0.5)])
def test_lists_to_probe_follow_a_power_between_none_and_the_square_root(exponent, fitted):
    law = PowerLaw.fit(SIZES, [8 * (entries / SIZES[0]) ** exponent for entries in SIZES])
    assert law.exponent == pytest.approx(fitted, abs=1e-9)
    if exponent == fitted:
        assert law.at(10**8) == pytest.approx(8 * 1000**exponent)


def test_a_store_is_divided_over_as_few_machines_as_hold_it():
    one = divided(1e6, 24.5, 64e9, dim=64, k=32)
    assert (one.shards, one.shard_entries, one.network_bytes) == (1, 1e6, 0)
    many = divided(1e12, 24.1, 64e9, dim=64, k=32)
    assert many.shards == 377  # of 376.6
    assert many.shard_entries == pytest.approx(1e12 / 377)
    assert many.network_bytes == 377 * (2 * 64 + 16 * 32)
    with pytest.raises(InvalidInput, match="an entry takes 24"):
        divided(1e6, 24.0, 20.0, dim=64, k=32)


def test_network_bytes_are_those_of_the_messages_of_shards():
    def search(dim):
        return ShardSearch("store", np.ones((1, dim), np.float32), 32, None, (), np.zeros(1, np.int64)).encode()

    def answer(k):
        found = Neighbors(np.ones((1, k), np.float32), np.ones((1, k), np.int64), np.ones((1, k), np.int64))
        return ShardAnswer(found).encode()

    assert len(search(576)) - len(search(512)) == 64 * QUERY_BYTES_PER_NUMBER  # headers of one length
    assert len(answer(64)) - len(answer(32)) == 32 * NEIGHBOR_BYTES
    whole = len(search(576)) + len(answer(32))
    assert divided(2e6, 1.0, 1e6, dim=576, k=32).network_bytes == pytest.approx(2 * whole, rel=0.1)
