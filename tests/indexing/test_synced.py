"""What a datastore remembers of synchronizations, and the documents of others."""

import base64
import json
import random
import shutil
import tracemalloc
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from synced_folders import killed_at, make_docs, put, synced, texts_in

from memlm.data.corpus import Corpus, Document
from memlm.data.synced_folder import MAX_FOLDERS, SyncedFolder, hash_of
from memlm.errors import AlreadyExists, Corrupt
from memlm.index.store.datastore import Datastore
from memlm.indexing import sync as sync_module
from memlm.indexing.build import build_index
from memlm.indexing.sync import SyncPlan, plan_sync, sync_index
from memlm.indexing.synced import SYNCED, Memory
from memlm.model.files.checkpoint import Checkpoint, load_checkpoint

DOCUMENT = [("id", "<u8"), ("content", "<u8"), ("file", "<u8"), ("folder", "<u4")]  # of a row in the file


@pytest.fixture(scope="module")
def checkpoint(model_folder: Path) -> Checkpoint:
    return load_checkpoint(model_folder)


@pytest.fixture
def docs(tmp_path: Path) -> Path:
    return make_docs(tmp_path)


@pytest.mark.parametrize("change", [{"text": "another's"}, {"title": "Another's"}, {"metadata": {"by": "another"}}])
def test_a_document_that_others_have_put_in_its_place_is_kept(checkpoint, docs, tmp_path, change):
    store = tmp_path / "store"
    synced(checkpoint, store, docs)
    a, b, c = Corpus([docs])
    others = [replace(each, **change) for each in (a, b)]
    put(checkpoint, store, *others)
    (docs / "a.txt").unlink()
    expected = SyncPlan(kept=("b.txt", "a.txt"), unchanged=("c.html",))
    assert plan_sync(checkpoint.tokenizer, Corpus([docs]), store) == expected
    assert synced(checkpoint, store, docs) == expected
    (docs / "b.txt").write_text("the file has changed")
    assert synced(checkpoint, store, docs) == SyncPlan(kept=("b.txt",), unchanged=("c.html",))  # a is others' by now
    assert texts_in(checkpoint, store) == {each.id: each.text for each in (*others, c)}
    assert sync_index(checkpoint, Corpus([docs]), store, replace=True, check="none").plan.replaced == ("b.txt",)
    (docs / "b.txt").unlink()
    assert synced(checkpoint, store, docs).deleted == ("b.txt",)
    assert set(texts_in(checkpoint, store)) == {"a.txt", "c.html"}


class Twin:
    """What two folders and a datastore have by the rules alone, with whole texts in place of hashes."""

    def __init__(self) -> None:
        self.store = dict[str, str]()
        self.folders: dict[str, dict[str, str]] = {"one": {}, "two": {}}
        self.brought: dict[str, dict[str, str]] = {"one": {}, "two": {}}

    def sync(self, name: str) -> SyncPlan | None:
        """None where a document of the other folder would be replaced."""
        files, own = self.folders[name], self.brought[name]
        other = self.brought["two" if name == "one" else "one"]
        kinds: dict[str, list[str]] = {kind: [] for kind in ("added", "replaced", "deleted", "kept", "unchanged")}
        for id_, text in sorted(files.items()):
            there = self.store.get(id_)
            if there in (None, text):
                kinds["added" if there is None else "unchanged"].append(id_)
            elif id_ in own and own[id_] != there:
                kinds["kept"].append(id_)
            elif id_ not in own and other.get(id_) == there:
                return None
            else:
                kinds["replaced"].append(id_)
        for id_ in own.keys() & self.store.keys() - files.keys():
            is_own = own[id_] == self.store[id_] != other.get(id_)
            kinds["deleted" if is_own else "kept"].append(id_)
        for id_ in other.keys() - self.store.keys():
            del other[id_]
        self.brought[name] = {id_: own[id_] if id_ in kinds["kept"] else text for id_, text in files.items()}
        self.store |= {id_: files[id_] for id_ in (*kinds["added"], *kinds["replaced"])}
        for id_ in kinds["deleted"]:
            del self.store[id_]
        return SyncPlan(**{kind: tuple(sorted(ids)) for kind, ids in kinds.items()})


@pytest.mark.parametrize("seed", range(3))
def test_two_folders_and_others_leave_what_the_rules_say(checkpoint, tmp_path, seed):
    rng, twin, store = random.Random(seed), Twin(), tmp_path / "store"
    build_index(checkpoint, [Document("own", "of nobody's folder")], store, keys="none", check="none")
    for name in twin.folders:
        (tmp_path / name).mkdir()
        (tmp_path / name / f"{name}.txt").write_text("something is left")
        twin.folders[name][f"{name}.txt"] = "something is left"
    for step in range(40):
        name, id_, text = rng.choice(("one", "two")), f"{rng.randrange(4)}.txt", f"text {rng.randrange(3)}"
        what = rng.choice(("write", "write", "remove", "put", "delete", "sync", "sync", "sync"))
        if what == "write":
            (tmp_path / name / id_).write_text(text)
            twin.folders[name][id_] = text
        elif what == "remove":
            (tmp_path / name / id_).unlink(missing_ok=True)
            twin.folders[name].pop(id_, None)
        elif what == "put":
            put(checkpoint, store, Document(id_, text, id_))
            twin.store[id_] = text
        elif what == "delete" and twin.store.pop(id_, None):
            with Datastore.open(store) as datastore:
                datastore.delete([id_])
        elif what == "sync" and (expected := twin.sync(name)) is None:
            with pytest.raises(AlreadyExists):
                synced(checkpoint, store, tmp_path / name)
        elif what == "sync":
            plan = synced(checkpoint, store, tmp_path / name)
            kinds = {kind: tuple(sorted(getattr(plan, kind))) for kind in ("added", "replaced", "deleted", "kept")}
            assert SyncPlan(**kinds, unchanged=plan.unchanged) == expected, step
            assert texts_in(checkpoint, store) == {"own": "of nobody's folder", **twin.store}


def test_a_document_that_others_put_there_since_the_plan_is_kept(checkpoint, docs, tmp_path):
    store = tmp_path / "store"
    synced(checkpoint, store, docs)
    for name in ("a.txt", "b.txt"):
        (docs / name).unlink()
    plan = plan_sync(checkpoint.tokenizer, Corpus([docs]), store)
    put(checkpoint, store, Document("a.txt", "another's"))
    done = sync_index(checkpoint, Corpus([docs]), store, check="none", plan=plan).plan
    assert (plan.deleted, done.deleted, done.kept) == (("a.txt", "b.txt"), ("b.txt",), ("a.txt",))
    assert set(texts_in(checkpoint, store)) == {"a.txt", "c.html"}


def test_a_document_that_others_have_put_as_it_is_in_the_file_is_the_folders(checkpoint, docs, tmp_path):
    store = tmp_path / "store"
    synced(checkpoint, store, docs)
    (docs / "a.txt").write_text("changed twice, once")
    put(checkpoint, store, next(iter(Corpus([docs]))))
    assert synced(checkpoint, store, docs).unchanged == ("a.txt", "b.txt", "c.html")
    (docs / "a.txt").write_text("changed twice, twice")
    assert synced(checkpoint, store, docs).replaced == ("a.txt",)


def test_what_another_folder_brought_counts_as_long_as_it_is_there(checkpoint, docs, tmp_path):
    store, other, third = tmp_path / "store", tmp_path / "other", tmp_path / "third"
    shutil.copytree(docs, other)
    synced(checkpoint, store, docs)
    synced(checkpoint, store, other)
    (other / "a.txt").write_text("the other's")
    assert synced(checkpoint, store, other).replaced == ("a.txt",)  # it brought what is there
    assert synced(checkpoint, store, docs).kept == ("a.txt",)  # and nothing is turned back
    put(checkpoint, store, Document("a.txt", "nobody's"))
    third.mkdir()
    (third / "a.txt").write_text("the third's")
    assert synced(checkpoint, store, third).replaced == ("a.txt",)
    (docs / "b.txt").unlink()
    (docs / "a.txt").unlink()
    plan = synced(checkpoint, store, docs)
    assert (plan.deleted, set(plan.kept)) == ((), {"a.txt", "b.txt"})


def test_a_memory_without_contents_takes_its_documents_as_the_folders(checkpoint, docs, tmp_path):
    store = tmp_path / "store"
    synced(checkpoint, store, docs)
    ways = {hash_of(id_): way for id_, way in plan_sync(checkpoint.tokenizer, Corpus([docs]), store).files.items()}
    old = {"version": 3, "synced": {SyncedFolder(Corpus([docs])).origin: ways}}
    (store / SYNCED).write_text(json.dumps(old))
    put(checkpoint, store, Document("a.txt", "another's"))
    (docs / "b.txt").unlink()
    plan = synced(checkpoint, store, docs)
    assert (plan.replaced, plan.deleted) == (("a.txt",), ("b.txt",))
    put(checkpoint, store, Document("a.txt", "another's"))
    assert synced(checkpoint, store, docs).kept == ("a.txt",)


def test_a_changed_document_is_the_folders_after_a_kill_behind_its_commit(checkpoint, docs, tmp_path):
    store = tmp_path / "store"
    synced(checkpoint, store, docs)
    for number in range(2):
        (docs / "a.txt").write_text(f"version {number}")
        with killed_at(sync_module, "note_brought"):
            synced(checkpoint, store, docs)
    (docs / "a.txt").write_text("the last version")
    assert synced(checkpoint, store, docs).replaced == ("a.txt",)
    put(checkpoint, store, Document("a.txt", "version 0"))
    assert synced(checkpoint, store, docs).kept == ("a.txt",)  # by now only the last one is


def test_documents_that_go_away_while_they_are_brought_are_still_the_folders(checkpoint, docs, tmp_path):
    store = tmp_path / "store"
    synced(checkpoint, store, docs)
    for name in ("a.txt", "b.txt"):
        (docs / name).write_text("another text")
    plan = plan_sync(checkpoint.tokenizer, Corpus([docs]), store)
    (docs / "a.txt").unlink()
    sync_index(checkpoint, Corpus([docs]), store, check="none", plan=plan)
    assert synced(checkpoint, store, docs).deleted == ("a.txt",)


@pytest.mark.parametrize("version", [1, 2])
def test_a_memory_without_folders_deletes_nothing(checkpoint, docs, tmp_path, version):
    store = tmp_path / "store"
    synced(checkpoint, store, docs)
    old = {origin: list(files) for origin, files in json.loads((store / SYNCED).read_text())["synced"].items()}
    if version == 2:
        old = {origin: dict.fromkeys(ids, "0123456789abcdef") for origin, ids in old.items()}
    (store / SYNCED).write_text(json.dumps({"version": version, "synced": old}))
    (docs / "a.txt").unlink()
    assert synced(checkpoint, store, docs) == SyncPlan(unchanged=("b.txt", "c.html"))
    (docs / "b.txt").unlink()
    assert synced(checkpoint, store, docs).deleted == ("b.txt",)


def test_the_memory_of_the_folder_has_no_names(checkpoint, docs, tmp_path):
    store = tmp_path / "store"
    synced(checkpoint, store, docs)
    content = (store / SYNCED).read_text()
    assert not any(word in content for word in ("a.txt", "html", "docs"))
    (store / SYNCED).write_text("{")
    with pytest.raises(Corrupt, match="remove it"):
        synced(checkpoint, store, docs)


def test_the_memory_takes_some_bytes_for_each_document_that_is_there(checkpoint, docs, tmp_path):
    store, deep = tmp_path / "store", docs.joinpath(*["folder"] * 12)
    deep.mkdir(parents=True)
    for number in range(200):
        (deep / f"{number}.txt").write_text(f"text {number}")
    copy = Path(shutil.copytree(docs, tmp_path / "copy"))
    synced(checkpoint, store, docs)
    assert (store / SYNCED).stat().st_size < 203 * 28 * 4 / 3 + 500
    with Datastore.open(store) as datastore:
        datastore.delete([document.id for document in datastore.snapshot.documents()])
    for folder in (docs, copy):
        shutil.rmtree(folder / "folder")
    synced(checkpoint, store, copy)
    assert list(json.loads((store / SYNCED).read_text())["synced"]) == [SyncedFolder(Corpus([copy])).origin]
    assert (store / SYNCED).stat().st_size < 500


@pytest.mark.parametrize(
    "damage",
    [
        lambda rows: rows["documents"][:-1], lambda rows: rows["documents"][:-8], lambda rows: 7,
        lambda rows: rows["documents"].swapcase()[::-1],
    ],
)  # fmt: skip
def test_a_damaged_memory_is_named(checkpoint, docs, tmp_path, damage):
    store = tmp_path / "store"
    synced(checkpoint, store, docs)
    memory = json.loads((store / SYNCED).read_text())
    for rows in memory["synced"].values():
        rows["documents"] = damage(rows)
    (store / SYNCED).write_text(json.dumps(memory))
    with pytest.raises(Corrupt, match="remove it"):
        synced(checkpoint, store, docs)


def test_what_a_memory_takes_is_bounded_by_its_file(checkpoint, docs, tmp_path):
    """Here each folder lies in the one before, and in the file its row takes sixteen bytes."""
    store = tmp_path / "store"
    synced(checkpoint, store, docs)
    memory = json.loads((store / SYNCED).read_text())
    (rows,) = memory["synced"].values()
    chain = np.zeros(2000, [("hash", "<u8"), ("above", "<u4")])
    chain["hash"], chain["above"] = np.arange(2000) + 1, np.arange(2000)
    rows["folders"] = base64.b64encode(chain.tobytes()).decode()
    documents = np.frombuffer(base64.b64decode(rows["documents"]), DOCUMENT).copy()
    documents["folder"] = 2000
    rows["documents"] = base64.b64encode(documents.tobytes()).decode()
    (store / SYNCED).write_text(json.dumps(memory))
    tracemalloc.start()
    found = Memory.read(store, SyncedFolder(Corpus([docs])).origin)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 4 << 20  # 35 MB where each folder has its whole way
    assert {row.folder for rows in found.own.values() for row in rows} == {
        "/".join(f"{number:016x}" for number in range(1, MAX_FOLDERS + 1))
    }
