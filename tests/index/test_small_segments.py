"""Documents that are remembered at once: durable, while others write, in a number of segments that stays low."""

import os
import signal
import time
from dataclasses import replace
from itertools import count
from pathlib import Path

import numpy as np
import pytest
from crashes import crash_at_every_step, fill_disk_at_every_step
from random_stores import DIM, IVF, Corpus, build, fill, spec

from memlm.errors import AlreadyExists, Incompatible, InvalidInput, Locked, StorageFull
from memlm.index.factory import NO_INDEX
from memlm.index.store.backup import copy_store
from memlm.index.store.compaction import compact
from memlm.index.store.datastore import Datastore
from memlm.index.store.journal import is_being_extended
from memlm.index.store.manifest import JOURNAL
from memlm.index.store.segment import SMALL_ENTRIES
from memlm.index.store.small_segments import MERGED_AT_ONCE, NewEntries
from memlm.index.store.writer import StoreWriter

LATER = Corpus(2, 5, prefix="later")


def entries(name: str, seed: int, size: int = 7, *, keys: bool = True) -> NewEntries:
    rng = np.random.default_rng(seed)
    keys_ND = rng.normal(size=(size, DIM)).astype(np.float16)
    return NewEntries(
        name, keys_ND if keys else None, rng.integers(0, 500, size), title=name.upper(), metadata={"seed": seed}
    )


def contents(store: Datastore) -> dict[str, tuple]:
    """The title, metadata and values of each live document."""
    return {
        document.id: (document.title, document.metadata["seed" if "seed" in document.metadata else "number"],
                      store.snapshot.tokens(document.id).tolist())
        for document in store.snapshot.documents()
    }  # fmt: skip


def nearest_to(store: Datastore, document: NewEntries) -> list[int]:
    return store.search(document.keys_ND.astype(np.float32), 1).values_QK[:, 0].tolist()


@pytest.mark.parametrize("index", [IVF, "auto"])
def test_a_remembered_document_is_found_at_once_and_by_whoever_opens_the_store(corpus, tmp_path, index):
    store, note = build(tmp_path / "s", corpus, index), entries("note", 1)
    record = store.remember([note])
    assert (record.entries, record.index) == (7, "Flat")
    for each in (store, Datastore.open(tmp_path / "s")):
        assert nearest_to(each, note) == note.values_N.tolist()
        assert contents(each)["note"] == ("NOTE", 1, note.values_N.tolist())
        assert each.snapshot.verify() == []


def test_a_store_without_keys_remembers_texts(corpus, tmp_path):
    store = build(tmp_path / "s", corpus, NO_INDEX)
    store.remember([entries("note", 1, keys=False)])
    assert store.snapshot.tokens("note").tolist() == entries("note", 1).values_N.tolist()
    assert store.snapshot.verify() == []


def test_an_id_that_is_taken_is_refused_or_replaced(corpus, tmp_path):
    store = build(tmp_path / "s", corpus)
    store.remember([entries("note", 1)])
    before = contents(store)
    with pytest.raises(AlreadyExists, match="a document 'note' already"):
        store.remember([entries("other", 3), entries("note", 2)])
    assert contents(Datastore.open(store.path)) == before
    store.remember([entries("note", 2)], replace=True)
    assert contents(store) == before | {"note": ("NOTE", 2, entries("note", 2).values_N.tolist())}


def test_two_documents_of_one_id_and_documents_without_a_token_change_nothing(corpus, tmp_path):
    store = build(tmp_path / "s", corpus)
    before = contents(store)
    with pytest.raises(AlreadyExists):
        store.remember([entries("note", 1), entries("note", 2)])
    with pytest.raises(InvalidInput, match="no token"):
        store.remember([entries("note", 1, size=0)])
    assert contents(Datastore.open(store.path)) == before
    store.remember([entries("note", 1)])  # into the folder that the refused ones have left
    assert Datastore.open(store.path).snapshot.verify() == []


def test_entries_for_a_store_of_another_spec_are_refused(corpus, tmp_path):
    store = build(tmp_path / "s", corpus)
    with pytest.raises(Locked, match="replaced by another store"):
        store.prepare_remember([entries("note", 1)], spec(context=9))


@pytest.mark.parametrize("index", [IVF, NO_INDEX])
def test_an_addition_goes_on_over_what_is_remembered_and_merged_meanwhile(corpus, tmp_path, index):
    path, keys = tmp_path / "s", index != NO_INDEX
    store = build(path, corpus, index)
    store.remember([entries("before", 9, keys=keys)])
    with StoreWriter.extend(path, spec(index), keyed=index != NO_INDEX) as writer:
        fill(writer, LATER, stop_after=2)
        for number in range(MERGED_AT_ONCE):
            store.remember([entries(f"note-{number}", number, keys=keys)])
        assert store.merge_small()
    assert is_being_extended(path)
    with StoreWriter.extend(path, spec(index), keyed=index != NO_INDEX) as writer:  # as another process, after a kill
        assert writer.num_resumed_entries == LATER.sizes[:2].sum()
        store.remember([entries("late", 8, keys=keys)])
        fill(writer, LATER)
        writer.commit().close()
    store.refresh()
    names = {"before", "late", *corpus.names, *LATER.names, *(f"note-{n}" for n in range(MERGED_AT_ONCE))}
    assert set(contents(store)) == names
    assert store.snapshot.verify() == []


def test_an_addition_whose_document_came_meanwhile_replaces_it_or_keeps_what_was_encoded(corpus, tmp_path):
    store = build(tmp_path / "s", corpus)
    with StoreWriter.extend(tmp_path / "s", spec()) as writer:
        fill(writer, LATER)
        store.remember([entries(LATER.names[1], 1)])
        with pytest.raises(AlreadyExists, match="came into the datastore meanwhile"):
            writer.commit()
    with StoreWriter.extend(tmp_path / "s", spec()) as writer:
        assert writer.num_resumed_entries == LATER.sizes.sum()
        for name, _, values_N in LATER.blocks():
            writer.begin_document(name, title=name.upper(), metadata={"number": 0}, replace=True)
            writer.verify_resumed(values_N)
        writer.commit().close()
    store.refresh()
    assert contents(store)[LATER.names[1]][0] == LATER.names[1].upper()
    assert len(contents(store)) == len(corpus.names) + len(LATER.names)


@pytest.mark.parametrize("emptied", [False, True])
def test_a_compaction_keeps_what_is_remembered_meanwhile(corpus, tmp_path, emptied):
    store = build(tmp_path / "s", corpus, IVF)
    store.delete(corpus.names if emptied else corpus.names[:3])
    with StoreWriter.compacting(tmp_path / "s") as writer:
        store.remember([entries("note", 1)])
        if emptied:
            writer.commit_empty().close()
        else:
            for segment in writer.base.segments:
                for document in segment.live_documents():
                    writer.begin_document(document.id, title=document.title, metadata=document.metadata)
                    writer.append(*segment.entries_of(document.row))
            writer.commit().close()
    store.refresh()
    assert set(contents(store)) == {"note"} | (set() if emptied else set(corpus.names[3:]))
    assert len(store.manifest.segments) == (1 if emptied else 2)
    assert store.snapshot.verify() == []
    compact(store.path)
    store.refresh()
    assert len(store.manifest.segments) == 1
    assert "note" in contents(store)


def test_small_segments_merge_until_each_tier_has_three_at_most(corpus, tmp_path):
    store, notes = build(tmp_path / "s", corpus, IVF), []
    for number in range(90):
        notes.append(entries(f"note-{number}", number, size=30))
        store.remember([notes[-1]])
        if number % 9 == 4:
            store.delete([f"note-{number - 1}"])
        while store.merge_small():
            store.refresh()
        assert len(store.manifest.segments) <= 1 + 3 * 3  # 2,700 entries reach the third tier
    deleted = {f"note-{number - 1}" for number in range(90) if number % 9 == 4}
    live = [note for note in notes if note.id not in deleted]
    assert set(contents(store)) == {*corpus.names, *(note.id for note in live)}
    for note in live:
        assert nearest_to(store, note) == note.values_N.tolist()
    assert store.snapshot.num_deleted_documents < len(deleted)  # a merge leaves them out
    assert store.snapshot.verify() == []


def test_a_merge_of_deleted_documents_leaves_no_segment_and_no_number_for_others(corpus, tmp_path):
    store = build(tmp_path / "s", corpus, IVF)
    for number in range(MERGED_AT_ONCE):
        store.remember([entries(f"note-{number}", number)])
    taken = store.manifest.last_segment
    store.delete([f"note-{number}" for number in range(MERGED_AT_ONCE)])
    assert store.merge_small()
    store.refresh()
    assert len(store.manifest.segments) == 1
    assert store.remember([entries("note", 1)]).number > taken


def test_a_merge_leaves_large_segments_and_those_of_lists_alone(corpus, tmp_path):
    store = build(tmp_path / "s", corpus, NO_INDEX)
    for number in range(MERGED_AT_ONCE):
        store.remember([entries(f"note-{number}", number, size=SMALL_ENTRIES // 3, keys=False)])
    assert not store.merge_small()


def test_a_merge_loses_no_document_to_readers_but_the_deleted_and_changed(corpus, tmp_path):
    store = build(tmp_path / "s", corpus, IVF)
    for number in range(MERGED_AT_ONCE):
        store.remember([entries(f"note-{number}", number)])
    before = store.snapshot
    store.delete(["note-1"])
    store.remember([entries("note-2", 77)], replace=True)
    while store.merge_small():
        store.refresh()
    assert sorted(before.missing_from(store.snapshot)) == ["note-1", "note-2"]


def remember_and_merge(path: Path) -> None:
    with Datastore.open(path) as store:
        store.remember([entries("note-1", 21), entries("note-9", 9)], replace=True)
        store.merge_small()


@pytest.mark.crash
def test_a_crash_at_any_step_leaves_all_of_a_text_or_none(corpus, tmp_path):
    store = build(tmp_path / "s", corpus, IVF)
    for number in range(MERGED_AT_ONCE - 1):
        store.remember([entries(f"note-{number}", number)])
    before = contents(store)
    after = before | {each.id: (each.title, each.metadata["seed"], each.values_N.tolist())
                      for each in (entries("note-1", 21), entries("note-9", 9))}  # fmt: skip
    seen = set()
    for _, path in crash_at_every_step(remember_and_merge, store.path, tmp_path / "crashes"):
        with Datastore.open(path) as crashed:
            assert contents(crashed) in (before, after)
            seen.add(contents(crashed) == after)
            assert crashed.snapshot.verify() == []
            crashed.remember([entries("note-8", 8)])  # over what the crash has left
            assert contents(crashed)["note-8"][1] == 8
            assert crashed.snapshot.verify() == []
    assert seen == {False, True}


@pytest.mark.crash
def test_a_full_disk_at_any_step_leaves_all_of_a_text_or_none(corpus, tmp_path):
    store = build(tmp_path / "s", corpus, IVF)
    before = contents(store)
    for _, path, error in fill_disk_at_every_step(remember_and_merge, store.path, tmp_path / "full"):
        assert isinstance(error, StorageFull)
        with Datastore.open(path) as left:
            assert {name: content for name, content in contents(left).items() if name in before} == before
            assert left.snapshot.verify() == []


def test_a_done_journal_that_a_kill_left_bars_nobody_after_a_merge(corpus, tmp_path):
    store = build(tmp_path / "s", corpus)
    with StoreWriter.extend(store.path, spec()) as writer:
        fill(writer, LATER)
        journal = (store.path / JOURNAL).read_bytes()
        writer.commit().close()
    (store.path / JOURNAL).write_bytes(journal)  # killed between the commit and its removal
    for number in range(MERGED_AT_ONCE):
        store.remember([entries(f"note-{number}", number)])
    assert store.merge_small()
    assert not is_being_extended(store.path)
    compact(store.path)


def test_remembering_beside_an_addition_leaves_its_documents_to_it(corpus, tmp_path):
    store = build(tmp_path / "s", corpus)
    with StoreWriter.extend(store.path, spec()) as writer:
        fill(writer, LATER, stop_after=3)
        store.remember([entries("note", 1)])
    with pytest.raises(Incompatible, match="documents were being added"):
        compact(store.path)


def remember_until_killed(path: Path, first: int, pipe: int) -> None:
    """Remembers text after text, and writes each one's number to a pipe once it is committed."""
    with Datastore.open(path) as store:
        for number in count(first):
            store.remember([entries(f"note-{number}", number)])
            os.write(pipe, b"%d\n" % number)
            store.merge_small()
            store.refresh()


def kill_while_remembering(path: Path, kills: int, seed: int) -> int:
    """Kills a process that remembers, again and again at a random moment. Returns how many texts came to be."""
    rng, present = np.random.default_rng(seed), 0
    for _ in range(kills):
        reading, writing = os.pipe()
        if (child := os.fork()) == 0:
            try:
                remember_until_killed(path, present, writing)
            finally:
                os._exit(1)
        os.close(writing)
        with open(reading, "rb") as pipe:
            acknowledged = [int(pipe.readline()) for _ in range(rng.integers(3))]
            time.sleep(float(rng.uniform(0, 0.05)))
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
            acknowledged += map(int, pipe.read().split())
        last = acknowledged[-1] + 1 if acknowledged else present
        with Datastore.open(path) as store:
            notes = {name: content for name, content in contents(store).items() if name.startswith("note-")}
        present = len(notes)
        assert present in (last, last + 1)  # whatever was acknowledged, and perhaps the next one
        assert notes == {f"note-{number}": (f"NOTE-{number}", number, entries("", number).values_N.tolist())
                         for number in range(present)}  # fmt: skip
    return present


@pytest.mark.crash
@pytest.mark.parametrize("kills", [20, pytest.param(1000, marks=pytest.mark.exhaustive)])
def test_what_was_acknowledged_outlasts_a_kill(corpus, tmp_path, kills):
    build(tmp_path / "s", corpus, IVF).close()
    assert kill_while_remembering(tmp_path / "s", kills, 1) > 5
    assert Datastore.open(tmp_path / "s").snapshot.verify() == []


@pytest.mark.parametrize("task", ["extend", "compacting"])
def test_a_writer_that_goes_on_after_a_kill_is_safe_from_merges(corpus, tmp_path, task):
    store = build(tmp_path / "s", corpus, IVF)
    store.delete(corpus.names[:2])

    def begin() -> StoreWriter:
        return StoreWriter.compacting(store.path) if task == "compacting" else StoreWriter.extend(store.path, spec(IVF))

    with begin() as writer:
        if task == "extend":
            fill(writer, LATER, stop_after=2)
    for number in range(MERGED_AT_ONCE - 1):
        store.remember([entries(f"note-{number}", number)])
    with begin() as writer:
        for number in range(MERGED_AT_ONCE):
            store.remember([entries(f"more-{number}", number)])
        assert store.merge_small()
        if task == "extend":
            fill(writer, LATER)
        else:
            for segment in writer.base.segments:
                for document in segment.live_documents():
                    writer.begin_document(document.id, title=document.title, metadata=document.metadata)
                    writer.append(*segment.entries_of(document.row))
        writer.commit().close()
    store.refresh()
    names = {f"note-{n}" for n in range(MERGED_AT_ONCE - 1)} | {f"more-{n}" for n in range(MERGED_AT_ONCE)}
    assert set(contents(store)) == names | set(corpus.names[2:]) | set(LATER.names if task == "extend" else ())
    assert store.snapshot.verify() == []


def test_a_tier_with_more_than_a_merge_takes_is_merged_in_parts(corpus, tmp_path):
    store = build(tmp_path / "s", corpus, NO_INDEX)
    for number in range(6):
        store.remember([entries(f"note-{number}", number, size=SMALL_ENTRIES // 5, keys=False)])
    assert store.merge_small()
    store.refresh()
    assert [record.documents for record in store.manifest.segments[1:]] == [5, 1]


def test_a_segment_whose_deleted_text_a_copy_keeps_is_left_to_a_purge_that_tells(corpus, tmp_path):
    store = build(tmp_path / "s", corpus, IVF)
    for number in range(MERGED_AT_ONCE):
        store.remember([entries(f"note-{number}", number)])
    copy_store(store.path, tmp_path / "copy")
    store.delete(["note-1"])
    assert not store.merge_small()
    assert compact(store.path, purge=True).linked_files > 0


def test_a_text_whose_tokens_are_all_pruned_is_remembered(corpus, tmp_path):
    with StoreWriter.create(tmp_path / "s", spec("auto", prune=0.5)) as writer:
        for name, keys_ND, values_N in corpus.blocks():
            writer.begin_document(name, metadata={"number": 0})
            writer.append(keys_ND, values_N, np.zeros(len(values_N), bool))
        store = writer.commit()
    for number in range(MERGED_AT_ONCE):
        note = entries(f"note-{number}", number)
        store.remember([replace(note, pruned_N=np.ones(len(note.values_N), bool))])
    for _ in range(2):
        assert "note-3" in contents(store)
        assert set(store.search(entries("", 1).keys_ND.astype(np.float32), 500).values_QK.ravel()) <= {
            -1, *corpus.values_N.tolist()
        }  # fmt: skip
        assert store.snapshot.verify() == []
        assert store.merge_small() == (store.snapshot.manifest.segments[-1].documents == 1)
        store.refresh()
