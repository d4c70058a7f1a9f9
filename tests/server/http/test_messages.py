"""Anthropic's client against /v1/messages: the texts of our chats, with the citations, errors and events of its API."""

import os
import signal
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Literal

import anthropic
import httpx
import pytest
from anthropic.types import Message, RawMessageStreamEvent, TextBlock
from pydantic import BaseModel, TypeAdapter
from running import PATIENCE_S, RunningServer, wait_until

from memlm.api.generation import Completion
from memlm.client import Client
from memlm.data.corpus import Corpus, Document
from memlm.indexing.build import build_index
from memlm.server.http import events
from memlm.server.http.message_bodies import MESSAGE
from memlm.server.http.records import source_of

ASKED = [{"role": "user", "content": "the gateway: which port?"}]
LIMITED: dict[str, Any] = {"model": "tiny", "max_tokens": 6}
GREEDY = {"temperature": 0}  # the client has no parameter for it any more
TWO = {"memory": {"passages": 2}, **GREEDY}
NONE = {"memory": {"passages": 0}, **GREEDY}
DOCUMENTS = [
    Document("notes/port.md", "The roof is red.\nThe gateway has the port 7443.", "Ports"),
    Document("page", "The gateway forwards.", metadata={"url": "https://example.org/gate"}),
    Document("other", "The sea is blue."),
]
ANN, BEN = "ann's own secret 0", "ben's own secret 0"
TOKENS = f"""
[[token]]
name = "ann"
secret = "{ANN}"

[[token]]
name = "ben"
secret = "{BEN}"
calls = ["Tokenize"]
"""


class Short(BaseModel):
    it: Literal[1, 2]


def client_of(server: RunningServer, key: str | None = ANN, **given: Any) -> anthropic.Anthropic:
    return anthropic.Anthropic(base_url=server.http_url, api_key=key, max_retries=0, **given)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory, model_folder: Path) -> Iterator[RunningServer]:
    folder = tmp_path_factory.mktemp("cited")
    build_index(model_folder, Corpus(DOCUMENTS), folder / "stored", check="none")
    (folder / "tokens.toml").write_text(TOKENS)
    options = ("--threads", "1", "--http-port", "0", "--attention-window", "44", "--auth-file", f"{folder}/tokens.toml")
    with RunningServer(folder / "log", model_folder, folder / "stored", options=options) as running:
        yield running


@pytest.fixture
def claude(server: RunningServer) -> Iterator[anthropic.Anthropic]:
    with client_of(server) as client:
        yield client


@pytest.fixture
def http(server: RunningServer) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=server.http_url, headers={"x-api-key": ANN}, timeout=PATIENCE_S) as http:
        yield http


def ours(server: RunningServer, talk: list[dict[str, str]], **options: Any) -> Completion:
    with Client(server.address, token=ANN) as client:
        return client.chat(talk, **{"max_tokens": 6, "temperature": 0, **options}).result()


def test_a_message_is_our_chat(claude: anthropic.Anthropic, server: RunningServer) -> None:
    """Strictly of the client's type, since the client checks nothing that it reads."""
    reply = claude.messages.with_raw_response.create(messages=ASKED, extra_body=TWO, **LIMITED)
    message = Message.model_validate_json(reply.http_response.text, strict=True)
    wanted = ours(server, ASKED, num_passages=2)
    (block,) = message.content
    assert isinstance(block, TextBlock)
    assert block.text == wanted.text
    usage = message.usage
    assert usage.input_tokens + usage.cache_read_input_tokens == wanted.finished.usage.prompt_tokens
    assert (usage.output_tokens, message.stop_reason, message.stop_sequence) == (6, "max_tokens", None)
    sources = [source_of(passage) for passage in wanted.accepted.prompt.passages]
    assert len(sources) == 2
    assert [(each.source, each.title, each.cited_text) for each in block.citations] == [
        (source["url"], source["title"], source["content"]) for source in sources
    ]
    assert [each.search_result_index for each in block.citations] == [0, 1]
    assert len(message.model_extra["memory"]["tokens"]) == 6


def test_a_stream_has_anthropics_events_in_their_order(claude: anthropic.Anthropic, http: httpx.Client) -> None:
    asked = {"messages": ASKED, "extra_body": TWO, **LIMITED}
    whole = claude.messages.create(**asked)
    body = {**LIMITED, **TWO, "messages": ASKED, "stream": True}
    lines = http.post("/v1/messages", json=body).text.splitlines()
    types = [line.removeprefix("event: ") for line in lines if line.startswith("event: ")]
    adapter = TypeAdapter[RawMessageStreamEvent](RawMessageStreamEvent)
    shown = [adapter.validate_json(line[6:], strict=True) for line in lines if line.startswith("data: ")]
    assert [each.type for each in shown] == types
    assert types[:2] == ["message_start", "content_block_start"]
    assert types[-3:] == ["content_block_stop", "message_delta", "message_stop"]
    kinds = [each.delta.type for each in shown if each.type == "content_block_delta"]
    assert kinds == sorted(kinds, reverse=True)  # text_delta before citations_delta
    assert kinds.count("citations_delta") == 2
    assert shown[0].message.usage.input_tokens == whole.usage.input_tokens + whole.usage.cache_read_input_tokens
    with claude.messages.stream(**asked) as stream:  # which joins the events again
        joined = stream.get_final_message()
    assert [TextBlock(**block.to_dict()) for block in joined.content] == whole.content
    assert (joined.stop_reason, joined.usage.output_tokens) == (whole.stop_reason, whole.usage.output_tokens)
    assert joined.usage.input_tokens + joined.usage.cache_read_input_tokens == shown[0].message.usage.input_tokens


async def test_the_asynchronous_client_gets_the_same(server: RunningServer, claude: anthropic.Anthropic) -> None:
    whole = claude.messages.create(messages=ASKED, extra_body=NONE, **LIMITED)
    async with (
        anthropic.AsyncAnthropic(base_url=server.http_url, api_key=ANN, max_retries=0) as client,
        client.messages.stream(messages=ASKED, extra_body=NONE, **LIMITED) as stream,
    ):
        texts = [text async for text in stream.text_stream]
    assert "".join(texts) == whole.content[0].text
    assert whole.content[0].citations is None


def test_blocks_and_turns_are_those_of_a_chat(claude: anthropic.Anthropic, server: RunningServer) -> None:
    """Messages of one role behind each other are one turn."""
    cached = {"cache_control": {"type": "ephemeral"}}
    system = [{"type": "text", "text": "Be ", **cached}, {"type": "text", "text": "brief."}]
    talk = [
        {"role": "user", "content": [{"type": "text", "text": "the "}, {"type": "text", "text": "roof", **cached}]},
        {"role": "user", "content": "is it red?"},
        {"role": "assistant", "content": "a"},
        {"role": "user", "content": "b"},
    ]
    extra = {**NONE, "metadata": {"user_id": "me"}, "service_tier": "auto", "tools": [], "top_k": 0, "seed": 1}
    message = claude.messages.create(messages=talk, system=system, extra_body=extra, **LIMITED)
    plain = [("system", "Be brief."), ("user", "the roof\n\nis it red?"), ("assistant", "a"), ("user", "b")]
    wanted = ours(server, [{"role": role, "content": text} for role, text in plain], num_passages=0, seed=1)
    assert message.content[0].text == wanted.text
    assert message.usage.input_tokens + message.usage.cache_read_input_tokens == wanted.finished.usage.prompt_tokens


def test_a_text_has_the_form_that_is_asked_for(claude: anthropic.Anthropic) -> None:
    form = {"format": {"type": "json_schema", "schema": {"enum": [1, 2]}}}
    message = claude.messages.create(messages=ASKED, model="tiny", max_tokens=30, output_config=form, extra_body=TWO)
    assert message.content[0].text in ("1", "2")
    assert message.stop_reason == "end_turn"
    assert message.content[0].citations
    parsed = claude.messages.parse(messages=ASKED, model="tiny", max_tokens=30, output_format=Short, extra_body=NONE)
    assert parsed.parsed_output.it in (1, 2)


def test_an_answer_may_come_back_with_the_next_question(claude: anthropic.Anthropic) -> None:
    first = claude.messages.create(messages=ASKED, extra_body=TWO, **LIMITED)
    assert first.content[0].citations
    for answer in (first.to_param(), {"role": "assistant", "content": first.content[0].text}):
        again = claude.messages.create(messages=[*ASKED, answer, *ASKED], extra_body=NONE, **LIMITED)
        assert again.usage.output_tokens == 6


def test_the_reason_of_an_end_is_named(claude: anthropic.Anthropic) -> None:
    options = {"temperature": 0.9, "seed": 3, "memory": {"passages": 0}}
    text = claude.messages.create(messages=ASKED, extra_body=options, model="tiny", max_tokens=30).content[0].text
    stop = text[10]
    stopped = claude.messages.create(
        messages=ASKED, extra_body=options, model="tiny", max_tokens=30, stop_sequences=["never", stop]
    )
    assert (stopped.stop_reason, stopped.stop_sequence) == ("stop_sequence", stop)
    assert stopped.content[0].text == text[: text.index(stop)]
    full = claude.messages.create(messages=ASKED, extra_body=NONE, model="tiny", max_tokens=20_000)
    assert full.stop_reason in ("end_turn", "model_context_window_exceeded")
    assert full.usage.output_tokens > 6


@pytest.mark.parametrize("passages", [0, 2])
def test_tokens_are_counted_as_they_are_read(claude: anthropic.Anthropic, passages: int) -> None:
    asked: dict[str, Any] = {"messages": ASKED, "system": "Be brief.", "model": "tiny"}
    extra = {"memory": {"passages": passages}}
    counted = claude.messages.count_tokens(extra_body=extra, **asked)
    usage = claude.messages.create(extra_body={**extra, **GREEDY}, max_tokens=6, **asked).usage
    assert counted.input_tokens == usage.input_tokens + usage.cache_read_input_tokens
    assert (counted.input_tokens > 100) == bool(passages)


def refused(reply: httpx.Response, status: int, kind: str, *words: str) -> None:
    assert (reply.status_code, reply.json()["error"]["type"]) == (status, kind), reply.text
    assert set(reply.json()) == {"type", "error", "request_id"}
    assert set(reply.json()["error"]) == {"type", "message"}
    assert reply.json()["type"] == "error"
    for word in words:
        assert word in reply.json()["error"]["message"]


@pytest.mark.parametrize("name", [name for name, each in MESSAGE["properties"].items() if "x-unsupported" in each])
def test_what_messages_lack_is_refused_by_name(http: httpx.Client, name: str) -> None:
    for value in (7, "x", ["x"], {"x": 1}, {"type": "enabled", "budget_tokens": 2000}):
        body = {**LIMITED, "messages": ASKED, name: value}
        refused(http.post("/v1/messages", json=body), 400, "invalid_request_error", name)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"stop": ["a"]}, ("unknown parameter 'stop'", "stop_sequences")),
        ({"max_tokens": 0}, ("max_tokens is 0",)),
        ({"max_tokens": None}, ("max_tokens",)),
        ({"messages": []}, ("messages",)),
        ({"messages": [{"role": "tool", "content": "a"}]}, ("messages[0].role",)),
        ({"messages": [{"role": "user"}]}, ("messages[0].content is missing",)),
        ({"messages": [*ASKED, {"role": "assistant", "content": "It"}]}, ("does not continue it",)),
        ({"messages": [{"role": "user", "content": [{"type": "document", "source": {}}]}]},
         ("messages[0].content[0].type is 'document'", "not supported")),
        ({"memory": {"passages": -1}}, ("memory.passages",)),
        ({"stop_sequences": ["a"] * 17}, ("stop_sequences",)),
        ({"stop_sequences": [""]}, ("stop",)),
        ({"output_config": {"effort": "low"}}, ("output_config.effort", "not supported")),
        ({"output_config": {"format": {"type": "json_schema"}}}, ("output_config.format.schema",)),
        ({"messages": [{"role": "user", "content": [{"type": "tool_use", "id": "1", "name": "f", "input": {}}]}]},
         ("messages[0].content[0].type is 'tool_use'", "assistant")),
        ({"messages": [{"role": "assistant", "content": [{"type": "tool_result", "tool_use_id": "1"}]}, *ASKED]},
         ("messages[0].content[0].type is 'tool_result'", "user")),
        ({"system": "a\0"}, ("NUL",)),
    ],
)  # fmt: skip
def test_bad_parameters_are_refused_by_name(http: httpx.Client, change: dict[str, Any], words: tuple[str, ...]) -> None:
    reply = http.post("/v1/messages", json={**LIMITED, "messages": ASKED, **change})
    refused(reply, 400, "invalid_request_error", *words)


def test_errors_are_those_of_anthropic(server: RunningServer, claude: anthropic.Anthropic, http: httpx.Client) -> None:
    with pytest.raises(anthropic.NotFoundError, match="this server has 'tiny'") as caught:
        claude.messages.create(messages=ASKED, model="claude-9", max_tokens=1)
    assert caught.value.body["error"]["type"] == "not_found_error"
    with pytest.raises(anthropic.NotFoundError, match="no datastore 'x'"):
        claude.messages.create(messages=ASKED, extra_body={"memory": {"stores": ["x"]}}, **LIMITED)
    with client_of(server, "none") as nobody, pytest.raises(anthropic.AuthenticationError, match="token"):
        nobody.messages.create(messages=ASKED, **LIMITED)
    with client_of(server, BEN) as ben:
        for call in (ben.messages.create, ben.messages.count_tokens):
            limit = LIMITED if call == ben.messages.create else {"model": "tiny"}
            with pytest.raises(anthropic.PermissionDeniedError, match="may not call Chat"):
                call(messages=ASKED, **limit)
    refused(http.get("/v1/messages"), 405, "invalid_request_error", "takes POST")
    large = {**LIMITED, "messages": [{"role": "user", "content": "a" * (5 << 20)}]}
    refused(http.post("/v1/messages", json=large), 413, "request_too_large", "bytes")
    assert "code" in http.post("/v1/completions", json={}).json()["error"]  # others stay OpenAI's


def test_a_token_is_taken_from_either_header(server: RunningServer) -> None:
    for given in (
        {"x-api-key": ANN},
        {"authorization": f"Bearer {ANN}"},
        {"authorization": f"Bearer {ANN}", "x-api-key": "x"},
    ):
        assert httpx.get(f"{server.http_url}/v1/models", headers=given).status_code == 200
    for given in ({"x-api-key": "x"}, {"authorization": "Bearer x", "x-api-key": ANN}):
        assert httpx.get(f"{server.http_url}/v1/models", headers=given).status_code == 401
    with client_of(server, None, auth_token=ANN) as client:
        assert client.messages.count_tokens(messages=ASKED, model="tiny").input_tokens > 0


@pytest.fixture(scope="module")
def single_web(tmp_path_factory: pytest.TempPathFactory, long_model: Path) -> Iterator[RunningServer]:
    """Runs one generation at a time, and tells those that wait so every 50 ms. Its workers may be killed."""
    options = ("--threads", "1", "--http-port", "0", "--max-running", "1")
    hasty = f"import {events.__name__} as events; events.HEARTBEAT_S = 0.05"
    log = tmp_path_factory.mktemp("log") / "log"
    with RunningServer(log, long_model, options=options, first=hasty) as server:
        yield server


def test_a_message_that_waits_is_pinged_and_its_error_is_an_event(single_web: RunningServer) -> None:
    long = {"model": "long", "max_tokens": 30_000, "messages": ASKED, "stream": True, **GREEDY}
    with ExitStack() as stack:
        http = stack.enter_context(httpx.Client(base_url=single_web.http_url, timeout=PATIENCE_S))
        tokens = stack.enter_context(http.stream("POST", "/v1/messages", json=long)).iter_bytes()
        next(tokens)
        lines = stack.enter_context(http.stream("POST", "/v1/messages", json=long)).iter_lines()
        assert [next(lines) for _ in range(3)] == ["event: ping", 'data: {"type": "ping"}', ""]
        client = stack.enter_context(client_of(single_web))
        seen = client.messages.create(model="long", max_tokens=30_000, messages=ASKED, stream=True, extra_body=GREEDY)
        os.kill(single_web.worker_pid, signal.SIGKILL)
        with pytest.raises(anthropic.APIStatusError) as caught:
            list(seen)
        assert caught.value.body["error"]["type"] == "overloaded_error"
        *_, kind, last, _ = lines
        assert kind == "event: error"
        assert '"overloaded_error"' in last
        wait_until(lambda: http.get("/readyz").status_code == 200)
