"""What the HTTP port refuses, and how: OpenAI's errors, unknown parameters, tokens, sizes, slow and foreign clients."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from running import RunningServer

from memlm.server.http.bodies import CHAT, COMPLETION, schema_of_document

PROMPT = {"model": "tiny", "prompt": "the"}
TALK = {"model": "tiny", "messages": [{"role": "user", "content": "the"}]}
ANN, BEN, PROMETHEUS = "ann's own secret 0", "ben's own secret 0", "that of the scrapes"
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

[[token]]
name = "prometheus"
secret = "{PROMETHEUS}"
calls = []
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
    neutral = {"tools": [], "response_format": {"type": "text"}, "store": False, "parallel_tool_calls": True,
               "chat_template_kwargs": {}}  # fmt: skip
    reply = http.post("/v1/chat/completions", json={**TALK, **neutral, "max_tokens": 1})
    assert reply.status_code == 200, reply.text


def test_what_changes_no_answer_is_accepted(http: httpx.Client) -> None:
    """Fields that clients send without being asked, of a request, of its messages, and of their parts."""
    fields = {"user": "me", "metadata": {"a": {"b": [1]}}, "store": True, "safety_identifier": "s",
              "prompt_cache_key": "k", "prompt_cache_retention": "24h", "service_tier": "flex"}  # fmt: skip
    part = {"type": "text", "text": "the", "cache_control": {"type": "ephemeral"}, "annotations": []}
    talk = [
        {"role": "user", "name": "ann", "content": [part]},
        {"role": "assistant", "content": "a", "annotations": [], "reasoning_content": "b", "reasoning": "c",
         "refusal": None, "tool_calls": [], "function_call": None, "audio": None},
        {"role": "user", "content": "the", "cache_control": {"type": "ephemeral"}},
    ]  # fmt: skip
    plain = [{"role": each["role"], "content": text} for each, text in zip(talk, ("the", "a", "the"), strict=True)]
    options = {"model": "tiny", "temperature": 0, "max_tokens": 4}
    replies = [
        http.post("/v1/chat/completions", json={**options, **more, "messages": messages})
        for more, messages in (({}, plain), (fields, talk))
    ]
    first, second = (reply.json()["choices"] for reply in replies)
    assert first == second
    replies = [http.post("/v1/completions", json={**options, **more, "prompt": "the"}) for more in ({}, fields)]
    assert replies[0].json()["choices"] == replies[1].json()["choices"]


def test_numbers_that_mean_none_are_none(http: httpx.Client) -> None:
    def text_of(**options: Any) -> str:
        reply = http.post("/v1/completions", json={**PROMPT, "seed": 1, "max_tokens": 20, **options})
        assert reply.status_code == 200, reply.text
        return reply.json()["choices"][0]["text"]

    assert text_of(top_k=0) == text_of(top_k=-1) == text_of(top_k=-1.0) == text_of()
    assert text_of(top_k=1.0) == text_of(top_k=1) != text_of()
    assert text_of(max_tokens=5.0) == text_of(max_tokens=5)
    whole = http.post("/v1/completions", json={**PROMPT, "temperature": 0, "max_tokens": -1}).json()
    assert whole["choices"][0]["finish_reason"] == "stop" or whole["usage"]["completion_tokens"] > 16
    talk = [
        http.post("/v1/chat/completions", json={**TALK, "temperature": 0, **limit}).json()["choices"]
        for limit in ({}, {"max_tokens": -1}, {"max_completion_tokens": -1.0})
    ]
    assert talk[0] == talk[1] == talk[2]
    found = http.get("/v1/operations?page_size=2.0")
    assert found.status_code == 200, found.text


def test_the_published_schema_has_the_numbers_that_mean_none() -> None:
    properties = schema_of_document(CHAT)["properties"]
    assert properties["top_k"]["minimum"] == -1
    assert {"type": "integer", "enum": [-1]} in properties["max_tokens"]["anyOf"]
    assert "x-" not in json.dumps(properties)


@pytest.mark.parametrize(
    ("message", "param"),
    [
        ({"role": "assistant", "content": None, "tool_calls": [{"id": "1"}]}, "tool_calls"),
        ({"role": "assistant", "tool_calls": [{"id": "1"}]}, "tool_calls"),
        ({"role": "assistant", "content": "", "tool_calls": [{"id": "1"}]}, "tool_calls"),
        ({"role": "assistant", "content": None, "function_call": {"name": "f"}}, "function_call"),
        ({"role": "tool", "content": "4", "tool_call_id": "1"}, "tool_call_id"),
        ({"tool_call_id": "1", "role": "tool", "content": [{"type": "image"}]}, "tool_call_id"),
    ],
)
def test_a_history_of_tool_calls_is_refused_by_that_name(
    http: httpx.Client, message: dict[str, Any], param: str
) -> None:
    body = {**TALK, "messages": [*TALK["messages"], message]}
    reply = http.post("/v1/chat/completions", json=body)
    refused(reply, 400, f"messages[1].{param}", "not supported", "tool calls and their results as the texts")


@pytest.mark.parametrize("part", ["image_url", "input_audio", "file"])
def test_parts_that_are_no_text_are_refused_as_such(http: httpx.Client, part: str) -> None:
    for content in ({"type": part, part: {"url": "x"}}, {part: {"url": "x"}, "type": part}):
        body = {**TALK, "messages": [{"role": "user", "content": [{"type": "text", "text": "a"}, content]}]}
        reply = http.post("/v1/chat/completions", json=body)
        refused(reply, 400, "messages[0].content[1].type", part, "images, audio and files are not supported")


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
    refused(http.get("/v2/models"), 404, None, "/v2/models", "did you mean /v1/models?")
    for path in ("/v1/embeddings", "/v1/responses", "/nonsense", "/"):
        for method in ("POST", "PUT", "DELETE"):
            refused(http.request(method, path), 404, None, f"no '{path}'", "/v1/completions, /v1/chat/completions")
    refused(http.post("/chat/completions", json=TALK), 404, None, "did you mean /v1/chat/completions?")
    refused(http.delete("/v1/models"), 405, None, "GET")
    refused(http.get("/v1/completions"), 405, None, "POST")
    refused(http.get("/v1/operations?pages=1"), 400, "pages")
    refused(http.get("/v1/operations?page_size=many"), 400, "page_size")
    refused(http.get("/v1/operations/x"), 404, None, "no operation")


def test_a_slash_at_the_end_of_a_path_is_passed_over(http: httpx.Client) -> None:
    assert http.post("/v1/completions/", json={**PROMPT, "max_tokens": 1}).status_code == 200
    for path in ("/v1/models/", "/v1/datastores/", "/v1/datastores/store/", "/health/", "/metrics/"):
        assert http.get(path).status_code == 200, path
    assert http.post("/v1/datastores/search/", json={"text": "the"}).status_code == 200
    refused(http.get("/v1/completions/"), 405, None, "POST")


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


def test_a_token_that_may_call_nothing_reads_the_metrics(guarded_web: RunningServer) -> None:
    with httpx.Client(base_url=guarded_web.http_url, headers={"authorization": f"Bearer {PROMETHEUS}"}) as http:
        assert "\nmemlm_info{" in http.get("/metrics").text
        refused(http.post("/v1/completions", json=PROMPT), 403, None, "it may call nothing")


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
