"""A document that is deleted and compacted away over gRPC is in no file of the server, and no process maps one."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import numpy as np
from running import PATIENCE_S, RunningServer, family_of, wait_until
from texts import make_text

from memlm.api.datastores import NewDocument
from memlm.client import Client

ID, TITLE, NOTE = "qzx-secret-id", "qzx-secret-title", "qzx-secret-note"


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
        processes = [server.process.pid, *family_of(server.process.pid)]
        wait_until(lambda: not list(removed_in_use(processes, stores)))
        assert "other" in {found.document_id for found in client.search("docs", "the", k=1000)}
