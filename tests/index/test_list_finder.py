"""Which list a key comes into: as the plain twin finds it, the nearest or hardly farther, the same each time."""

import faiss
import numpy as np
import pytest
from reference import list_by_groups

from memlm.base.progress import silent
from memlm.index.clustering import GROUPING, LOOKED_AT, ListAssigner, num_compared
from memlm.index.ivf import VALUE_BITS, add, create_index, inner, search_ivf
from memlm.index.ivf_writer import write_ivf

DIM, LISTS = 12, 600


def in_clusters(number: int, *, seed: int, clusters: int = 40) -> np.ndarray:
    rng = np.random.default_rng(seed)
    centres = np.random.default_rng(99).normal(size=(clusters, DIM)) * 3
    return (centres[rng.integers(clusters, size=number)] + rng.normal(size=(number, DIM))).astype(np.float32)


def trained(centroids_LD: np.ndarray, codes: str = "SQfp16"):
    index = create_index(f"IVF{len(centroids_LD)},{codes}", DIM)
    inner(index).quantizer.add(centroids_LD)
    index.train(centroids_LD)
    return index


CENTROIDS_LD, KEYS_ND = in_clusters(LISTS, seed=0), in_clusters(5_000, seed=1)


def nearest(index, keys_ND: np.ndarray) -> np.ndarray:
    return inner(index).quantizer.search(keys_ND, 1)[1][:, 0]


def test_a_key_is_compared_with_the_lists_of_the_nearest_groups():
    index = trained(CENTROIDS_LD)
    finder = ListAssigner(inner(index).quantizer)
    groups = finder.lists_of_groups
    assert len(groups) > LOOKED_AT
    assert sorted(np.concatenate(groups)) == list(range(LISTS))
    middles = [finder._middles.reconstruct(number) for number in range(len(groups))]
    expected = [list_by_groups(key, CENTROIDS_LD, groups, middles, LOOKED_AT) for key in KEYS_ND[:500]]
    np.testing.assert_array_equal(finder.find(KEYS_ND[:500]), expected)


def test_how_many_are_compared_is_told_before_there_are_groups():
    index = trained(CENTROIDS_LD)
    finder = ListAssigner(inner(index).quantizer)
    sizes = np.array([len(lists) for lists in finder.lists_of_groups])
    looked_at = sizes[finder._middles.search(KEYS_ND, LOOKED_AT)[1]].sum(axis=1).mean() + len(sizes)
    assert num_compared(LISTS) - GROUPING == pytest.approx(looked_at, rel=0.5)
    assert num_compared(200) == 200


def test_nearly_all_come_into_the_nearest_list_and_the_rest_into_one_hardly_farther():
    index = trained(CENTROIDS_LD)
    found_N, nearest_N = ListAssigner(inner(index).quantizer).find(KEYS_ND), nearest(index, KEYS_ND)
    lost, least = (((KEYS_ND - CENTROIDS_LD[each]) ** 2).sum(axis=1).sum() for each in (found_N, nearest_N))
    assert (found_N == nearest_N).mean() > 0.95
    assert (found_N != nearest_N).any()  # else nothing was spared
    assert lost < 1.02 * least


def test_a_key_has_one_list_whoever_asks_and_however_many_at_once():
    index = trained(CENTROIDS_LD)
    finder, again = ListAssigner(inner(index).quantizer), ListAssigner(inner(index).quantizer)
    together = finder.find(KEYS_ND)
    parts = [again.find(KEYS_ND[begin : begin + 700]) for begin in range(0, len(KEYS_ND), 700)]
    np.testing.assert_array_equal(together, np.concatenate(parts))
    assert not len(finder.find(KEYS_ND[:0]))


@pytest.mark.parametrize("centroids_LD", [
    CENTROIDS_LD[:200],  # few lists
    CENTROIDS_LD * np.geomspace(1e-4, 1, LISTS, dtype=np.float32)[:, None],  # a large group, and many small ones
])  # fmt: skip
def test_all_lists_are_looked_at_where_groups_spare_nothing(centroids_LD):
    index = trained(centroids_LD)
    finder = ListAssigner(inner(index).quantizer)
    assert not finder.lists_of_groups
    np.testing.assert_array_equal(finder.find(KEYS_ND), nearest(index, KEYS_ND))


def test_a_quantizer_that_is_more_than_a_table_is_asked_itself():
    index = create_index(f"IVF{LISTS}_HNSW8,SQfp16", DIM)
    index.train(np.concatenate([CENTROIDS_LD, KEYS_ND]))
    finder = ListAssigner(inner(index).quantizer)
    assert not finder.lists_of_groups
    np.testing.assert_array_equal(finder.find(KEYS_ND), nearest(index, KEYS_ND))


@pytest.mark.parametrize("codes", ["SQfp16", "SQ8", "PQ4x4", "RaBitQ"])
def test_in_memory_and_on_disk_keys_are_in_the_same_lists(tmp_path, codes):
    index, keys_ND = trained(CENTROIDS_LD, codes), KEYS_ND.astype(np.float16)
    values_N = np.arange(len(keys_ND)) % 500
    write_ivf(tmp_path / "index.faiss", index, keys_ND, values_N, progress=silent)
    add(index, keys_ND, (np.arange(len(keys_ND)) << VALUE_BITS) | values_N)
    assert (tmp_path / "index.faiss").read_bytes() == faiss.serialize_index(index).tobytes()
    lists_N = ListAssigner(inner(index).quantizer).find(keys_ND.astype(np.float32))
    for number in range(0, LISTS, 50):
        ids, size = inner(index).invlists.get_ids(number), inner(index).invlists.list_size(number)
        rows = faiss.rev_swig_ptr(ids, size).astype(np.int64) >> VALUE_BITS
        np.testing.assert_array_equal(rows, np.flatnonzero(lists_N == number))
    found = search_ivf(index, keys_ND[:50].astype(np.float32), 1, LISTS)
    assert codes != "SQfp16" or found.ids_QK[:, 0].tolist() == list(range(50))
