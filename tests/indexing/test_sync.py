"""A folder and its datastore stay the same."""

import json
import os
import shutil
from pathlib import Path

import pytest
from synced_folders import killed_at, make_docs, put, synced, texts_in

from memlm.data.corpus import Corpus, Document
from memlm.data.synced_folder import MAX_FOLDERS, SyncedFolder, hash_of, signature_of, way_of
from memlm.errors import AlreadyExists, Incompatible, InvalidInput, NotFound
from memlm.index.store.compaction import compact
from memlm.index.store.journal import Journal
from memlm.index.store.manifest import JOURNAL
from memlm.index.store.segment_writer import SegmentWriter
from memlm.indexing import build as build_module
from memlm.indexing import sync as sync_module
from memlm.indexing.build import build_index
from memlm.indexing.sync import SyncPlan, plan_sync, sync_index
from memlm.model.files.checkpoint import Checkpoint, load_checkpoint


@pytest.fixture(scope="module")
def checkpoint(model_folder: Path) -> Checkpoint:
    return load_checkpoint(model_folder)


@pytest.fixture
def docs(tmp_path: Path) -> Path:
    return make_docs(tmp_path)


def test_a_store_holds_the_documents_of_the_folder(checkpoint, docs, tmp_path):
    store = tmp_path / "store"
    assert synced(checkpoint, store, docs) == SyncPlan(added=("a.txt", "b.txt", "c.html"))
    (docs / "a.txt").write_text("another text")
    (docs / "b.txt").unlink()
    (docs / "d.txt").write_text("a new one")
    expected = SyncPlan(added=("d.txt",), replaced=("a.txt",), deleted=("b.txt",), unchanged=("c.html",))
    assert plan_sync(checkpoint.tokenizer, Corpus([docs]), store) == expected
    assert synced(checkpoint, store, docs) == expected
    assert texts_in(checkpoint, store) == {document.id: document.text for document in Corpus([docs])}
    before = (store / "CURRENT").read_bytes()
    assert synced(checkpoint, store, docs) == SyncPlan(unchanged=("a.txt", "c.html", "d.txt"))
    assert (store / "CURRENT").read_bytes() == before


def test_only_documents_of_the_same_folder_are_deleted(checkpoint, docs, tmp_path):
    store, other = tmp_path / "store", tmp_path / "other"
    other.mkdir()
    (other / "b.txt").write_text((docs / "b.txt").read_text())
    (other / "x.txt").write_text("another folder's")
    build_index(checkpoint, [Document("own", "of nobody's folder"), docs / "a.txt"], store, check="none")
    assert synced(checkpoint, store, docs).added == ("b.txt", "c.html")
    assert synced(checkpoint, store, other) == SyncPlan(added=("x.txt",), unchanged=("b.txt",))
    (docs / "a.txt").unlink()
    (docs / "b.txt").unlink()
    plan = synced(checkpoint, store, docs)
    assert (plan.deleted, plan.kept) == (("a.txt",), ("b.txt",))  # the other folder has a b.txt too
    (other / "b.txt").unlink()
    assert synced(checkpoint, store, other).deleted == ("b.txt",)
    assert set(texts_in(checkpoint, store)) == {"own", "c.html", "x.txt"}


def test_a_folder_that_replaces_deletes_what_folders_of_earlier_days_brought_too(checkpoint, docs, tmp_path):
    store = tmp_path / "store"
    synced(checkpoint, store, docs)
    moved = docs.rename(tmp_path / "moved")
    synced(checkpoint, store, moved)
    (moved / "a.txt").unlink()
    plan = sync_index(checkpoint, Corpus([moved]), store, replace=True, check="none").plan
    assert (plan.deleted, plan.kept) == (("a.txt",), ())
    assert set(texts_in(checkpoint, store)) == {"b.txt", "c.html"}


def test_nothing_is_deleted_where_files_are_there_and_cannot_be_read(checkpoint, docs, tmp_path):
    store = tmp_path / "store"
    synced(checkpoint, store, docs)
    (docs / "b.txt").write_bytes(b"\0")
    (docs / "a.txt").unlink()
    assert synced(checkpoint, store, docs) == SyncPlan(deleted=("a.txt",), kept=("b.txt",), unchanged=("c.html",))
    (docs / "b.txt").unlink()
    assert synced(checkpoint, store, docs).deleted == ("b.txt",)  # what was kept is remembered
    (docs / "c.html").unlink()
    with pytest.raises(InvalidInput, match="no text was found"):
        synced(checkpoint, store, docs)
    shutil.rmtree(docs)
    with pytest.raises(NotFound):
        synced(checkpoint, store, docs)
    assert set(texts_in(checkpoint, store)) == {"c.html"}


MAILS = "".join(f"From a@b Mon\nFrom: a\nSubject: {word}\n\nhello {word}\n\n" for word in ("one", "two"))
ROWS = '{"id": "one", "text": "hello"}\n{"id": "two", "text": "hello again"}\n'


def write(file: Path, content: str) -> None:
    """Of Parquet, two rows, of which a missing letter leaves the second one without a text."""
    if file.suffix != ".parquet":
        file.write_text(content)
        return
    pyarrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    parquet.write_table(pyarrow.table({"id": ["one", "two"], "text": [content[0], content[1:] or None]}), file)


@pytest.mark.parametrize(
    ("name", "content", "damaged"),
    [
        ("x.jsonl", ROWS, ROWS[:-10]),
        ("x.jsonl", ROWS, ""),
        ("x.jsonl", ROWS, "\0\0"),
        ("x.mbox", MAILS, ""),
        ("x.parquet", "ab", "a"),
    ],
)
def test_no_document_of_a_file_with_a_problem_is_deleted(checkpoint, docs, tmp_path, name, content, damaged):
    store, file = tmp_path / "store", docs / name
    write(file, content)
    one, two = synced(checkpoint, store, docs).added[-2:]
    write(file, damaged)
    (docs / "a.txt").write_text("another text")
    plan = synced(checkpoint, store, docs)
    assert (plan.replaced, plan.deleted, plan.kept[-1]) == (("a.txt",), (), two)
    assert {one, two} <= set(texts_in(checkpoint, store))
    file.unlink()
    assert synced(checkpoint, store, docs).deleted == (one, two)


def test_nothing_is_deleted_where_one_of_several_folders_is_empty(checkpoint, docs, tmp_path):
    store, other, away = tmp_path / "store", tmp_path / "other", tmp_path / "away"
    other.mkdir()
    (other / "x.txt").write_text("another folder's")
    synced(checkpoint, store, docs, other)
    docs.rename(away)
    docs.mkdir()
    told = []
    plan = plan_sync(checkpoint.tokenizer, Corpus([docs, other], on_problem=told.append), store)
    assert plan == SyncPlan(kept=("a.txt", "b.txt", "c.html"), unchanged=("x.txt",))
    assert [(each.where, each.reason) for each in told] == [
        (str(docs), "no file was found, as where a folder is not mounted")
    ]
    synced(checkpoint, store, docs, other)
    docs.rmdir()
    away.rename(docs)
    (docs / "a.txt").unlink()
    assert synced(checkpoint, store, docs, other).deleted == ("a.txt",)  # what was kept is remembered


def test_files_that_are_left_out_keep_their_documents(checkpoint, docs, tmp_path):
    store = tmp_path / "store"
    (docs / ".d.txt").write_text("a hidden one")
    sync_index(checkpoint, Corpus([docs], hidden=True), store, check="none")
    narrow = Corpus([docs], "**/*.html")
    assert plan_sync(checkpoint.tokenizer, narrow, store) == SyncPlan(
        kept=(".d.txt", "a.txt", "b.txt"), unchanged=("c.html",)
    )
    (docs / "b.txt").unlink()
    plan = sync_index(checkpoint, narrow, store, check="none").plan
    assert (plan.deleted, plan.kept) == (("b.txt",), (".d.txt", "a.txt"))
    assert synced(checkpoint, store, docs) == SyncPlan(kept=(".d.txt",), unchanged=("a.txt", "c.html"))


def test_a_file_under_a_new_name_loses_its_old_one(checkpoint, docs, tmp_path):
    store, other = tmp_path / "store", tmp_path / "other"
    other.mkdir()
    (other / "a.txt").write_text("another folder's")
    assert synced(checkpoint, store, docs, other).added == ("docs/a.txt", "b.txt", "c.html", "other/a.txt")
    (other / "a.txt").rename(other / "x.txt")
    plan = synced(checkpoint, store, docs, other)
    assert (plan.added, set(plan.deleted)) == (("a.txt", "x.txt"), {"docs/a.txt", "other/a.txt"})


def test_a_document_of_another_folder_is_not_replaced(checkpoint, docs, tmp_path):
    store, other = tmp_path / "store", tmp_path / "other"
    other.mkdir()
    synced(checkpoint, store, docs)
    before = texts_in(checkpoint, store)
    for name in ("a.txt", "b.txt"):
        (other / name).write_text("another folder's")
    for path in (other, other / "b.txt"):
        with pytest.raises(AlreadyExists, match=r"'.\.txt'.* rename its file.*--replace"):
            synced(checkpoint, store, path)
    assert texts_in(checkpoint, store) == before
    (docs / "a.txt").write_text("the same file")
    assert synced(checkpoint, store, docs / "a.txt").replaced == ("a.txt",)
    moved = docs.rename(tmp_path / "moved")
    (moved / "b.txt").write_text("the same folder")
    with pytest.raises(AlreadyExists):
        synced(checkpoint, store, moved)
    plan = sync_index(checkpoint, Corpus([moved]), store, replace=True, check="none").plan
    assert (plan.replaced, plan.unchanged) == (("b.txt",), ("a.txt", "c.html"))
    for name in ("a.txt", "b.txt"):
        (moved / name).unlink()
    assert synced(checkpoint, store, moved).deleted == ("a.txt", "b.txt")  # they are its own now


def test_a_document_that_left_its_file_is_deleted(checkpoint, docs, tmp_path):
    store, file = tmp_path / "store", docs / "x.jsonl"
    file.write_text(ROWS)
    synced(checkpoint, store, docs)
    file.write_text(ROWS.splitlines()[0])
    assert synced(checkpoint, store, docs).deleted == ("two",)


def test_an_empty_folder_within_keeps_its_documents(checkpoint, docs, tmp_path):
    store, mounted = tmp_path / "store", docs / "mounted"
    (mounted / "deep").mkdir(parents=True)
    (mounted / "deep" / "e.txt").write_text("far below")
    (mounted / "x.jsonl").write_text(ROWS)
    synced(checkpoint, store, docs)
    (docs / "a.txt").unlink()
    mounted.rename(tmp_path / "away")
    (mounted / "lost+found").mkdir(parents=True)
    assert synced(checkpoint, store, docs) == SyncPlan(
        deleted=("a.txt",), kept=("mounted/deep/e.txt", "one", "two"), unchanged=("b.txt", "c.html")
    )
    (mounted / "f.txt").write_text("somebody is in")
    assert set(synced(checkpoint, store, docs).deleted) == {"mounted/deep/e.txt", "one", "two"}


def test_a_folder_that_goes_away_while_it_is_read_keeps_its_documents(checkpoint, docs, tmp_path):
    store, mounted = tmp_path / "store", docs / "mounted"
    mounted.mkdir()
    (mounted / "m.txt").write_text("far away")
    synced(checkpoint, store, docs)
    going = Corpus([docs], on_document=lambda file, document: shutil.rmtree(mounted, ignore_errors=True))
    assert plan_sync(checkpoint.tokenizer, going, store).kept == ("mounted/m.txt",)
    assert plan_sync(checkpoint.tokenizer, going, store).deleted == ("mounted/m.txt",)


def test_ways_of_deep_files_are_short_and_tell_them_apart(tmp_path):
    deep = "/".join(["d"] * (2 * MAX_FOLDERS))
    (tmp_path / deep).mkdir(parents=True)
    for name in ("a.txt", "b.txt"):
        (tmp_path / deep / name).write_text("a text")
    folder = SyncedFolder(Corpus([tmp_path]))
    list(folder.documents())
    one, other = folder.files().values()
    assert one != other
    for way in (one, way_of(f"{deep}/a.txt")):
        assert len(way.split("/")) == MAX_FOLDERS + 1
    assert way_of("d/a").split("/")[0] == way_of("d/e/b").split("/")[0] == way_of("d")


def test_a_folder_that_cannot_be_listed_keeps_its_documents(checkpoint, docs, tmp_path, monkeypatch):
    store = tmp_path / "store"
    (docs / "deep").mkdir()
    (docs / "deep" / "e.txt").write_text("far below")
    synced(checkpoint, store, docs)
    (docs / "a.txt").unlink()
    scan = os.scandir

    def refused(path):
        if str(path).endswith("deep"):
            raise PermissionError(13, "Permission denied")
        return scan(path)

    monkeypatch.setattr(os, "scandir", refused)
    plan = synced(checkpoint, store, docs)
    assert (plan.deleted, plan.kept) == (("a.txt",), ("deep/e.txt",))
    healing = Corpus([docs], on_document=lambda file, document: monkeypatch.undo())
    assert plan_sync(checkpoint.tokenizer, healing, store).kept == ("deep/e.txt",)  # it can be listed in the end
    assert synced(checkpoint, store, docs).unchanged == ("b.txt", "c.html", "deep/e.txt")


def test_a_link_that_leads_nowhere_keeps_its_document(checkpoint, docs, tmp_path):
    store, outside = tmp_path / "store", tmp_path / "outside"
    outside.mkdir()
    (outside / "x.txt").write_text("far away")
    (docs / "l.txt").symlink_to(outside / "x.txt")
    synced(checkpoint, store, docs)
    (docs / "a.txt").unlink()
    outside.rename(tmp_path / "away")
    plan = synced(checkpoint, store, docs)
    assert (plan.deleted, plan.kept) == (("a.txt",), ("l.txt",))
    (docs / "l.txt").unlink()
    assert synced(checkpoint, store, docs).deleted == ("l.txt",)


@pytest.mark.parametrize("change", ["empty", "away", "ignored", "not followed"])
def test_a_linked_folder_of_which_nothing_is_read_keeps_its_documents(checkpoint, docs, tmp_path, change):
    store, outside, folder, glob = tmp_path / "store", tmp_path / "outside", docs / "folder", "*/*.txt"
    for path in (outside, folder):
        path.mkdir()
        for name in ("x.txt", "y.txt"):
            (path / name).write_text(f"{name} of {path.name}")
    (docs / "link").symlink_to(outside)
    sync_index(checkpoint, Corpus([docs], glob), store, check="none")
    (folder / "x.txt").unlink()
    if change == "ignored":
        (docs / ".gitignore").write_text("link/")
    elif change == "not followed":
        glob = "**/*.txt"
    else:
        outside.rename(tmp_path / "away")
    if change == "empty":
        outside.mkdir()
    plan = sync_index(checkpoint, Corpus([docs], glob), store, check="none").plan
    assert (plan.deleted, plan.kept) == (("folder/x.txt",), ("link/x.txt", "link/y.txt"))
    (docs / "link").unlink()
    plan = sync_index(checkpoint, Corpus([docs], glob), store, check="none").plan
    assert (plan.deleted, plan.kept) == (("link/x.txt", "link/y.txt"), ())


def test_an_empty_folder_far_below_keeps_its_documents(checkpoint, docs, tmp_path):
    store, above = tmp_path / "store", docs.joinpath(*["d"] * (MAX_FOLDERS + 8))
    (above / "mounted").mkdir(parents=True)
    for file in (above / "mounted" / "x.txt", above / "y.txt"):
        file.write_text("far below")
    synced(checkpoint, store, docs)
    (docs / "a.txt").unlink()
    (above / "mounted" / "x.txt").unlink()
    plan = synced(checkpoint, store, docs)
    assert (plan.deleted, [Path(id_).name for id_ in plan.kept]) == (("a.txt",), ["x.txt"])
    (above / "mounted").rmdir()
    assert [Path(id_).name for id_ in synced(checkpoint, store, docs).deleted] == ["x.txt"]


def test_a_folder_with_nothing_but_left_out_files_keeps_its_documents(checkpoint, docs, tmp_path):
    store, mounted = tmp_path / "store", docs / "mounted"
    mounted.mkdir()
    (mounted / "x.txt").write_text("far away")
    synced(checkpoint, store, docs)
    mounted.rename(tmp_path / "away")
    (mounted / "lost").mkdir(parents=True)
    for marker in (mounted / ".keep", mounted / "lost" / ".keep"):
        marker.write_text("")
    assert synced(checkpoint, store, docs).kept == ("mounted/x.txt",)


def test_files_of_a_left_out_folder_are_in_doubt_at_once(docs):
    for number in range(3):
        (docs / "node_modules" / str(number)).mkdir(parents=True)
        (docs / "node_modules" / str(number) / "m.txt").write_text("a module")
    (docs / ".d.txt").write_text("a hidden one")
    folder = SyncedFolder(Corpus([docs]), "docs")
    list(folder.documents())
    assert folder.doubtful() == {hash_of("node_modules"), hash_of(".d.txt")}


def test_files_that_come_after_the_listing_wait_for_the_next_one(docs):
    folder = SyncedFolder(Corpus([docs]), "docs")
    documents = folder.documents()
    (docs / "late.txt").write_text("a new one")
    assert [document.id for document in documents] == ["a.txt", "b.txt", "c.html"]
    assert folder.files() == {id_: f"{hash_of('.')}/{hash_of(id_)}" for id_ in ("a.txt", "b.txt", "c.html")}
    assert [document.id for document in folder.documents()] == ["a.txt", "b.txt", "c.html", "late.txt"]
    (docs / "late.txt").unlink()
    folder.documents()
    assert folder.files()["late.txt"] == f"{hash_of('.')}/{hash_of('late.txt')}"  # it was read before it went away


@pytest.mark.parametrize("is_build", [True, False])
def test_an_interrupted_call_begins_anew_where_the_folder_has_changed(checkpoint, docs, tmp_path, is_build):
    store = tmp_path / "store"
    if not is_build:
        synced(checkpoint, store, docs)
        for name in ("a.txt", "b.txt", "d.txt"):
            (docs / name).write_text(f"a longer text of {name}")
    for change in ("another text", "a"):
        with killed_at(SegmentWriter, "finish"):  # all was synced by then
            synced(checkpoint, store, docs)
        assert Journal.decode(store / JOURNAL).entries
        (docs / "a.txt").write_text(change)
    synced(checkpoint, store, docs)
    assert texts_in(checkpoint, store) == {document.id: document.text for document in Corpus([docs])}
    assert not (store / JOURNAL).exists()


def test_what_an_interrupted_call_left_hinders_nobody(checkpoint, docs, tmp_path):
    store = tmp_path / "store"
    with killed_at(SegmentWriter, "finish"):
        synced(checkpoint, store, docs)
    build_index(checkpoint, docs / "a.txt", store, keys="none", check="none")
    for change in (lambda: put(checkpoint, store, Document("x", "another's")), lambda: compact(store)):
        with killed_at(SegmentWriter, "finish"):
            synced(checkpoint, store, docs)
        change()
    with killed_at(SegmentWriter, "finish"):
        put(checkpoint, store, Document("y", "another's"))
    with pytest.raises(Incompatible, match="run the same `memlm index add` again"):
        synced(checkpoint, store, docs)  # whose documents it does not have
    put(checkpoint, store, Document("y", "another's"))
    synced(checkpoint, store, docs)
    assert set(texts_in(checkpoint, store)) == {"a.txt", "b.txt", "c.html", "x", "y"}


def test_titles_and_metadata_count_too(checkpoint, tmp_path):
    store, file = tmp_path / "store", tmp_path / "c.jsonl"
    for title, year in (("A", 1), ("B", 1), ("B", 2)):
        file.write_text(json.dumps({"id": "x", "text": "the same", "title": title, "year": year}))
        plan = synced(checkpoint, store, file)
        assert (plan.added or plan.replaced) == ("x",)
    assert synced(checkpoint, store, file).unchanged == ("x",)


@pytest.mark.parametrize("step", ["add_to_index", "_delete", "make_keys"])
def test_an_interrupted_call_goes_on_when_it_is_called_again(checkpoint, docs, tmp_path, monkeypatch, step):
    class Killed(Exception):
        pass

    def kill(*args, **options):
        raise Killed

    store = tmp_path / "store"
    synced(checkpoint, store, docs)
    (docs / "a.txt").unlink()
    (docs / "d.txt").write_text("a new one")
    monkeypatch.setattr(build_module if step == "make_keys" else sync_module, step, kill)
    with pytest.raises(Killed):
        synced(checkpoint, store, docs)
    monkeypatch.undo()
    assert ("d.txt" in texts_in(checkpoint, store)) == (step != "add_to_index")
    assert ("a.txt" in texts_in(checkpoint, store)) == (step != "make_keys")  # a deletion does not wait for keys
    (docs / "d.txt").unlink()  # what was added in between is known as the folder's
    synced(checkpoint, store, docs)
    assert set(texts_in(checkpoint, store)) == {"b.txt", "c.html"}


def test_files_that_went_away_since_the_plan_are_not_added(checkpoint, docs, tmp_path):
    store = tmp_path / "store"
    synced(checkpoint, store, docs)
    (docs / "a.txt").unlink()
    for name in ("d.txt", "e.txt"):
        (docs / name).write_text("a new one")
    plan = plan_sync(checkpoint.tokenizer, Corpus([docs]), store)
    for name in ("d.txt", "e.txt"):
        (docs / name).unlink()
    report = sync_index(checkpoint, Corpus([docs]), store, check="none", plan=plan)
    assert (report.plan.added, report.plan.deleted, report.built) == ((), ("a.txt",), None)
    assert set(texts_in(checkpoint, store)) == {"b.txt", "c.html"}


def test_documents_that_cannot_be_read_again_are_refused(checkpoint, tmp_path):
    for given in ([Document("a", "b")], ["-"]):
        with pytest.raises(InvalidInput, match="only files and folders"):
            plan_sync(checkpoint.tokenizer, Corpus(given), tmp_path / "s")


def test_a_signature_differs_once_a_file_does(docs):
    before = signature_of(Corpus([docs]))
    assert signature_of(Corpus([docs])) == before
    (docs / "a.txt").write_text("longer or shorter")
    assert signature_of(Corpus([docs])) != before
