"""The context cache finds what a plain loop finds, whatever was appended, cropped or forgotten before."""

import numpy as np
import pytest

from memlm.retrieval import context_cache, position_lists
from memlm.retrieval.context_cache import ContextCache

WIDTH = 6


def nearest(keys_ND, values_N, query_D, k, size):
    """The obvious search: all distances of float16-rounded keys in float64, nearest first, the earlier one of a tie."""
    rounded_ND, rounded_D = (np.asarray(each, np.float16).astype(np.float64) for each in (keys_ND, query_D))
    distances = [((rounded_ND[n] - rounded_D) ** 2).sum() if values_N[n] >= 0 else np.inf for n in range(size)]
    order = [n for n in sorted(range(size), key=lambda n: (np.float32(distances[n]), n)) if distances[n] < np.inf][:k]
    missing = k - len(order)
    return (
        [distances[n] for n in order] + [np.inf] * missing,
        order + [-1] * missing,
        [int(values_N[n]) for n in order] + [-1] * missing,
    )


def check(cache, keys_ND, values_N, rng, k=5):
    queries_QD = np.concatenate([rng.normal(size=(6, WIDTH)), keys_ND[:2]]).astype(np.float32)
    sizes_Q = rng.integers(0, len(keys_ND) + 1, len(queries_QD))
    found = cache.search(queries_QD, k, sizes_Q)
    for row, (query_D, size) in enumerate(zip(queries_QD, sizes_Q, strict=True)):
        distances, ids, values = nearest(keys_ND, values_N, query_D, k, size)
        assert found.ids_QK[row].tolist() == ids
        assert found.values_QK[row].tolist() == values
        np.testing.assert_allclose(found.distances_QK[row], np.array(distances), rtol=1e-5)


@pytest.fixture(params=["exact", "all lists"])
def way(request, monkeypatch):
    """Exact search, and lists from 64 positions on, all of which are read."""
    if request.param == "all lists":
        monkeypatch.setattr(context_cache, "FIRST_SIZE", 64)
        monkeypatch.setattr(position_lists, "ROWS_READ", 1_000_000)


@pytest.mark.parametrize("seed", range(8))
def test_the_nearest_earlier_positions_are_found(seed, way):
    rng = np.random.default_rng(seed)
    cache, keys_ND, values_N = ContextCache(WIDTH), np.empty((0, WIDTH), np.float32), np.empty(0, np.int64)
    for _ in range(12):
        count = int(rng.choice([1, 7, 40, 700]))
        new_ND = rng.normal(size=(count, WIDTH)).astype(np.float32).round(1 if seed % 2 else 8)  # some are equal
        new_N = rng.integers(0, 50, count)
        cache.append(new_ND, new_N)
        keys_ND, values_N = np.concatenate([keys_ND, new_ND]), np.concatenate([values_N, new_N])
        action = rng.choice(["crop", "forget", "copy", "save", "nothing"])
        if action == "crop":
            size = int(rng.integers(len(keys_ND) + 1))
            cache.crop(size)
            keys_ND, values_N = keys_ND[:size], values_N[:size]
        elif action == "forget" and len(keys_ND):
            start, stop = sorted(rng.integers(0, len(keys_ND) + 1, 2).tolist())
            cache.forget(start, stop)
            values_N[start:stop] = -1
        elif action == "copy":
            kept, cache = cache, cache.copy()
            kept.append(keys_ND[:1], values_N[:1])  # is not seen by the copy
            cache.follow([int(values_N[-1])]) if len(values_N) and values_N[-1] >= 0 else None
        elif action == "save":
            cache = ContextCache.restored(cache.save(len(cache)))
            cache.follow([int(values_N[-1])]) if len(values_N) and values_N[-1] >= 0 else None
        assert len(cache) == len(keys_ND)
        if len(keys_ND) > 2:
            check(cache, keys_ND, values_N, rng)


def test_a_distance_does_not_depend_on_the_other_queries():
    rng = np.random.default_rng(0)
    cache = ContextCache(WIDTH)
    cache.append(rng.normal(size=(3000, WIDTH)), np.arange(3000))
    queries_QD, sizes_Q = rng.normal(size=(40, WIDTH)), rng.integers(1, 3000, 40)
    together = cache.search(queries_QD, 7, sizes_Q)
    for row in range(40):
        alone = cache.search(queries_QD[row : row + 1], 7, sizes_Q[row : row + 1])
        assert np.array_equal(alone.distances_QK[0], together.distances_QK[row])
        assert np.array_equal(alone.ids_QK[0], together.ids_QK[row])


@pytest.mark.parametrize("way", ["crop", "copy"])
@pytest.mark.parametrize("size", [40, 100])
def test_the_first_positions_have_the_lists_that_they_had_before_more_came(monkeypatch, way, size):
    """Those of 700 positions are made of 64 and of 256."""
    monkeypatch.setattr(context_cache, "FIRST_SIZE", 16)
    monkeypatch.setattr(position_lists, "ROWS_READ", 1)
    rng = np.random.default_rng(2)
    keys_ND, values_N = rng.normal(size=(700, WIDTH)), np.arange(700)
    queries_QD, sizes_Q = rng.normal(size=(40, WIDTH)), rng.integers(size - 10, size, 40)
    expected, cache = ContextCache(WIDTH), ContextCache(WIDTH)
    expected.append(keys_ND[:size], values_N[:size])
    cache.append(keys_ND, values_N)
    if way == "copy":
        cache = cache.copy(size)
        assert cache._values_N[size - 1] == -1  # the token that followed is of the later text
    else:
        cache.crop(size)
    found, wanted = (each.search(queries_QD, 7, sizes_Q) for each in (cache, expected))
    assert np.array_equal(found.ids_QK, wanted.ids_QK)


def test_what_was_forgotten_is_erased():
    cache = ContextCache(WIDTH)
    cache.append(np.ones((4, WIDTH)), np.arange(4))
    cache.forget(1, 3)
    found = cache.search(np.ones((1, WIDTH)), 4, np.array([4]))
    assert found.ids_QK.tolist() == [[0, 3, -1, -1]]
    assert not cache._keys_ND[1:3].any()


def test_many_queries_are_searched_in_parts(monkeypatch):
    rng = np.random.default_rng(1)
    cache = ContextCache(WIDTH)
    cache.append(rng.normal(size=(500, WIDTH)), np.arange(500))
    queries_QD, sizes_Q = rng.normal(size=(300, WIDTH)), rng.integers(0, 500, 300)
    whole = cache.search(queries_QD, 5, sizes_Q)
    monkeypatch.setattr("memlm.retrieval.context_cache.SCORES_AT_ONCE", 1000)
    parts = cache.search(queries_QD, 5, sizes_Q)
    assert np.array_equal(whole.ids_QK, parts.ids_QK)
    assert np.array_equal(whole.distances_QK, parts.distances_QK)


@pytest.mark.parametrize("size", [0, 1, 1024, 1025, 5000])
def test_bytes_are_those_of_the_arrays(size):
    cache = ContextCache(WIDTH)
    cache.append(np.zeros((size, WIDTH)), np.zeros(size, np.int64))
    arrays = cache._keys_ND.nbytes + cache._norms_N.nbytes + cache._values_N.nbytes
    assert cache.num_bytes(size) == arrays + 12 * len(cache._values_N)


def test_nothing_is_found_before_the_first_position():
    cache = ContextCache(WIDTH)
    assert (cache.search(np.ones((2, WIDTH)), 3, np.zeros(2, np.int64)).ids_QK == -1).all()


LISTED = 300  # positions of a text with lists from 64 on, made anew at 256


@pytest.fixture
def listed(monkeypatch):
    """Keys of a text around 20 topics, and lists of which few are read."""
    monkeypatch.setattr(context_cache, "FIRST_SIZE", 64)
    monkeypatch.setattr(position_lists, "ROWS_READ", 30)
    rng = np.random.default_rng(3)
    topics_TD = 4 * rng.normal(size=(20, WIDTH))
    return (topics_TD[rng.integers(0, 20, LISTED)] + rng.normal(size=(LISTED, WIDTH))).astype(np.float32)


def read(keys_ND, pieces):
    cache = ContextCache(WIDTH)
    for piece in np.split(keys_ND, pieces):
        cache.append(piece, np.arange(len(cache), len(cache) + len(piece)))
    return cache


def found_at(cache, keys_ND, sizes):
    found = cache.search(keys_ND[list(sizes)], 5, np.array(list(sizes)))
    return found.ids_QK.tolist(), found.distances_QK.tolist()


def test_few_lists_find_nearly_all(listed):
    cache = read(listed, [])
    sizes = range(100, LISTED)
    expected = [nearest(listed, np.arange(LISTED), listed[size], 5, size)[1] for size in sizes]
    ids, _ = found_at(cache, listed, sizes)
    hits = sum(len(set(one) & set(other)) for one, other in zip(ids, expected, strict=True))
    assert hits > 0.9 * 5 * len(sizes)
    assert hits < 5 * len(sizes)  # few lists were read


def test_neighbors_do_not_depend_on_the_pieces_of_a_text(listed):
    sizes = [40, 63, 64, 65, 200, 255, 256, 257, 299]
    whole = found_at(read(listed, []), listed, sizes)
    assert found_at(read(listed, range(1, LISTED)), listed, sizes[-1:]) == tuple(part[-1:] for part in whole)
    for cut in (64, 200, 256, 280):
        later = [size for size in sizes if size >= cut]
        assert found_at(read(listed, [cut]), listed, later) == tuple(part[-len(later) :] for part in whole)


@pytest.mark.parametrize("end", [60, 64, 200, 255, 256, 290])
def test_drafts_that_were_taken_back_leave_no_trace(listed, end):
    other_ND = np.random.default_rng(9).normal(size=(60, WIDTH)).astype(np.float32)
    plain, drafted = read(listed[:end], []), read(np.concatenate([listed[:end], other_ND]), [])
    drafted.crop(end)
    for cache in (plain, drafted):
        cache.append(listed[end:], np.arange(end, LISTED))
    sizes = range(end, LISTED)
    assert found_at(plain, listed, sizes) == found_at(drafted, listed, sizes)


@pytest.mark.parametrize("size", [50, 64, 257, LISTED])
def test_a_restored_cache_finds_the_same(listed, size):
    cache = read(listed, [])
    cache.crop(size)
    restored = ContextCache.restored(cache.save(size))
    for each in (cache, restored):
        each.append(listed[size:], np.arange(size, LISTED))
    sizes = range(size, LISTED)
    assert found_at(cache, listed, sizes) == found_at(restored, listed, sizes)
