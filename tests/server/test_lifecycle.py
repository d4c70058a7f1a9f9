"""Starting, stopping, giving up, dying: every request gets one answer, every place is freed, no process is left."""

import asyncio
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from concurrent.futures import TimeoutError as StillWaiting
from pathlib import Path

import grpc
import pytest
from google.rpc.error_details_pb2 import RetryInfo
from google.rpc.status_pb2 import Status
from grpc_health.v1 import health_pb2, health_pb2_grpc
from running import (
    PATIENCE_S,
    RunningServer,
    cpu_seconds,
    family_of,
    forker_of,
    is_alive,
    refusal_of,
    wait_until,
    wait_until_idle,
)

from memlm.api.generation import FinishReason
from memlm.api.handles import TokenStream
from memlm.base.cpu import OPENMP_SPIN_COUNT
from memlm.client import AsyncClient, Client
from memlm.errors import Corrupt, DeadlineExceeded, InvalidInput, NotFound, Overloaded, Unavailable
from memlm.index.store.lock import commit_lock
from memlm.index.store.manifest import CURRENT, FIRST_MANIFEST
from memlm.language_model import load
from memlm.server.config import ServerConfig

LONG = {"temperature": 0}  # on the long model: goes round in circles for many seconds

# One thread is enough for so small a model; a machine that is busy with other things needs long to drain.
PATIENT = ("--threads", "1", "--drain", "120")


def first_tokens(stream: TokenStream, count: int = 3) -> TokenStream:
    for _ in range(count):
        next(stream)
    return stream


def is_free(client: Client, within_s: float = 5.0) -> None:
    """The only place is free: a short request runs at once."""
    begin_s = time.monotonic()
    assert len(list(client.generate("a", max_tokens=3, temperature=0, timeout_s=within_s))) == 3
    assert time.monotonic() - begin_s < within_s


@pytest.fixture
def narrow(narrow_server: RunningServer) -> Iterator[Client]:
    with Client(narrow_server.address) as client:
        client.wait_until_ready(PATIENCE_S)
        yield client


def test_dropping_a_stream_frees_its_place(narrow: Client) -> None:
    first_tokens(narrow.generate("a", **LONG))
    is_free(narrow)


async def test_closing_an_awaited_stream_frees_its_place(narrow_server: RunningServer, narrow: Client) -> None:
    async with AsyncClient(narrow_server.address) as client, await client.generate("a", **LONG) as stream:
        await anext(stream)
    is_free(narrow)


def test_a_request_that_waits_can_be_cancelled(narrow_server: RunningServer, narrow: Client) -> None:
    """The second one waits for the first; given up, it makes room for a third, and never runs."""
    with first_tokens(narrow.generate("a", **LONG)):
        for _ in range(5):
            with pytest.raises(DeadlineExceeded):
                narrow.generate("a", timeout_s=0.1, **LONG)
    is_free(narrow)


def test_a_worker_without_requests_uses_next_to_no_processor_time(narrow_server: RunningServer, narrow: Client) -> None:
    is_free(narrow)
    wait_until_idle(narrow_server.worker_pid)
    before_s = cpu_seconds(narrow_server.worker_pid)
    time.sleep(1.0)
    assert cpu_seconds(narrow_server.worker_pid) - before_s < 0.3


def test_a_full_server_refuses_at_once_and_says_when_to_come_back(narrow_server: RunningServer, narrow: Client) -> None:
    with first_tokens(narrow.generate("a", **LONG)):
        waiting = threading.Thread(target=lambda: list(narrow.generate("a", max_tokens=1)))
        waiting.start()
        time.sleep(0.2)
        begin_s = time.monotonic()
        with pytest.raises(Overloaded, match="try again") as raised:
            narrow.generate("a")
        assert time.monotonic() - begin_s < 10
        assert raised.value.retry_after_s > 0
        with grpc.insecure_channel(narrow_server.address) as channel, pytest.raises(grpc.RpcError) as plain:
            channel.unary_unary("/memlm.v1.Generation/GetModel")(b"", timeout=5)
        assert plain.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        status = Status.FromString(dict(plain.value.trailing_metadata())["grpc-status-details-bin"])
        assert any(packed.Unpack(RetryInfo()) for packed in status.details)
    waiting.join(PATIENCE_S)
    assert not waiting.is_alive()


def test_sigterm_lets_running_requests_finish(tmp_path: Path, long_model: Path) -> None:
    """What runs ends as it should, what is new is refused, health says so, and then the server is gone."""
    with RunningServer(tmp_path / "log", long_model, options=PATIENT) as server, Client(server.address) as client:
        stream = first_tokens(client.generate("a", max_tokens=1000, **LONG))
        server.process.send_signal(signal.SIGTERM)
        wait_until(lambda: "draining" in server.output)
        with pytest.raises(Unavailable, match="stopping"):
            client.generate("b")
        with grpc.insecure_channel(server.address) as channel:
            health = health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=5)
        assert health.status == health_pb2.HealthCheckResponse.NOT_SERVING
        assert len(list(stream)) == 1000 - 3
        assert stream.finished is not None
        assert stream.finished.reason is FinishReason.LENGTH
        assert server.process.wait(PATIENCE_S) == 0


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_an_idle_server_stops_soon(tmp_path: Path, model_folder: Path, number: signal.Signals) -> None:
    with RunningServer(tmp_path / "log", model_folder, forked=number is signal.SIGINT) as server:
        begin_s = time.monotonic()
        assert server.stop(number) == 0
        assert time.monotonic() - begin_s < 10  # not the 30 s that it gives to streams


def test_a_signal_to_the_whole_group_drains_too(tmp_path: Path, long_model: Path) -> None:
    """Ctrl-C in a terminal reaches the worker as well, which leaves it to the front."""
    with RunningServer(tmp_path / "log", long_model, options=PATIENT) as server, Client(server.address) as client:
        stream = first_tokens(client.generate("a", max_tokens=1000, **LONG))
        for pid in (server.worker_pid, server.process.pid):
            os.kill(pid, signal.SIGINT)
        assert len(list(stream)) == 1000 - 3
        assert server.process.wait(PATIENCE_S) == 0


def test_a_second_signal_stops_at_once(tmp_path: Path, long_model: Path) -> None:
    with RunningServer(tmp_path / "log", long_model, options=PATIENT) as server, Client(server.address) as client:
        stream = first_tokens(client.generate("a", **LONG))
        server.process.send_signal(signal.SIGTERM)
        wait_until(lambda: "draining" in server.output)
        begin_s = time.monotonic()
        assert server.stop() == 1
        assert time.monotonic() - begin_s < 20  # not the 30 s that it gives to streams
        with pytest.raises(Unavailable):
            list(stream)


async def test_a_second_signal_does_not_wait_for_a_worker_that_hangs(tmp_path: Path, model_folder: Path) -> None:
    with RunningServer(tmp_path / "log", model_folder) as server:
        async with AsyncClient(server.address) as client:
            await client.get_model()
            os.kill(server.worker_pid, signal.SIGSTOP)
            asking = asyncio.create_task(client.generate("a"))
            await asyncio.sleep(0.2)
            server.process.send_signal(signal.SIGTERM)
            wait_until(lambda: "draining: 1" in server.output)
            begin_s = time.monotonic()
            assert server.stop() == 1
            assert time.monotonic() - begin_s < 20
            with pytest.raises(Unavailable):
                await asking


def test_draining_has_an_end(tmp_path: Path, long_model: Path) -> None:
    hasty = ("--threads", "1", "--drain", "0.5")
    with RunningServer(tmp_path / "log", long_model, options=hasty) as server, Client(server.address) as c:
        stream = first_tokens(c.generate("a", **LONG))
        begin_s = time.monotonic()
        assert server.stop() == 0
        assert time.monotonic() - begin_s < 20
        with pytest.raises(Unavailable):
            list(stream)


def test_a_worker_that_is_killed_is_started_again(tmp_path: Path, model_folder: Path, long_model: Path) -> None:
    with RunningServer(tmp_path / "log", long_model, options=PATIENT) as server, Client(server.address) as client:
        stream = first_tokens(client.generate("a", **LONG))
        old = server.worker_pid
        os.kill(old, signal.SIGKILL)
        with pytest.raises(Unavailable, match="died"):
            list(stream)
        with pytest.raises(Unavailable, match="started again"):
            client.generate("a")
        wait_until(lambda: not is_alive(old))
        time.sleep(0.3)
        client.wait_until_ready(PATIENCE_S)
        is_free(client, within_s=10)
        assert server.worker_pid != old


def test_the_process_that_workers_come_from_may_die(tmp_path: Path, model_folder: Path) -> None:
    """Those it made go on, and the next ones come from another."""
    with RunningServer(tmp_path / "log", model_folder, options=PATIENT) as server, Client(server.address) as client:
        worker, forker = server.worker_pid, forker_of(server.process.pid)
        os.kill(forker, signal.SIGKILL)
        wait_until(lambda: not is_alive(forker))
        assert len(list(client.generate("a", max_tokens=3, temperature=0))) == 3
        assert is_alive(worker)
        os.kill(worker, signal.SIGKILL)
        wait_until(lambda: "starting another" in server.output)
        time.sleep(0.3)  # health looks four times a second
        client.wait_until_ready(PATIENCE_S)
        assert len(list(client.generate("a", max_tokens=3, temperature=0))) == 3
        assert forker_of(server.process.pid) != forker


def test_a_worker_does_not_outlive_a_front_that_is_killed(tmp_path: Path, long_model: Path) -> None:
    with RunningServer(tmp_path / "log", long_model, options=PATIENT) as server, Client(server.address) as client:
        first_tokens(client.generate("a", **LONG))
        family = family_of(server.process.pid)
        server.process.kill()
        server.process.wait()
        wait_until(lambda: not any(map(is_alive, family)))


def test_a_worker_that_hangs_is_not_healthy(tmp_path: Path, model_folder: Path) -> None:
    """Health means that the work loop moves; a stopped process still exists."""
    impatient = "import memlm.server.inference.requests as link; link.STALE_HEARTBEAT_S = 1.5"
    with (
        RunningServer(tmp_path / "log", model_folder, first=impatient) as server,
        grpc.insecure_channel(server.address) as channel,
    ):
        check, request = health_pb2_grpc.HealthStub(channel).Check, health_pb2.HealthCheckRequest()
        worker = server.worker_pid
        os.kill(worker, signal.SIGSTOP)
        wait_until(lambda: check(request, timeout=5).status == health_pb2.HealthCheckResponse.NOT_SERVING)
        os.kill(worker, signal.SIGCONT)
        wait_until(lambda: check(request, timeout=5).status == health_pb2.HealthCheckResponse.SERVING)


def test_deleting_is_effective_at_once(tmp_path: Path, model_folder: Path, own_store: Path) -> None:
    """Also for a generation that is going on: the next token has nothing of the document any more."""
    with RunningServer(tmp_path / "log", model_folder, own_store) as server, Client(server.address) as client:
        before = client.search("store", "the memory of a model", k=50)
        gone = before[0].document_id
        report = client.datastores.delete_documents("store", [gone])
        assert (report.store, report.num_documents) == ("store", 1)
        after = client.search("store", "the memory of a model", k=50)
        assert gone not in {neighbor.document_id for neighbor in after}
        spoken = {n.document_id for token in client.generate("the memory", neighbors=50, k=50) for n in token.neighbors}
        assert spoken
        assert gone not in spoken
        assert client.datastores.list()[0].num_deleted_documents == 1
        with pytest.raises(NotFound, match=gone):
            client.datastores.delete_documents("store", [gone])
    with load(model_folder, [own_store]) as lm:
        assert lm.stores[0].num_deleted_documents == 1


def test_who_deletes_while_another_commits_waits_and_nobody_else_does(
    tmp_path: Path, model_folder: Path, own_store: Path
) -> None:
    with RunningServer(tmp_path / "log", model_folder, own_store) as server, Client(server.address) as client:
        stored = client.search("store", "the memory of a model", k=1)[0].document_id
        with ThreadPoolExecutor(1) as pool, commit_lock(own_store):
            deleting = pool.submit(client.datastores.delete_documents, "store", [stored])
            for _ in range(3):
                assert list(client.generate("the memory", max_tokens=20, temperature=0, neighbors=1))
                assert client.search("store", "the memory of a model", k=1)[0].document_id == stored
            with pytest.raises(StillWaiting):
                deleting.result(0.2)
        assert deleting.result(PATIENCE_S).num_documents == 1
        assert client.search("store", "the memory of a model", k=1)[0].document_id != stored


def test_who_deletes_need_not_wait_until_another_datastore_is_open(
    tmp_path: Path, model_folder: Path, own_store: Path
) -> None:
    slow = tmp_path / "slow"
    slow.mkdir()
    os.mkfifo(slow / FIRST_MANIFEST)  # opens once somebody writes to it
    (slow / CURRENT).write_text(f"{FIRST_MANIFEST} 0")
    with (
        RunningServer(tmp_path / "log", model_folder, own_store, options=("--store-dir", str(tmp_path))) as server,
        Client(server.address) as client,
        ThreadPoolExecutor(1) as pool,
    ):
        loading = pool.submit(client.datastores.load, str(slow))
        with pytest.raises(StillWaiting):
            loading.result(0.5)
        stored = client.search("store", "the memory of a model", k=1)[0].document_id
        try:
            assert client.datastores.delete_documents("store", [stored], timeout_s=30).num_documents == 1
        finally:
            with (slow / FIRST_MANIFEST).open("wb"):  # lets who reads it go on
                (slow / FIRST_MANIFEST).unlink()
        with pytest.raises(Corrupt):
            loading.result(PATIENCE_S)


def test_a_port_in_use_is_told_in_one_line_before_anything_is_loaded(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        said = refusal_of(tmp_path / "log", "--port", port, "--model", str(tmp_path / "there-is-no-model"))
    assert f"127.0.0.1:{port} (Address already in use)" in said
    assert len(said.strip().splitlines()) == 1, said


def test_two_servers_do_not_share_a_port(server: RunningServer, model_folder: Path, tmp_path: Path) -> None:
    """gRPC would let them by default, each getting some of the requests."""
    port = server.address.split(":")[1]
    said = refusal_of(tmp_path / "log", "--port", port, "--model", str(model_folder))
    assert "Address already in use" in said


def test_what_cannot_be_loaded_is_told_in_one_line(tmp_path: Path) -> None:
    said = refusal_of(tmp_path / "log", "--port", "0", "--model", str(tmp_path / "nowhere"))
    assert "no model at" in said
    assert len(said.strip().splitlines()) == 1, said


def test_a_signal_while_loading_ends_it(tmp_path: Path, long_model: Path) -> None:
    command = [sys.executable, "-m", "memlm", "serve", "--model", str(long_model), "--port", "0"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        wait_until(lambda: len(family_of(process.pid)) >= 3)  # one tracks, one has loaded torch, and a worker
        family = family_of(process.pid)
        process.send_signal(signal.SIGTERM)
        assert process.wait(5) == 0
        assert process.stderr is not None
        assert "Traceback" not in process.stderr.read()
        wait_until(lambda: not any(map(is_alive, family)))


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("index_nice", 20),
        ("index_idle_s", -1),
        ("index_ahead", True),
        ("index_nice", "low"),
        ("port", 70_000),
        ("port", -1),
        ("max_running", 0),
        ("max_queued", -1),
        ("drain_s", float("nan")),
        ("num_threads", -1),
    ],
)
def test_settings_that_mean_nothing_are_refused_by_name(tmp_path: Path, field: str, value: float | str) -> None:
    with pytest.raises(InvalidInput, match=field) as raised:
        ServerConfig(model=tmp_path, **{field: value})
    assert raised.value.field == field


def test_a_system_without_the_idle_class_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert ServerConfig(model=tmp_path, index_nice="idle").index_nice == "idle"
    monkeypatch.delattr(os, "SCHED_IDLE")
    with pytest.raises(InvalidInput, match="only Linux has") as raised:
        ServerConfig(model=tmp_path, index_nice="idle")
    assert raised.value.field == "index_nice"


@pytest.mark.skipif(sys.platform != "linux", reason="processes are forked, and wait as libgomp does, under Linux")
@pytest.mark.parametrize(
    ("environment", "spins"),
    [({}, str(OPENMP_SPIN_COUNT)), ({"GOMP_SPINCOUNT": "7"}, "7"), ({"OMP_WAIT_POLICY": "active"}, None)],
    ids=["nothing", "a count", "a policy"],
)
def test_threads_of_the_servers_processes_spin_briefly_unless_told_otherwise(environment, spins, tmp_path):
    """Another process on their core would else be waited for at every product. TMPDIR is too long for a socket."""
    script = (
        "from memlm.server import processes\n"
        "processes.PRELOADED = 'os'  # and not torch, which takes seconds\n"
        "context = processes.process_context()\n"
        "code = 'import os; print(os.getenv(\"GOMP_SPINCOUNT\"), flush=True)'\n"
        "if __name__ == '__main__':\n"
        "    child = context.Process(target=exec, args=(code,)); child.start(); child.join()"
    )
    clean = {name: value for name, value in os.environ.items() if name not in ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY")}
    clean["TMPDIR"] = str(tmp_path / ("long" * 30))
    os.mkdir(clean["TMPDIR"])
    done = subprocess.run(
        [sys.executable, "-c", script], env=clean | environment, capture_output=True, text=True, check=True, timeout=60
    )
    assert done.stdout.strip() == str(spins)
