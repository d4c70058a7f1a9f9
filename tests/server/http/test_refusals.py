"""What the HTTP port refuses, and how: OpenAI's errors, unknown parameters, tokens, sizes, slow and foreign clients."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from running import RunningServer

from memlm.server.http.bodies import CHAT, COMPLETION

PROMPT = {"model": "tiny", "prompt": "the"}
TALK = {"model": "tiny", "messages": [{"role": "user", "content": "the"}]}
ANN, BEN = "ann's own secret 0", "ben's own secret 0"
TOKENS = f"""
[[token]]
name = "ann"
secret = "{ANN}"
stores = []

[[token]]
name = "ben"
secret = "{BEN}"
calls = ["Tokenize"]
requests_per_minute = 6
"""


@pytest.fixture
def http(web: RunningServer) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=web.http_url, timeout=60) as http:
        yield http


@pytest.fixture(scope="module")
def guarded_web(
    tmp_path_factory: pytest.TempPathFactory, model_folder: Path, store_folder: Path
) -> Iterator[RunningServer]:
    folder = tmp_path_factory.mktemp("guarded")
    (folder / "tokens.toml").write_text(TOKENS)
    options = ("--threads", "1", "--http-port", "0", "--auth-file", str(folder / "tokens.toml"))
    with RunningServer(folder / "log", model_folder, store_folder, options=options) as server:
        yield server


def refused(reply: httpx.Response, status: int, param: str | None, *words: str) -> None:
    assert reply.status_code == status, reply.text
    error = reply.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["param"] == param
    for word in words:
        assert word in error["message"]


def unsupported(schema: dict[str, Any]) -> list[str]:
    return [name for name, each in schema["properties"].items() if "x-unsupported" in each]


@pytest.mark.parametrize("name", unsupported(COMPLETION))
def test_what_completions_lack_is_refused_by_name(http: httpx.Client, name: str) -> None:
    for value in (2, "x", [1], {"x": 1}):
        refused(http.post("/v1/completions", json={**PROMPT, name: value}), 400, name, name, "not supported")


@pytest.mark.parametrize("name", unsupported(CHAT))
def test_what_chats_lack_is_refused_by_name(http: httpx.Client, name: str) -> None:
    for value in (7, "x", ["x"], {"x": 1}):
        reply = http.post("/v1/chat/completions", json={**TALK, name: value})
        assert reply.status_code == 400
        assert reply.json()["error"]["param"].startswith(name)


def test_values_that_ask_for_nothing_are_accepted(http: httpx.Client) -> None:
    neutral = {"best_of": 1, "frequency_penalty": 0, "presence_penalty": 0.0, "logit_bias": {}, "suffix": None,
               "prediction": None, "drafts": None}  # fmt: skip
    reply = http.post("/v1/completions", json={**PROMPT, **neutral, "user": "me", "max_tokens": 1, "stop": None})
    assert reply.status_code == 200, reply.text
    neutral = {"tools": [], "response_format": {"type": "text"}, "store": False, "parallel_tool_calls": True}
    reply = http.post("/v1/chat/completions", json={**TALK, **neutral, "max_tokens": 1})
    assert reply.status_code == 200, reply.text


@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({"temprature": 1}, "temprature"),
        ({"temperature": "hot"}, "temperature"),
        ({"temperature": True}, "temperature"),
        ({"temperature": -1}, "temperature"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": 1.5}, "max_tokens"),
        ({"max_tokens": 1 << 40}, "max_tokens"),
        ({"n": 0}, "n"),
        ({"n": 100, "prompt": ["a"] * 100}, "n"),
        ({"top_p": 0}, "top_p"),
        ({"seed": -1}, "seed"),
        ({"stop": [""]}, "stop"),
        ({"stop": {}}, "stop"),
        ({"prompt": []}, "prompt"),
        ({"prompt": [[]]}, "prompt"),
        ({"prompt": ["a", 1]}, "prompt"),
        ({"prompt": [-1]}, "prompt"),
        ({"prompt": [1 << 31]}, "prompt"),
        ({"prompt": [300]}, "prompt_token_ids"),
        ({"prompt": {"text": "a"}}, "prompt"),
        ({"prompt": "a\0"}, "prompt"),
        ({"logprobs": 65}, "logprobs"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
        ({"stream": True, "stream_options": {"chunks": 1}}, "stream_options.chunks"),
        ({"drafts": 65}, "drafts"),
        ({"drafts": "auto"}, "drafts"),
        ({"prediction": "the"}, "prediction"),
        ({"prediction": {}}, "prediction.type"),
        ({"prediction": {"type": "text", "content": "the"}}, "prediction.type"),
        ({"prediction": {"type": "content", "content": ["the"]}}, "prediction.content[0]"),
        ({"prediction": {"type": "content", "content": "the\0"}}, "prediction.content"),
        ({"memory": {"lam": 2}}, "memory.lam"),
        ({"memory": {"knn_temperature": 0}}, "memory.knn_temperature"),
        ({"memory": {"lambda": 1}}, "memory.lambda"),
        ({"memory": {"stores": "store"}}, "memory.stores"),
        ({"memory": {"stores": ["store", "store"]}}, "memory.stores"),
        ({"memory": {"neighbors": 65}}, "neighbors"),
        ({"memory": {"exclude_documents": "doc-1.txt"}}, "memory.exclude_documents"),
        ({"memory": {"exclude_documents": ["doc-1.txt", ""]}}, "memory.exclude_documents"),
        ({"memory": {"exclude_documents": ["a"] * 101}}, "memory.exclude_documents"),
        ({"memory": {"exclude_documents": ["doc-1.txt"], "stores": []}}, "exclude_documents"),
        ({"memory": {"context_cache": True}}, "memory.context_cache"),
    ],
)
def test_bad_parameters_are_refused_by_name(http: httpx.Client, change: dict, param: str) -> None:
    reply = http.post("/v1/completions", json={**PROMPT, **change})
    assert (reply.status_code, reply.json()["error"]["type"]) == (400, "invalid_request_error")
    refused(reply, 400, param)


def test_bad_bodies_are_refused(http: httpx.Client) -> None:
    json_type = {"content-type": "application/json"}
    for body in (
        b"", b"{", b"[]", b"null", b"\xff\xfe", b'{"model": NaN}', b"[" * 100_000, b"9" * 5000,
        b'{"model": "tiny", "prompt": "\\ud800"}', b'{"model": "tiny", "prompt": 1e999}', b'{"\\ud800": 1}',
    ):  # fmt: skip
        assert http.post("/v1/completions", content=body, headers=json_type).status_code == 400, body[:40]
    refused(http.post("/v1/completions", content=json.dumps(PROMPT)), 400, None, "Content-Type", "application/json")
    refused(http.post("/v1/chat/completions", json={**TALK, "top_logprobs": 1}), 400, "top_logprobs", "logprobs")
    two = {**TALK, "max_tokens": 1, "max_completion_tokens": 2}
    refused(http.post("/v1/chat/completions", json=two), 400, "max_tokens")
    refused(
        http.post("/v1/chat/completions", json={**TALK, "messages": [{"role": "user"}]}), 400, "messages[0].content"
    )


def test_errors_are_those_of_openai(web: RunningServer, ai: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError, match="no model 'gpt-9'; this server has 'tiny'") as caught:
        ai.completions.create(model="gpt-9", prompt="a")
    assert caught.value.code == "NotFound"
    with pytest.raises(openai.NotFoundError, match="no datastore 'nowhere'"):
        ai.completions.create(model="tiny", prompt="a", extra_body={"memory": {"stores": ["nowhere"]}})
    with pytest.raises(openai.BadRequestError, match="best_of") as refusal:
        ai.completions.create(model="tiny", prompt="a", best_of=3)
    assert (refusal.value.code, refusal.value.param) == ("InvalidInput", "best_of")


def test_unknown_paths_and_methods_are_refused_in_the_same_shape(http: httpx.Client) -> None:
    refused(http.get("/v2/models"), 404, None, "/v2/models")
    refused(http.delete("/v1/models"), 405, None, "GET")
    refused(http.get("/v1/completions"), 405, None, "POST")
    refused(http.get("/v1/operations?pages=1"), 400, "pages")
    refused(http.get("/v1/operations?page_size=many"), 400, "page_size")
    refused(http.get("/v1/operations/x"), 404, None, "no operation")


def test_a_body_above_the_limit_is_refused_before_it_is_read(web: RunningServer, http: httpx.Client) -> None:
    reply = http.post("/v1/completions", json={**PROMPT, "prompt": "a" * (5 << 20)})
    refused(reply, 413, None, "4,194,304 bytes")
    assert reply.headers["connection"] == "close"  # else the unread body would be the next request
    assert "connection" not in http.post("/v1/completions", json={**PROMPT, "n": 0}).headers

    def endless() -> Iterator[bytes]:
        while True:
            yield b" " * 65_536

    with pytest.raises(httpx.HTTPError):  # closed while it is being sent, with or without a chance to read the refusal
        http.post("/v1/completions", content=endless(), headers={"content-type": "application/json"}).raise_for_status()


def test_tokens_count_as_over_grpc(guarded_web: RunningServer) -> None:
    with httpx.Client(base_url=guarded_web.http_url) as http:
        for path in ("/health", "/livez", "/readyz", "/openapi.json", "/docs"):
            assert http.get(path).status_code == 200, path
        for path in ("/v1/models", "/v1/datastores", "/metrics"):
            reply = http.get(path)
            refused(reply, 401, None, "token")
            assert reply.headers["www-authenticate"] == "Bearer"
        refused(http.post("/v1/completions", json=PROMPT), 401, None)
        ann, ben = ({"authorization": f"Bearer {secret}"} for secret in (ANN, BEN))
        assert http.get("/metrics", headers=ann).status_code == 200
        assert http.get("/v1/datastores", headers=ann).json()["data"] == []
        named = {**PROMPT, "memory": {"stores": ["store"]}}
        refused(http.post("/v1/completions", json=named, headers=ann), 403, None, "may not use the datastore 'store'")
        memory = http.post("/v1/completions", json={**PROMPT, "memory": {}}, headers=ann).json()["choices"][0]["memory"]
        assert memory["store"] is None
        refused(http.post("/v1/completions", json=PROMPT, headers=ben), 403, None, "may not call Generate")
        replies = [http.post("/tokenize", json={"prompt": "a"}, headers=ben) for _ in range(3)]
        assert [reply.status_code for reply in replies] == [200, 429, 429]
        assert 1 <= int(replies[-1].headers["retry-after"]) <= 10
