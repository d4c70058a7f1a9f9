import faiss
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from random_stores import DEFAULTS, DIM, Corpus, spec
from reference import exact_search

from memlm.errors import InvalidInput, NotFound
from memlm.index import exact
from memlm.index.arrays import RowSubset
from memlm.index.ivf import resolve_index
from memlm.index.neighbors import Neighbors, merge_nearest
from memlm.index.store.manifest import ROW_BITS
from memlm.index.store.segment import Segment
from memlm.index.store.writer import StoreWriter

INDEXES = ["Flat", "IVF4,SQfp16"]
QUERIES_QD = np.random.default_rng(7).normal(size=(5, DIM)).astype(np.float32) * 3


def rows_of(found: Neighbors) -> np.ndarray:
    """The rows within the one segment of a store; -1 where missing."""
    return np.where(found.ids_QK >= 0, found.ids_QK & ((1 << ROW_BITS) - 1), -1)


@pytest.mark.parametrize("index", INDEXES)
@pytest.mark.parametrize("k", [1, 7, 10_000])
def test_results_keep_the_contract(make, corpus, index, k):
    found = make(corpus, index).search(QUERIES_QD, k, nprobe=4)
    assert found.distances_QK.shape == found.ids_QK.shape == found.values_QK.shape == (5, k)
    assert (found.distances_QK.dtype, found.ids_QK.dtype, found.values_QK.dtype) == (np.float32, np.int64, np.int64)
    assert (found.distances_QK[:, 1:] >= found.distances_QK[:, :-1]).all()
    missing_QK = found.ids_QK < 0
    assert missing_QK.sum() == 5 * max(0, k - len(corpus.values_N))
    assert np.isinf(found.distances_QK[missing_QK]).all()
    assert (found.values_QK[missing_QK] == -1).all()
    assert (np.diff(missing_QK.astype(int), axis=1) >= 0).all()
    np.testing.assert_array_equal(found.values_QK[~missing_QK], corpus.values_N[rows_of(found)[~missing_QK]])


@pytest.mark.parametrize("index", INDEXES)
def test_with_all_lists_probed_search_equals_its_plain_twin(make, corpus, index):
    found = make(corpus, index).search(QUERIES_QD, 20, nprobe=4)
    distances_QK, rows_QK = exact_search(QUERIES_QD, corpus.keys_ND, 20)
    np.testing.assert_array_equal(rows_of(found), rows_QK)
    np.testing.assert_allclose(found.distances_QK, distances_QK, rtol=1e-5)


def test_distances_do_not_cancel_far_from_the_origin(make):
    corpus = Corpus(3)
    corpus.keys_ND += 500
    found = make(corpus).search(corpus.keys_ND[:9], 3)
    np.testing.assert_array_equal(found.distances_QK[:, 0], 0)
    distances_QK, _ = exact_search(corpus.keys_ND[:9], corpus.keys_ND, 3)
    np.testing.assert_allclose(found.distances_QK, distances_QK, rtol=1e-5)


@pytest.mark.parametrize("index", INDEXES)
def test_a_stored_key_finds_itself_and_the_value_that_follows(make, corpus, index):
    store = make(corpus, index)
    found = store.search(corpus.keys_ND, 1, nprobe=4)
    np.testing.assert_array_equal(rows_of(found)[:, 0], np.arange(len(corpus.values_N)))
    np.testing.assert_array_equal(found.values_QK[:, 0], corpus.values_N)


@settings(max_examples=25)
@given(seed=st.integers(0, 10_000), share=st.floats(0, 1), k=st.integers(1, 40), index=st.sampled_from(INDEXES))
def test_deleted_documents_never_come_back_and_all_others_do(tmp_path_factory, seed, share, k, index):
    from random_stores import build

    corpus = Corpus(seed % 7, num_documents=9)
    store = build(tmp_path_factory.mktemp("s") / "store", corpus, index)
    rng = np.random.default_rng(seed)
    dead = rng.random(9) < share
    if dead.any():
        store.delete([corpus.names[number] for number in np.flatnonzero(dead)])
    live_N = np.flatnonzero(~dead[corpus.owner_N])
    for found in (store.search(QUERIES_QD, k, nprobe=4), store.snapshot.exact().search(QUERIES_QD, k)):
        distances_QK, order_QK = exact_search(QUERIES_QD, corpus.keys_ND[live_N], k)
        width = order_QK.shape[1]
        np.testing.assert_array_equal(rows_of(found)[:, :width], live_N[order_QK])
        np.testing.assert_allclose(found.distances_QK[:, :width], distances_QK, rtol=1e-5)
        assert (found.ids_QK[:, width:] == -1).all()
    store.close()


def test_several_searches_merge_into_the_nearest():
    near = Neighbors(np.array([[1.0, 4.0]], np.float32), np.array([[10, 11]]), np.array([[1, 2]]))
    far = Neighbors(np.array([[2.0, np.inf]], np.float32), np.array([[20, -1]]), np.array([[3, -1]]))
    both = merge_nearest([near, far], 3)
    assert both.ids_QK.tolist() == [[10, 20, 11]]
    assert both.values_QK.tolist() == [[1, 3, 2]]


@pytest.mark.parametrize("index", INDEXES)
def test_places_are_told_right_at_the_borders_of_documents(make, corpus, index):
    store = make(corpus, index)
    everything = store.search(corpus.keys_ND, 1, nprobe=4).ids_QK[:, 0]
    starts = np.cumsum(corpus.sizes) - corpus.sizes
    for row, place in enumerate(store.snapshot.locate(everything)):
        owner = corpus.owner_N[row]
        assert (place.document_id, place.title) == (corpus.names[owner], corpus.names[owner].upper())
        assert place.metadata == {"number": owner}
        assert place.token_offset == row - starts[owner]
    numbers = store.snapshot.document_of(everything)
    assert len(set(numbers.tolist())) == len(corpus.names)
    assert (np.diff(numbers) >= 0).all()
    assert store.snapshot.document_of(np.array([[-1]])).tolist() == [[-1]]
    for name, _, values_N in corpus.blocks():
        assert store.snapshot.tokens(name).tolist() == values_N.tolist()
        assert store.snapshot.tokens(name, 1, 3).tolist() == values_N[1:3].tolist()
    with pytest.raises(NotFound):
        store.snapshot.tokens("nobody")
    with pytest.raises(NotFound):
        store.snapshot.locate(np.array([1 << 50]))


def test_samples_are_live_entries_without_repetition(make, corpus):
    store = make(corpus)
    store.delete(corpus.names[:6])
    ids = store.snapshot.sample(10_000, seed=0)
    assert len(ids) == len(set(ids.tolist())) == store.snapshot.num_entries
    assert {place.document_id for place in store.snapshot.locate(ids)} == set(corpus.names[6:])
    assert (
        store.snapshot.sample(5, seed=1).tolist()
        == store.snapshot.sample(5, seed=1).tolist()
        != store.snapshot.sample(5, seed=2).tolist()
    )


def test_the_index_is_chosen_by_size():
    assert resolve_index("auto", 1 << 17, 64) == "Flat"
    assert resolve_index("auto", (1 << 17) + 1, 64) == "IVF724,SQfp16"
    assert resolve_index("auto", 14_563, 576) == "Flat"
    assert resolve_index("auto", 14_564, 576) == "IVF241,SQfp16"
    assert resolve_index("IVF64,PQ8", 10, 64) == "IVF64,PQ8"
    for bad in ("HNSW32", "mystery", "IVFx,Flat"):
        with pytest.raises(InvalidInput, match="expected auto, Flat, or IVF"):
            resolve_index(bad, 10, 64)


def test_an_index_that_faiss_does_not_make_is_refused_with_what_is_supported(make, corpus):
    with pytest.raises(InvalidInput, match="expected auto, Flat, or IVF"):
        make(corpus, "IVF4,Nonsense")


def test_queries_of_another_width_are_refused(make, corpus):
    with pytest.raises(InvalidInput, match="expected"):
        make(corpus).search(np.zeros((2, DIM + 1), np.float32), 1)
    with pytest.raises(InvalidInput, match="k is 0"):
        make(corpus, name="other").search(QUERIES_QD, 0)


def test_one_query_finds_the_same_on_all_cores(make, corpus, monkeypatch):
    store = make(corpus, "IVF4,SQfp16")
    for nprobe in (1, 2, 4):
        alone = [store.search(query_D[None], 9, nprobe=nprobe) for query_D in QUERIES_QD]
        with monkeypatch.context() as patch:
            patch.setattr("memlm.index.ivf.SHARED_ENTRIES", 0)
            patch.setattr("memlm.index.threads.num_cores", lambda: 3)
            shared = [store.search(query_D[None], 9, nprobe=nprobe) for query_D in QUERIES_QD]
        for one, other in zip(alone, shared, strict=True):
            np.testing.assert_array_equal(one.ids_QK, other.ids_QK)
            np.testing.assert_array_equal(one.distances_QK, other.distances_QK)


@pytest.mark.parametrize("cores", [1, 2, 3, 64])
@pytest.mark.parametrize("k", [1, 7, 50])
def test_keys_in_ram_are_searched_as_those_on_disk(monkeypatch, cores, k):
    monkeypatch.setattr("memlm.index.threads.num_cores", lambda: cores)
    monkeypatch.setattr(exact, "BLOCK_ROWS", 40)
    rng = np.random.default_rng(cores)
    stored_ND, values_N = rng.normal(size=(80, DIM)).astype(np.float16), rng.integers(0, 500, 80)
    kept = np.flatnonzero(rng.random(80) < 0.5)
    for keys_ND, values in (
        (stored_ND, values_N),
        (RowSubset(stored_ND, kept), values_N[kept]),
        (stored_ND[:3], values_N),
    ):
        index = exact.FlatIndex(keys_ND, values)
        for queries in (1, 2, 7, 8, 20):
            queries_QD = rng.normal(size=(queries, DIM)).astype(np.float32)
            found, expected = index.search(queries_QD, k), exact.exact_neighbors(queries_QD, keys_ND, values, k)
            for found_QK, expected_QK in zip(vars(found).values(), vars(expected).values(), strict=True):
                np.testing.assert_array_equal(found_QK, expected_QK)


def test_exact_search_by_matrix_products_equals_its_plain_twin(monkeypatch):
    monkeypatch.setattr(faiss.cvar, "distance_compute_blas_threshold", 1)
    rng = np.random.default_rng(0)
    scales_N1 = rng.uniform(0.2, 5.0, size=(80, 1))  # norms that differ, and so count
    keys_ND, values_N = (scales_N1 * rng.normal(size=(80, DIM))).astype(np.float16), rng.integers(0, 500, 80)
    queries_QD = rng.normal(size=(64, DIM)).astype(np.float16).astype(np.float32)
    found = exact.FlatIndex(keys_ND, values_N).search(queries_QD, 7)
    distances_QK, rows_QK = exact_search(queries_QD, keys_ND, 7)
    np.testing.assert_array_equal(found.ids_QK, rows_QK)
    np.testing.assert_array_equal(found.values_QK, values_N[rows_QK])
    np.testing.assert_allclose(found.distances_QK, distances_QK, rtol=1e-5)


@pytest.mark.parametrize("cores", [1, 2, 64])
@pytest.mark.parametrize("rows", [1, 7, 50, 1000])
def test_exact_search_in_blocks_equals_its_plain_twin(monkeypatch, cores, rows):
    monkeypatch.setattr("memlm.index.threads.num_cores", lambda: cores)
    monkeypatch.setattr(exact, "BLOCK_ROWS", rows)
    rng = np.random.default_rng(rows)
    keys_ND, values_N = rng.normal(size=(80, DIM)).astype(np.float16), rng.integers(0, 500, 80)
    queries_QD = rng.normal(size=(9, DIM)).astype(np.float16).astype(np.float32)
    found = exact.exact_neighbors(queries_QD, keys_ND, values_N, 20)
    distances_QK, rows_QK = exact_search(queries_QD, keys_ND, 20)
    np.testing.assert_array_equal(found.ids_QK, rows_QK)
    np.testing.assert_array_equal(found.values_QK, values_N[rows_QK])
    np.testing.assert_allclose(found.distances_QK, distances_QK, rtol=1e-5)


@pytest.mark.parametrize("copies", [12, 300])
def test_equal_keys_come_in_the_order_of_rows_however_many_queries_there_are(copies):
    rng = np.random.default_rng(3)
    same_D = rng.normal(size=64).astype(np.float32)
    keys_ND = rng.normal(size=(2000, 64)).astype(np.float32) + 2
    rows = np.sort(rng.choice(2000, copies, replace=False))
    keys_ND[rows] = same_D  # as the states at the start of documents, all nearer than the others
    queries_QD = same_D + rng.normal(size=(40, 64)).astype(np.float32) / 100
    together = exact.exact_neighbors(queries_QD, keys_ND, np.arange(2000), 8)
    assert together.ids_QK.tolist() == [rows[:8].tolist()] * 40
    for number in range(40):
        alone = exact.exact_neighbors(queries_QD[number : number + 1], keys_ND, np.arange(2000), 8)
        assert alone.ids_QK.tolist() == together.ids_QK[number : number + 1].tolist()


def nearly_equal_keys(count: int) -> np.ndarray:
    """One key again and again, with a few of its numbers rounded otherwise: as of a text that was read in batches of
    different shapes. Products of matrices cannot tell them apart.
    """
    rng = np.random.default_rng(4)
    ulps_ND = rng.choice([0] * 20 + [1, -1], size=(count, 64)) * 2.0**-11
    return ((rng.normal(size=64) * 4) * (1 + ulps_ND)).astype(np.float16)


def test_nearly_equal_keys_find_the_same_however_many_queries_there_are():
    keys_ND, values_N = nearly_equal_keys(300), np.arange(300)
    together = exact.exact_neighbors(keys_ND.astype(np.float32), keys_ND, values_N, 3)
    distances_QK, _ = exact_search(keys_ND, keys_ND, 3)
    np.testing.assert_allclose(together.distances_QK, distances_QK, rtol=1e-5)
    np.testing.assert_array_equal(together.distances_QK[:, 0], 0)
    for number in range(0, 300, 30):
        alone = exact.exact_neighbors(keys_ND[number : number + 1].astype(np.float32), keys_ND, values_N, 3)
        assert alone.ids_QK.tolist() == together.ids_QK[number : number + 1].tolist()


@pytest.mark.parametrize("copies", [300, 3000])  # below and above the candidates that are compared
def test_a_store_of_nearly_equal_keys_is_sound_until_its_search_is_broken(tmp_path, monkeypatch, copies):
    keys_ND = nearly_equal_keys(copies)
    with StoreWriter.create(tmp_path / "s", spec("Flat", dim=64)) as writer:
        for number in range(copies // 10):
            writer.begin_document(f"doc-{number}")
            writer.append(keys_ND[10 * number : 10 * number + 10].astype(np.float32), np.arange(10))
        store = writer.commit(defaults=DEFAULTS)
    assert store.snapshot.verify() == []
    search = Segment.search
    monkeypatch.setattr(Segment, "search", lambda s, queries, *others: search(s, queries * 1.02, *others))
    assert "do not find themselves" in store.snapshot.verify()[0]
