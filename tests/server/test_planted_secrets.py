"""Secrets of 40 bytes are planted through every way in, and deleted: afterwards no file and no process has them."""

from __future__ import annotations

import gzip
import hashlib
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import grpc
import pyarrow
import pytest
from pyarrow import parquet
from running import PATIENCE_S, RunningServer, family_of, wait_until
from texts import make_text

from memlm.api.datastores import NewDocument
from memlm.api.generation import ResumeGenerationRequest
from memlm.api.params import GenerateRequest
from memlm.client import Client
from memlm.data.tokenizer import Tokenizer
from memlm.v1.generation_pb2_grpc import GenerationStub
from memlm.wire import codec


def secret(way: str) -> str:
    """40 bytes that are nowhere else."""
    return hashlib.sha256(way.encode()).hexdigest()[:40]


def text_with(way: str) -> str:
    return f"{make_text(len(way), 20)} {secret(way)} {make_text(len(way) + 1, 20)}"


CORPUS = ("file", "file name", "lines", "lines id", "lines title", "lines metadata", "gz", "parquet", "piped")
UPLOAD = ("upload", "upload id", "upload title", "upload metadata")
ALL = (*CORPUS, *UPLOAD, "prompt", "session", "interrupted")


def plant(folder: Path) -> list[str]:
    """Writes a corpus of every layout with secrets in it; gives the ids of the documents."""
    folder.mkdir()
    (folder / f"{secret('file name')}.txt").write_text(text_with("file"))
    about = {"id": secret("lines id"), "title": secret("lines title"), "note": {"deep": [secret("lines metadata")]}}
    (folder / "lines.jsonl").write_text(json.dumps({**about, "text": text_with("lines")}))
    with gzip.open(folder / "packed.jsonl.gz", "wt") as file:
        file.write(json.dumps({"id": "gz", "text": text_with("gz")}))
    parquet.write_table(
        pyarrow.Table.from_pylist([{"id": "table", "text": text_with("parquet")}]), folder / "t.parquet"
    )
    return [f"{secret('file name')}.txt", secret("lines id"), "gz", "table"]


class Places:
    """All folders that a server writes to, and its log."""

    def __init__(self, *folders: Path, tokenizer: Tokenizer) -> None:
        self.folders = folders
        self._traces = {way: list(traces_of(secret(way), tokenizer)) for way in ALL}

    def ways_left(self) -> set[str]:
        """The ways in whose secrets are found in some file."""
        contents = list(self._contents())
        return {
            way
            for way, traces in self._traces.items()
            if any(trace in content for trace in traces for content in contents)
        }

    def _contents(self) -> Iterator[bytes]:
        for file in (file for folder in self.folders for file in folder.rglob("*")):
            with suppress(FileNotFoundError):  # on its way out
                if file.is_file():
                    yield file.read_bytes()
            yield os.fsencode(file)


def traces_of(text: str, tokenizer: Tokenizer) -> Iterator[bytes]:
    """A text as files may hold it: itself, and as token ids without the outer ones, which depend on what is beside."""
    yield text.encode()
    yield tokenizer.encode(f" {text} ")[4:-4].astype("<u4").tobytes()


def removed_but_in_use(pids: list[int], folder: Path) -> list[str]:
    """Files below a folder that are gone, and that a process still has open or mapped."""
    found = list[str]()
    for pid in pids:
        with suppress(FileNotFoundError, ProcessLookupError):
            found += [line.split(maxsplit=5)[-1] for line in Path(f"/proc/{pid}/maps").read_text().splitlines()]
            for file in Path(f"/proc/{pid}/fd").iterdir():
                with suppress(FileNotFoundError):
                    found.append(os.readlink(file))
    return [name for name in found if str(folder) in name and name.endswith("(deleted)")]


def interrupt_addition(store: Path, model: Path, corpus: Path, folder: Path) -> None:
    """Starts `memlm index add` to a store, and kills it once some of the text is on the disk."""
    corpus.mkdir()
    for number in range(30):
        (corpus / f"{number}.txt").write_text(text_with("interrupted") + make_text(number, 3000))
    command = [sys.executable, "-m", "memlm", "index", "add", str(store), str(corpus), "--model", str(model)]
    with (folder / "add.log").open("w") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log)
    values = store / "building" / "values.npy"
    wait_until(lambda: (values.exists() and values.stat().st_size > 20_000) or process.poll() is not None)
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert (store / "building.json").exists()


@pytest.fixture
def temporary() -> Iterator[Path]:
    """A folder for temporary files, with a name that is short enough for the path of a socket."""
    with tempfile.TemporaryDirectory(prefix="memlm-test-") as folder:
        yield Path(folder)


@pytest.mark.slow
def test_no_file_and_no_process_keeps_a_secret_that_was_deleted(
    tmp_path: Path, temporary: Path, long_model: Path, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    corpus, written = tmp_path / "corpus", tmp_path / "written"
    for folder in ("stores", "sessions"):
        (written / folder).mkdir(parents=True)
    monkeypatch.setenv("TMPDIR", str(temporary))
    ids = plant(corpus)
    places = Places(written, temporary, tokenizer=tokenizer)
    piped = [sys.executable, "-m", "memlm", "index", "build", "-", "--model", long_model, "--out", written / "piped"]
    subprocess.run(piped, input=text_with("piped").encode(), check=True, capture_output=True)
    options = ("--threads", "1", "--workers", "2", "--corpus-root", str(corpus), "--store-dir", str(written / "stores"))
    options += ("--session-dir", str(written / "sessions"))
    server = RunningServer(written / "log", long_model, written / "piped", options=options)
    with server, Client(server.address) as client, grpc.insecure_channel(server.address) as channel:
        client.datastores.build("docs", str(corpus)).result(PATIENCE_S)
        metadata = {"note": secret("upload metadata")}
        new = NewDocument(secret("upload id"), text_with("upload"), secret("upload title"), metadata)
        client.datastores.add("docs", [new, NewDocument("stays", make_text(5, 100))]).result(PATIENCE_S)
        session = client.session()
        session.append(text_with("session"))
        stub, options = (
            GenerationStub(channel),
            {"neighbors": 64, "k": 64, "resume_s": 100, "max_tokens": 20, "temperature": 0},
        )
        generation = list(stub.Generate(codec.to_wire(GenerateRequest.of(text_with("prompt"), options))))
        for store in ("docs", "piped"):
            assert client.search(store, secret("file")[:20], k=1000)
        (store_folder,) = (written / "stores").glob("docs-*")
        interrupt_addition(store_folder, long_model, tmp_path / "more", tmp_path)
        assert places.ways_left() == set(ALL) - {"prompt"}
        delivered = b"".join(event.SerializeToString() for event in generation)
        assert secret("file name").encode() in delivered

        client.datastores.delete_documents("docs", [*ids, secret("upload id")])
        client.datastores.delete_documents("piped", ["stdin"])
        again = stub.ResumeGeneration(codec.to_wire(ResumeGenerationRequest(generation[0].accepted.request_id, 0)))
        delivered = b"".join(event.SerializeToString() for event in again)
        assert not [way for way in ALL if secret(way).encode() in delivered]
        session.delete()
        for store in ("docs", "piped"):
            client.datastores.compact(store, purge=True).result(PATIENCE_S)

        assert places.ways_left() == set()
        processes = [server.process.pid, *family_of(server.process.pid)]
        wait_until(lambda: not removed_but_in_use(processes, written))
        assert {found.document_id for found in client.search("docs", "the", k=1000)} == {"stays"}
        assert not client.search("piped", "the", k=10)
        assert client.datastores.get("piped").num_entries == 0
        assert len(list(client.generate("the", max_tokens=3, temperature=0, stores={"piped": 1.0}))) == 3
    assert places.ways_left() == set()
