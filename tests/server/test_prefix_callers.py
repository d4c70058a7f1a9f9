"""Without tokens, the connections of one address go on from each other's texts."""

import json
import urllib.request

import pytest
from running import RunningServer

from memlm.client import Client


@pytest.fixture(scope="module")
def server(tmp_path_factory, model_folder):
    options = ("--threads", "1", "--http-port", "0")
    with RunningServer(tmp_path_factory.mktemp("one") / "log", model_folder, options=options) as server:
        yield server


def test_connections_of_one_address_are_of_one_caller_over_grpc(server):
    cached = []
    for _ in range(3):
        with Client(server.address) as client:
            answer = client.generate([*range(60, 20, -1)], use_store=False, max_tokens=2).result()
            cached.append(answer.finished.usage.cached_tokens)
    assert cached == [0, 39, 39]


def test_connections_of_one_address_are_of_one_caller_over_http(server):
    cached = []
    for _ in range(3):
        body = json.dumps({"model": "tiny", "prompt": [*range(90, 50, -1)], "max_tokens": 2}).encode()
        asked = urllib.request.Request(f"{server.http_url}/v1/completions", body, {"content-type": "application/json"})
        with urllib.request.urlopen(asked) as reply:
            cached.append(json.load(reply)["usage"]["prompt_tokens_details"]["cached_tokens"])
    assert cached == [0, 39, 39]
