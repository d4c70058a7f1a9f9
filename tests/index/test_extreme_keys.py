"""Keys, queries, values, k and sizes at the bounds of what a store holds: taken or refused by name, never changed."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from random_stores import DEFAULTS, DIM, IVF, Corpus, add, build, spec

from memlm.errors import InvalidInput
from memlm.index.store.datastore import Datastore
from memlm.index.store.writer import StoreWriter

LARGEST = 65_504.0  # of float16
MOST_VALUE = (1 << 24) - 1  # an IVF's ids hold a row and a value
INDEXES = pytest.mark.parametrize("index", ["Flat", IVF])


def some_keys(count: int = 64) -> np.ndarray:
    return np.random.default_rng(0).normal(size=(count, DIM)).astype(np.float32)


@INDEXES
@pytest.mark.parametrize("key", [65_520, 7e4, 1e38, np.inf, -np.inf, np.nan])
def test_a_key_beyond_float16_is_refused_whatever_the_index(tmp_path: Path, index: str, key: float) -> None:
    keys_ND = some_keys()
    keys_ND[3, 5] = key
    with StoreWriter.create(tmp_path / "s", spec(index)) as writer:
        writer.begin_document("doc")
        with pytest.raises(InvalidInput, match="not finite in float16"):
            writer.append(keys_ND, np.arange(len(keys_ND)))


@INDEXES
def test_the_largest_keys_are_stored_and_found(tmp_path: Path, index: str) -> None:
    keys_ND = some_keys()
    keys_ND[3], keys_ND[7] = LARGEST, -LARGEST
    with StoreWriter.create(tmp_path / "s", spec(index)) as writer:
        writer.begin_document("doc")
        writer.append(keys_ND, np.arange(len(keys_ND)))
        with writer.commit(defaults=DEFAULTS) as store:
            found = store.search(keys_ND[[3, 7]], 2, nprobe=4)
            assert found.values_QK[:, 0].tolist() == [3, 7]
            assert found.distances_QK[:, 0].tolist() == [0, 0]
            assert not np.isnan(found.distances_QK).any()
            assert store.snapshot.verify() == []


@INDEXES
@pytest.mark.parametrize("query", [7e4, -1e38, np.inf, np.nan])
@pytest.mark.filterwarnings("ignore:overflow encountered in cast:RuntimeWarning")
def test_a_query_that_float16_cannot_hold_has_no_neighbor(tmp_path: Path, index: str, query: float) -> None:
    with build(tmp_path / "s", Corpus(1), index) as store:
        queries_QD = Corpus(1).keys_ND[:3].copy()
        queries_QD[1, 4] = query
        found = store.search(queries_QD, 4, nprobe=4)
        assert (found.ids_QK[1] == -1).all()
        assert np.isposinf(found.distances_QK[1]).all()
        assert found.values_QK[[0, 2], 0].tolist() == Corpus(1).values_N[[0, 2]].tolist()


@INDEXES
def test_values_up_to_24_bits_are_stored(tmp_path: Path, index: str) -> None:
    keys_ND = some_keys()
    with StoreWriter.create(tmp_path / "s", spec(index)) as writer:
        writer.begin_document("doc")
        for value in (MOST_VALUE + 1, -1, 1 << 40):
            with pytest.raises(InvalidInput, match=f"outside 0 to {MOST_VALUE}"):
                writer.append(keys_ND[:1], np.array([value]))
        values_N = MOST_VALUE - np.arange(len(keys_ND))
        writer.append(keys_ND, values_N)
        with writer.commit(defaults=DEFAULTS) as store:
            assert store.search(keys_ND, 1, nprobe=4).values_QK[:, 0].tolist() == values_N.tolist()
            assert store.snapshot.tokens("doc").tolist() == values_N.tolist()


@INDEXES
def test_more_neighbors_than_entries_are_all_entries_and_the_rest_is_missing(tmp_path: Path, index: str) -> None:
    with build(tmp_path / "s", Corpus(1), index) as store:
        for nothing in (0, -1):
            with pytest.raises(InvalidInput, match="expected at least 1"):
                store.search(Corpus(1).keys_ND[:1], nothing)
        found = store.search(Corpus(1).keys_ND[:1], 1_000_000, nprobe=4)
        size = store.snapshot.num_entries
        assert sorted(set(found.ids_QK[0, :size].tolist())) == sorted(found.ids_QK[0, :size].tolist())
        assert (found.ids_QK[0, :size] >= 0).all()
        assert (found.ids_QK[0, size:] == -1).all()
        assert np.isposinf(found.distances_QK[0, size:]).all()


@INDEXES
def test_an_emptied_store_answers_with_nothing_and_may_be_added_to(tmp_path: Path, index: str) -> None:
    with build(tmp_path / "s", Corpus(1), index) as store:
        store.delete(Corpus(1).names)
        found = store.search(Corpus(1).keys_ND[:2], 3, nprobe=4)
        assert (found.ids_QK == -1).all()
        assert np.isposinf(found.distances_QK).all()
        assert (store.snapshot.num_entries, store.snapshot.num_documents) == (0, 0)
        assert store.snapshot.verify() == []
    add(tmp_path / "s", Corpus(2), index=index)
    with Datastore.open(tmp_path / "s") as store:
        found = store.search(Corpus(2).keys_ND, 1, nprobe=4)
        assert found.values_QK[:, 0].tolist() == Corpus(2).values_N.tolist()
        assert store.snapshot.verify() == []


ONE_DOCUMENT = """
import resource, sys, time
sys.path.insert(0, sys.argv[2])
import numpy as np
from random_stores import DEFAULTS, DIM, spec
from memlm.index.store.writer import StoreWriter
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
rng = np.random.default_rng(0)
with StoreWriter.create(sys.argv[1], spec("IVF64,SQfp16")) as writer:
    writer.begin_document("long")
    for _ in range(100):
        writer.append(rng.normal(size=(10_000, DIM)).astype(np.float32), rng.integers(0, 500, 10_000))
    writer.commit(defaults=DEFAULTS).close()
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
"""


@pytest.mark.slow
def test_one_document_of_a_million_tokens_is_built_in_bounded_memory_and_deleted(tmp_path: Path) -> None:
    command = [sys.executable, "-c", ONE_DOCUMENT, str(tmp_path / "s"), str(Path(__file__).parents[1] / "support")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=True)
    assert int(done.stdout) < 400_000  # kB; all keys as float32 with the lists' ids would alone be 56,000
    with Datastore.open(tmp_path / "s") as store:
        assert (store.snapshot.num_entries, store.snapshot.num_documents) == (1_000_000, 1)
        assert store.snapshot.verify() == []
        assert store.delete(["long"]).num_entries == 1_000_000
        assert (store.search(some_keys(2), 3).ids_QK == -1).all()
