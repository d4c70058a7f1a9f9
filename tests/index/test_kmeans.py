"""The middles of lists: a round is Lloyd's, groups lose nothing, the same each time."""

import faiss
import numpy as np
import pytest
from reference import list_by_groups, moved_centroids

from memlm.index import clustering
from memlm.index.clustering import LOOKED_AT, POINTS_PER_LIST, ListAssigner, centroids_of, moved, table_of

DIM = 12


def in_clusters(number: int, *, seed: int = 0) -> np.ndarray:
    rng = np.random.default_rng(seed)
    centres = np.random.default_rng(99).normal(size=(60, DIM)) * 3
    return (centres[rng.integers(60, size=number)] + rng.normal(size=(number, DIM))).astype(np.float32)


def squared_error(points_ND: np.ndarray, centroids_LD: np.ndarray) -> float:
    return float(table_of(centroids_LD).search(points_ND, 1)[0].mean())


@pytest.mark.parametrize("block_rows", [64, 1 << 16])
def test_a_round_moves_each_centroid_into_the_middle_of_its_points(monkeypatch, block_rows):
    monkeypatch.setattr(clustering, "BLOCK_ROWS", block_rows)
    points_ND = in_clusters(700)
    far_1D = np.full((1, DIM), 1e3, np.float32)  # has no points, and stays
    centroids_LD = np.concatenate([points_ND[:30], far_1D])
    expected_LD = moved_centroids(centroids_LD, points_ND)
    np.testing.assert_allclose(moved(centroids_LD, points_ND), expected_LD, rtol=1e-5, atol=1e-5)
    np.testing.assert_array_equal(expected_LD[-1:], far_1D)


def test_with_many_lists_points_are_those_that_groups_find():
    points_ND = in_clusters(2_000)
    centroids_LD = points_ND[:600]
    table = table_of(centroids_LD)
    finder = ListAssigner(table)
    groups = finder.lists_of_groups
    middles = [finder._middles.reconstruct(number) for number in range(len(groups))]
    lists = [list_by_groups(point, centroids_LD, groups, middles, LOOKED_AT) for point in points_ND]
    expected_LD = moved_centroids(centroids_LD, points_ND, lists)
    np.testing.assert_allclose(moved(centroids_LD, points_ND), expected_LD, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("nlist", [400, 1_000])
def test_lists_are_hardly_worse_than_those_of_faiss_by_all_of_the_sample(nlist):
    points_ND, others_ND = in_clusters(nlist * POINTS_PER_LIST), in_clusters(5_000, seed=1)
    theirs = faiss.Clustering(DIM, nlist)
    theirs.seed, theirs.niter = 1, 4
    theirs.train(points_ND, faiss.IndexFlatL2(DIM))
    theirs_LD = faiss.vector_to_array(theirs.centroids).reshape(nlist, DIM)
    ours_LD = centroids_of(points_ND, nlist, seed=1)
    assert squared_error(others_ND, ours_LD) < 1.02 * squared_error(others_ND, theirs_LD)


def test_the_same_seed_gives_the_same_lists_and_another_gives_others():
    points_ND = in_clusters(2_000)
    once_LD, again_LD, other_LD = (centroids_of(points_ND, 50, seed=seed) for seed in (3, 3, 4))
    np.testing.assert_array_equal(once_LD, again_LD)
    assert (once_LD != other_LD).any()


def test_a_sample_with_the_same_point_again_and_again_ends_in_finite_middles():
    points_ND = np.repeat(in_clusters(5), 100, axis=0)
    assert np.isfinite(centroids_of(points_ND, 20, seed=0)).all()
