"""Segments divided among shards: evenly, for good, and without losing or bringing back a document."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from crashes import crash_at_every_step
from hypothesis import given
from hypothesis import strategies as st
from random_stores import Corpus, add, build, spec

from memlm.base.progress import silent
from memlm.errors import Incompatible, InvalidInput, Locked
from memlm.index.store.compaction import compact, copy_documents
from memlm.index.store.datastore import Datastore
from memlm.index.store.lock import write_lock
from memlm.index.store.manifest import SegmentRecord
from memlm.index.store.shards import ShardNumber, shards_of, split
from memlm.index.store.small_segments import NewEntries
from memlm.index.store.writer import StoreWriter

DOCS = Corpus(1, num_documents=24)
RECORD = SegmentRecord(number=1, entries=1, documents=1, index="Flat", nprobe=0, files={})


def contents(path: Path) -> dict[str, tuple[bytes, bytes, dict]]:
    """Keys, values and metadata of every live document."""
    with Datastore.open(path) as store:
        assert store.snapshot.verify() == []
        found = {}
        for segment in store.snapshot.segments:
            for document in segment.live_documents():
                assert document.id not in found
                keys_ND, values_N, _ = segment.entries_of(document.row)
                found[document.id] = keys_ND.tobytes(), values_N.tobytes(), dict(document.metadata)
        return found


def sizes(path: Path) -> list[int]:
    with Datastore.open(path) as store:
        return [segment.num_live_entries for segment in store.snapshot.segments]


@given(st.lists(st.integers(1, 1000), max_size=30), st.integers(1, 8))
def test_a_new_segment_moves_no_earlier_one(entries, num_shards):
    records = [replace(RECORD, number=number, entries=count) for number, count in enumerate(entries, 1)]
    shards = shards_of(records, num_shards)
    assert all(1 <= shard <= num_shards for shard in shards)
    for count in range(len(records)):
        assert shards_of(records[:count], num_shards) == shards[:count]
    loads = [sum(count for count, of in zip(entries, shards, strict=True) if of == shard) for shard in set(shards)]
    assert max(loads, default=0) <= sum(entries) / num_shards + max(entries, default=0)


@pytest.mark.parametrize("index", ["Flat", "IVF4,SQfp16"])
@pytest.mark.parametrize("num_shards", [2, 4])
def test_a_large_segment_is_cut_and_nothing_else_changes(tmp_path, index, num_shards):
    build(tmp_path / "s", DOCS, index).close()
    with Datastore.open(tmp_path / "s") as store:
        store.delete(["doc-0", "doc-9"])
    before = contents(tmp_path / "s")
    assert split(tmp_path / "s", num_shards) == 1
    assert contents(tmp_path / "s") == before
    with Datastore.open(tmp_path / "s") as store:
        assert store.snapshot.num_deleted_documents == 0
        records = store.manifest.segments
        share = store.snapshot.num_entries / num_shards
    assert sorted(shards_of(records, num_shards)) == list(range(1, num_shards + 1))
    assert max(sizes(tmp_path / "s")) <= share + max(DOCS.sizes)
    assert split(tmp_path / "s", num_shards) == 0


def test_only_large_segments_are_cut(tmp_path):
    build(tmp_path / "s", DOCS, "Flat").close()
    add(tmp_path / "s", Corpus(2, num_documents=2, prefix="more"), index="Flat")
    before, small = contents(tmp_path / "s"), sizes(tmp_path / "s")[1]
    assert split(tmp_path / "s", 3) == 1
    assert contents(tmp_path / "s") == before
    assert small in sizes(tmp_path / "s")


@pytest.mark.parametrize("moment", [1, 2, 3])
def test_what_others_change_meanwhile_stands(tmp_path, monkeypatch, moment):
    """A document is deleted, and one is replaced, before one of three commits of a split."""
    build(tmp_path / "s", DOCS, "Flat").close()
    new, commit, count = np.arange(5), StoreWriter.commit, 0

    def late(self: StoreWriter, *args: object, **options: object) -> Datastore:
        nonlocal count
        count += 1
        if count == moment:
            with Datastore.open(tmp_path / "s") as store:
                store.delete(["doc-2", "doc-12", "doc-20"])
                again = [NewEntries(name, np.ones((5, 12), np.float16), new) for name in ("doc-3", "doc-19")]
                store.remember(again, replace=True)
        return commit(self, *args, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(StoreWriter, "commit", late)
    split(tmp_path / "s", 3)
    after = contents(tmp_path / "s")
    assert set(after) == set(DOCS.names) - {"doc-2", "doc-12", "doc-20"}
    with Datastore.open(tmp_path / "s") as store:
        assert store.snapshot.tokens("doc-3").tolist() == store.snapshot.tokens("doc-19").tolist() == new.tolist()


def test_documents_that_move_are_not_lost(tmp_path):
    build(tmp_path / "s", DOCS, "Flat").close()
    with Datastore.open(tmp_path / "s") as store:
        before = store.snapshot
        store.delete(["doc-4"])
        segment = store.snapshot.segments[0]
        with StoreWriter.moving(tmp_path / "s", segment.record.number, range(8)) as writer:
            copy_documents(segment, writer, 0, 1, silent, range(8))
            writer.commit().close()
        store.refresh()
        assert before.missing_from(store.snapshot) == ["doc-4"]
        store.delete(["doc-2", "doc-20"])
        assert before.missing_from(store.snapshot) == ["doc-2", "doc-4", "doc-20"]


def test_a_crash_at_every_step_loses_nothing_and_the_same_call_goes_on(tmp_path):
    build(tmp_path / "original", DOCS, "Flat").close()
    before = contents(tmp_path / "original")
    for step, path in crash_at_every_step(lambda path: split(path, 3), tmp_path / "original", tmp_path, every=5):
        assert contents(path) == before, step
        split(path, 3)
        assert contents(path) == before, step
        assert len(sizes(path)) >= 3, step


def test_a_compaction_gives_up_an_interrupted_split(tmp_path):
    build(tmp_path / "s", DOCS, "Flat").close()
    before = contents(tmp_path / "s")
    with Datastore.open(tmp_path / "s") as store, StoreWriter.moving(tmp_path / "s", 1, range(5)) as writer:
        segment = store.snapshot.segments[0]
        writer.begin_document("doc-0")
        writer.append(segment.stored_keys()[:3], segment.values_N[:3].astype(np.int64))
        writer.checkpoint()
    compact(tmp_path / "s")
    assert contents(tmp_path / "s") == before


def test_what_cannot_be_cut_is_refused(tmp_path):
    build(tmp_path / "s", Corpus(1, num_documents=3), "Flat").close()
    with pytest.raises(InvalidInput, match="3 documents"):
        split(tmp_path / "s", 4)
    with pytest.raises(InvalidInput, match="shards"):
        split(tmp_path / "s", 0)
    with write_lock(tmp_path / "s"), pytest.raises(Locked):
        split(tmp_path / "s", 3)
    build(tmp_path / "ivf", DOCS, "IVF4,SQfp16").close()
    with Datastore.open(tmp_path / "ivf") as store:
        store.drop_keys()
    before = sizes(tmp_path / "ivf")
    with pytest.raises(Incompatible, match="keeping its keys"):
        split(tmp_path / "ivf", 3)
    assert sizes(tmp_path / "ivf") == before
    add_interrupted(tmp_path / "s")
    with pytest.raises(Incompatible, match="memlm index add"):
        split(tmp_path / "s", 2)


def add_interrupted(path: Path) -> None:
    with StoreWriter.extend(path, spec("Flat")) as writer:
        writer.begin_document("new")
        writer.append(np.ones((2, 12), np.float32), np.ones(2, np.int64))
        writer.checkpoint()


@pytest.mark.parametrize(("text", "shard"), [("1/1", ShardNumber(1, 1)), ("3/12", ShardNumber(3, 12))])
def test_the_number_of_a_shard(text: str, shard: ShardNumber):
    assert ShardNumber.parse(text) == shard
    assert str(shard) == text


@pytest.mark.parametrize("text", ["", "1", "0/2", "3/2", "a/b", "1/2/3", "-1/2", "1/99999"])
def test_what_is_no_number_of_a_shard(text: str):
    with pytest.raises(InvalidInput, match="1/4 for the first of four"):
        ShardNumber.parse(text)
