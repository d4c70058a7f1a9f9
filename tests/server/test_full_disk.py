"""A server whose disk is full refuses what it would have to write, answers all else, and goes on once there is room."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest
from broken import FILL, FULL
from running import PATIENCE_S, RunningServer, wait_until
from texts import make_text

from memlm.api.datastores import NewDocument
from memlm.api.operations import JobState
from memlm.client import Client
from memlm.errors import StorageFull
from memlm.index.store.datastore import Datastore
from memlm.index.store.lock import write_lock

NEW = [NewDocument("new", make_text(5, 40))]


def test_a_full_disk_is_told_as_such_and_changes_nothing(
    tmp_path: Path, model_folder: Path, corpus_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    full, stores, sessions = tmp_path / "full", tmp_path / "stores", tmp_path / "sessions"
    monkeypatch.setenv(FULL, str(full))
    options = ("--threads", "1", "--store-dir", str(stores), "--corpus-root", str(corpus_folder))
    options += ("--session-dir", str(sessions))
    with (
        RunningServer(tmp_path / "log", model_folder, options=options, first=FILL) as server,
        Client(server.address) as client,
    ):
        client.datastores.build("docs", str(corpus_folder)).result(PATIENCE_S)
        session = client.session()
        num_tokens = session.append("the memory").num_tokens
        before, jobs = client.datastores.get("docs"), client.operations.list()
        folders = sorted(path.name for path in stores.iterdir())

        full.touch()
        for _ in range(2):
            for write in (
                lambda: session.append(" of a"),
                client.session,
                lambda: client.datastores.delete_documents("docs", ["doc-1.txt"]),
                lambda: client.datastores.build("more", str(corpus_folder)),
                lambda: client.datastores.compact("docs"),
                lambda: client.datastores.add("docs", NEW),
            ):
                with pytest.raises(StorageFull, match="make room"):
                    write()
            assert client.get_session(session.name).num_tokens == num_tokens
            assert not client.get_session(session.name).busy
            assert client.datastores.get("docs") == before
            assert len(list(client.generate("the memory", max_tokens=3, temperature=0, neighbors=2))) == 3
            assert "doc-1.txt" in {found.document_id for found in client.search("docs", "the", k=2000)}
        full.unlink()

        assert client.operations.list() == jobs
        assert not list((stores / "jobs").glob("*.jsonl"))
        assert sorted(path.name for path in stores.iterdir()) == folders
        assert client.get_session(session.name).num_tokens == num_tokens
        assert session.append(" of a").num_tokens > num_tokens
        assert client.datastores.delete_documents("docs", ["doc-1.txt"]).num_documents == 1
        job = client.datastores.add("docs", NEW)
        assert job.result(PATIENCE_S).num_documents == before.num_documents
        assert client.datastores.compact("docs").wait(60).state == JobState.DONE
        session.delete()
        assert not list(sessions.glob("*.session*"))
        path = stores / client.datastores.get("docs").path
    with Datastore.open(path) as store:
        assert store.snapshot.verify() == []


def test_a_disk_that_fills_during_a_job_fails_the_job_and_keeps_the_datastore(
    tmp_path: Path, model_folder: Path, corpus_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The front's record of the job is written before; what its process writes is refused."""
    full, stores = tmp_path / "full", tmp_path / "stores"
    monkeypatch.setenv(FULL, str(full))
    only_jobs = FILL.replace("broken.fill_disk()\n", "")
    options = ("--threads", "1", "--store-dir", str(stores), "--corpus-root", str(corpus_folder))
    with (
        RunningServer(tmp_path / "log", model_folder, options=options, first=only_jobs) as server,
        Client(server.address) as client,
    ):
        client.datastores.build("docs", str(corpus_folder)).result(PATIENCE_S)
        before, folders = client.datastores.get("docs"), sorted(path.name for path in stores.iterdir())
        full.touch()
        for begin in (
            lambda: client.datastores.build("more", str(corpus_folder)),
            lambda: client.datastores.add("docs", NEW),
            lambda: client.datastores.delete_documents("docs", ["doc-1.txt"]),
        ):
            with pytest.raises(StorageFull, match="make room"):
                begin().result(PATIENCE_S)
        full.unlink()
        assert client.datastores.get("docs") == before
        assert client.datastores.add("docs", NEW).result(PATIENCE_S).num_documents == before.num_documents + 1
        assert sorted(path.name for path in stores.iterdir()) == folders
        with Datastore.open(stores / client.datastores.get("docs").path) as store:
            assert store.snapshot.verify() == []


@pytest.mark.parametrize("how", ["failed", "cancelled"])
def test_an_operation_that_ended_on_a_full_disk_is_not_begun_again_by_the_next_server(
    tmp_path: Path, model_folder: Path, own_store: Path, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    """Its end could not be written down, and its text must be gone with the answer."""
    full, jobs = tmp_path / "full", tmp_path / "stores" / "jobs"
    monkeypatch.setenv(FULL, str(full))
    options = ("--threads", "1", "--store-dir", str(tmp_path / "stores"), "+index_workers=1")
    with RunningServer(tmp_path / "log", model_folder, own_store, options=options, first=FILL) as server:
        with Client(server.address) as client, write_lock(own_store):
            job = client.datastores.add("store", NEW)
            wait_until(lambda: job.progress().phase == "wait for another writer")
            if how == "failed":
                full.touch()
            else:
                while job.progress().state != JobState.QUEUED:  # the disk fills between two attempts
                    pass
                full.touch()
                job.cancel()
            assert job.wait(PATIENCE_S).state in (JobState.FAILED, JobState.CANCELLED)
            assert not list(jobs.glob("*.jsonl"))
        server.stop(signal.SIGKILL)
    full.unlink()
    with (
        RunningServer(tmp_path / "log", model_folder, own_store, options=options) as server,
        Client(server.address) as client,
    ):
        client.datastores.compact("store", purge=True).result(PATIENCE_S)
        assert client.datastores.get("store").num_documents == 8
        assert [each.kind for each in client.operations.list()] == ["compact"]


def test_the_end_of_an_operation_is_written_down_once_there_is_room(
    tmp_path: Path, model_folder: Path, own_store: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    full, jobs = tmp_path / "full", tmp_path / "stores" / "jobs"
    monkeypatch.setenv(FULL, str(full))
    options = ("--threads", "1", "--store-dir", str(tmp_path / "stores"))
    with RunningServer(tmp_path / "log", model_folder, own_store, options=options, first=FILL) as server:
        with Client(server.address) as client, write_lock(own_store):
            job = client.datastores.add("store", NEW)
            wait_until(lambda: job.progress().phase == "wait for another writer")
            full.touch()
            assert job.wait(PATIENCE_S).state == JobState.FAILED
            assert not list(jobs.iterdir())
        full.unlink()
        wait_until(lambda: list(jobs.glob("*.json")))
        server.stop(signal.SIGKILL)
    with (
        RunningServer(tmp_path / "log", model_folder, own_store, options=options) as server,
        Client(server.address) as client,
    ):
        assert [each.state for each in client.operations.list()] == [JobState.FAILED]
        assert client.datastores.get("store").num_documents == 8
