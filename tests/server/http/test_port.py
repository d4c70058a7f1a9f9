"""The HTTP port itself: its address, TLS, draining, and bounds on the heads of requests."""

import signal
import socket
import ssl
import time
from contextlib import ExitStack, suppress
from pathlib import Path

import httpx
import pytest
import trustme
from running import PATIENCE_S, RunningServer, refusal_of, wait_until

LONG = {"model": "long", "prompt": "the", "temperature": 0, "max_tokens": 30_000, "stream": True}


def test_a_server_that_stops_refuses_new_requests_and_ends_its_streams(tmp_path: Path, long_model: Path) -> None:
    options = ("--threads", "1", "--http-port", "0", "--drain", "600")
    with ExitStack() as stack:
        server = stack.enter_context(RunningServer(tmp_path / "log", long_model, options=options))
        http = stack.enter_context(httpx.Client(base_url=server.http_url, timeout=PATIENCE_S))
        events = stack.enter_context(http.stream("POST", "/v1/completions", json=LONG)).iter_bytes()
        next(events)
        server.process.send_signal(signal.SIGTERM)
        wait_until(lambda: http.get("/readyz").status_code == 503)
        assert http.get("/livez").status_code == 200
        refusal = http.post("/tokenize", json={"prompt": "a"})
        assert (refusal.status_code, refusal.json()["error"]["code"]) == (503, "Unavailable")
        next(events)  # goes on meanwhile
        server.process.send_signal(signal.SIGTERM)  # at once
        with suppress(httpx.HTTPError):  # cut off, or by an event that says why
            *_, last = events
            assert b'"code":"Unavailable"' in last
            assert b"DONE" not in last


@pytest.fixture
def authority() -> trustme.CA:
    return trustme.CA()


def test_the_certificate_is_that_of_grpc_and_is_read_again(
    tmp_path: Path, model_folder: Path, authority: trustme.CA
) -> None:
    cert, key = tmp_path / "cert.pem", tmp_path / "key.pem"

    def issue() -> None:
        issued = authority.issue_cert("localhost", "127.0.0.1")
        issued.private_key_pem.write_to_path(key)
        issued.cert_chain_pems[0].write_to_path(cert)
        key.chmod(0o600)

    def serial(url: str) -> str:
        context = ssl.create_default_context()
        authority.configure_trust(context)
        with httpx.Client(verify=context) as http:
            assert http.get(f"{url}/health").status_code == 200
        host, port = url.removeprefix("https://").split(":")
        with (
            socket.create_connection((host, int(port))) as bare,
            context.wrap_socket(bare, server_hostname=host) as tls,
        ):
            return str((tls.getpeercert() or {})["serialNumber"])

    issue()
    options = ("--threads", "1", "--http-port", "0", "--tls-cert", str(cert), "--tls-key", str(key))
    with RunningServer(tmp_path / "log", model_folder, options=options) as server:
        url = server.http_url
        assert url.startswith("https://")
        first = serial(url)
        issue()
        wait_until(lambda: serial(url) != first)


def test_the_head_of_a_request_is_bounded(web: RunningServer) -> None:
    host, port = web.http_url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=30) as long:
        long.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\n")
        received = b""
        try:
            for _ in range(64):
                long.sendall(b"X-Long: " + b"a" * 4000 + b"\r\n")
            received = long.recv(4096)
        except OSError:  # closed under the client's hand
            received = received or b"431"
    assert b"431" in received


def test_clients_that_never_end_their_heads_are_disconnected(model_folder: Path, tmp_path: Path) -> None:
    hasty = "import memlm.server.http.port as port; port.HEAD_S = 1.0"
    options = ("--threads", "1", "--http-port", "0")
    with ExitStack() as stack:
        server = stack.enter_context(RunningServer(tmp_path / "log", model_folder, options=options, first=hasty))
        host, port = server.http_url.removeprefix("http://").split(":")
        slow = [stack.enter_context(socket.create_connection((host, int(port)), timeout=PATIENCE_S)) for _ in range(4)]
        begin_s = time.monotonic()
        for each, sent in zip(
            slow, (b"", b"GET /health HT", b"\r\n" * 3, b"GET / HTTP/1.1\r\nHost: localhost\r\n"), strict=True
        ):
            each.sendall(sent)
        assert [each.recv(4096) for each in slow] == [b""] * 4
        assert time.monotonic() - begin_s >= 0.9


def test_an_address_that_is_taken_is_refused_before_the_model_loads(model_folder: Path, tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        options = ("--model", str(model_folder), "--port", "0", "--http-port", str(port))
        said = refusal_of(tmp_path / "log", *options)
    assert f"cannot serve HTTP at 127.0.0.1:{port}" in said
    assert "Traceback" not in said


def test_without_the_extra_the_server_names_the_command(model_folder: Path, tmp_path: Path) -> None:
    lacking = "import sys; sys.modules['uvicorn'] = None"
    said = refusal_of(tmp_path / "log", "--model", str(model_folder), "--http-port", "0", first=lacking)
    assert "HTTP needs uvicorn, which is not installed; pip install 'memlm[http]'" in said
