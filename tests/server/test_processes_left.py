"""A front or a fork server that is killed leaves no process behind, loses no job, and stops no worker's answers."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest
from running import PATIENCE_S, RunningServer, family_of, forker_of, is_alive, wait_until
from texts import make_text

from memlm.base.progress import LOADING
from memlm.client import Client
from memlm.errors import DeadlineExceeded, Unavailable
from memlm.index.store.datastore import Datastore

DOCUMENTS = 8


@pytest.fixture
def texts(tmp_path: Path) -> Path:
    """A corpus that takes a while to build."""
    (tmp_path / "texts").mkdir()
    with (tmp_path / "texts" / "large.jsonl").open("w") as file:
        for number in range(DOCUMENTS):
            file.write(json.dumps({"id": f"large-{number}", "text": make_text(number, 400)}) + "\n")
    return tmp_path / "texts"


def serve(folder: Path, model: Path, name: str, *more: str) -> RunningServer:
    options = ("--threads", "1", "--workers", "2", "--drain", "30", "--store-dir", str(folder / "stores"), *more)
    options += ("--corpus-root", str(folder / "texts"), "--session-dir", str(folder / "sessions"))
    return RunningServer(folder / name, model, options=options, forked=False)


@pytest.fixture
def leftovers() -> Iterator[list[int]]:
    """Processes that a test has stopped: whatever happens, none stays."""
    pids = list[int]()
    yield pids
    for pid in pids:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def test_a_killed_front_leaves_no_process_and_its_build_goes_on_after_a_restart(
    tmp_path: Path, long_model: Path, texts: Path, leftovers: list[int]
) -> None:
    with serve(tmp_path, long_model, "log-1") as server:
        with Client(server.address) as client:
            streams = [client.generate("a", temperature=0) for _ in range(4)]
            for stream in streams:
                next(stream)
            job = client.datastores.build("docs", str(texts))
            wait_until(lambda: job.progress().phase not in ("", LOADING))
            (building,) = server.job_pids
            os.kill(building, signal.SIGSTOP)  # so that it is in its midst when the front dies
            leftovers.append(building)
            assert not job.progress().has_ended
            family = family_of(server.process.pid)
            assert len(server.worker_pids) == 2
            assert set(family) >= {*server.worker_pids, building, forker_of(server.process.pid)}
            server.process.kill()
            server.process.wait(PATIENCE_S)
            os.kill(building, signal.SIGCONT)
            for stream in streams:
                with pytest.raises(Unavailable):
                    list(stream)
        wait_until(lambda: not any(map(is_alive, family)))
    with serve(tmp_path, long_model, "log-2") as server, Client(server.address) as client:
        report = client.operations.open(job.name).result(PATIENCE_S)
        assert client.operations.get(job.name).attempts == 2
        assert report.num_documents == DOCUMENTS
        path = tmp_path / "stores" / client.datastores.get("docs").path
    with Datastore.open(path) as store:
        assert store.snapshot.verify() == []


def test_a_killed_fork_server_stops_no_worker_and_all_end_with_the_server(tmp_path: Path, long_model: Path) -> None:
    (tmp_path / "texts").mkdir()
    with (
        serve(tmp_path, long_model, "log", "--max-running", "2") as server,
        Client(server.address) as client,
    ):
        workers, forker = server.worker_pids, forker_of(server.process.pid)
        family = [*workers, *family_of(server.process.pid)]
        os.kill(forker, signal.SIGKILL)
        wait_until(lambda: not is_alive(forker))
        for _ in range(6):  # each worker in its turn
            assert len(list(client.generate("a", max_tokens=3, temperature=0))) == 3
        endless = [client.generate("a", temperature=0) for _ in workers]
        for stream in endless:
            next(stream)
        with pytest.raises(DeadlineExceeded):
            client.generate("a", max_tokens=3, temperature=0, timeout_s=0.3)
        for stream in endless:
            stream.close()
        for _ in range(4):
            assert len(list(client.generate("a", max_tokens=3, temperature=0, timeout_s=20))) == 3
        assert all(map(is_alive, workers))
        assert server.stop() == 0
        wait_until(lambda: not any(map(is_alive, family)))
