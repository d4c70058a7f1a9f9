"""Purging: afterwards no file of a store holds a byte of a deleted document."""

from pathlib import Path

import numpy as np
import pytest
from crashes import crash_at_every_step
from random_stores import DEFAULTS, Corpus, add, build, spec

from memlm.errors import Incompatible, NotFound
from memlm.index.store.compaction import compact
from memlm.index.store.datastore import Datastore
from memlm.index.store.writer import StoreWriter

SECRET = "a secret of forty characters, or near it"
SECRET_VALUES = np.arange(7_000_000, 7_000_010)


def add_secret(path: Path, name: str = "secret") -> None:
    """Adds a document whose id, title, metadata and values are found in the files."""
    with StoreWriter.extend(path, spec()) as writer:
        write_secret(writer, name)
        writer.commit().close()


def write_secret(writer: StoreWriter, name: str) -> None:
    writer.begin_document(f"{name} {SECRET}", title=SECRET, metadata={"note": SECRET})
    writer.append(np.ones((10, 12), np.float32), SECRET_VALUES)


def traces_in(folder: Path) -> set[str]:
    """The files that hold the secret, as text or as values."""
    traces = SECRET.encode(), SECRET_VALUES.astype("<u4").tobytes()
    return {
        file.name
        for file in folder.rglob("*")
        if file.is_file() and any(trace in file.read_bytes() for trace in traces)
    }


def with_secret(path: Path) -> Path:
    build(path, Corpus(1)).close()
    add_secret(path)
    assert traces_in(path) == {"documents.sqlite", "values.npy"}
    return path


def test_a_store_whose_every_document_is_deleted_is_compacted_to_none(tmp_path):
    path = with_secret(tmp_path / "s")
    with Datastore.open(path) as store:
        ids = store.search(np.ones((1, 12), np.float32), 4).ids_QK
        store.delete([document.id for document in store.snapshot.documents()])
    done = compact(path)
    assert (done.segments_before, done.deleted_documents, done.entries, done.bytes_after) == (2, 13, 0, 0)
    assert not traces_in(path)
    assert not list((path / "segments").iterdir())
    with Datastore.open(path) as store:
        assert store.snapshot.verify() == []
        assert (
            store.snapshot.num_entries,
            store.snapshot.num_documents,
            store.snapshot.index_kind,
            store.snapshot.distances,
        ) == (0, 0, "Flat", "exact")
        for searcher in (store, store.snapshot.exact()):
            found = searcher.search(np.ones((2, 12), np.float32), 3)
            assert (found.ids_QK == -1).all()
            assert found.ids_QK.shape == (2, 3)
        assert not len(store.snapshot.sample(5, 0))
        assert not store.snapshot.sample_documents(5, 0)
        assert not len(store.snapshot.live(ids[0]))
    assert compact(path).segments_before == 0
    add(path, Corpus(2), index="auto")
    with Datastore.open(path) as store:
        assert store.snapshot.num_documents == 12
        assert store.snapshot.defaults == DEFAULTS
        assert store.snapshot.verify() == []
        later = store.search(np.ones((1, 12), np.float32), 4).ids_QK
        assert later.min() > ids.max()  # ids of entries do not come again


@pytest.mark.parametrize("purge", [False, True])
def test_files_that_earlier_versions_derived_go_with_a_commit_or_a_purge(tmp_path, purge):
    path = tmp_path / "s"
    build(path, Corpus(1)).close()
    (folder,) = (path / "segments").iterdir()
    (folder / "means.sqlite").touch()
    if purge:
        compact(path, purge=True)
    else:
        with Datastore.open(path) as store:
            store.save_defaults(DEFAULTS)
    assert not list(path.rglob("means.sqlite"))


@pytest.mark.crash
def test_a_crash_at_every_step_of_emptying_leaves_the_old_state_or_the_new_and_a_purge_ends_it(tmp_path):
    original = with_secret(tmp_path / "original")
    with Datastore.open(original) as store:
        store.delete([document.id for document in store.snapshot.documents()])
    step = 0
    for step, path in crash_at_every_step(lambda path: compact(path, purge=True), original, tmp_path):
        with Datastore.open(path) as store:
            assert store.snapshot.verify() == []
            assert store.snapshot.num_documents == 0
        compact(path, purge=True)
        assert not traces_in(path), step
    assert step > 5


def test_what_is_deleted_while_a_compaction_copies_is_left_and_told_or_purged(tmp_path):
    for purge in (False, True):
        path = with_secret(tmp_path / f"s-{purge}")
        add_secret(path, "another")
        deleted = iter([f"secret {SECRET}", f"another {SECRET}"])

        def delete_one(phase, done, total, note="", path=path, deleted=deleted):
            if phase == "copy" and done == total and (name := next(deleted, None)):
                with Datastore.open(path) as store:
                    store.delete([name])

        done = compact(path, delete_one, purge=purge)
        if purge:
            assert (done.left_documents, done.segments_before, done.deleted_documents) == (0, 3, 2)
            assert not traces_in(path)
        else:
            assert done.left_documents == 1
            assert traces_in(path)
        with Datastore.open(path) as store:
            assert store.snapshot.num_documents == 12 + (not purge)
            assert store.snapshot.verify() == []


def test_an_interrupted_addition_is_given_up_by_a_purge_and_named_by_a_deletion(tmp_path):
    path = tmp_path / "s"
    build(path, Corpus(1)).close()
    with StoreWriter.extend(path, spec()) as writer:
        write_secret(writer, "secret")
        writer.checkpoint()
    assert "values.npy" in traces_in(path)
    with pytest.raises(Incompatible, match="--purge"):
        compact(path)
    with Datastore.open(path) as store:
        with pytest.raises(NotFound, match=r"being added to it cannot be deleted yet.*--purge"):
            store.delete([f"secret {SECRET}"])
        with pytest.raises(NotFound, match="nothing was changed;"):
            store.delete(["nobody"])
    assert compact(path, purge=True).rolled_back_addition
    assert not traces_in(path)
    with Datastore.open(path) as store:
        assert store.snapshot.num_documents == 12
        with pytest.raises(NotFound, match=r"nothing was changed$"):
            store.delete(["nobody"])
    assert not compact(path, purge=True).rolled_back_addition


def test_a_purge_of_a_replaced_document_leaves_none_of_its_old_text(tmp_path):
    path = with_secret(tmp_path / "s")
    with StoreWriter.extend(path, spec()) as writer:
        writer.begin_document(f"secret {SECRET}", replace=True)
        writer.append(np.zeros((3, 12), np.float32), np.arange(3))
        writer.commit().close()
    compact(path, purge=True)
    with Datastore.open(path) as store:
        store.delete([f"secret {SECRET}"])
    compact(path, purge=True)
    assert not traces_in(path)
