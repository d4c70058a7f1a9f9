"""Text of a datastore is served before its keys are made, by the job itself or in the background."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
from running import PATIENCE_S, RunningServer, wait_until
from texts import make_text

from memlm.api.datastores import NewDocument
from memlm.client import Client
from memlm.data.corpus import Document
from memlm.errors import Cancelled
from memlm.indexing.build import build_index

WORD = "zyzzyva"


@pytest.fixture
def long_store(tmp_path: Path, long_model: Path) -> Path:
    return build_index(long_model, [Document("begin", make_text(1, 20))], tmp_path / "store", check="none").path


def serving(folder: Path, model: Path, *stores: Path, options: tuple[str, ...] = ()) -> RunningServer:
    own = ("--threads", "1", "+index_threads=1", "--store-dir", str(folder / "stores"), *options)
    return RunningServer(folder / "log", model, *stores, options=own)


def found(client: Client) -> set[str]:
    return {each.document_id for each in client.find_passages(f"the {WORD}", by="words", k=4)}


def test_an_addition_answers_while_its_keys_are_made(tmp_path: Path, long_model: Path, long_store: Path) -> None:
    new = [NewDocument(f"long-{n}", f"{WORD} {make_text(n, 2000)}") for n in range(8)]
    with serving(tmp_path, long_model, long_store) as server, Client(server.address) as client:
        job = client.datastores.add("store", new, keys="now", check="none")
        wait_until(lambda: job.progress().phase == "make keys")
        (child,) = server.job_pids
        os.kill(child, signal.SIGSTOP)
        try:
            wait_until(lambda: found(client) != set())
            info = client.datastores.get("store")
            assert (info.num_documents, info.num_keyed_documents) == (9, 1)
        finally:
            os.kill(child, signal.SIGCONT)
        assert job.result(PATIENCE_S).num_documents == 9
        assert client.datastores.get("store").num_keyed_documents == 9


def test_a_cancelled_addition_keeps_the_text_that_was_served(
    tmp_path: Path, long_model: Path, long_store: Path
) -> None:
    new = [NewDocument(f"long-{n}", f"{WORD} {make_text(n, 2000)}") for n in range(8)]
    with serving(tmp_path, long_model, long_store) as server, Client(server.address) as client:
        job = client.datastores.add("store", new, keys="now", check="none")
        wait_until(lambda: job.progress().phase == "make keys" and found(client) != set())
        job.cancel()
        with pytest.raises(Cancelled, match="has its documents, and not all of their keys"):
            job.result(PATIENCE_S)
        assert client.datastores.get("store").num_documents == 9
        client.datastores.add("store", [NewDocument("later", make_text(3, 30))]).result(PATIENCE_S)


def test_a_server_makes_keys_in_the_background_if_it_is_asked(tmp_path: Path, model_folder: Path) -> None:
    documents = [Document(f"d-{n}", f"{WORD} {make_text(n, 60)}") for n in range(4)]
    store = build_index(model_folder, documents, tmp_path / "store", keys="none").path
    options = ("--background-keys",)
    with serving(tmp_path, model_folder, store, options=options) as server, Client(server.address) as client:
        assert len(found(client)) == 4
        wait_until(lambda: client.datastores.get("store").num_keyed_documents == 4)
        assert client.search("store", WORD, k=2)
