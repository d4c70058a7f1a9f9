import faiss
import numpy as np
import pytest
from random_stores import Corpus

from memlm.base.progress import silent
from memlm.index import ivf_writer
from memlm.index.ivf import VALUE_BITS, create_index, inner, open_index, search_ivf, train_ivf, transformed
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
@pytest.mark.parametrize("rows", [50, 100_000])
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


@pytest.mark.parametrize("factory", ["IVF40,SQfp16", "IVF40_HNSW8,SQfp16", "PCA6,IVF40,SQ8", "OPQ4,IVF40,PQ4x4"])
def test_lists_are_as_close_to_their_keys_as_faiss_makes_them(factory):
    ours, theirs = train_ivf(factory, KEYS_ND, seed=0, progress=silent), create_index(factory, KEYS_ND.shape[1])
    inner(theirs).cp.niter = 4
    theirs.train(KEYS_ND.astype(np.float32))
    lost = [inner(index).quantizer.search(transformed(index, KEYS_ND), 1)[0].mean() for index in (ours, theirs)]
    assert inner(ours).quantizer.ntotal == 40
    assert lost[0] < 1.05 * lost[1]
