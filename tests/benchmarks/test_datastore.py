"""What `python -m benchmarks datastore` tells of indexes whose worth is known."""

import numpy as np
import pytest

from benchmarks.datastore import bench_datastore, default_kinds
from memlm.data.corpus import Corpus
from memlm.errors import InvalidInput
from memlm.index.ivf import resolve_index

pytestmark = pytest.mark.exhaustive

KINDS = ("Flat", "IVF*,SQfp16", "IVF*,PQ4x4", "codes:IVF*,PQ4x4")


def test_indexes_are_told_apart(model_folder, corpus_folder, tmp_path):
    learnt, held_out = (
        Corpus([corpus_folder / f"doc-{n}.txt" for n in range(5, 8)]),
        Corpus([corpus_folder / "doc-1.txt"]),
    )
    figures = bench_datastore(model_folder, learnt, held_out, tmp_path / "keys", sizes=(500, 1000), kinds=KINDS)
    assert [(row["entries"], row["index"]) for row in figures["rows"]] == [(n, k) for n in (500, 1000) for k in KINDS]
    assert figures["keys_per_s"] > 0
    for flat, lossless, reranked, codes in (figures["rows"][:4], figures["rows"][4:]):
        assert flat["softmax_mass_k32"] == flat["recall_k1024"] == pytest.approx(1.0, abs=1e-6)
        assert flat["nats_change_k32"] == 0
        assert lossless["softmax_mass_k32"] > 0.98
        assert (lossless["rerank"], reranked["rerank"], codes["rerank"]) == (0, 8, 0)
        assert codes["softmax_mass_k32"] < reranked["softmax_mass_k32"]
        assert codes["bytes_per_entry"] == reranked["bytes_per_entry"] == 2 + 8
        assert all(row["ms_per_query_k1024_batch64"] > 0 for row in (flat, lossless, reranked, codes))
        assert all(row["add_over_bare_faiss"] > 0 for row in (lossless, reranked, codes))
    again = bench_datastore(model_folder, learnt, held_out, tmp_path / "keys", sizes=(500,), kinds=KINDS[:1])
    assert again["keys_per_s"] is None  # they were there
    assert len(np.load(tmp_path / "keys" / "values.npy")) >= 1000
    with pytest.raises(InvalidInput, match="are wanted"):
        bench_datastore(model_folder, learnt, held_out, tmp_path / "more", sizes=(10**7,), kinds=KINDS[:1])


def test_what_is_compared_can_be_built():
    for kind in default_kinds(192):
        resolve_index(kind.removeprefix("codes:").replace("*", "64"), 10, 64)
