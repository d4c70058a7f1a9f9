"""A folder of a client and a datastore of a server stay the same."""

from __future__ import annotations

import asyncio
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import grpc
import pytest
from broken import HALT, HALTS
from running import PATIENCE_S, RunningServer, is_stopped, wait_until
from synced_folders import make_docs
from texts import make_text

from memlm.api.datastores import AddDocumentsRequest, NewDocument
from memlm.api.handles import Operation
from memlm.api.operations import JobState, SyncOutcome
from memlm.base.progress import COMPARING
from memlm.client import AsyncClient, Client
from memlm.data.corpus import Corpus
from memlm.data.synced_folder import SyncedFolder, hash_of
from memlm.errors import AlreadyExists, Cancelled, InvalidInput, MemlmError, NotFound, Overloaded, PermissionDenied
from memlm.index.store.datastore import Datastore
from memlm.indexing.build import build_index
from memlm.indexing.sync import sync_index
from memlm.indexing.synced import SYNCED
from memlm.language_model import LanguageModel
from memlm.model.files.checkpoint import Checkpoint
from memlm.server.jobs.uploads import Upload
from memlm.v1.datastores_pb2_grpc import DatastoresStub
from memlm.wire import codec

OWN = "doc-0.txt"  # of the datastore, and of no synchronized folder
PASSAGE_WORDS = ("the gateway", "memory of a", "listens on the registry")


class Ground(NamedTuple):
    """A server with a datastore `docs`, a client of it, and a folder to be synchronized."""

    server: RunningServer
    client: Client
    docs: Path
    stores: Path
    halts: Path

    @property
    def store(self) -> Path:
        return self.stores / self.client.datastores.get("docs").path

    def sync(self, *paths: Path, **options: object) -> SyncOutcome:
        job = self.client.datastores.sync("docs", paths or (self.docs,), check="none", **options)
        outcome = job.result(PATIENCE_S).sync
        assert outcome is not None
        return outcome

    def ids(self) -> set[str]:
        with Datastore.open(self.store) as store:
            assert store.snapshot.verify() == []
            return {document.id for document in store.snapshot.documents()} - {OWN}

    def halt(self, start: Callable[[], Operation], phase: str = "read", besides: int = 0) -> tuple[Operation, int]:
        """Starts a job, and waits until its process has stopped as it reads documents, `besides` one that has."""
        self.halts.write_text(phase)
        job, stopped = start(), list[int]()
        wait_until(lambda: stopped.extend(filter(is_stopped, set(self.server.job_pids) - {besides})) or stopped)
        self.halts.unlink()
        return job, stopped[0]


def serve(folder: Path, model: Path, corpus: Path, *options: str) -> RunningServer:
    own = ("--threads", "1", "--store-dir", str(folder / "stores"), "+index_workers=2", *options)
    own += ("--corpus-root", str(corpus), "--corpus-root", str(folder))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(HALTS, str(folder / "halts"))
        return RunningServer(folder / "log", model, options=own, first=HALT)


@pytest.fixture(scope="module")
def running(
    tmp_path_factory: pytest.TempPathFactory, model_folder: Path, corpus_folder: Path
) -> Iterator[tuple[RunningServer, Path]]:
    folder = tmp_path_factory.mktemp("sync")
    with serve(folder, model_folder, corpus_folder) as server:
        yield server, folder


@pytest.fixture
def ground(running: tuple[RunningServer, Path], tmp_path: Path, corpus_folder: Path) -> Iterator[Ground]:
    server, folder = running
    with Client(server.address) as client:
        client.datastores.build("docs", str(corpus_folder / OWN), keys="none", check="none").result(PATIENCE_S)
        yield Ground(server, client, make_docs(tmp_path), folder / "stores", folder / "halts")
        client.datastores.unload("docs")


def content(store: Path) -> dict[str, tuple[str, dict[str, object], list[int]]]:
    with Datastore.open(store) as datastore:
        return {
            row.id: (row.title, dict(row.metadata), segment.text_of(row.row).tolist())
            for segment in datastore.snapshot.segments
            for row in segment.live_documents()
        }


def test_a_datastore_holds_the_documents_of_the_folder(ground: Ground) -> None:
    assert ground.sync() == SyncOutcome(num_added=3, added=("a.txt", "b.txt", "c.html"))
    (ground.docs / "a.txt").write_text("another text")
    (ground.docs / "b.txt").unlink()
    (ground.docs / "d.txt").write_text("a new one")
    expected = SyncOutcome(1, 1, 1, 0, 1, added=("d.txt",), replaced=("a.txt",), deleted=("b.txt",))
    assert ground.sync(dry_run=True) == expected
    assert ground.ids() == {"a.txt", "b.txt", "c.html"}
    assert ground.sync() == expected
    assert ground.ids() == {"a.txt", "c.html", "d.txt"}
    before, memory = (ground.store / "CURRENT").read_bytes(), (ground.store / SYNCED).stat().st_mtime_ns
    assert ground.sync() == SyncOutcome(num_unchanged=3)
    assert (ground.store / "CURRENT").read_bytes() == before
    assert (ground.store / SYNCED).stat().st_mtime_ns == memory
    info = ground.client.operations.list()[0]
    assert (info.kind, info.state, info.report.sync) == ("sync", JobState.DONE, SyncOutcome(num_unchanged=3))
    assert ground.client.operations.list()[1].report.sync == SyncOutcome(1, 1, 1, 0, 1)  # a list names none


def text(rng: random.Random) -> str:
    """Unlike any other: of texts that are nearly the same, the first one of a datastore answers for all."""
    return f"{make_text(rng.randint(0, 20), 15)} {rng.randbytes(60).hex(' ')}"


def change(docs: Path, rng: random.Random) -> None:
    """Writes, changes, moves or removes some files; a folder that is left empty goes too."""
    files = sorted(path for path in docs.rglob("*") if path.is_file())
    for _ in range(rng.randint(1, 4)):
        what = rng.choice(("write", "write", "rows", "move", "remove"))
        name = f"{rng.choice(('', 'x/', 'x/y/', 'z/'))}{rng.randint(0, 12)}"
        path = docs / f"{name}.{'jsonl' if what == 'rows' else rng.choice(('txt', 'md'))}"
        path.parent.mkdir(parents=True, exist_ok=True)
        if what == "write":
            path.write_text(text(rng))
        elif what == "rows":
            rows = [{"id": f"{name}-{n}", "text": text(rng), "v": rng.randint(0, 1)} for n in range(3)]
            path.write_text("".join(json.dumps(row) + "\n" for row in rng.sample(rows, rng.randint(1, 3))))
        elif files and (chosen := rng.choice(files)).exists():
            chosen.unlink() if what == "remove" else chosen.rename(path.with_suffix(chosen.suffix))
    (docs / "always.txt").write_text("something is left")
    for folder in sorted((path for path in docs.rglob("*") if path.is_dir()), reverse=True):
        if not any(folder.iterdir()):
            folder.rmdir()


@pytest.mark.parametrize("seed", range(2))
def test_random_changes_leave_what_a_build_of_the_folder_has(
    ground: Ground, checkpoint: Checkpoint, corpus_folder: Path, tmp_path: Path, seed: int
) -> None:
    """And what the local synchronization leaves: the same documents, texts, counts and passages."""
    rng, local = random.Random(seed), tmp_path / "local"
    build_index(checkpoint, corpus_folder / OWN, local, keys="none", check="none")
    for step in range(6):
        change(ground.docs, rng)
        plan = sync_index(checkpoint, Corpus([ground.docs]), local, check="none").plan
        found = ground.sync()
        kinds = ("added", "replaced", "deleted", "kept", "unchanged")
        assert [getattr(found, f"num_{kind}") for kind in kinds] == [len(getattr(plan, kind)) for kind in kinds]
        assert set(found.deleted) <= set(plan.deleted)
        anew = build_index(
            checkpoint, [corpus_folder / OWN, ground.docs], tmp_path / f"anew-{step}", keys="none", check="none"
        ).path
        assert content(ground.store) == content(local) == content(anew)
        with LanguageModel(checkpoint, [local]) as lm:
            assert passages(ground.client) == passages(lm)
    ground.client.datastores.compact("docs", check="none").result(PATIENCE_S)
    with LanguageModel(checkpoint, [anew]) as lm:
        assert passages(ground.client) == passages(lm)


def passages(host: Client | LanguageModel) -> list[tuple[str, str, float]]:
    """In no order, since the documents have another one."""
    found = [each for words in PASSAGE_WORDS for each in host.find_passages(words, by="words", k=64)]
    return sorted((each.document_id, each.text, round(each.score, 3)) for each in found)


def test_documents_of_others_stay(ground: Ground, tmp_path: Path) -> None:
    other = tmp_path / "other"
    other.mkdir()
    (other / "b.txt").write_text((ground.docs / "b.txt").read_text())
    (other / "x.txt").write_text("another folder's")
    ground.client.datastores.add("docs", [NewDocument("mine", "of nobody's folder")]).result(PATIENCE_S)
    ground.sync()
    assert ground.sync(other) == SyncOutcome(num_added=1, num_unchanged=1, added=("x.txt",))
    (ground.docs / "b.txt").unlink()
    assert ground.sync() == SyncOutcome(num_kept=1, num_unchanged=2, kept=("b.txt",))  # the other folder has it too
    (other / "a.txt").write_text("another folder's")
    with pytest.raises(AlreadyExists, match=r"'a\.txt' came from another folder.* to docs-\w+, .*--replace"):
        ground.sync(other)
    (other / "b.txt").unlink()
    assert ground.sync(other, replace=True).replaced == ("a.txt",)
    assert ground.ids() == {"a.txt", "c.html", "x.txt", "mine"}


def test_a_document_that_others_have_put_in_its_place_stays(ground: Ground) -> None:
    ground.sync()
    put = [NewDocument("a.txt", "another's"), NewDocument("b.txt", "another's")]
    ground.client.datastores.add("docs", put, replace=True, check="none").result(PATIENCE_S)
    (ground.docs / "a.txt").unlink()
    assert ground.sync() == SyncOutcome(num_kept=2, num_unchanged=1, kept=("b.txt", "a.txt"))
    assert ground.sync(replace=True).replaced == ("b.txt",)
    (ground.docs / "b.txt").unlink()
    assert ground.sync().deleted == ("b.txt",)
    assert ground.ids() == {"a.txt", "c.html"}


def test_a_folder_that_has_a_name_may_lie_anywhere(ground: Ground, tmp_path: Path) -> None:
    for place in ("one", "two"):
        shutil.copytree(ground.docs, tmp_path / place / "docs")
    (tmp_path / "two" / "docs" / "a.txt").unlink()
    (tmp_path / "two" / "docs" / "b.txt").write_text("another text")
    assert ground.sync(tmp_path / "one" / "docs", name="manual").num_added == 3
    found = ground.sync(tmp_path / "two" / "docs", name="manual")
    assert (found.replaced, found.deleted) == (("b.txt",), ("a.txt",))
    with pytest.raises(AlreadyExists, match=r"'b\.txt' came from another folder"):
        ground.sync(tmp_path / "one" / "docs", name="other")  # files of one way, which are not one file
    assert ground.sync(tmp_path / "one" / "docs", name="other", replace=True, dry_run=True).num_added == 1
    with pytest.raises(InvalidInput, match="name is empty"):
        ground.sync(name="")


def test_more_folders_of_one_name_leave_in_doubt_what_was(ground: Ground, tmp_path: Path) -> None:
    ground.sync(name="manual")
    (ground.docs / "a.txt").write_bytes(b"\0\1")
    (tmp_path / "more").mkdir()
    (tmp_path / "more" / "y.txt").write_text("more text")
    found = ground.sync(ground.docs, tmp_path / "more", name="manual")
    assert (found.added, found.deleted, found.kept) == (("y.txt",), (), ("a.txt",))


def test_what_is_in_doubt_keeps_its_documents(ground: Ground, tmp_path: Path) -> None:
    mounted = ground.docs / "mounted"
    mounted.mkdir()
    (mounted / "m.txt").write_text("far away")
    (ground.docs / "x.jsonl").write_text('{"id": "one", "text": "hello"}\n{"id": "two", "text": "hello"}\n')
    ground.sync()
    shutil.rmtree(mounted)
    mounted.mkdir()
    (ground.docs / "x.jsonl").write_text('{"id": "one", "text": "hello"}\n{"id": "two", "te')
    (ground.docs / "a.txt").unlink()
    (ground.docs / "b.txt").write_bytes(b"\0")
    found = ground.sync()
    assert (found.deleted, set(found.kept)) == (("a.txt",), {"b.txt", "mounted/m.txt", "two"})
    mounted.rmdir()
    (ground.docs / "b.txt").unlink()
    assert set(ground.sync().deleted) == {"mounted/m.txt", "b.txt"}


def test_a_folder_without_documents_is_refused_before_anything_is_sent(ground: Ground) -> None:
    ground.sync()
    before = ground.server.output.count("AddDocuments")
    for path in ground.docs.iterdir():
        path.unlink()
    with pytest.raises(InvalidInput, match="no text was found"):
        ground.sync()
    ground.docs.rmdir()
    with pytest.raises(NotFound):
        ground.sync()
    assert ground.server.output.count("AddDocuments") == before
    assert before
    assert len(ground.ids()) == 3


def send(ground: Ground, *messages: AddDocumentsRequest) -> str:
    """The error of a stub that sends messages as they are. Empty if the server takes them."""
    with grpc.insecure_channel(ground.server.address) as channel:
        try:
            reply = DatastoresStub(channel).AddDocuments(iter(map(codec.to_wire, messages)), timeout=PATIENCE_S)
        except grpc.RpcError as error:
            return str(error.details())
        ground.client.operations.open(reply.name).result(PATIENCE_S)
        return ""


def test_an_upload_that_ends_early_changes_nothing(ground: Ground) -> None:
    ground.sync()
    folder = SyncedFolder(Corpus([ground.docs]))
    first = AddDocumentsRequest("docs", sync=folder.name, check="none")
    documents = [NewDocument(each.id, each.text, each.title, each.metadata) for each in folder.documents()]
    one, end = AddDocumentsRequest(documents=tuple(documents[:1])), AddDocumentsRequest(num_documents=3)
    for messages in ((first, one), (first, one, end), (first, end), (first,)):
        assert "num_documents is" in send(ground, *messages) or "no document was sent" in send(ground, *messages)
    assert ground.ids() == {"a.txt", "b.txt", "c.html"}
    assert not list((ground.stores / "jobs").glob("*.[jw]*s"))

    def broken() -> Iterator[object]:
        yield codec.to_wire(first)
        yield codec.to_wire(one)
        raise RuntimeError

    with grpc.insecure_channel(ground.server.address) as channel, pytest.raises(grpc.RpcError):
        DatastoresStub(channel).AddDocuments(broken(), timeout=PATIENCE_S)
    wait_until(lambda: not list((ground.stores / "jobs").glob("*.ways")))
    assert ground.ids() == {"a.txt", "b.txt", "c.html"}
    every = AddDocumentsRequest(documents=tuple(documents))
    assert send(ground, first, every, end) == ""
    assert ground.sync() == SyncOutcome(num_unchanged=3)


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({"sync": "x" * 201}, "sync has 201 characters"),
        ({"sync": "", "dry_run": True}, "dry_run is of a synchronization"),
        ({"sync": "", "keep": (hash_of("a"),)}, "file and keep are of a synchronization"),
        ({"keep": ("../../etc",)}, "keep has '../../etc'; expected a hash"),
        ({"keep": (hash_of("a") + "\n",)}, "expected a hash"),
        ({"file": "a.txt"}, "has the file 'a.txt'; expected up to 32 hashes"),
        ({"file": hash_of("a") + "/"}, "expected up to 32 hashes"),
        ({"file": "/".join([hash_of("a")] * 33)}, "expected up to 32 hashes"),
        ({"file": "/".join([hash_of("a")] * 32)}, ""),
    ],
)
def test_a_malformed_synchronization_is_refused(ground: Ground, change: dict[str, object], expected: str) -> None:
    file = str(change.pop("file", ""))
    request = codec.to_wire(AddDocumentsRequest("docs", check="none", num_documents=1, sync="mine"))
    request.documents.add(id="x", text="a text", file=file)
    for name, value in change.items():
        if isinstance(value, tuple):
            request.keep.extend(value)
        else:
            setattr(request, name, value)
    with grpc.insecure_channel(ground.server.address) as channel:
        if expected:
            with pytest.raises(grpc.RpcError) as raised:
                DatastoresStub(channel).AddDocuments(iter([request]), timeout=PATIENCE_S)
            assert raised.value.code() == grpc.StatusCode.INVALID_ARGUMENT
            assert expected in raised.value.details()
        else:
            reply = DatastoresStub(channel).AddDocuments(iter([request]), timeout=PATIENCE_S)
            assert ground.client.operations.open(reply.name).result(PATIENCE_S).sync.added == ("x",)


def test_only_the_first_message_names_the_folder(ground: Ground) -> None:
    """A later name, and `dry_run` beside it, would be ignored: the documents would be added to what is there."""
    documents, end = AddDocumentsRequest(documents=(NewDocument("x", "a text"),)), {"num_documents": 1}
    for name, later in (("", {"sync": "mine"}), ("mine", {"sync": "other"}), ("mine", {"sync": "mine", "dry_run": 1})):
        first = AddDocumentsRequest("docs", check="none", sync=name)
        assert "sync is in a message behind the first" in send(
            ground, first, documents, AddDocumentsRequest(**later, **end)
        )
    assert ground.ids() == set()


def test_what_an_upload_keeps_is_bounded(tmp_path: Path) -> None:
    """In number and in bytes, together with the ways of its documents."""
    hashes = tuple(hash_of(str(number)) for number in range(3))
    with Upload(tmp_path, 1 << 20, 2, is_sync=True) as upload, pytest.raises(InvalidInput, match="2 files and folders"):
        upload.take(AddDocumentsRequest(keep=hashes))
    with Upload(tmp_path, 60, is_sync=True) as upload, pytest.raises(InvalidInput, match="60 bytes in one upload"):
        upload.take(AddDocumentsRequest(keep=hashes))
    long = NewDocument("a", "b", file="/".join(hashes * 10))
    with Upload(tmp_path, 500, is_sync=True) as upload, pytest.raises(InvalidInput, match="folders one by one"):
        upload.take(AddDocumentsRequest(documents=(long,)))
    assert not list(tmp_path.iterdir())


def large(docs: Path, number: int = 12) -> Path:
    with (docs / "large.jsonl").open("w") as file:
        for each in range(number):
            file.write(json.dumps({"id": f"large-{each}", "text": make_text(each, 400)}) + "\n")
    return docs


@pytest.mark.parametrize("who", ["index worker", "server"])
def test_what_dies_goes_on(tmp_path: Path, model_folder: Path, corpus_folder: Path, who: str) -> None:
    docs = make_docs(tmp_path)
    with serve(tmp_path, model_folder, corpus_folder) as server, Client(server.address) as client:
        ground = Ground(server, client, docs, tmp_path / "stores", tmp_path / "halts")
        client.datastores.build("docs", str(corpus_folder / OWN), keys="none", check="none").result(PATIENCE_S)
        ground.sync()
        (docs / "a.txt").unlink()
        large(docs)
        job, pid = ground.halt(lambda: client.datastores.sync("docs", docs, check="none"))
        if who == "server":
            server.process.kill()
            server.process.wait(PATIENCE_S)
            os.kill(pid, signal.SIGCONT)  # to see that the server has gone
            wait_until(lambda: not Path(f"/proc/{pid}").exists())
        else:
            os.kill(pid, signal.SIGKILL)
            assert job.result(PATIENCE_S).sync.deleted == ("a.txt",)
    with serve(tmp_path, model_folder, corpus_folder) as server, Client(server.address) as client:
        ground = Ground(server, client, docs, tmp_path / "stores", tmp_path / "halts")
        report = client.operations.open(job.name).result(PATIENCE_S)
        assert report.sync == SyncOutcome(num_added=12, num_deleted=1, num_unchanged=2)  # no names after a restart
        assert ground.ids() == {"b.txt", "c.html", *(f"large-{n}" for n in range(12))}
        assert not list((tmp_path / "stores" / "jobs").glob("*.[jw]*s"))


@pytest.mark.parametrize("phase", [COMPARING, "read"])
def test_a_cancelled_one_leaves_things_as_they_were(ground: Ground, phase: str) -> None:
    ground.sync()
    (ground.docs / "a.txt").unlink()
    job, _ = ground.halt(lambda: ground.client.datastores.sync("docs", large(ground.docs), check="none"), phase)
    job.cancel()
    with pytest.raises(Cancelled, match="as it was before"):
        job.result(PATIENCE_S)
    assert ground.ids() == {"a.txt", "b.txt", "c.html"}
    assert ground.sync().num_added == 12


def folders_of(stores: Path, name: str) -> list[Path]:
    return [path for path in stores.glob(f"{name}-*") if not path.name.endswith(".removed")]


def test_a_datastore_that_is_not_there_is_made_of_the_folder_and_served(ground: Ground) -> None:
    datastores, expected = ground.client.datastores, SyncOutcome(num_added=3, added=("a.txt", "b.txt", "c.html"))
    (ground.docs / "a.txt").write_text("the zyzzyva quagga of the folder")
    report = datastores.sync("new", ground.docs, dry_run=True).result(PATIENCE_S)
    assert (report.sync, report.num_documents) == (expected, 0)
    assert not folders_of(ground.stores, "new")
    with pytest.raises(NotFound):
        datastores.get("new")
    assert datastores.sync("new", ground.docs, check="none").result(PATIENCE_S).sync == expected
    assert datastores.get("new").num_documents == 3
    assert [each.document_id for each in ground.client.search("new", "zyzzyva quagga", by="words")] == ["a.txt"]
    (ground.docs / "a.txt").unlink()
    outcome = datastores.sync("new", ground.docs, check="none").result(PATIENCE_S).sync
    assert outcome == SyncOutcome(num_deleted=1, num_unchanged=2, deleted=("a.txt",))
    assert len(folders_of(ground.stores, "new")) == 1
    datastores.unload("new")


@pytest.mark.parametrize("who", ["index worker", "server"])
def test_the_making_of_a_datastore_goes_on_after_a_kill(
    tmp_path: Path, model_folder: Path, corpus_folder: Path, who: str
) -> None:
    docs = large(make_docs(tmp_path))
    with serve(tmp_path, model_folder, corpus_folder) as server, Client(server.address) as client:
        ground = Ground(server, client, docs, tmp_path / "stores", tmp_path / "halts")
        job, pid = ground.halt(lambda: client.datastores.sync("new", docs, check="none"))
        with pytest.raises(Overloaded, match="synchronize again once it is there") as refused:  # and --watch does
            client.datastores.sync("new", docs)
        assert refused.value.retry_after_s == 5.0
        with pytest.raises(AlreadyExists, match="is being built"):
            client.datastores.build("new", str(corpus_folder / OWN))
        if who == "server":
            server.process.kill()
            server.process.wait(PATIENCE_S)
        os.kill(pid, signal.SIGKILL)
        if who == "index worker":
            assert job.result(PATIENCE_S).sync.num_added == 15
    with serve(tmp_path, model_folder, corpus_folder) as server, Client(server.address) as client:
        assert client.operations.open(job.name).result(PATIENCE_S).sync == SyncOutcome(num_added=15)
        assert client.datastores.get("new").num_documents == 15
        assert client.datastores.sync("new", docs).result(PATIENCE_S).sync == SyncOutcome(num_unchanged=15)
        assert len(folders_of(tmp_path / "stores", "new")) == 1


def test_a_repeated_request_is_the_operation_that_makes_the_datastore(ground: Ground) -> None:
    """While that runs, and afterwards. One of the same id with other documents is another request."""
    first = AddDocumentsRequest("again", request_id="mine", sync="notes", check="none", keys="none")
    documents = tuple(NewDocument(f"d-{n}", make_text(n, 400)) for n in range(12))
    end = AddDocumentsRequest(num_documents=len(documents))
    with grpc.insecure_channel(ground.server.address) as channel:

        def sync(*documents: NewDocument) -> Operation:
            messages = map(codec.to_wire, (first, AddDocumentsRequest(documents=documents), end))
            reply = DatastoresStub(channel).AddDocuments(messages, timeout=PATIENCE_S)
            return ground.client.operations.open(reply.name)

        job, pid = ground.halt(lambda: sync(*documents))
        assert sync(*documents).name == job.name
        with pytest.raises(grpc.RpcError, match="which was another request; choose another"):
            sync(*documents[:-1], NewDocument("other", "a text"))
        os.kill(pid, signal.SIGCONT)
        assert job.result(PATIENCE_S).sync.num_added == 12
        assert sync(*documents).name == job.name
    ground.client.datastores.unload("again")


@pytest.fixture
def victim(ground: Ground, corpus_folder: Path) -> Iterator[str]:
    """The folder of a datastore that was in service, with the document OWN."""
    ground.client.datastores.build("victim", str(corpus_folder / OWN), keys="none", check="none").result(PATIENCE_S)
    yield ground.client.datastores.unload("victim").path
    assert ground.client.datastores.get("victim").num_documents == 1
    folder = ground.stores / ground.client.datastores.unload("victim").path
    assert folders_of(ground.stores, "victim") == [folder]
    shutil.rmtree(folder)


@pytest.mark.parametrize("kind", ["sync", "build"])
def test_what_is_loaded_while_one_of_its_name_is_made_stays(ground: Ground, victim: str, kind: str) -> None:
    docs, datastores = large(ground.docs), ground.client.datastores
    corpus = str(shutil.copytree(docs, ground.halts.parent / "made", dirs_exist_ok=True))
    job, pid = ground.halt(
        lambda: (
            datastores.sync("victim", docs, replace=True, check="none")  # of documents
            if kind == "sync"
            else datastores.build("victim", corpus, check="none")
        )
    )
    datastores.load(victim, "victim")
    os.kill(pid, signal.SIGCONT)
    with pytest.raises(AlreadyExists, match="another datastore 'victim' was loaded"):
        job.result(PATIENCE_S)
    assert datastores.get("victim").path == victim


def test_what_is_being_loaded_when_one_of_its_name_is_made_stays(ground: Ground, victim: str) -> None:
    """It opens so slowly that no name is taken yet when the other goes into service."""
    job, pid = ground.halt(lambda: ground.client.datastores.sync("victim", large(ground.docs), check="none"))
    manifest = max((ground.stores / victim).glob("manifest-*"))
    content = manifest.read_bytes()
    manifest.unlink()
    os.mkfifo(manifest)  # opens once somebody writes to it
    with ThreadPoolExecutor(1) as pool:
        loading = pool.submit(ground.client.datastores.load, victim, "victim")
        with manifest.open("wb") as fifo:  # once the load reads it
            os.kill(pid, signal.SIGCONT)
            wait_until(lambda: "victim" in (ground.stores / "stores.json").read_text())
            manifest.unlink()
            manifest.write_bytes(content)
            fifo.write(content)
        assert loading.result(PATIENCE_S).path == victim
    with pytest.raises(AlreadyExists, match="another datastore 'victim' was loaded"):
        job.result(PATIENCE_S)


def test_a_datastore_whose_making_is_cancelled_leaves_nothing(ground: Ground) -> None:
    job, _ = ground.halt(lambda: ground.client.datastores.sync("other", large(ground.docs), check="none"))
    job.cancel()
    with pytest.raises(Cancelled):
        job.result(PATIENCE_S)
    assert not folders_of(ground.stores, "other")
    with pytest.raises(NotFound):
        ground.client.datastores.get("other")


def test_a_deleted_document_is_in_no_answer_and_no_record(ground: Ground) -> None:
    words = "zyzzyva quagga"
    (ground.docs / "secret.txt").write_text(f"the {words} of the folder")
    job = ground.client.datastores.sync("docs", ground.docs, check="none")
    assert "secret.txt" in job.result(PATIENCE_S).sync.added
    with pytest.raises(AlreadyExists, match=r"secret\.txt"):
        ground.client.datastores.add("docs", [NewDocument("secret.txt", "x")]).result(PATIENCE_S)
    assert [each.document_id for each in ground.client.search("docs", words, by="words")] == ["secret.txt"]
    (ground.docs / "secret.txt").unlink()
    assert ground.sync().deleted == ("secret.txt",)
    ground.client.datastores.delete_documents("docs", ["b.txt"])
    assert job.progress().report.sync == SyncOutcome(num_added=4, added=("a.txt", "c.html"))
    assert not ground.client.search("docs", words, by="words")
    assert not any(b"secret" in file.read_bytes() for file in (ground.stores / "jobs").iterdir())
    assert b"secret" not in (ground.store / SYNCED).read_bytes()


def test_callers_have_folders_of_their_own(tmp_path: Path, model_folder: Path, corpus_folder: Path) -> None:
    """Two machines may have different folders under one path, and each caller may name its own `manual`."""
    tokens = tmp_path / "tokens.toml"
    names = ("ann", "bob", "dan", "eve")
    calls = {name: ["AddDocuments", "GetOperation", "WaitOperation"] for name in ("dan", "eve")}
    calls["dan"].append("DeleteDocuments")
    tokens.write_text(
        "".join(
            f"[[token]]\nname = '{name}'\nsecret = '{name * 20}'\n"
            + (f"calls = {json.dumps(calls[name])}\n" if name in calls else "")
            for name in names
        )
    )
    tokens.chmod(0o600)
    docs, other = make_docs(tmp_path), tmp_path / "other"
    other.mkdir()
    (other / "x.txt").write_text("of another machine")
    with (
        serve(tmp_path, model_folder, corpus_folder, "--auth-file", str(tokens)) as server,
        Client(server.address, token="ann" * 20) as ann,
        Client(server.address, token="bob" * 20) as bob,
        Client(server.address, token="dan" * 20) as dan,
        Client(server.address, token="eve" * 20) as eve,
    ):
        ann.datastores.build("docs", str(corpus_folder / OWN), keys="none", check="none").result(PATIENCE_S)
        ann.datastores.sync("docs", docs, name="manual", check="none").result(PATIENCE_S)
        job = bob.datastores.sync("docs", other, name="manual", check="none")
        assert job.result(PATIENCE_S).sync == SyncOutcome(num_added=1, added=("x.txt",))
        with pytest.raises(NotFound):
            ann.operations.get(job.name)
        assert bob.datastores.get("docs").num_documents == 5
        with pytest.raises(PermissionDenied, match="may not call DeleteDocuments"):
            eve.datastores.sync("docs", other, name="manual", check="none")
        eve.datastores.add("docs", [NewDocument("e", "a text")], check="none").result(PATIENCE_S)
        with pytest.raises(PermissionDenied, match="may not call BuildDatastore"):
            dan.datastores.sync("new", other, check="none")
        assert dan.datastores.sync("docs", other, name="manual", check="none").result(PATIENCE_S).sync.num_added == 0
        assert {store.name for store in ann.datastores.list()} == {"docs"}


class Handshake:
    """Lets a thread that reads wait until the loop, which another task runs in, has done something."""

    def __init__(self) -> None:
        self.count, self._loop = 0, asyncio.get_running_loop()

    def wait(self) -> None:
        done = threading.Event()
        self._loop.call_soon_threadsafe(done.set)
        assert done.wait(10), "the loop stands still"
        self.count += 1


class WaitingCorpus(Corpus):
    """Lists no file before the loop has gone on."""

    handshake: Handshake

    def found(self, *arguments: Callable[[Path, OSError], None]) -> list[tuple[str, Path]]:
        WaitingCorpus.handshake.wait()
        return super().found(*arguments)


async def test_the_loop_goes_on_while_an_awaited_upload_reads(ground: Ground) -> None:
    handshake = WaitingCorpus.handshake = Handshake()

    def documents() -> Iterator[NewDocument]:
        for number in range(3):
            handshake.wait()
            yield NewDocument(f"awaited-{number}", "a text")

    def broken() -> Iterator[NewDocument]:
        yield from documents()
        raise RuntimeError("the documents end here")

    async with AsyncClient(ground.server.address) as client:
        job = await client.datastores.add("docs", documents(), check="none")
        await job.result(PATIENCE_S)
        assert handshake.count == 3
        with pytest.raises(RuntimeError, match="the documents end here"):
            await client.datastores.add("docs", broken(), check="none")
        read = Corpus([ground.docs], on_document=lambda file, document: handshake.wait())
        for corpus, most in ((read, 3), (WaitingCorpus([ground.docs]), 2)):
            handshake.count = 0
            await (await client.datastores.sync("docs", corpus, check="none")).result(PATIENCE_S)
            assert handshake.count >= most
        with pytest.raises(InvalidInput, match="no where"):
            await client.datastores.sync("no where", read, check="none")
    assert ground.ids() == {"a.txt", "b.txt", "c.html", *(f"awaited-{number}" for number in range(3))}
    wait_until(lambda: not any(thread.name.startswith("upload") for thread in threading.enumerate()))


def test_a_command_prints_what_it_does_and_goes_on_with_what_changes(ground: Ground, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "memlm", "index", "sync", "docs", str(ground.docs)]
    command += ["--target", ground.server.address, "--check", "none"]
    printed = subprocess.run([*command, "--dry-run"], capture_output=True, text=True, check=True).stdout
    assert printed == "added a.txt\nadded b.txt\nadded c.html\n3 documents, 0 of them unchanged\n"
    planned = json.loads(
        subprocess.run([*command, "--dry-run", "--json"], capture_output=True, text=True, check=True).stdout
    )
    assert planned.pop("operation") == ground.client.operations.list()[0].name
    assert planned == {
        "added": ["a.txt", "b.txt", "c.html"],
        "replaced": [],
        "deleted": [],
        "kept": [],
        "unchanged": 0,
        "num_added": 3,
        "num_replaced": 0,
        "num_deleted": 0,
        "num_kept": 0,
    }  # the fields are those in this process
    assert ground.ids() == set()
    with subprocess.Popen(
        [*command, "--watch"], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    ) as process:
        assert [process.stdout.readline() for _ in range(4)] == printed.splitlines(keepends=True)
        (ground.docs / "a.txt").unlink()
        (ground.docs / "b.txt").write_text("another text")
        assert [process.stdout.readline() for _ in range(3)] == [
            "replaced b.txt\n", "deleted a.txt\n", "2 documents, 1 of them unchanged\n",
        ]  # fmt: skip
        process.send_signal(signal.SIGINT)
        assert process.wait(PATIENCE_S) == 130


def test_two_at_once_follow_each_other(ground: Ground) -> None:
    first, pid = ground.halt(lambda: ground.client.datastores.sync("docs", large(ground.docs), check="none"))
    (ground.docs / "large.jsonl").unlink()
    second = ground.client.datastores.sync("docs", ground.docs, check="none")
    assert second.progress().state == JobState.QUEUED
    os.kill(pid, signal.SIGCONT)
    assert first.result(PATIENCE_S).sync.num_added == 15
    assert second.result(PATIENCE_S).sync.num_deleted == 12
    assert ground.ids() == {"a.txt", "b.txt", "c.html"}


def test_what_is_deleted_during_a_replacement_does_not_come_back(ground: Ground, tmp_path: Path) -> None:
    """The replacement has its own files; only what was deleted meanwhile is not taken from them."""
    corpus = shutil.copytree(ground.docs, ground.halts.parent / "corpus")
    ground.sync()
    (ground.docs / "a.txt").unlink()
    (ground.docs / "d.txt").write_text("a new one")
    job, pid = ground.halt(
        lambda: ground.client.datastores.build("docs", str(large(corpus)), replace=True, check="none")
    )
    assert ground.sync().deleted == ("a.txt",)
    os.kill(pid, signal.SIGCONT)
    job.result(PATIENCE_S)
    assert ground.ids() == {"b.txt", "c.html", *(f"large-{n}" for n in range(12))}
    assert ground.sync().added == ("d.txt",)


def test_what_is_deleted_while_a_replacement_goes_into_service_does_not_come_back(ground: Ground) -> None:
    """The replacement has looked for deletions by then, and the old datastore takes another one."""
    corpus = shutil.copytree(ground.docs, ground.halts.parent / "late", dirs_exist_ok=True)
    ground.sync()
    build, pid = ground.halt(
        lambda: ground.client.datastores.build("docs", str(large(corpus)), replace=True, keys="none", check="none")
    )
    (ground.docs / "a.txt").unlink()
    assert ground.sync().deleted == ("a.txt",)
    ground.halts.write_text("delete")  # where a.txt goes from the replacement
    os.kill(pid, signal.SIGCONT)
    stopped = list[int]()
    wait_until(
        lambda: stopped.extend(each for each in set(ground.server.job_pids) - {pid} if is_stopped(each)) or stopped
    )
    ground.halts.unlink()
    (ground.docs / "b.txt").unlink()
    job = ground.client.datastores.sync("docs", ground.docs, check="none")
    wait_until(lambda: content(ground.store).keys() == {OWN, "c.html"})
    assert job.progress().state == JobState.RUNNING  # until b.txt is in no answer
    os.kill(stopped[0], signal.SIGCONT)
    assert job.result(PATIENCE_S).sync.deleted == ("b.txt",)
    build.result(PATIENCE_S)
    assert ground.ids() == {"c.html", *(f"large-{n}" for n in range(12))}
    assert ground.sync() == SyncOutcome(num_unchanged=1)


@pytest.mark.parametrize("then", ["sync first", "build first", "cancelled"])
def test_what_was_deleted_before_a_kill_comes_back_in_no_replacement(
    tmp_path: Path, model_folder: Path, corpus_folder: Path, then: str
) -> None:
    """The server dies when the deletion is committed and it has not heard of it, and a replacement is being built."""
    docs = make_docs(tmp_path)
    corpus = large(shutil.copytree(docs, tmp_path / "corpus"))
    with serve(tmp_path, model_folder, corpus_folder) as server, Client(server.address) as client:
        ground = Ground(server, client, docs, tmp_path / "stores", tmp_path / "halts")
        client.datastores.build("docs", str(corpus_folder / OWN), keys="none", check="none").result(PATIENCE_S)
        ground.sync()
        build, first = ground.halt(
            lambda: client.datastores.build("docs", str(corpus), replace=True, keys="none", check="none")
        )
        (docs / "a.txt").unlink()
        job, second = ground.halt(
            lambda: client.datastores.sync("docs", docs, check="none"), "committed", besides=first
        )
        server.process.kill()
        server.process.wait(PATIENCE_S)
        for pid in (first, second):
            os.kill(pid, signal.SIGKILL)
        wait_until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in (first, second)))
        ground.halts.write_text(COMPARING if then == "build first" else "read")  # who waits after the restart
    own = ("+index_workers=1",) if then == "cancelled" else ()  # the build's, so that the other has not begun
    with serve(tmp_path, model_folder, corpus_folder, *own) as server, Client(server.address) as client:
        ground = Ground(server, client, docs, tmp_path / "stores", tmp_path / "halts")
        again, build = client.operations.open(job.name), client.operations.open(build.name)
        stopped = list[int]()
        wait_until(lambda: stopped.extend(filter(is_stopped, server.job_pids)) or stopped)
        ground.halts.unlink()
        if then == "cancelled":
            again.cancel()
        elif then == "sync first":
            assert again.result(PATIENCE_S).sync.num_deleted == 1
        if then != "build first":
            os.kill(stopped[0], signal.SIGCONT)
        build.result(PATIENCE_S)
        if then == "build first":
            os.kill(stopped[0], signal.SIGCONT)
            with pytest.raises(MemlmError):  # its datastore is no more
                again.result(PATIENCE_S)
        assert ground.ids() == {"b.txt", "c.html", *(f"large-{n}" for n in range(12))}
        wait_until(lambda: not any(b"a.txt" in file.read_bytes() for file in (tmp_path / "stores" / "jobs").iterdir()))


def test_what_waits_while_its_datastore_is_replaced_fails_and_builds_nothing(ground: Ground) -> None:
    ground.sync()
    before = ground.store
    first, pid = ground.halt(lambda: ground.client.datastores.sync("docs", large(ground.docs), check="none"))
    second = ground.client.datastores.sync("docs", ground.docs, check="none")
    corpus = str(ground.halts.parent / "corpus")
    shutil.copytree(ground.docs, corpus, dirs_exist_ok=True)
    ground.client.datastores.build("docs", corpus, replace=True, check="none", keys="none").result(PATIENCE_S)
    os.kill(pid, signal.SIGCONT)
    for job in (first, second):
        with pytest.raises(MemlmError):
            job.result(PATIENCE_S)
    assert not before.exists()
    assert ground.sync().num_added == 0
