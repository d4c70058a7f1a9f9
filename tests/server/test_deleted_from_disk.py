"""A document that is deleted and compacted away is in no file of a server, and no process has one open or mapped."""

from __future__ import annotations

import gc
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from encoders import save_bert
from running import PATIENCE_S, RunningServer, family_of, wait_until
from texts import make_text

from memlm.api.datastores import NewDocument
from memlm.client import Client
from memlm.index.store.compaction import compact
from memlm.index.store.datastore import Datastore
from memlm.language_model import load

ID, TITLE, NOTE = "qzx-secret-id", "qzx-secret-title", "qzx-secret-note"
TEXT = make_text(77, 60)

# Calls that read files of their own, or keep some open, of a client or a language model.
CALLS: dict[str, Callable[[Any], Any]] = {
    "words": lambda lm: lm.search(None, "model", by="words"),
    "state": lambda lm: lm.search(None, TEXT[:20]),
    "passages by words": lambda lm: lm.find_passages(TEXT[:20], by="words"),
    "passages by meaning": lambda lm: lm.find_passages(TEXT[:20], by="meaning"),
    "trace": lambda lm: lm.trace(TEXT),
    "drafts": lambda lm: lm.generate(TEXT[:60], max_tokens=8, drafts=4, temperature=0).result(),
    "answer": lambda lm: lm.answer(TEXT[:20], max_tokens=4),
    "score": lambda lm: lm.score(TEXT[:60]),
}


@pytest.fixture(scope="module")
def bert(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_bert("no head", tmp_path_factory.mktemp("bert"))


@pytest.fixture
def no_garbage_collection() -> Iterator[None]:
    """Files are closed by who used them last, and not some time later."""
    gc.disable()
    yield
    gc.enable()


def files_with(folder: Path, content: bytes) -> list[Path]:
    """Files in which some bytes stand."""
    found = list[Path]()
    for file in folder.rglob("*"):
        with suppress(FileNotFoundError):  # on its way out
            if file.is_file() and content in file.read_bytes():
                found.append(file)
    return found


def removed_in_use(pids: list[int], folder: Path) -> Iterator[str]:
    """Files of a folder that are gone, and that a process still has open or mapped."""
    for pid in pids:
        with suppress(FileNotFoundError, ProcessLookupError):
            names = [line.split(maxsplit=5)[-1] for line in Path(f"/proc/{pid}/maps").read_text().splitlines()]
            for file in Path(f"/proc/{pid}/fd").iterdir():
                with suppress(FileNotFoundError):
                    names.append(os.readlink(file))
            yield from (f"{pid}: {name}" for name in names if str(folder) in name and name.endswith("(deleted)"))


def wait_until_released(server: RunningServer, folder: Path) -> None:
    """Until no process of a server, the front and index workers too, has a removed file of a folder open or mapped."""
    processes = [server.process.pid, *family_of(server.process.pid)]
    wait_until(lambda: not list(removed_in_use(processes, folder)))


def test_a_deleted_and_compacted_document_is_in_no_file_and_no_memory_map(
    tmp_path: Path, model_folder: Path, corpus_folder: Path
) -> None:
    stores = tmp_path / "stores"
    options = ("--threads", "1", "--workers", "2", "--store-dir", str(stores), "--corpus-root", str(corpus_folder))
    with (
        RunningServer(tmp_path / "log", model_folder, options=options) as server,
        Client(server.address) as client,
    ):
        client.datastores.build("docs", str(corpus_folder)).result(PATIENCE_S)
        secret = NewDocument(ID, make_text(77, 60), TITLE, {"note": NOTE})
        client.datastores.add("docs", [secret, NewDocument("other", make_text(78, 30))]).result(PATIENCE_S)
        for _ in range(4):  # every worker has looked at it
            assert ID in {found.document_id for found in client.search("docs", secret.text[:40], k=64)}
        words = np.array(client.tokenize(secret.text)[:20], "<u4").tobytes()
        assert {file.name for file in files_with(stores, ID.encode())} == {"documents.sqlite"}
        assert {file.name for file in files_with(stores, words)} == {"values.npy"}
        assert client.datastores.delete_documents("docs", [ID]).num_documents == 1
        client.datastores.compact("docs").result(PATIENCE_S)
        for trace in (ID.encode(), TITLE.encode(), NOTE.encode(), words):
            wait_until(lambda trace=trace: not files_with(stores, trace))  # type: ignore[misc]
        assert not list((stores / "jobs").glob("*.jsonl"))
        wait_until_released(server, stores)
        assert "other" in {found.document_id for found in client.search("docs", "the", k=1000)}


def test_after_a_purge_no_call_before_it_keeps_a_removed_file_open_or_mapped(
    tmp_path: Path, model_folder: Path, own_store: Path, bert: Path
) -> None:
    options = ("--threads", "1", "--store-dir", str(tmp_path / "stores"), "--encoder", str(bert))
    with (
        RunningServer(tmp_path / "log", model_folder, own_store, options=options) as server,
        Client(server.address) as client,
    ):
        for kind, call in CALLS.items():
            client.datastores.remember("store", TEXT, document_id=ID)
            assert call(client), kind
            client.datastores.delete_documents("store", [ID])
            client.datastores.compact("store", purge=True, check="none").result(PATIENCE_S)
            wait_until_released(server, own_store)


def test_after_a_compaction_an_idle_server_frees_the_room_on_the_disk(
    tmp_path: Path, model_folder: Path, own_store: Path, bert: Path
) -> None:
    """Also one that another process made, as the command line does."""
    options = ("--threads", "1", "--encoder", str(bert))
    with (
        RunningServer(tmp_path / "log", model_folder, own_store, options=options) as server,
        Client(server.address) as client,
    ):
        for call in CALLS.values():
            call(client)
        with Datastore.open(own_store) as store:
            store.delete(["doc-1.txt"])
        compact(own_store)
        wait_until_released(server, own_store)


@pytest.mark.usefixtures("no_garbage_collection")
@pytest.mark.parametrize("kind", CALLS)
def test_a_language_model_that_follows_a_purge_keeps_no_removed_file(
    tmp_path: Path, model_folder: Path, own_store: Path, bert: Path, kind: str
) -> None:
    with load(model_folder, stores=[own_store], passage_encoder=bert) as lm:
        CALLS[kind](lm)
        lm.delete_documents(["doc-1.txt"])
        compact(own_store, purge=True)
        lm.refresh()
        assert not list(removed_in_use([os.getpid()], own_store))


@pytest.mark.usefixtures("no_garbage_collection")
def test_an_unloaded_datastore_keeps_no_removed_file(model_folder: Path, own_store: Path, bert: Path) -> None:
    for removed in (False, True):  # derived files are made the first time, and then read
        with load(model_folder, stores=[own_store], passage_encoder=bert) as lm:
            for call in CALLS.values():
                call(lm)
            lm.unload_datastore("store")
            if removed:
                shutil.rmtree(own_store)
                assert not list(removed_in_use([os.getpid()], own_store))
