"""What Prometheus is told, after calls that went well and calls that did not."""

import os
import signal
import socket
import time
from contextlib import ExitStack, closing
from http.client import HTTPConnection
from pathlib import Path

import pytest
from running import RunningServer, figures_at, free_port, wait_until

from memlm.client import Client
from memlm.errors import InvalidInput
from memlm.index.store.datastore import Datastore


def test_calls_tokens_sessions_and_the_heartbeat_are_counted(
    model_folder: Path, store_folder: Path, tmp_path: Path
) -> None:
    port = free_port()
    options = ("--threads", "1", "--metrics-port", str(port))
    with RunningServer(tmp_path / "log", model_folder, store_folder, options=options) as server:
        with Client(server.address) as client:
            client.wait_until_ready()
            stream = client.generate("the memory", seed=1, max_tokens=7)
            count = len(list(stream))
            with pytest.raises(InvalidInput):
                client.score("")
            session = client.session()
            session.append("the memory of a model")
            wait_until(lambda: (at := figures_at(port))["memlm_sessions"] == 1 and not at["memlm_running"])
            figures = figures_at(port)
        assert stream.finished is not None
        assert figures['memlm_requests_total{call="Generate",code="OK"}'] == 1
        assert figures['memlm_requests_total{call="Score",code="INVALID_ARGUMENT"}'] == 1
        assert figures['memlm_tokens_total{kind="generated"}'] == count
        assert figures['memlm_tokens_total{kind="prompt"}'] == stream.finished.usage.prompt_tokens
        assert figures["memlm_searches_total"] == stream.finished.usage.searches > 0
        assert figures["memlm_retrieval_seconds_count"] == figures["memlm_lam_count"] == 1
        usage = stream.finished.usage
        assert 0 < figures["memlm_retrieval_seconds_sum"] == pytest.approx(usage.retrieval_ms / usage.searches / 1000)
        assert figures["memlm_lam_sum"] == pytest.approx(usage.lam) == pytest.approx(0.25)
        assert figures["memlm_time_to_first_token_seconds_count"] == 1
        assert figures["memlm_session_bytes"] > 0
        assert figures["memlm_requests_open"] == 0
        assert 0 <= figures["memlm_heartbeat_age_seconds"] < 5
        assert (figures["memlm_running"], figures["memlm_waiting"], figures["memlm_cache_bytes"]) == (0, 0, 0)


def test_what_another_process_deletes_is_silent_here_too(model_folder: Path, own_store: Path, tmp_path: Path) -> None:
    log, options = tmp_path / "log", ("--threads", "1")
    with RunningServer(log, model_folder, own_store, options=options) as server, Client(server.address) as client:
        client.wait_until_ready()
        loud = client.search(None, "the memory", k=1)[0].document_id
        with Datastore.open(own_store) as store:
            store.delete([loud])
        wait_until(lambda: loud not in {n.document_id for n in client.search(None, "the memory", k=50)})
        assert client.datastores.list()[0].num_deleted_documents == 1


def status_at(port: int, path: str, method: str = "GET") -> int:
    connection = HTTPConnection("127.0.0.1", port, timeout=10)
    with closing(connection):
        connection.request(method, path)
        return connection.getresponse().status


def test_the_metrics_port_tells_readiness_and_knows_no_other_path(model_folder: Path, tmp_path: Path) -> None:
    port = free_port()
    options = ("--threads", "1", "--metrics-port", str(port), "--worker-timeout", "3")
    with RunningServer(tmp_path / "log", model_folder, options=options) as server:
        assert [status_at(port, path) for path in ("/metrics", "/metrics?name[]=a", "/health")] == [200, 200, 200]
        assert [status_at(port, path) for path in ("/", "/healthz", "/metrics/", "/../metrics")] == [404] * 4
        assert status_at(port, "/metrics", "POST") == 405
        os.kill(server.worker_pid, signal.SIGSTOP)
        wait_until(lambda: status_at(port, "/health") == 503)
        wait_until(lambda: status_at(port, "/health") == 200)  # another worker has taken its place


def test_connections_to_the_metrics_port_are_bounded_in_number_and_time(model_folder: Path, tmp_path: Path) -> None:
    port = free_port()
    options = ("--threads", "1", "--metrics-port", str(port))
    with RunningServer(tmp_path / "log", model_folder, options=options) as server, ExitStack() as stack:
        threads = len(list(Path(f"/proc/{server.process.pid}/task").iterdir()))
        begin_s = time.monotonic()
        half = [stack.enter_context(socket.create_connection(("127.0.0.1", port))) for _ in range(60)]
        for each in half:
            each.sendall(b"GET /metrics HTTP/1.1\r\n")
            each.settimeout(15)
        assert "memlm_running" in figures_at(port)
        assert len(list(Path(f"/proc/{server.process.pid}/task").iterdir())) < threads + 10
        assert half[0].recv(1) == b""  # the oldest gave way
        assert time.monotonic() - begin_s < 4
        assert half[-1].recv(1) == b""  # the latest had its time
