"""Compaction, replacing and deleting by metadata: what is left is what a store built from the rest would hold."""

from functools import partial
from pathlib import Path

import numpy as np
import pytest
from crashes import Crash, crash_at_every_step, fill_disk_at_every_step
from random_stores import DEFAULTS, IVF, Corpus, add, build, spec

from memlm.errors import Incompatible, InvalidInput, Locked, NotFound, StorageFull
from memlm.index.store.compaction import compact
from memlm.index.store.datastore import Datastore
from memlm.index.store.lock import write_lock
from memlm.index.store.manifest import read_manifest
from memlm.index.store.writer import StoreWriter


def grown(path: Path) -> Path:
    """Two segments, each with something deleted."""
    build(path, Corpus(1), IVF).close()
    add(path, Corpus(2, prefix="more"))
    with Datastore.open(path) as store:
        store.delete(["doc-0", "doc-7", "more-3"])
    return path


def remaining() -> list[tuple[str, np.ndarray, np.ndarray]]:
    blocks = [*Corpus(1).blocks(), *Corpus(2, prefix="more").blocks()]
    return [block for block in blocks if block[0] not in {"doc-0", "doc-7", "more-3"}]


def fresh(path: Path) -> Datastore:
    """A store that is built from what is left."""
    with StoreWriter.create(path, spec(IVF)) as writer:
        for name, keys_ND, values_N in remaining():
            writer.begin_document(name, title=name.upper(), metadata={"number": int(name.split("-")[1])})
            writer.append(keys_ND, values_N)
        return writer.commit(defaults=DEFAULTS)


def files_of(store: Datastore) -> dict[str, bytes]:
    folder = store.path / store.manifest.segments[0].folder
    return {file.name: file.read_bytes() for file in folder.iterdir() if file.suffix != ".sqlite"}


def test_a_compacted_store_equals_one_built_from_what_is_left(tmp_path):
    result = compact(grown(tmp_path / "s"))
    expected = fresh(tmp_path / "fresh")
    with Datastore.open(tmp_path / "s") as store:
        assert len(store.manifest.segments) == 1
        assert files_of(store) == files_of(expected)
        assert list(store.snapshot.documents()) == list(expected.snapshot.documents())
        assert store.snapshot.verify() == []
        assert store.snapshot.num_deleted_documents == 0
        assert (result.segments_before, result.deleted_documents, result.entries) == (
            2,
            3,
            expected.snapshot.num_entries,
        )
        assert result.bytes_after == store.snapshot.bytes_on_disk < result.bytes_before
        assert [folder.name for folder in (store.path / "segments").iterdir()] == ["000003"]


def test_there_may_be_nothing_to_compact(tmp_path):
    with build(tmp_path / "s", Corpus(1)) as store:
        result = compact(store.path)
        assert result.bytes_before == result.bytes_after
        assert Datastore.open(store.path).manifest == store.manifest
    with pytest.raises(NotFound):
        compact(tmp_path / "nowhere")


def test_a_reader_keeps_what_it_opened_while_others_compact(tmp_path):
    queries_QD = Corpus(1).keys_ND[:16]
    with Datastore.open(grown(tmp_path / "s")) as reader:
        before = reader.search(queries_QD, 5, nprobe=4)
        compact(tmp_path / "s")
        after = reader.search(queries_QD, 5, nprobe=4)
        assert (before.ids_QK == after.ids_QK).all()
        places = [place.document_id for place in reader.snapshot.locate(after.ids_QK[0])]
        assert reader.refresh()
        moved = reader.search(queries_QD, 5, nprobe=4)
        np.testing.assert_array_equal(moved.distances_QK, before.distances_QK)
        assert [place.document_id for place in reader.snapshot.locate(moved.ids_QK[0])] == places


@pytest.mark.crash
def test_a_crash_at_every_step_of_a_compaction_leaves_the_old_state_or_the_new(tmp_path, monkeypatch):
    monkeypatch.setattr("memlm.index.store.compaction.CHECKPOINT_ROWS", 100)
    original = grown(tmp_path / "grown")
    with fresh(tmp_path / "fresh") as expected:
        wanted = files_of(expected)
    resumed = step = 0
    for step, path in crash_at_every_step(compact, original, tmp_path):
        with Datastore.open(path) as store:
            assert store.snapshot.verify() == []
            assert [document.id for document in store.snapshot.documents()] == [name for name, _, _ in remaining()]
        with StoreWriter.compacting(path) as writer:
            resumed += writer.num_resumed_entries > 0
        compact(path)
        with Datastore.open(path) as store:
            assert files_of(store) == wanted, f"step {step}"
            assert store.snapshot.verify() == []
    assert step > 20
    assert resumed > 3


@pytest.mark.crash
def test_a_disk_that_fills_while_compacting_is_reported_and_harms_nothing(tmp_path, monkeypatch):
    monkeypatch.setattr("memlm.index.store.compaction.CHECKPOINT_ROWS", 100)
    original = grown(tmp_path / "grown")
    reported = 0
    with fresh(tmp_path / "fresh") as expected:
        wanted = files_of(expected)
    for step, path, error in fill_disk_at_every_step(compact, original, tmp_path):
        assert isinstance(error, StorageFull | OSError)
        reported += isinstance(error, StorageFull) and "make room" in str(error)
        with Datastore.open(path) as store:
            assert store.snapshot.verify() == []
            assert [document.id for document in store.snapshot.documents()] == [name for name, _, _ in remaining()]
        compact(path)
        with Datastore.open(path) as store:
            assert files_of(store) == wanted, f"step {step}"
    assert reported > 10


def crash(*given: object, **named: object) -> None:
    raise Crash


@pytest.fixture
def half_compacted(tmp_path, monkeypatch) -> Path:
    """A store whose compaction was stopped when almost all was copied."""
    monkeypatch.setattr("memlm.index.store.compaction.CHECKPOINT_ROWS", 100)
    path = grown(tmp_path / "s")
    with monkeypatch.context() as patch:
        patch.setattr(StoreWriter, "commit", crash)
        with pytest.raises(Crash):
            compact(path)
    with StoreWriter.compacting(path) as writer:
        assert writer.num_resumed_entries > 200
    return path


def test_a_compaction_that_another_change_overtook_begins_anew(half_compacted):
    with Datastore.open(half_compacted) as store:
        store.delete(["doc-1"])
    compact(half_compacted)
    with Datastore.open(half_compacted) as store:
        assert [document.id for document in store.snapshot.documents()] == [
            n for n, _, _ in remaining() if n != "doc-1"
        ]
        assert store.snapshot.verify() == []


def test_an_interrupted_compaction_does_not_stand_in_the_way_of_adding(half_compacted):
    add(half_compacted, Corpus(3, prefix="late"))
    with Datastore.open(half_compacted) as store:
        assert store.snapshot.num_documents == len(remaining()) + 12
        assert store.snapshot.verify() == []


def test_a_reader_that_comes_while_files_go_takes_the_newer_state(tmp_path, monkeypatch):
    path = grown(tmp_path / "s")
    stale = read_manifest(path)
    compact(path)
    result = [stale]
    monkeypatch.setattr(
        "memlm.index.store.datastore.read_manifest", lambda at: result.pop() if result else read_manifest(at)
    )
    with Datastore.open(path) as store:
        assert not result
        assert store.manifest.number == stale.number + 1
        assert store.snapshot.verify() == []


def test_documents_that_wait_to_be_added_are_not_thrown_away(tmp_path):
    path = grown(tmp_path / "s")
    late = Corpus(3, prefix="late")
    add(path, late, stop_after=4)
    with pytest.raises(Incompatible, match="index add"):
        compact(path)
    with StoreWriter.extend(path, spec(IVF)) as writer:
        assert writer.num_resumed_entries == late.sizes[:4].sum()
    with write_lock(path), pytest.raises(Locked):
        compact(path)


def test_a_replaced_document_speaks_until_the_commit_and_its_successor_after(tmp_path):
    build(tmp_path / "s", Corpus(1), IVF).close()
    new = Corpus(9, num_documents=3)
    with Datastore.open(tmp_path / "s") as before:
        add(tmp_path / "s", new, replace=True)
        assert before.snapshot.num_documents == 12
        assert before.refresh()
        assert (before.snapshot.num_documents, before.snapshot.num_deleted_documents) == (12, 3)
        found = before.search(new.keys_ND, 1, nprobe=4)
        assert found.values_QK[:, 0].tolist() == new.values_N.tolist()
        old = Corpus(1)
        gone = before.search(old.keys_ND[old.owner_N < 3], 4, nprobe=4)
        assert (gone.distances_QK[:, 0] > 0).all()
        assert before.snapshot.tokens("doc-1").tolist() == new.values_N[new.owner_N == 1].tolist()


@pytest.mark.crash
def test_a_crash_while_replacing_leaves_the_old_documents_or_the_new(tmp_path):
    new = Corpus(9, num_documents=3)
    build(tmp_path / "built", Corpus(1)).close()
    old_sizes, new_sizes = (dict(zip(each.names, each.sizes.tolist(), strict=True)) for each in (Corpus(1), new))
    seen = set()
    replacing = partial(add, corpus=new, index="auto", replace=True)
    for _, path in crash_at_every_step(replacing, tmp_path / "built", tmp_path):
        with Datastore.open(path) as store:
            assert store.snapshot.verify() == []
            sizes = {document.id: document.num_tokens for document in store.snapshot.documents()}
            assert sizes in (old_sizes, old_sizes | new_sizes)
            seen.add(sizes == old_sizes)
    assert seen == {True, False}


def test_documents_are_deleted_by_what_is_known_of_them(tmp_path):
    with StoreWriter.create(tmp_path / "s", spec()) as writer:
        known = [
            {"license": "MIT", "year": 2020, "tags": ["a", "b"], "open": True},
            {"license": "unknown", "year": 2020, "tags": ["b"], "open": False},
            {"license": "unknown", "year": 2021},
            {},
        ]
        for number, metadata in enumerate(known):
            writer.begin_document(f"doc-{number}", title=f"Title {number}", metadata=metadata)
            writer.append(np.ones((2, 12), np.float32) * number, np.arange(2))
        store = writer.commit(defaults=DEFAULTS)
    assert store.snapshot.matching({"license": "unknown"}) == ["doc-1", "doc-2"]
    assert store.snapshot.matching({"license": "unknown", "year": "2020"}) == ["doc-1"]
    assert store.snapshot.matching({"tags": "b"}) == ["doc-0", "doc-1"]
    assert store.snapshot.matching({"open": "true"}) == ["doc-0"]
    assert store.snapshot.matching({"title": "Title 3"}) == ["doc-3"]
    assert store.snapshot.matching({"nothing": "x"}) == []
    number = store.manifest.number
    assert store.delete_where({"license": "GPL"}).num_documents == 0
    assert store.manifest.number == number
    assert store.delete_where({"license": "unknown"}).num_documents == 2
    assert [document.id for document in store.snapshot.documents()] == ["doc-0", "doc-3"]
    with pytest.raises(InvalidInput, match="everything"):
        store.delete_where({})


def test_a_journal_that_was_changed_is_refused_and_files_that_lost_their_end_too(tmp_path):
    path = grown(tmp_path / "s")
    add(path, Corpus(3, prefix="late"), stop_after=4)
    journal = path / "building.json"
    whole = journal.read_bytes()
    for place in range(len(whole)):
        changed = bytearray(whole)
        changed[place] ^= 0x04
        journal.write_bytes(changed)
        with pytest.raises(Exception, match=r"building\.json"):
            StoreWriter.extend(path, spec(IVF))
    journal.write_bytes(whole)
    keys = path / "building" / "keys.npy"
    keys.write_bytes(keys.read_bytes()[:-1])
    with pytest.raises(Exception, match=r"keys\.npy has"):
        StoreWriter.extend(path, spec(IVF))
    journal.unlink()
    add(path, Corpus(3, prefix="late"))
    with Datastore.open(path) as store:
        assert store.snapshot.verify() == []
