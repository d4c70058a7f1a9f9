import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from reference import log_softmax, mix_plainly

from memlm.retrieval.interpolation import (
    KnnLogprobs,
    knn_logprobs,
    mix,
    mix_targets,
    neighbor_logweights,
    target_logprobs,
)

VOCAB = 11
NEIGHBORS = st.lists(st.tuples(st.floats(0, 1e4, width=32), st.integers(0, VOCAB - 1)), min_size=1, max_size=20)


def lm_of(seed: int) -> np.ndarray:
    return np.exp(log_softmax(np.random.default_rng(seed).normal(size=VOCAB) * 3))


@given(NEIGHBORS, st.floats(0.1, 1e3), st.floats(0, 1), st.integers(0, 5), st.integers(0, 3))
def test_the_mixture_equals_its_plain_twin(neighbors, temperature, lam, seed, missing):
    neighbors = sorted(neighbors)
    distances = [d for d, _ in neighbors] + [math.inf] * missing
    values = [v for _, v in neighbors] + [-1] * missing
    lm = lm_of(seed)
    expected = mix_plainly(lm, distances, values, temperature, lam)
    logweights_K = neighbor_logweights(np.array([distances], np.float32), temperature)[0]
    knn = knn_logprobs(logweights_K, np.array(values))
    mixed_V = mix(torch.from_numpy(np.log(lm)).float(), knn, lam)
    np.testing.assert_allclose(mixed_V.double().exp().numpy(), expected, atol=2e-6)

    targets = np.arange(VOCAB)
    rows = np.repeat(logweights_K[None], VOCAB, axis=0), np.repeat(np.array([values]), VOCAB, axis=0)
    knn_Q = target_logprobs(*rows, targets)
    mixed_Q = mix_targets(np.log(lm).astype(np.float32), knn_Q, np.ones(VOCAB, bool), lam)
    np.testing.assert_allclose(np.exp(mixed_Q), expected, atol=2e-6)


def test_lam_0_is_the_model_bit_for_bit_and_lam_1_the_memory_alone():
    lm_V, knn = (
        torch.log(torch.from_numpy(lm_of(0)).float()),
        KnnLogprobs(np.array([1, 3]), np.array([-0.5, -1.0], "f4")),
    )
    assert torch.equal(mix(lm_V, knn, 0.0), lm_V)
    alone_V = mix(lm_V, knn, 1.0)
    assert alone_V[[1, 3]].tolist() == [-0.5, -1.0]
    assert alone_V[[0, 2]].tolist() == [-math.inf, -math.inf]
    assert [knn.of(token_id) for token_id in range(5)] == [-math.inf, -0.5, -math.inf, -1.0, -math.inf]


@pytest.mark.parametrize("lam", [5e-324, 1e-300, 1e-9, 1 - 2.9e-8, 1 - 1e-12, math.nextafter(1, 0)])
def test_lam_near_0_or_1_leaves_the_less_likely_side_its_share(lam):
    lm_Q, knn_Q = np.array([-2.0, -0.5, -2.0], np.float32), np.array([-math.inf, -1.0, -800.0], np.float32)
    one_side = [[math.log(lam) + float(knn), math.log1p(-lam) + float(lm)] for lm, knn in zip(lm_Q, knn_Q, strict=True)]
    expected_Q = np.array([np.logaddexp(*sides) for sides in one_side])
    assert np.isfinite(expected_Q).all()
    np.testing.assert_allclose(mix_targets(lm_Q, knn_Q, np.ones(3, bool), lam), expected_Q, rtol=1e-6)
    knn = KnnLogprobs(np.array([1, 2]), knn_Q[1:])
    np.testing.assert_allclose(mix(torch.from_numpy(lm_Q), knn, lam), expected_Q, rtol=1e-6)


@given(NEIGHBORS, st.floats(5e-324, 1e308))
def test_weights_are_finite_or_none_at_any_temperature(neighbors, temperature):
    distances_QK = np.array([[distance for distance, _ in sorted(neighbors)]], np.float32)
    weights_QK = np.exp(neighbor_logweights(distances_QK, temperature).astype(np.float64))
    np.testing.assert_allclose(weights_QK.sum(), 1, rtol=1e-6)
    assert weights_QK[0, 0] == weights_QK.max()


def test_no_neighbor_at_all_is_the_model_again():
    logweights_QK = neighbor_logweights(np.full((1, 3), np.inf, np.float32), 1.0)
    assert np.isneginf(logweights_QK).all()
    assert knn_logprobs(logweights_QK[0], np.full(3, -1)) is None
    lm_V = torch.log(torch.from_numpy(lm_of(0)).float())
    assert torch.equal(mix(lm_V, None, 1.0), lm_V)
    lm_Q = np.array([-1.0, -2.0], np.float32)
    nothing_Q = np.full(2, -np.inf, np.float32)
    np.testing.assert_array_equal(mix_targets(lm_Q, nothing_Q, np.array([False, False]), 0.7), lm_Q)


def test_neighbors_that_name_the_same_token_are_summed():
    logweights_QK = neighbor_logweights(np.array([[1.0, 1.0, 1.0, 1.0]], np.float32), 1.0)
    knn_Q = target_logprobs(logweights_QK, np.array([[3, 3, 3, 5]]), np.array([3]))
    np.testing.assert_allclose(np.exp(knn_Q), [0.75], rtol=1e-6)


def test_missing_places_have_no_mass():
    with_missing = neighbor_logweights(np.array([[1.0, 2.0, np.inf]], np.float32), 1.0)[0]
    without = neighbor_logweights(np.array([[1.0, 2.0]], np.float32), 1.0)[0]
    np.testing.assert_array_equal(with_missing[:2], without)
    np.testing.assert_allclose(np.exp(without).sum(), 1, rtol=1e-6)


def test_huge_distances_do_not_underflow_to_nothing():
    logweights_QK = neighbor_logweights(np.array([[1e9, 1e9 + 64]], np.float32), 1.0)
    assert np.isfinite(logweights_QK).all()
    np.testing.assert_allclose(np.exp(logweights_QK).sum(), 1, rtol=1e-6)
