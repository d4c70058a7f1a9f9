import faiss
import numpy as np
import pytest
from random_stores import Corpus

from memlm.base.progress import silent
from memlm.errors import Incompatible
from memlm.index import ivf_writer
from memlm.index.ivf import (
    VALUE_BITS,
    add,
    inner,
    nearest_lists,
    open_index,
    search_ivf,
    train_ivf,
    transformed,
)
from memlm.index.ivf_writer import write_ivf

CORPUS = Corpus(5, num_documents=40)
KEYS_ND = CORPUS.keys_ND.astype(np.float16)


@pytest.mark.parametrize(
    "factory",
    [
        "IVF8,SQfp16",
        "IVF8,SQ8",
        "IVF8,Flat",
        "IVF4,PQ4x4",
        "IVF4,RaBitQ",
        "OPQ4,IVF8,PQ4x4",
        "PCA8,IVF8,SQfp16",
        "IVF300,SQfp16",
    ],
)
@pytest.mark.parametrize("rows", [50, pytest.param(100_000, marks=pytest.mark.exhaustive)])
def test_the_file_is_the_one_that_faiss_writes_from_memory(tmp_path, monkeypatch, factory, rows):
    monkeypatch.setattr(ivf_writer, "BLOCK_ROWS", rows)
    monkeypatch.setattr(ivf_writer, "GROUP_ROWS", rows)
    index = train_ivf(factory, KEYS_ND, seed=0, progress=silent)
    write_ivf(tmp_path / "index.faiss", index, KEYS_ND, CORPUS.values_N, progress=silent)
    packed_N = (np.arange(len(KEYS_ND)) << VALUE_BITS) | CORPUS.values_N
    index.add_with_ids(KEYS_ND.astype(np.float32), packed_N)
    assert (tmp_path / "index.faiss").read_bytes() == faiss.serialize_index(index).tobytes()
    assert [path.name for path in tmp_path.iterdir()] == ["index.faiss"]

    queries_QD = KEYS_ND[:9].astype(np.float32)
    mapped = open_index(tmp_path / "index.faiss", len(KEYS_ND), KEYS_ND.shape[1])
    found, expected = (search_ivf(each, queries_QD, 6, 3) for each in (mapped, index))
    np.testing.assert_array_equal(found.ids_QK, expected.ids_QK)
    np.testing.assert_array_equal(found.values_QK, expected.values_QK)


def test_a_layout_of_lists_that_is_not_known_is_refused_before_anything_is_written(tmp_path, monkeypatch):
    index = train_ivf("IVF8,SQfp16", KEYS_ND, seed=0, progress=silent)
    later = faiss.serialize_index(index).tobytes() + b"more"
    monkeypatch.setattr(faiss, "serialize_index", lambda index: np.frombuffer(later, np.uint8))
    with pytest.raises(Incompatible, match=rf"Faiss {faiss.__version__} "):
        write_ivf(tmp_path / "index.faiss", index, KEYS_ND, CORPUS.values_N, progress=silent)
    assert not (tmp_path / "index.faiss").stat().st_size


@pytest.mark.parametrize("factory", ["IVF40,SQfp16", "IVF40_HNSW8,SQfp16", "PCA6,IVF40,SQ8"])
def test_a_seed_draws_the_lists_and_every_key_lies_in_its_nearest_one(tmp_path, factory):
    once, again, other = (
        faiss.serialize_index(train_ivf(factory, KEYS_ND, seed=seed, progress=silent)).tobytes() for seed in (3, 3, 4)
    )
    assert once == again != other
    index = train_ivf(factory, KEYS_ND, seed=3, progress=silent)
    lists = inner(index)
    assert lists.quantizer.ntotal == 40
    lists_N = nearest_lists(index, transformed(index, KEYS_ND))
    add(index, KEYS_ND, (np.arange(len(KEYS_ND)) << VALUE_BITS) | CORPUS.values_N)
    for number in range(40):
        ids = faiss.rev_swig_ptr(lists.invlists.get_ids(number), lists.invlists.list_size(number))
        np.testing.assert_array_equal(ids >> VALUE_BITS, np.flatnonzero(lists_N == number))


def test_fewer_different_keys_than_lists_still_make_an_index_that_finds_them():
    keys_ND = np.repeat(KEYS_ND[:3], 40, axis=0)
    index = train_ivf("IVF20,SQfp16", keys_ND, seed=0, progress=silent)
    assert np.isfinite(inner(index).quantizer.reconstruct_n(0, 20)).all()
    add(index, keys_ND, np.arange(len(keys_ND)) << VALUE_BITS)
    assert (search_ivf(index, keys_ND.astype(np.float32), 1, 1).distances_QK == 0).all()
