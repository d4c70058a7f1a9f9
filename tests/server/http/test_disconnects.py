"""Clients that leave, servers that stop: places, files, threads and memory are what they were."""

import os
import random
import socket
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import openai
import pytest
from running import RunningServer, anonymous_bytes, wait_until, wait_until_idle

LONG = {"model": "long", "prompt": "the", "temperature": 0, "max_tokens": 30_000}
LEAKED_BYTES = 8 << 20
SPARE_FILES, SPARE_THREADS = 3, 4


def figure(server: RunningServer, name: str) -> float:
    lines = httpx.get(f"{server.http_url}/metrics", timeout=60).text.splitlines()
    return next(float(line.split()[1]) for line in lines if line.startswith(f"{name} "))


def is_idle(server: RunningServer) -> bool:
    names = ("memlm_running", "memlm_waiting", "memlm_requests_open")
    try:
        return all(figure(server, name) == 0 for name in names)
    except httpx.TransportError:  # there are as many connections as may be
        return False


def request_bytes(body: str, path: str = "/v1/completions") -> bytes:
    head = (
        f"POST {path} HTTP/1.1\r\nHost: [::1]\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    )
    return (head + body).encode()


def connect(server: RunningServer) -> socket.socket:
    host, port = server.http_url.removeprefix("http://").split(":")
    return socket.create_connection((host, int(port)), timeout=60)


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_leaves_frees_its_place(narrow_web: RunningServer, stream: bool) -> None:
    body = str(LONG | {"n": 4}).replace("'", '"')[:-1] + f', "stream": {str(stream).lower()}}}'
    with connect(narrow_web) as client:
        client.sendall(request_bytes(body))
        wait_until(lambda: figure(narrow_web, "memlm_running") == 4)
    wait_until(lambda: is_idle(narrow_web))


def test_a_full_server_refuses_and_says_when_to_try_again(narrow_web: RunningServer) -> None:
    with openai.OpenAI(base_url=f"{narrow_web.http_url}/v1", api_key="none", max_retries=0) as ai:
        streams = [ai.completions.create(**LONG, stream=True) for _ in range(4)]
        waiting = [connect(narrow_web) for _ in range(4)]
        for client in waiting:
            client.sendall(request_bytes(str(LONG).replace("'", '"')))
        wait_until(lambda: figure(narrow_web, "memlm_waiting") == 4)
        with pytest.raises(openai.RateLimitError, match="running or waiting") as refusal:
            ai.completions.create(**LONG)
        assert int(refusal.value.response.headers["retry-after"]) >= 1
        for client in waiting:
            client.close()
        for stream in streams:
            stream.close()
    wait_until(lambda: is_idle(narrow_web))


def leave_at_random(server: RunningServer, count: int, seed: int) -> None:
    """Sends requests, or parts of one, and leaves after a random time, mostly without a word."""
    rng = random.Random(seed)
    long = str(LONG).replace("'", '"')
    bodies = (long, long[:-1] + ', "stream": true}', long[:-1] + ', "stream": true, "n": 3, "memory": {}}')
    for _ in range(count):
        data = request_bytes(rng.choice(bodies))
        with connect(server) as client:
            client.sendall(data[: rng.randrange(len(data))] if rng.random() < 0.3 else data)
            if rng.random() < 0.5:
                time.sleep(rng.random() * 0.03)
            if rng.random() < 0.5:
                client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")  # a reset


def used_by(server: RunningServer) -> dict[str, dict[str, int]]:
    """Files, threads and bytes of the front end and of its worker."""
    processes = {"front end": server.process.pid, "worker": server.worker_pid}
    return {
        name: {
            "files": len(os.listdir(f"/proc/{pid}/fd")),
            "threads": len(os.listdir(f"/proc/{pid}/task")),
            "bytes": anonymous_bytes(pid),
        }
        for name, pid in processes.items()
    }


def check_nothing_is_left(server: RunningServer, count: int) -> None:
    def leave(count: int) -> None:
        with ThreadPoolExecutor(8) as threads:
            list(threads.map(lambda seed: leave_at_random(server, count // 8, seed), range(8)))
        wait_until(lambda: is_idle(server))
        for pid in (server.process.pid, server.worker_pid):
            wait_until_idle(pid)

    leave(count)  # pools and heaps grow to the size that such a crowd needs
    before = used_by(server)
    leave(count)
    wait_until(lambda: used_by(server)["front end"]["files"] <= before["front end"]["files"] + SPARE_FILES)
    after = used_by(server)
    for name in before:
        assert after[name]["files"] <= before[name]["files"] + SPARE_FILES, name
        assert after[name]["threads"] <= before[name]["threads"] + SPARE_THREADS, name
        assert after[name]["bytes"] <= before[name]["bytes"] + LEAKED_BYTES, name
    short = {**LONG, "max_tokens": 4}
    assert httpx.post(f"{server.http_url}/v1/completions", json=short, timeout=60).status_code == 200


def test_hundreds_of_disconnects_leave_nothing_behind(narrow_web: RunningServer) -> None:
    check_nothing_is_left(narrow_web, 400)


@pytest.mark.slow
def test_ten_thousand_disconnects_leave_nothing_behind(narrow_web: RunningServer) -> None:
    check_nothing_is_left(narrow_web, 10_000)


def test_a_client_that_does_not_read_is_ended(tmp_path: Path, long_model: Path) -> None:
    """Its place is free once as many bytes wait as may; then the connection ends."""
    options = ("--threads", "1", "--http-port", "0", "+stream_bytes=20000", "+message_timeout=2")
    # A fast machine sends some twenty tokens in one event, which must not be too large by itself.
    body = str({**LONG, "logprobs": 20}).replace("'", '"')[:-1] + ', "stream": true}'
    with RunningServer(tmp_path / "log", long_model, options=options) as server, socket.socket() as deaf:
        deaf.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)  # before it connects, else the system lets it grow
        host, port = server.http_url.removeprefix("http://").split(":")
        deaf.connect((host, int(port)))
        deaf.sendall(request_bytes(body))
        wait_until(lambda: "code=CANCELLED" in server.output)
        wait_until(lambda: is_idle(server))
