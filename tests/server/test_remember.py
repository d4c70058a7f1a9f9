"""Texts that a server remembers at once: on every worker, beside a running job, and after a kill."""

import asyncio
import os
import signal
from itertools import count
from pathlib import Path

import pytest
from running import PATIENCE_S, RunningServer, wait_until
from texts import make_text

from memlm.api.datastores import NewDocument
from memlm.client import AsyncClient, Client
from memlm.data.corpus import Corpus
from memlm.errors import AlreadyExists, InvalidInput, NotFound
from memlm.index.store.datastore import Datastore
from memlm.indexing.build import build_index


@pytest.fixture
def store(model_folder: Path, corpus_folder: Path, tmp_path: Path) -> Path:
    build_index(model_folder, Corpus([corpus_folder]), tmp_path / "notes", check="none")
    return tmp_path / "notes"


def serving(store: Path, model_folder: Path, *options: str) -> RunningServer:
    return RunningServer(store.parent / "log", model_folder, store, options=("--threads", "1", *options))


def holders(client: Client, words: str, tries: int = 1) -> list[list[str]]:
    """The documents in which words stand, as each of several calls says."""
    return [[each.document_id for each in client.search("notes", words, by="words")] for _ in range(tries)]


def test_every_worker_knows_a_text_when_the_call_returns(store: Path, model_folder: Path) -> None:
    with serving(store, model_folder, "--workers", "2") as server, Client(server.address) as client:
        for number in range(8):
            report = client.datastores.remember("notes", f"gateway {number} listens", document_id=f"note-{number}")
            assert (report.store, report.document_ids) == ("notes", (f"note-{number}",))
            assert holders(client, f"gateway {number} listens", 6) == [[f"note-{number}"]] * 6
        client.datastores.remember("notes", "gateway 1 sleeps", document_id="note-1", replace=True)
        assert holders(client, "gateway 1 listens", 6) == [[]] * 6
        wait_until(lambda: len(Datastore.open(store).manifest.segments) <= 4)  # merged without being asked
        assert holders(client, "gateway 7 listens", 6) == [["note-7"]] * 6
    assert Datastore.open(store).snapshot.verify() == []


def test_what_is_refused_changes_nothing(store: Path, model_folder: Path) -> None:
    with serving(store, model_folder) as server, Client(server.address) as client:
        client.datastores.remember("notes", "the gateway listens", document_id="note")
        before = client.datastores.get("notes")
        with pytest.raises(AlreadyExists, match="a document 'note' already"):
            client.datastores.remember("notes", [NewDocument("other", "a"), NewDocument("note", "b")])
        with pytest.raises(NotFound, match="no datastore 'nowhere'"):
            client.datastores.remember("nowhere", "a")
        with pytest.raises(InvalidInput, match="has no text"):
            client.datastores.remember("notes", "  ")
        assert client.datastores.get("notes") == before


async def test_texts_come_in_beside_each_other_and_beside_a_generation(store: Path, model_folder: Path) -> None:
    with serving(store, model_folder) as server:
        async with AsyncClient(server.address) as client:
            stream = await client.generate("the memory", max_tokens=40, temperature=0)
            texts = [f"gateway {number} {make_text(number, 300)}" for number in range(6)]
            reports = await asyncio.gather(*(client.datastores.remember("notes", text) for text in texts))
            assert len({report.manifest for report in reports}) == len(texts)
            assert len((await stream.result()).tokens) == 40
            assert (await client.datastores.get("notes")).num_documents == 8 + len(texts)


def test_a_text_is_remembered_while_a_job_adds_others(store: Path, model_folder: Path, tmp_path: Path) -> None:
    options = ("--store-dir", str(tmp_path / "stores"))
    with serving(store, model_folder, *options) as server, Client(server.address) as client:
        many = [NewDocument(f"new-{number}", make_text(200 + number, 400)) for number in range(24)]
        job = client.datastores.add("notes", many, check="none")
        wait_until(lambda: (store / "building.json").exists() or job.progress().has_ended)
        begun = not job.progress().has_ended
        client.datastores.remember("notes", "the gateway listens", document_id="note")
        assert holders(client, "gateway listens") == [["note"]]
        job.result(PATIENCE_S)
        assert begun
        assert holders(client, "gateway listens") == [["note"]]
        assert client.datastores.get("notes").num_documents == 8 + len(many) + 1
    assert Datastore.open(store).snapshot.verify() == []


def test_an_acknowledged_text_outlasts_a_kill_of_the_whole_server(store: Path, model_folder: Path) -> None:
    with serving(store, model_folder) as server, Client(server.address) as client:
        client.datastores.remember("notes", "the gateway listens", document_id="note")
        for pid in (server.worker_pid, server.process.pid):
            os.kill(pid, signal.SIGKILL)
    with serving(store, model_folder) as server, Client(server.address) as client:
        assert holders(client, "gateway listens") == [["note"]]


def test_texts_come_in_while_their_datastore_is_replaced(
    model_folder: Path, corpus_folder: Path, tmp_path: Path
) -> None:
    options = ("--threads", "1", "--store-dir", str(tmp_path / "stores"), "--corpus-root", str(corpus_folder))
    with RunningServer(tmp_path / "log", model_folder, options=options) as server, Client(server.address) as client:
        client.datastores.build("docs", str(corpus_folder), check="none").result(PATIENCE_S)
        job = client.datastores.build("docs", str(corpus_folder), replace=True, check="none")
        numbers = count()
        while not job.progress().has_ended:
            client.datastores.remember("docs", f"gateway {(last := next(numbers))} listens", document_id=f"note-{last}")
        job.result(PATIENCE_S)
        client.datastores.remember("docs", "the last gateway", document_id="last")
        assert [each.document_id for each in client.search("docs", "last gateway", by="words")] == ["last"]
        assert last > 0
