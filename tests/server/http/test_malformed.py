"""Malformed requests: no answer to them is a fault of the server, and none keeps it from serving."""

import json
import random
import re
import socket
import threading
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from running import RunningServer, wait_until

from memlm.server.http.endpoints import ENDPOINTS

REFUSALS = {503, 507}  # of the 5xx: not now, no room
SEEDS = 4
TOKENS = (
    b"\r\n", b"\0", b"\xff", b" ", b"GET ", b"POST ", b"/v1/completions", b" HTTP/1.1", b"Content-Length: ", b"-1",
    b"99999999999999999999", b"Transfer-Encoding: chunked\r\n", b"Host: x\r\n", b"%00", b"%", b"{", b'"', b"1e999",
    b"Content-Type: application/json\r\n", b"Upgrade: websocket\r\nConnection: upgrade\r\n", b"0\r\n\r\n",
    b"ffffffff\r\n", b"Expect: 100-continue\r\n", b"Content-Type: multipart/form-data; boundary=b\r\n", b"--b\r\n",
)  # fmt: skip
VALUES = (
    None, True, False, 0, -1, 1, 2, 0.5, -0.0, 1e308, 1 << 31, 1 << 63, 1 << 70, "", "a", "é", "\0", "tiny", "store",
    "\U0001f9e0", "a" * 3000, [], {}, [0], [1, 2], [299], [[1]], ["a"], [None], [[]], {"a": 1}, {"store": 1}, [{}],
    {"store": -1}, [{"role": "user", "content": "a"}], [{"role": "", "content": ""}], [{"id": "a", "text": "b"}],
    [{"role": "user", "content": [{"type": "text", "text": "a"}]}], {"lam": 0.5}, {"stores": ["store"]},
    {"include_usage": True},
)  # fmt: skip
QUERIES = ("", "", "?", "?a=b", "?wait_s=1e999", "?wait_s=nan", "?page_size=-1", "?page_token=%ff", "?=&=", "/", "#")


def random_head(rng: random.Random) -> bytes:
    """Bytes that resemble a request, or none."""
    if rng.random() < 0.2:
        return rng.randbytes(rng.randrange(300))
    body = random_body(rng, rng.choice(ENDPOINTS).body or {"properties": {}})
    data = bytearray(
        f"{rng.choice(('GET', 'POST', 'DELETE', 'PUT', 'HEAD'))} {random_path(rng)} HTTP/1.1\r\nHost: localhost\r\n"
        f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n".encode()
        + body
    )
    for _ in range(rng.randrange(4)):
        place, end = sorted(rng.randrange(len(data) + 1) for _ in range(2))
        data[place : min(end, place + rng.randrange(30))] = rng.choice(TOKENS)
    return bytes(data)


def random_path(rng: random.Random) -> str:
    path = rng.choice(ENDPOINTS).path
    for name in ("store", "operation", "model:id", "document:id"):
        value = rng.choice(("store", "x", "%00", "%ff", "%2e%2e%2f", "..", "%F0%9F%A7%A0", "a" * 2000, ""))
        path = path.replace(f"{{{name}}}", value)
    return path + rng.choice(QUERIES)


def random_body(rng: random.Random, schema: Any) -> bytes:
    body = {
        name: rng.choice(VALUES)
        for name in [*schema["properties"], "unknown"]
        if name in schema.get("required", ()) or rng.random() < 0.15
    }
    if rng.random() < 0.7:
        body |= {"model": "tiny"} if "model" in schema["properties"] else {}
        body |= {"prompt": "the", "max_tokens": 1} if "prompt" in schema["properties"] and rng.random() < 0.7 else {}
    return json.dumps(body).encode()


def answers_to(server: RunningServer, data: bytes) -> Iterator[int]:
    """The status codes of what a server answers to some bytes, up to its closing."""
    host, port = server.http_url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=60) as client:
        try:
            client.sendall(data)
            client.shutdown(socket.SHUT_WR)
            received = b"".join(iter(lambda: client.recv(1 << 16), b""))
        except OSError:
            return
    for code in re.findall(rb"HTTP/1\.1 (\d{3}) ", received):  # not a request that an answer quotes
        yield int(code)


def check_random_bytes(server: RunningServer, count: int, seed: int) -> None:
    rng = random.Random(seed)
    for number in range(count):
        data = random_head(rng)
        for status in answers_to(server, data):
            assert status < 500 or status in REFUSALS, (seed, number, status, data)


def check_random_bodies(server: RunningServer, count: int, seed: int) -> None:
    rng = random.Random(seed)
    posts = [endpoint for endpoint in ENDPOINTS if endpoint.body is not None]
    with httpx.Client(base_url=server.http_url, timeout=60) as http:
        for number in range(count):
            endpoint = rng.choice(posts)
            path = endpoint.path.replace("{store}", "store")
            body = random_body(rng, endpoint.body)
            reply = http.post(path, content=body, headers={"content-type": "application/json"})
            assert reply.status_code < 500 or reply.status_code in REFUSALS, (seed, number, path, body, reply.text)
            if reply.status_code >= 400:
                assert set(reply.json()["error"]) == {"message", "type", "param", "code"}


def check(server: RunningServer, count: int) -> None:
    """Half as random bytes, half as random values of every endpoint, from several clients at once."""
    failures = list[BaseException]()

    def run(work: Any, seed: int) -> None:
        try:
            work(server, count // (2 * SEEDS), seed)
        except BaseException as error:
            failures.append(error)

    threads = [
        threading.Thread(target=run, args=(work, seed))
        for work in (check_random_bytes, check_random_bodies)
        for seed in range(SEEDS)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failures:
        raise failures[0]
    with httpx.Client(base_url=server.http_url, timeout=60) as http:
        wait_until(lambda: "\nmemlm_requests_open 0.0\n" in http.get("/metrics").text)
        answer = http.post("/v1/completions", json={"model": "tiny", "prompt": "the", "max_tokens": 1})
        assert answer.status_code == 200


def test_malformed_requests_are_no_fault_of_the_server(random_web: RunningServer) -> None:
    check(random_web, 600)


@pytest.mark.slow
def test_a_hundred_thousand_malformed_requests_are_no_fault_of_the_server(random_web: RunningServer) -> None:
    check(random_web, 100_000)


def test_the_openapi_document_describes_every_endpoint(web: RunningServer) -> None:
    document = httpx.get(f"{web.http_url}/openapi.json").json()
    described = {(method.upper(), path) for path, methods in document["paths"].items() for method in methods}
    assert described == {(each.method, each.path.replace(":id", "")) for each in ENDPOINTS}
    page = httpx.get(f"{web.http_url}/docs").text
    for endpoint in ENDPOINTS:
        assert endpoint.path.replace(":id", "") in page
        for name in (endpoint.body or {"properties": {}})["properties"]:
            assert f"<code>{name}</code>" in page
    assert "http://" not in page.replace("http://127", "")  # nothing is loaded from elsewhere
    assert "https://" not in page
