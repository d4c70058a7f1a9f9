"""A store without some documents, for one request: what it is once these documents are deleted, to the last bit."""

import shutil
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from random_stores import DIM, Corpus, add, build

from memlm.index.ivf import Ivf
from memlm.index.neighbors import Neighbors
from memlm.index.store.compaction import compact
from memlm.index.store.datastore import Datastore
from memlm.index.store.document_names import is_named
from memlm.index.store.documents import DocumentTable, DocumentTableWriter
from memlm.index.store.exclusion import Exclusion, search_views
from memlm.index.store.snapshot import Snapshot

STORES = [
    ("Flat", "whole"), ("Flat", "tombstones"), ("IVF4,Flat", "whole"), ("IVF4,SQfp16", "tombstones"),
    ("IVF4,SQ8", "whole"), ("IVF4,SQ8", "codes"), ("IVF4,PQ4x4", "codes"), ("IVF4_HNSW,SQfp16", "tombstones"),
]  # fmt: skip
QUERIES_QD = np.random.default_rng(3).normal(size=(9, DIM)).astype(np.float32) * 3
NONE, SOME, ALL = (), ("doc-3", "doc-7"), ("*",)
DELETED = "doc-5"  # before all else, where a store is to have deleted documents already


def deleted_from(store: Datastore, names: Sequence[str], folder: Path) -> Datastore:
    """The slow twin: a copy of the store, from which the documents are deleted."""
    shutil.rmtree(folder / "twin", ignore_errors=True)
    twin = Datastore.open(shutil.copytree(store.path, folder / "twin"))
    ids = [document.id for document in twin.snapshot.documents()]
    twin.delete([each for each in ids if any(is_named(each, name) for name in names)])
    return twin


def assert_same(found: Neighbors, expected: Neighbors) -> None:
    np.testing.assert_array_equal(found.ids_QK, expected.ids_QK)
    np.testing.assert_array_equal(found.distances_QK, expected.distances_QK)
    np.testing.assert_array_equal(found.values_QK, expected.values_QK)


def two_segments(folder: Path, index: str) -> Datastore:
    """Documents in a segment of the index, and more of them in a second one."""
    build(folder / "store", Corpus(1), index).close()
    add(folder / "store", Corpus(2, prefix="more"), index=index)
    return Datastore.open(folder / "store")


def of_row(found, row):
    one = slice(row, row + 1)
    return Neighbors(found.distances_QK[one], found.ids_QK[one], found.values_QK[one])


@pytest.mark.parametrize(("index", "kind"), STORES)
def test_excluded_documents_are_deleted_documents(tmp_path, index, kind):
    store = two_segments(tmp_path, index)
    if kind == "codes":
        store.drop_keys()
    if kind == "tombstones":
        store.delete([DELETED])
    assert store.snapshot.num_entries  # and keeps the number
    asked = [NONE, SOME, ALL, NONE, ("more-*",), SOME, (*SOME, "more-*"), NONE, ALL]
    views = [Exclusion(names).view_of(store.snapshot) for names in asked]
    together = {k: search_views(views, QUERIES_QD, k, nprobe=3) for k in (1, 8, 2000)}
    for names in dict.fromkeys(asked):
        twin = deleted_from(store, names, tmp_path)
        for row in [row for row, each in enumerate(asked) if each == names]:
            for k, found in together.items():
                expected = twin.search(QUERIES_QD[row : row + 1], k, nprobe=3)
                assert_same(views[row].search(QUERIES_QD[row : row + 1], k, nprobe=3), expected)
                assert_same(of_row(found, row), expected)
        assert_same_store(views[asked.index(names)], twin.snapshot)
        twin.close()
    store.close()


def assert_same_store(view: Snapshot, twin: Snapshot) -> None:
    """What exact search and reports read."""
    assert (view.num_entries, view.num_documents) == (twin.num_entries, twin.num_documents)
    assert [each.id for each in view.documents()] == [each.id for each in twin.documents()]
    everything = np.concatenate([segment.base_id + np.arange(segment.record.entries) for segment in twin.segments])
    np.testing.assert_array_equal(view.live(everything), twin.live(everything))
    if view.has_keys:
        assert_same(view.exact().search(QUERIES_QD, 8), twin.exact().search(QUERIES_QD, 8))


def test_the_index_is_searched_twice_at_most_for_all_views(tmp_path, monkeypatch):
    """Once for those without deleted documents, once for all others. A segment that has none of them: once."""
    store, calls = two_segments(tmp_path, "IVF4,SQfp16"), list[int]()
    search = Ivf.search

    def counted(index: Ivf, queries_QD: np.ndarray, *options: int) -> Neighbors:
        calls.append(len(queries_QD))
        return search(index, queries_QD, *options)

    monkeypatch.setattr(Ivf, "search", counted)
    asked = [NONE, ("doc-3",), ("doc-4",), NONE, ("doc-6",)]
    search_views([Exclusion(names).view_of(store.snapshot) for names in asked], QUERIES_QD[:5], 4, nprobe=4)
    assert sorted(calls) == [2, 3, 5]
    store.close()


def test_an_exclusion_follows_what_happens_to_the_store(tmp_path):
    """Its documents stay out after a deletion, an addition, a replacement, and a compaction."""
    store, exclusion = two_segments(tmp_path, "IVF4,SQfp16"), Exclusion(("doc-3", "more-1*"))

    def check() -> None:
        view = exclusion.view_of(store.snapshot)
        assert exclusion.view_of(store.snapshot) is view
        names = {each.id for each in view.documents()}
        assert not any(name == "doc-3" or name.startswith("more-1") for name in names)
        assert names == {
            each.id for each in store.snapshot.documents() if each.id != "doc-3" and not each.id.startswith("more-1")
        }
        assert_same(
            view.search(QUERIES_QD, 6), Exclusion(exclusion.names).view_of(store.snapshot).search(QUERIES_QD, 6)
        )

    check()
    store.delete(["doc-7", "more-2"])
    check()
    add(tmp_path / "store", Corpus(5, num_documents=3, prefix="more-1-new"))
    store.refresh()
    check()
    add(tmp_path / "store", Corpus(1), replace=True)
    store.refresh()
    check()
    compact(tmp_path / "store")
    store.refresh()
    check()
    assert len(exclusion._masks) == len(store.snapshot.segments)  # those of segments that are gone are forgotten
    store.close()


def test_names_are_looked_up_once_in_each_segment(tmp_path, monkeypatch):
    store, lookups, look_up = two_segments(tmp_path, "IVF4,SQfp16"), list[str](), DocumentTable.rows_named
    monkeypatch.setattr(DocumentTable, "rows_named", lambda table, name: lookups.append(name) or look_up(table, name))
    exclusion = Exclusion(SOME)
    for _ in range(3):
        exclusion.view_of(store.snapshot)
    store.delete(["doc-1"])
    exclusion.view_of(store.snapshot)
    assert lookups == [*SOME, *SOME]
    store.close()


def test_unknown_names_are_told(tmp_path):
    store = two_segments(tmp_path, "Flat")
    store.delete([DELETED])
    exclusion = Exclusion(("doc-1", "nobody", "more-*", "folder/", DELETED))
    exclusion.view_of(store.snapshot)
    assert exclusion.unknown == ["nobody", "folder/", DELETED]
    store.close()


@settings(max_examples=60)
@example(ids=["a", "a/b", "a0", "a.", "b/a/", "a/é"], names=["a/"])
@given(
    ids=st.lists(st.text("ab/*[]?.0é", min_size=1, max_size=5), unique=True, max_size=12),
    names=st.lists(st.text("ab/*[]?.0é", min_size=1, max_size=4), max_size=4),
)
def test_the_table_finds_the_documents_that_names_stand_for(tmp_path_factory, ids, names):
    path = tmp_path_factory.mktemp("table") / "documents.sqlite"
    writer = DocumentTableWriter(path)
    for document_id in ids:
        writer.add(document_id, "", {})
    writer.commit()
    table = DocumentTable(path)
    for name in (*names, *ids):
        assert table.rows_named(name) == [row for row, document_id in enumerate(ids) if is_named(document_id, name)]
    assert table.rows_named("\ud800") == []
    table.close()
