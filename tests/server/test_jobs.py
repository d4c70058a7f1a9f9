"""Long work behind the service: it survives, it can be stopped, and what is served goes on being served."""

import json
import os
import shutil
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path

import grpc
import numpy as np
import pytest
from broken import HALT, HALTS
from google.longrunning import operations_pb2
from google.longrunning.operations_grpc_pb2 import OperationsStub
from running import PATIENCE_S, RunningServer, alike, is_stopped, niceness_of, wait_until
from texts import make_text
from typer.testing import CliRunner

from memlm.api.datastores import NewDocument
from memlm.api.handles import Operation
from memlm.api.operations import JobState
from memlm.base.files import read_signed, sign
from memlm.cli.app import app
from memlm.client import AsyncClient, Client
from memlm.data.corpus import Corpus
from memlm.errors import (
    AlreadyExists,
    Cancelled,
    Incompatible,
    InvalidInput,
    MemlmError,
    NotFound,
    PermissionDenied,
    StorageFull,
    Unavailable,
)
from memlm.index.store.datastore import Datastore
from memlm.index.store.lock import write_lock
from memlm.indexing.build import add_to_index, build_index
from memlm.language_model import LanguageModel
from memlm.server.config import ServerConfig
from memlm.server.jobs.uploads import Upload
from memlm.server.jobs.worker import ADD, BUILD, ProgressReporter, Task, _run

NEW = [NewDocument(f"new-{n}", make_text(100 + n, 60), metadata={"number": n}) for n in range(3)]


class Place:
    """A folder for datastores, a corpus that may be read, and servers over them, one after another."""

    def __init__(self, folder: Path, model: Path, corpus: Path) -> None:
        self.folder, self.model, self.corpus = folder, model, corpus
        self.stores, self.halts = folder / "stores", folder / "halts"
        self.count = 0

    def serve(self, *stores: Path, options: tuple[str, ...] = ()) -> RunningServer:
        self.count += 1
        own = ("--threads", "1", "--store-dir", str(self.stores), "--corpus-root", str(self.corpus))
        log = self.folder / f"log-{self.count}"
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv(HALTS, str(self.halts))
            return RunningServer(log, self.model, *stores, options=(*own, *options), first=HALT)

    def halt(self, server: RunningServer, start: Callable[[], Operation]) -> tuple[Operation, int]:
        """Starts a job, and waits until its process has stopped in its midst; also gives its number."""
        self.halts.touch()
        job, stopped = start(), list[int]()
        wait_until(lambda: stopped.extend(filter(is_stopped, server.job_pids)) or stopped)
        self.halts.unlink()
        assert not job.progress().has_ended
        return job, stopped[0]

    def folder_of(self, client: Client, name: str) -> Path:
        """Where a datastore that is in service lies; callers see a path relative to the folder for datastores."""
        return self.stores / client.datastores.get(name).path

    def left(self, name: str) -> list[str]:
        """Folders of that datastore, one at most of which is in service."""
        return sorted(path.name for path in self.stores.glob(f"{name}-*"))


@pytest.fixture
def place(tmp_path: Path, model_folder: Path, corpus_folder: Path) -> Place:
    """One of its own, for what starts and stops servers."""
    return Place(tmp_path, model_folder, corpus_folder)


@pytest.fixture(scope="module")
def shared(
    tmp_path_factory: pytest.TempPathFactory, model_folder: Path, corpus_folder: Path
) -> Iterator[tuple[Place, RunningServer]]:
    place = Place(tmp_path_factory.mktemp("jobs"), model_folder, corpus_folder)
    with place.serve() as server:
        yield place, server


@pytest.fixture
def served(shared: tuple[Place, RunningServer]) -> Iterator[tuple[Place, RunningServer, Client]]:
    """For what needs a server that goes on; whatever is left in service is taken out afterwards."""
    place, server = shared
    with Client(server.address) as client:
        yield place, server, client
        for store in client.datastores.list():
            client.datastores.unload(store.name)


def loaded_by(client: Client) -> list[str]:
    """Names of what is in service; nothing while there is no worker."""
    with suppress(Unavailable):
        return [store.name for store in client.datastores.list()]
    return []


LARGE = 12  # documents


def large(folder: Path) -> Path:
    """A corpus that is no short addition."""
    folder.mkdir(exist_ok=True)
    with (folder / "large.jsonl").open("w") as file:
        for number in range(LARGE):
            file.write(json.dumps({"id": f"large-{number}", "text": make_text(number, 400)}) + "\n")
    return folder


def test_a_datastore_is_built_served_extended_and_compacted(served, lm: LanguageModel) -> None:
    place, _, client = served
    job = client.datastores.build("docs", str(place.corpus), check="none", request_id="first")  # as the store of `lm`
    report = job.result(PATIENCE_S)
    info = job.progress()
    assert (info.state, info.kind, info.store, info.attempts) == (JobState.DONE, "build", "docs", 1)
    assert info.created_s <= info.started_s <= info.ended_s
    assert (report.num_entries, report.num_documents) == (lm.stores[0].num_entries, lm.stores[0].num_documents)
    assert client.datastores.get("docs").num_entries == report.num_entries
    text = "the memory of a"
    found = [(n.document_id, n.token_offset) for n in client.search("docs", text, k=5)]
    assert found == [(n.document_id, n.token_offset) for n in lm.search(None, text, k=5)]
    assert alike(client.generate(text, temperature=0, max_tokens=5), lm.generate(text, temperature=0, max_tokens=5))

    added = client.datastores.add("docs", NEW).result(PATIENCE_S)
    assert added.num_documents == report.num_documents + len(NEW)
    found = client.search("docs", NEW[1].text[:60], k=64)
    assert ("new-1", {"number": 1}) in [(n.document_id, n.metadata) for n in found]
    with pytest.raises(AlreadyExists, match="new-0"):
        client.datastores.add("docs", NEW[:1]).result(PATIENCE_S)
    again = client.datastores.add("docs", NEW[:1], replace=True).result(PATIENCE_S)
    assert again.num_documents == added.num_documents
    client.datastores.delete_documents("docs", ["doc-0.txt"])
    compacted = client.datastores.compact("docs").result(PATIENCE_S)
    assert compacted.num_documents == added.num_documents - 1
    assert client.datastores.get().num_deleted_documents == 0
    with Datastore.open(place.folder_of(client, "docs")) as store:
        assert store.snapshot.verify() == []
        assert len(store.snapshot.segments) == 1
    assert client.datastores.get("docs").path in place.left("docs")
    assert [info.kind for info in client.operations.list()][:5] == ["compact", "add", "add", "add", "build"]
    assert [info.state for info in client.operations.list()][:5].count(JobState.FAILED) == 1
    client.operations.delete(job.name)
    with pytest.raises(NotFound, match="no operation"):
        job.progress()


def test_who_finds_the_datastore_being_written_to_waits(served) -> None:
    place, _, client = served
    client.datastores.build("docs", str(place.corpus), check="none").result(PATIENCE_S)
    with write_lock(place.folder_of(client, "docs")):
        job = client.datastores.add("docs", NEW)
        wait_until(lambda: job.progress().phase == "wait for another writer")
        assert client.datastores.delete_documents("docs", ["doc-0.txt"]).num_documents == 1
    assert job.result(PATIENCE_S).num_documents == 10


def test_who_deletes_need_not_wait_for_a_job(served, tmp_path: Path) -> None:
    """And the job does not bring back what was deleted while it went on."""
    place, server, client = served
    client.datastores.build("docs", str(place.corpus), check="none").result(PATIENCE_S)
    job, pid = place.halt(server, lambda: client.datastores.add("docs", Corpus([large(tmp_path / "more")])))
    client.datastores.delete_documents("docs", ["doc-1.txt"])
    os.kill(pid, signal.SIGCONT)
    assert job.result(PATIENCE_S).num_documents == 7 + LARGE
    with Datastore.open(place.folder_of(client, "docs")) as store:
        assert not store.snapshot.has_document("doc-1.txt")
        assert store.snapshot.verify() == []


def test_a_request_id_means_one_operation(served) -> None:
    place, _, client = served
    first = client.datastores.build("docs", str(place.corpus), request_id="mine")
    assert client.datastores.build("docs", str(place.corpus), request_id="mine").name == first.name
    with pytest.raises(AlreadyExists, match="another request"):
        client.datastores.build("other", str(place.corpus), request_id="mine")
    with pytest.raises(AlreadyExists, match="'docs' already"):
        client.datastores.build("docs", str(place.corpus))
    first.result(PATIENCE_S)
    added = client.datastores.add("docs", NEW, request_id="added")
    assert client.datastores.add("docs", NEW, request_id="added").name == added.name
    with pytest.raises(AlreadyExists, match="another request"):
        client.datastores.add("docs", NEW[1:], request_id="added")
    added.result(PATIENCE_S)
    assert client.datastores.build("docs", str(place.corpus), request_id="mine").result(PATIENCE_S) == first.result(
        PATIENCE_S
    )
    assert not list((place.stores / "jobs").glob("*.jsonl"))


@pytest.mark.parametrize("kind", ["build", "add", "compact"])
def test_a_cancelled_job_leaves_things_as_they_were(served, kind: str, tmp_path: Path) -> None:
    place, server, client = served
    client.datastores.build("docs", str(place.corpus), check="none").result(PATIENCE_S)
    client.datastores.add("docs", NEW).result(PATIENCE_S)
    before, left = client.datastores.get("docs"), place.left("docs")
    start = {
        "build": lambda: client.datastores.build("docs", str(place.corpus), replace=True),
        "add": lambda: client.datastores.add("docs", Corpus([large(tmp_path / "more")])),
        "compact": lambda: client.datastores.compact("docs"),
    }[kind]
    job, pid = place.halt(server, start)
    job.cancel()
    with pytest.raises(Cancelled, match=r"operations/.* was cancelled; 'docs' is as it was before"):
        job.result(PATIENCE_S)
    wait_until(lambda: not Path(f"/proc/{pid}").exists())
    assert client.datastores.get("docs") == before
    assert place.left("docs") == left
    with Datastore.open(place.stores / before.path) as store:
        assert store.snapshot.verify() == []
    assert not list((place.stores / "jobs").glob("*.jsonl"))
    assert client.datastores.compact("docs").result(PATIENCE_S).num_documents == before.num_documents
    job.cancel()  # nothing more to stop


def test_a_waiting_job_can_be_cancelled_and_waits_its_turn(served) -> None:
    place, server, client = served
    first, pid = place.halt(server, lambda: client.datastores.build("one", str(place.corpus)))
    second, third = (client.datastores.build(name, str(place.corpus)) for name in ("two", "three"))
    assert second.progress().state == JobState.QUEUED
    second.cancel()
    with pytest.raises(Cancelled):
        second.result(PATIENCE_S)
    with pytest.raises(Incompatible, match="cancel it first"):
        client.operations.delete(third.name)
    os.kill(pid, signal.SIGCONT)
    assert third.result(PATIENCE_S).num_entries == first.result(PATIENCE_S).num_entries
    assert [store.name for store in client.datastores.list()] == ["one", "three"]


def test_a_short_addition_does_not_wait_behind_a_long_job_on_another_datastore(served, tmp_path: Path) -> None:
    """Nor does it need an index worker of its own. It ends as any other."""
    place, server, client = served
    client.datastores.build("docs", str(place.corpus), check="none").result(PATIENCE_S)
    long, pid = place.halt(server, lambda: client.datastores.build("long", str(place.corpus)))
    job = client.datastores.add("docs", NEW)
    report, info = job.result(PATIENCE_S), job.progress()
    assert (info.state, info.attempts, report.num_documents, report.store) == (JobState.DONE, 1, 11, "docs")
    assert report.num_entries == client.datastores.get("docs").num_entries
    found = client.search("docs", NEW[1].text, by="words", k=1)
    assert [(neighbor.document_id, neighbor.metadata) for neighbor in found] == [("new-1", {"number": 1})]
    assert not list((place.stores / "jobs").glob("*.jsonl"))
    with pytest.raises(AlreadyExists, match="'new-0'"):
        client.datastores.add("docs", NEW).result(PATIENCE_S)
    assert client.datastores.add("docs", NEW, replace=True).result(PATIENCE_S).num_documents == 11
    assert server.job_pids == [pid]
    assert not long.progress().has_ended
    os.kill(pid, signal.SIGCONT)
    assert long.result(PATIENCE_S).num_documents == 8
    with Datastore.open(place.folder_of(client, "docs")) as store:
        assert store.snapshot.verify() == []


def test_what_may_not_overtake_says_that_it_waits(served, tmp_path: Path) -> None:
    """A large addition, and a short one to a datastore on which an earlier operation is to end first."""
    place, server, client = served
    for name in ("one", "two"):
        client.datastores.build(name, str(place.corpus), check="none").result(PATIENCE_S)
    first, pid = place.halt(server, lambda: client.datastores.add("one", Corpus([large(tmp_path / "first")])))
    waiting = [client.datastores.add("two", Corpus([large(tmp_path / "more")])), client.datastores.add("one", NEW)]
    for job in waiting:
        wait_until(lambda job=job: job.progress().phase == "wait for another operation")
        assert job.progress().state == JobState.QUEUED
    waiting[0].cancel()
    os.kill(pid, signal.SIGCONT)
    assert [job.result(PATIENCE_S).num_documents for job in (first, waiting[1])] == [8 + LARGE, 8 + LARGE + len(NEW)]


def test_progress_may_wait_for_the_end(served) -> None:
    place, server, client = served
    job, pid = place.halt(server, lambda: client.datastores.build("docs", str(place.corpus)))
    begin_s = time.monotonic()
    assert not job.progress(0.2).has_ended
    assert time.monotonic() - begin_s >= 0.2
    os.kill(pid, signal.SIGCONT)
    assert job.progress(PATIENCE_S).has_ended


@pytest.mark.parametrize("who", ["index worker", "server", "server at once"])
def test_what_dies_goes_on(place: Place, who: str) -> None:
    corpus = large(place.folder / "large")
    place.corpus = corpus
    with place.serve() as server, Client(server.address) as client:
        job, pid = place.halt(server, lambda: client.datastores.build("docs", str(corpus)))
        if who == "index worker":
            os.kill(pid, signal.SIGKILL)
            report = job.result(PATIENCE_S)
        elif who == "server":
            assert server.stop() == 0
        else:
            server.process.kill()
            server.process.wait(PATIENCE_S)
            os.kill(pid, signal.SIGCONT)  # to see that the server has gone
        wait_until(lambda: not Path(f"/proc/{pid}").exists())
    if who != "index worker":
        with place.serve() as server, Client(server.address) as client:
            report = client.operations.open(job.name).result(PATIENCE_S)
            assert client.operations.get(job.name).attempts == 2
            assert [store.name for store in client.datastores.list()] == ["docs"]
    build_index(place.model, Corpus([corpus]), place.folder / "whole")
    path = next(place.stores.glob("docs-*"))
    with Datastore.open(place.folder / "whole") as whole, Datastore.open(path) as store:
        assert store.snapshot.verify() == []
        assert report.num_entries == whole.snapshot.num_entries == store.snapshot.num_entries
        assert list(store.snapshot.documents()) == list(whole.snapshot.documents())


@pytest.mark.parametrize("nice", ["7", "idle"])
def test_an_index_worker_runs_at_the_priority_of_its_option(place: Place, nice: str) -> None:
    with place.serve(options=(f"+index_nice={nice!r}",)) as server, Client(server.address) as client:
        job, pid = place.halt(server, lambda: client.datastores.build("docs", str(place.corpus)))
        assert os.sched_getscheduler(pid) == (os.SCHED_IDLE if nice == "idle" else os.SCHED_OTHER)
        assert niceness_of(pid) == niceness_of(0) + {"7": 7, "idle": 0}[nice]
        job.cancel()
    assert ServerConfig(place.model).index_nice == 10  # the idle class would starve on a busy machine


def test_an_index_worker_that_keeps_dying_fails_its_job(place: Place) -> None:
    place.halts.touch()  # no attempt is done before this process, on a busy machine, comes to kill it
    with place.serve() as server, Client(server.address) as client:
        job = client.datastores.build("dying", str(place.corpus))
        killed = set[int]()
        while not job.progress().has_ended:
            for pid in set(server.index_worker_pids) - killed:
                os.kill(pid, signal.SIGKILL)
                killed.add(pid)
            time.sleep(0.01)
        assert len(killed) == job.progress().attempts == 3
        with pytest.raises(Unavailable, match="died 3 times"):
            job.result(PATIENCE_S)
        assert place.left("dying") == []


@pytest.mark.parametrize("replace", [False, True])
def test_an_addition_that_was_committed_before_its_process_died_is_not_done_twice(place: Place, replace: bool) -> None:
    """As if the kill had come after the commit and before anybody was told. What was deleted since stays deleted."""
    with place.serve() as server, Client(server.address) as client:
        client.datastores.build("docs", str(place.corpus), check="none").result(PATIENCE_S)
        job = client.datastores.add("docs", NEW, replace=replace)
        report = job.result(PATIENCE_S)
        deleted = client.datastores.delete_documents("docs", ["new-1"])
    (record,) = [file for file in (place.stores / "jobs").glob("*.json") if file.stem in job.name]
    record_fields = read_signed(record.read_bytes())
    documents = place.stores / "jobs" / "again.jsonl"
    documents.write_text("".join(json.dumps({"id": d.id, "text": d.text, **d.metadata}) + "\n" for d in NEW))
    record_fields |= {"state": "running", "report": None, "ended_s": None, "documents": str(documents)}
    record_fields |= {"request": {"replace": replace}}  # what an operation that has ended no longer keeps
    record.write_bytes(sign(record_fields))
    with place.serve() as server, Client(server.address) as client:
        again = client.operations.open(job.name).result(PATIENCE_S)
        assert (again.num_documents, again.manifest) == (report.num_documents - 1, deleted.manifest)


def test_one_takes_the_others_place_while_streams_go_on(served) -> None:
    """Nobody who asks meanwhile is refused, and each answer is of the old one or of the new one."""
    place, server, client = served
    client.datastores.build("docs", str(place.corpus), check="none").result(PATIENCE_S)
    old = client.datastores.get("docs")
    failures, num_calls, stop = list[BaseException](), [0], threading.Event()

    def ask() -> None:
        with Client(server.address) as own:
            while not stop.is_set():
                try:
                    list(own.generate("the memory", max_tokens=8, temperature=0, neighbors=2))
                    own.search("docs", "the memory", k=2)
                    num_calls[0] += 1
                except MemlmError as error:
                    failures.append(error)

    threads = [threading.Thread(target=ask) for _ in range(2)]
    for thread in threads:
        thread.start()
    job = client.datastores.build("docs", str(place.corpus), replace=True, glob="doc-[0-3].txt")
    report = job.result(PATIENCE_S)
    stop.set()
    for thread in threads:
        thread.join()
    assert not failures, failures[0]
    assert num_calls[0] > 2
    new = client.datastores.get("docs")
    assert new.num_documents == report.num_documents == 4
    assert new.path != old.path
    assert not (place.stores / old.path).exists()


def test_only_what_is_allowed_is_read(served, tmp_path: Path) -> None:
    place, _, client = served
    secret = tmp_path / "secret.txt"
    secret.write_text("nobody may read this here\n" * 20)
    with pytest.raises(PermissionDenied, match="under none of the folders"):
        client.datastores.build("docs", str(secret))
    with pytest.raises(PermissionDenied):
        client.datastores.build("docs", f"{place.corpus}/../{secret.name}")
    with pytest.raises(NotFound):
        client.datastores.build("docs", f"{place.corpus}/not-there")
    with pytest.raises(PermissionDenied, match="none of the datastores"):
        client.datastores.load(str(tmp_path))
    for path in ("\0", "a\0b"):
        with pytest.raises(PermissionDenied):
            client.datastores.build("docs", path)
        with pytest.raises(PermissionDenied):
            client.datastores.load(path)
    too_long = "a" * 300
    with pytest.raises(NotFound):
        client.datastores.build("docs", f"{place.corpus}/{too_long}")
    with pytest.raises(NotFound):
        client.datastores.load(f"{place.stores}/{too_long}")
    for name in ("", "../docs", ".hidden", "a/b", "x" * 101):
        with pytest.raises(InvalidInput, match="store"):
            client.datastores.build(name, str(place.corpus))
    link = place.corpus / "link.txt"
    link.symlink_to(secret)
    try:
        report = client.datastores.build("docs", str(place.corpus), check="none").result(PATIENCE_S)
        assert client.operations.list()[0].skipped == 1
    finally:
        link.unlink()
    with Datastore.open(place.folder_of(client, "docs")) as store:
        assert report.num_documents == 8
        assert not store.snapshot.has_document("link.txt")


def test_a_document_larger_than_a_message_is_sent_in_parts(served) -> None:
    place, server, client = served
    long = NewDocument("long", make_text(1, 600) + ' "ä\\n\U0001f600" ' * 40, "A title", {"text": 1, "number": 7})
    limit = 2_000
    with Client(server.address, max_message_bytes=limit) as small:
        assert len(long.text.encode()) > limit
        for name, sender in (("whole", client), ("parts", small)):
            client.datastores.build(name, str(place.corpus), check="none").result(PATIENCE_S)
            sender.datastores.add(name, [NEW[0], long, NEW[1]]).result(PATIENCE_S)
        added = client.datastores.add("whole", [long], replace=True, request_id="cut up or not")
        assert small.datastores.add("whole", [long], replace=True, request_id="cut up or not").name == added.name
        added.result(PATIENCE_S)
    with (
        Datastore.open(place.folder_of(client, "whole")) as whole,
        Datastore.open(place.folder_of(client, "parts")) as parts,
    ):
        assert parts.snapshot.num_documents == 8 + 3
        for each in ("long", "new-0", "new-1"):
            assert np.array_equal(parts.snapshot.tokens(each), whole.snapshot.tokens(each))
        cut_up, uncut = (next(row for row in each.snapshot.documents() if row.id == "long") for each in (parts, whole))
        assert (cut_up.title, cut_up.metadata) == (uncut.title, uncut.metadata) == ("A title", {"number": 7})


def test_parts_of_an_upload_make_whole_documents(tmp_path: Path) -> None:
    def part(id_: str, text: str) -> NewDocument:
        return NewDocument(id_, text, continues=True)

    with Upload(tmp_path, 1000) as upload, Upload(tmp_path, 1000) as at_once:
        upload.add((NewDocument("a", 'on"e', "A", {"n": 1, "text": 2}), part("a", "\n ")))
        upload.add((part("a", "two"), NewDocument("b", "three")))
        upload.finish()
        at_once.add((NewDocument("a", 'on"e\n two', "A", {"n": 1, "text": 2}), NewDocument("b", "three")))
        at_once.finish()
        assert upload.digest == at_once.digest
        record_fields = [json.loads(line) for line in upload.path.read_text().splitlines()]
        assert record_fields == [
            {"n": 1, "id": "a", "title": "A", "text": 'on"e\n two'},
            {"id": "b", "title": "", "text": "three"},
        ]
    with Upload(tmp_path, 1000) as upload:
        with pytest.raises(InvalidInput, match="'a' continues ''"):
            upload.add((part("a", "text"),))
        with pytest.raises(InvalidInput, match="'a' continues 'b'"):
            upload.add((NewDocument("a", "text"), NewDocument("b", "text"), part("a", "text")))
    assert not list(tmp_path.iterdir())


def test_uploads_that_are_no_good_leave_nothing(place: Place) -> None:
    with place.serve(options=("+upload_bytes=4096",)) as server, Client(server.address) as client:
        client.datastores.build("docs", str(place.corpus), check="none").result(PATIENCE_S)
        with pytest.raises(NotFound, match="'other' is loaded"):
            client.datastores.add("other", NEW)
        with pytest.raises(InvalidInput, match="came twice"):
            client.datastores.add("docs", [NEW[0], NEW[0]])
        with pytest.raises(InvalidInput, match="no document was sent"):
            client.datastores.add("docs", [])
        with pytest.raises(InvalidInput, match="more than 4,096 bytes"):
            client.datastores.add("docs", [NewDocument("long", make_text(1, 3000))])
        with pytest.raises(InvalidInput, match="has no text"):
            client.datastores.add("docs", (NewDocument("empty", text) for text in ("some text", " ")))
        with pytest.raises(ZeroDivisionError):
            client.datastores.add("docs", (NewDocument(str(1 // n), "text") for n in (1, 0)))
        with (
            Client(server.address, max_message_bytes=10_000) as small,
            pytest.raises(InvalidInput, match="title and metadata of 9,0"),
        ):
            small.datastores.add("docs", [NewDocument("long", make_text(1, 300), title="T" * 9000)])
        wait_until(lambda: not list((place.stores / "jobs").glob("*.jsonl")))
        assert client.get_server_info().max_upload_bytes == 4096
        assert client.get_server_info().max_jobs == 64
        assert [info.kind for info in client.operations.list()] == ["build"]


@pytest.mark.parametrize("full", ["full.jsonl", "full.ways"])
@pytest.mark.parametrize("characters", [10, 100_000])
def test_an_upload_that_fills_the_disk_is_told_so_and_removed(
    tmp_path: Path, monkeypatch, characters: int, full: str
) -> None:
    """Also where only closing the file writes what is still in its buffer."""
    monkeypatch.setattr("memlm.server.jobs.uploads.token_hex", lambda size: "full")
    (tmp_path / full).symlink_to("/dev/full")

    def send() -> None:
        with Upload(tmp_path, 1 << 30, is_sync=full == "full.ways") as upload:
            upload.add((NewDocument("a", "x" * characters),))
            upload.finish(1)

    with pytest.raises(StorageFull, match="make room"):
        send()
    assert list(tmp_path.iterdir()) == []


def test_an_upload_that_is_given_up_on_a_full_disk_is_removed(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr("memlm.server.jobs.uploads.token_hex", lambda size: "full")
    (tmp_path / "full.jsonl").symlink_to("/dev/full")
    with pytest.raises(InvalidInput, match="came twice"), Upload(tmp_path, 1 << 30) as upload:
        upload.add((NewDocument("a", "x"), NewDocument("a", "x")))
    assert list(tmp_path.iterdir()) == []


def test_a_server_without_a_folder_builds_nothing(server: RunningServer, client: Client) -> None:
    with pytest.raises(Incompatible, match="--store-dir"):
        client.datastores.build("docs", "somewhere")
    with pytest.raises(Incompatible, match="--store-dir"):
        client.datastores.add(None, NEW)
    assert client.get_server_info().max_jobs == 0
    assert client.operations.list() == ()


def test_datastores_are_taken_in_and_out_of_service(place: Place, own_store: Path) -> None:
    with place.serve(own_store) as server, Client(server.address) as client:
        client.datastores.build("docs", str(place.corpus), check="none").result(PATIENCE_S)
        path = client.datastores.get("docs").path
        assert {store.name for store in client.datastores.list()} == {"store", "docs"}
        with pytest.raises(AlreadyExists, match="is loaded already"):
            client.datastores.load(path, "docs")
        with pytest.raises(Incompatible, match="cannot replace"):
            client.datastores.build("store", str(place.corpus), replace=True)
        assert client.datastores.unload("docs").path == path
        assert client.datastores.unload("store").name == "store"
        assert client.datastores.list() == ()
        with pytest.raises(NotFound, match="loaded: none"):
            client.search("docs", "a")
        assert client.datastores.load(path, "again").name == "again"
        os.kill(server.worker_pid, signal.SIGKILL)
        wait_until(lambda: "starting another" in server.output)
        wait_until(lambda: loaded_by(client) == ["again"])
    with place.serve(own_store) as server, Client(server.address) as client:
        assert {store.name for store in client.datastores.list()} == {"store", "again"}


def test_operations_are_their_owners_alone(place: Place, tmp_path: Path) -> None:
    tokens = tmp_path / "tokens.toml"
    tokens.write_text(
        '[[token]]\nname = "ann"\nsecret = "ann has a long secret"\n'
        '[[token]]\nname = "bob"\nsecret = "bob has a long secret"\nstores = ["other"]\n'
    )
    with (
        place.serve(options=("--auth-file", str(tokens))) as server,
        Client(server.address, token="ann has a long secret") as ann,
        Client(server.address, token="bob has a long secret") as bob,
    ):
        job = ann.datastores.build("docs", str(place.corpus))
        for call in (bob.operations.get, bob.operations.cancel, bob.operations.delete):
            with pytest.raises(NotFound, match="no operation"):
                call(job.name)
        assert bob.operations.list() == ()
        with pytest.raises(PermissionDenied, match="may not use the datastore 'docs'"):
            bob.datastores.build("docs", str(place.corpus))
        assert job.result(PATIENCE_S).num_documents == 8
        for change in (
            lambda: bob.datastores.add("docs", NEW),
            lambda: bob.datastores.compact("docs"),
            lambda: bob.datastores.get("docs"),
            lambda: bob.datastores.unload("docs"),
        ):
            with pytest.raises(PermissionDenied):
                change()
        assert bob.datastores.build("other", str(place.corpus)).result(PATIENCE_S).num_documents == 8


async def test_the_async_client_does_the_same(place: Place) -> None:
    with place.serve() as server:
        async with AsyncClient(server.address) as client:
            job = await client.datastores.build("docs", [str(place.corpus)])
            report = await job.result(PATIENCE_S)
            added = await (await client.datastores.add("docs", NEW)).result(PATIENCE_S)
            assert added.num_documents == report.num_documents + 3
            with pytest.raises(ZeroDivisionError):
                await client.datastores.add("docs", (NewDocument(str(1 // n), "text") for n in (1, 0)))
            gone = await client.datastores.compact("docs")
            await gone.cancel()
            assert (await gone.wait(60)).has_ended
            assert [info.kind for info in await client.operations.list()] == ["compact", "add", "build"]
            await client.operations.delete(job.name)


def test_pages_and_filters_of_the_standard_service(served) -> None:
    place, server, client = served
    jobs = [client.datastores.build(f"docs-{n}", str(place.corpus)) for n in range(3)]
    with grpc.insecure_channel(server.address) as channel:
        stub = OperationsStub(channel)
        first = stub.ListOperations(operations_pb2.ListOperationsRequest(name="operations", page_size=2))
        rest = stub.ListOperations(operations_pb2.ListOperationsRequest(page_token=first.next_page_token))
        names = [operation.name for page in (first, rest) for operation in page.operations]
        assert (len(first.operations), rest.next_page_token) == (2, "")
        assert names[:3] == [job.name for job in reversed(jobs)]
        assert names == [info.name for info in client.operations.list()]
        with pytest.raises(grpc.RpcError, match="filter"):
            stub.ListOperations(operations_pb2.ListOperationsRequest(filter="done"))
        with pytest.raises(grpc.RpcError, match="page_token"):
            stub.ListOperations(operations_pb2.ListOperationsRequest(page_token="x"))
    for job in jobs:
        job.result(PATIENCE_S)


@pytest.mark.slow
def test_a_wait_outlasts_a_server_that_stands_still_for_a_while(place: Place) -> None:
    """As a machine does that is busy with other work: no call gives up before a minute."""
    with place.serve() as server, Client(server.address) as client:
        job = client.datastores.build("docs", str(place.corpus))
        os.kill(server.process.pid, signal.SIGSTOP)
        going_on = threading.Timer(12, os.kill, (server.process.pid, signal.SIGCONT))
        going_on.start()
        job.progress(0.5)
        assert not going_on.is_alive()
        job.result(PATIENCE_S)


def test_the_shell_does_it_all(served, tmp_path: Path) -> None:
    place, server, _ = served
    at = ["--target", server.address, "--json"]

    def run(*words: str) -> dict:
        done = CliRunner().invoke(app, [*words, *at])
        assert done.exit_code == 0, done.output
        return json.loads(done.stdout)

    report = run("index", "build", str(place.corpus), "--out", "docs")
    assert report["report"]["num_documents"] == 8
    more = tmp_path / "more.jsonl"
    more.write_text("".join(json.dumps({"id": d.id, "text": d.text}) + "\n" for d in NEW))
    started = run("index", "add", "docs", str(more), "--no-wait")
    assert run("operation", "wait", started["name"])["report"]["num_documents"] == 11
    assert run("index", "compact", "docs")["report"]["store"] == "docs"
    info = run("index", "info", "docs")
    assert info["num_documents"] == 11
    assert run("operation", "info", started["name"])["state"] == "done"
    assert len(run("operation", "info")["operations"]) >= 3
    assert run("index", "unload", "docs")["name"] == "docs"
    assert run("index", "load", info["path"], "--name", "docs")["num_documents"] == 11
    run("operation", "cancel", started["name"])
    run("operation", "delete", started["name"])
    failed = CliRunner().invoke(app, ["operation", "info", started["name"], "--target", server.address])
    assert isinstance(failed.exception, NotFound)


def test_what_the_server_was_started_with_is_not_replaced(
    model_folder: Path, store_folder: Path, tmp_path: Path
) -> None:
    """And still answers after the refusal."""
    first, second = (Path(shutil.copytree(store_folder, tmp_path / name)) for name in ("first", "second"))
    with (
        RunningServer(tmp_path / "log", model_folder, first, second, options=("--threads", "1")) as server,
        Client(server.address) as client,
    ):
        with pytest.raises(Incompatible, match="choose another name"):
            client.datastores.load(str(second), "first", replace=True)
        assert client.datastores.get("first").path == "first"


class Killed(Exception):
    """What ends a build in its checks."""


def kill_in_checks(phase: str, done: int, total: int | None, note: str = "") -> None:
    if phase == "check":
        raise Killed


def phases_in(pipe: Connection) -> set[str]:
    phases = set()
    while pipe.poll():
        phases.add(getattr(pipe.recv(), "phase", ""))
    return phases


def test_an_addition_killed_in_its_checks_is_finished_by_the_next_worker(model_folder, corpus_folder, tmp_path):
    first, second = corpus_folder / "doc-0.txt", corpus_folder / "doc-1.txt"
    build_index(model_folder, Corpus([first]), tmp_path / "s")
    with pytest.raises(Killed):
        add_to_index(model_folder, Corpus([second]), tmp_path / "s", progress=kill_in_checks)
    task = Task(ADD, "s", tmp_path / "s", model_folder, corpus=(second,), since=1, is_resumed=True)
    pipe, worker_end = Pipe()
    _run(task, ProgressReporter(worker_end))
    assert "read" not in (phases := phases_in(pipe)), "the documents were read once"
    assert "check" in phases
    with Datastore.open(tmp_path / "s") as store:
        assert store.snapshot.num_documents == 2
        assert store.manifest.quality is not None


def test_a_build_killed_in_its_checks_is_finished_by_the_next_worker(model_folder, corpus_folder, tmp_path):
    options = {"index": "IVF16,SQfp16", "keep_keys": False}
    with pytest.raises(Killed):
        build_index(model_folder, Corpus([corpus_folder]), tmp_path / "s", progress=kill_in_checks, **options)
    with Datastore.open(tmp_path / "s") as store:
        assert store.snapshot.has_keys
        assert store.manifest.quality is None
    task = Task(BUILD, "s", tmp_path / "s", model_folder, corpus=(corpus_folder,), options=options, is_resumed=True)
    pipe, worker_end = Pipe()
    first, second = (_run(task, ProgressReporter(worker_end)) for _ in range(2))
    assert "read" not in (phases := phases_in(pipe)), "the documents were read once"
    assert "check" in phases
    with Datastore.open(tmp_path / "s") as store:
        assert not store.snapshot.has_keys
        assert store.manifest.quality is not None
        assert first.manifest == second.manifest == store.manifest.number  # the second found nothing to do
