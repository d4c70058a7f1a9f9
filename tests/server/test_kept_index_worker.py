"""An index worker that has done a job keeps its model for the next one, and nothing of the documents."""

from __future__ import annotations

import os
import shutil
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest
from broken import BREAK, FAILS
from running import PATIENCE_S, RunningServer, is_alive, wait_until
from texts import make_text

from memlm.api.datastores import NewDocument
from memlm.client import Client
from memlm.data.corpus import Document
from memlm.data.tokenizer import Tokenizer
from memlm.errors import AlreadyExists, InternalError
from memlm.indexing.build import build_index

SECRET, SECRET_ID = "qzx wubble frolick snark", "qzx-secret-id"


@contextmanager
def serving(folder: Path, model: Path, store: Path, *options: str, **more: object) -> Iterator[RunningServer]:
    own = ("--threads", "1", "+index_threads=1", "--store-dir", str(folder / "stores"), *options)
    with RunningServer(folder / "log", model, store, options=own, **more) as server:
        yield server


def document(name: str, words: int = 20) -> NewDocument:
    return NewDocument(name, make_text(len(name), words))


def add(client: Client, *documents: NewDocument, **options: object) -> int:
    """Adds documents and gives the number of attempts that it took."""
    job = client.datastores.add("store", documents, **options)
    job.result(PATIENCE_S)
    return job.progress().attempts


def kept_pid(server: RunningServer) -> int:
    """The only index worker, once it has no child."""
    (pid,) = server.index_worker_pids
    wait_until(lambda: server.job_pids == [pid])
    return pid


def memory_of(pid: int) -> Iterator[bytes]:
    """All memory that a process can write to."""
    with Path(f"/proc/{pid}/mem").open("rb") as memory:
        for line in Path(f"/proc/{pid}/maps").read_text().splitlines():
            span, rights, *_ = line.split()
            if "w" not in rights:
                continue
            begin, end = (int(place, 16) for place in span.split("-"))
            with suppress(OSError, ValueError, OverflowError):  # the system's own pages
                memory.seek(begin)
                yield memory.read(end - begin)


def found_in(pid: int, *traces: bytes) -> set[bytes]:
    return {trace for part in memory_of(pid) for trace in traces if trace in part}


@pytest.fixture
def long_store(tmp_path: Path, long_model: Path) -> Path:
    """A store of one document of the model that takes a while."""
    return build_index(long_model, [Document("begin", make_text(1, 20))], tmp_path / "store", check="none").path


def test_the_next_job_finds_the_worker_of_the_last(tmp_path: Path, model_folder: Path, own_store: Path) -> None:
    with serving(tmp_path, model_folder, own_store) as server, Client(server.address) as client:
        assert add(client, document("first")) == 1
        pid = kept_pid(server)
        assert add(client, document("second")) == 1
        assert client.datastores.compact("store").result(PATIENCE_S).num_deleted_documents == 0
        with pytest.raises(AlreadyExists, match="second"):  # a refusal says nothing about the process
            add(client, document("second"))
        assert kept_pid(server) == pid
        found = client.search("store", document("second").text[:40], k=64)
        assert "second" in {neighbor.document_id for neighbor in found}


@pytest.mark.parametrize("idle_s", ["0", "0.5"])
def test_an_idle_worker_ends_in_time(idle_s: str, tmp_path: Path, model_folder: Path, own_store: Path) -> None:
    options = (f"+index_idle={idle_s!r}",)
    with serving(tmp_path, model_folder, own_store, *options) as server, Client(server.address) as client:
        for name in ("first", "second"):
            assert add(client, document(name)) == 1
            wait_until(lambda: not server.index_worker_pids)


def test_a_worker_ahead_waits_from_the_start_and_is_replaced(
    tmp_path: Path, model_folder: Path, own_store: Path
) -> None:
    options = ("+index_ahead=true", "+index_idle=0.3")
    with serving(tmp_path, model_folder, own_store, *options) as server, Client(server.address) as client:
        wait_until(lambda: server.index_worker_pids)
        pid = kept_pid(server)
        time.sleep(1)  # three times as long as a worker is kept without the option
        assert add(client, document("first")) == 1
        assert kept_pid(server) == pid
        os.kill(pid, signal.SIGKILL)
        client.datastores.compact("store", check="none").result(PATIENCE_S)  # in a worker that does not stay
        wait_until(lambda: server.index_worker_pids not in ([], [pid]))
        pid = kept_pid(server)
        assert add(client, document("second")) == 1
        assert kept_pid(server) == pid


def test_a_worker_that_is_killed_while_idle_costs_no_attempt(
    tmp_path: Path, model_folder: Path, own_store: Path
) -> None:
    with serving(tmp_path, model_folder, own_store) as server, Client(server.address) as client:
        add(client, document("first"))
        for name in ("second", "third", "fourth", "fifth"):  # more than a job has attempts
            pid = kept_pid(server)
            os.kill(pid, signal.SIGKILL)
            wait_until(lambda pid=pid: not is_alive(pid))
            assert add(client, document(name)) == 1
            assert kept_pid(server) != pid
        assert "died" not in server.output


@pytest.mark.parametrize("who", ["worker", "child"])
def test_a_worker_that_is_killed_at_work_costs_one_attempt(
    who: str, tmp_path: Path, long_model: Path, long_store: Path
) -> None:
    with serving(tmp_path, long_model, long_store) as server, Client(server.address) as client:
        add(client, document("first"))
        pid = kept_pid(server)
        job = client.datastores.add("store", [document(f"long-{n}", 2000) for n in range(8)])
        wait_until(lambda: job.progress().phase == "make keys")
        (child,) = server.job_pids
        os.kill(child, signal.SIGSTOP)
        assert child != pid
        assert not job.progress().has_ended
        os.kill(pid if who == "worker" else child, signal.SIGKILL)
        assert job.result(PATIENCE_S).num_documents == 10
        assert job.progress().attempts == 2
        assert not is_alive(child)
        assert not is_alive(pid)


def test_a_worker_with_a_bug_is_not_kept(
    tmp_path: Path, model_folder: Path, own_store: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(FAILS, str(tmp_path / "fails"))
    with (
        serving(tmp_path, model_folder, own_store, first=BREAK, fails=True) as server,
        Client(server.address) as client,
    ):
        add(client, document("first"))
        pid = kept_pid(server)
        (tmp_path / "fails").touch()
        with pytest.raises(InternalError, match=r"a bug.*; the documents are in 'store', and not all of their keys"):
            add(client, document("second"))
        wait_until(lambda: not is_alive(pid))
        (tmp_path / "fails").unlink()
        assert add(client, document("third")) == 1


def test_a_draining_server_ends_its_idle_worker(tmp_path: Path, long_model: Path, long_store: Path) -> None:
    with (
        serving(tmp_path, long_model, long_store, "--drain", "120") as server,
        Client(server.address) as client,
    ):
        add(client, document("drained"))
        pid = kept_pid(server)
        stream = client.generate("a", temperature=0, max_tokens=5000)
        next(stream)
        server.process.send_signal(signal.SIGTERM)
        wait_until(lambda: not is_alive(pid))
        next(stream)  # is still answered
        stream.close()


def test_a_worker_loads_while_documents_arrive(tmp_path: Path, model_folder: Path, own_store: Path) -> None:
    with serving(tmp_path, model_folder, own_store) as server, Client(server.address) as client:
        found = list[int]()

        def documents() -> Iterator[NewDocument]:
            yield document("first")
            wait_until(lambda: server.index_worker_pids)
            found.extend(server.index_worker_pids)
            yield document("second")

        job = client.datastores.add("store", documents())
        job.result(PATIENCE_S)
        assert found == [kept_pid(server)]


def test_the_model_of_a_kept_worker_is_that_of_its_files(tmp_path: Path, model_folder: Path, own_store: Path) -> None:
    """A model whose files were written anew since is loaded anew, in another process."""
    model = Path(shutil.copytree(model_folder, tmp_path / "model"))
    with serving(tmp_path, model, own_store) as server, Client(server.address) as client:
        add(client, document("first"))
        pid = kept_pid(server)
        os.utime(model / "config.json")
        assert add(client, document("second")) == 1
        assert kept_pid(server) != pid


def test_a_kept_worker_holds_nothing_of_a_document(
    tmp_path: Path, model_folder: Path, own_store: Path, tokenizer: Tokenizer
) -> None:
    """Neither while the document is there nor once it is deleted: it never did."""
    ids = tokenizer.encode(f" {SECRET} {SECRET} ")[4:-4]
    traces = (SECRET.encode(), SECRET_ID.encode(), *(ids.astype(kind).tobytes() for kind in ("<u4", "<i8")))
    with serving(tmp_path, model_folder, own_store) as server, Client(server.address) as client:
        add(client, NewDocument(SECRET_ID, f" {SECRET} {SECRET} "), document("other"))
        pid = kept_pid(server)
        assert found_in(pid, str(model_folder).encode())  # as a search of memory finds what is there
        assert not found_in(pid, *traces)
        client.datastores.delete_documents("store", [SECRET_ID])
        client.datastores.compact("store", purge=True).result(PATIENCE_S)
        pid = kept_pid(server)  # of another worker, if the first had not ended its job
        assert not found_in(pid, *traces)
        opened = [os.readlink(file) for file in Path(f"/proc/{pid}/fd").iterdir()]
        mapped = Path(f"/proc/{pid}/maps").read_text()
        assert str(own_store) not in f"{opened} {mapped}"
        assert str(tmp_path / "stores") not in f"{opened} {mapped}"
