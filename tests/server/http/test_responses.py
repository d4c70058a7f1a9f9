"""OpenAI's client against /v1/responses: our chats as responses, with file_search, events in order, and kept turns."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import httpx
import openai
import pytest
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import BaseModel, TypeAdapter
from running import PATIENCE_S, RunningServer

from memlm.client import Client
from memlm.data.corpus import Corpus, Document
from memlm.indexing.build import build_index
from memlm.server.http.bodies import SAMPLING
from memlm.server.http.response_bodies import RESPONSE

QUESTION = "the gateway: which port?"
ASKED: dict[str, Any] = {"model": "tiny", "input": QUESTION, "max_output_tokens": 6, "temperature": 0}
SEARCH = {"type": "file_search", "vector_store_ids": ["stored"], "max_num_results": 2}
DOCUMENTS = [
    Document("notes/port.md", "The roof is red.\nThe gateway has the port 7443.", "Ports", {"year": 2020, "part": [1]}),
    Document("page", "The gateway forwards."),
    Document("other", "The sea is blue."),
]
ANN, BEN, DOT = "ann's own secret 0", "ben's own secret 0", "dot's own secret 0"
TOKENS = f"""
[[token]]
name = "ann"
secret = "{ANN}"

[[token]]
name = "ben"
secret = "{BEN}"
stores = []

[[token]]
name = "dot"
secret = "{DOT}"
calls = ["Tokenize"]
"""


class Short(BaseModel):
    it: Literal[1, 2]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory, model_folder: Path) -> Iterator[RunningServer]:
    folder = tmp_path_factory.mktemp("cited")
    build_index(model_folder, Corpus(DOCUMENTS), folder / "stored", check="none")
    (folder / "tokens.toml").write_text(TOKENS)
    (folder / "tokens.toml").chmod(0o600)
    options = ("--threads", "1", "--http-port", "0", "--attention-window", "44", "--auth-file", f"{folder}/tokens.toml")
    with RunningServer(folder / "log", model_folder, folder / "stored", options=options) as running:
        yield running


def client_of(server: RunningServer, key: str = ANN) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.http_url}/v1", api_key=key, max_retries=0)


@pytest.fixture
def ai(server: RunningServer) -> Iterator[openai.OpenAI]:
    with client_of(server) as client:
        yield client


@pytest.fixture
def http(server: RunningServer) -> Iterator[httpx.Client]:
    headers = {"authorization": f"Bearer {ANN}"}
    with httpx.Client(base_url=server.http_url, headers=headers, timeout=PATIENCE_S) as http:
        yield http


def test_a_response_is_our_chat(ai: openai.OpenAI, server: RunningServer) -> None:
    """Strictly of the client's type, which checks nothing that it reads."""
    reply = ai.responses.with_raw_response.create(**ASKED, instructions="Be brief.", metadata={"a": "b"})
    response = Response.model_validate_json(reply.text, strict=True)
    with Client(server.address, token=ANN) as ours:
        talk = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": QUESTION}]
        wanted = ours.chat(talk, max_tokens=6, temperature=0).result()
    assert response.output_text == wanted.text
    assert (response.status, response.incomplete_details.reason) == ("incomplete", "max_output_tokens")
    assert (response.instructions, response.metadata, response.temperature) == ("Be brief.", {"a": "b"}, 0)
    usage, ours_used = response.usage, wanted.finished.usage
    assert (usage.input_tokens, usage.output_tokens) == (ours_used.prompt_tokens, 6)
    assert usage.total_tokens == usage.input_tokens + 6
    assert "memory" not in response.model_extra
    (annotation,) = response.output[0].content[0].annotations
    assert (annotation.type, annotation.file_id) == ("file_citation", "stored/notes/port.md")
    assert (annotation.filename, annotation.index) == ("notes/port.md", len(wanted.text))


def test_file_search_finds_in_the_datastores_that_it_names(ai: openai.OpenAI, server: RunningServer) -> None:
    shown = {"include": ["file_search_call.results"], "tools": [SEARCH]}
    reply = ai.responses.with_raw_response.create(**ASKED, **shown, extra_body={"memory": {}})
    response = Response.model_validate_json(reply.text, strict=True)
    search, message = response.output
    with Client(server.address, token=ANN) as ours:
        wanted = ours.chat(QUESTION, num_passages=2, max_tokens=6, temperature=0).result()
    passages = wanted.accepted.prompt.passages
    assert (search.type, search.status, search.queries) == ("file_search_call", "completed", [QUESTION])
    assert [each.text for each in search.results] == [each.text for each in passages]
    assert [each.score for each in search.results] == pytest.approx([each.score for each in passages])
    assert [each.file_id for each in search.results] == ["stored/notes/port.md", "stored/page"]
    assert search.results[0].attributes == {"year": 2020, "store": "stored", "place": "notes/port.md:2"}
    assert [each.file_id for each in message.content[0].annotations] == [each.file_id for each in search.results]
    assert message.content[0].text == wanted.text
    assert len(response.model_extra["memory"]["tokens"]) == 6
    assert response.tools[0].vector_store_ids == ["stored"]
    hidden = ai.responses.create(**ASKED, tools=[SEARCH], tool_choice={"type": "file_search"})
    assert hidden.output[0].results is None
    alone = ai.responses.create(**ASKED, tools=[SEARCH], tool_choice="none")
    assert [each.type for each in alone.output] == ["message"]
    assert alone.output[0].content[0].annotations == []


@pytest.mark.parametrize("tools", [[], [SEARCH]])
def test_a_stream_has_the_typed_events_in_their_order(
    ai: openai.OpenAI, http: httpx.Client, tools: list[dict[str, Any]]
) -> None:
    asked = {**ASKED, "tools": tools, "include": ["file_search_call.results"]}
    whole = ai.responses.create(**asked)
    lines = http.post("/v1/responses", json={**asked, "stream": True}).text.splitlines()
    adapter = TypeAdapter[ResponseStreamEvent](ResponseStreamEvent)
    shown = [adapter.validate_json(line[6:], strict=True) for line in lines if line.startswith("data: ")]
    types = [line.removeprefix("event: ") for line in lines if line.startswith("event: ")]
    assert [each.type for each in shown] == types
    assert [each.sequence_number for each in shown] == list(range(len(shown)))
    searched = [f"file_search_call.{each}" for each in ("in_progress", "searching", "completed")]
    searched = ["output_item.added", *searched, "output_item.done"] if tools else []
    texts = ["output_text.delta"] * types.count("response.output_text.delta")
    cited = ["output_text.annotation.added"] * (2 if tools else 1)
    said = ["output_item.added", "content_part.added", *texts, *cited, "output_text.done"]
    last = ["content_part.done", "output_item.done", "incomplete"]
    assert types == [f"response.{each}" for each in ("created", "in_progress", *searched, *said, *last)]
    assert "".join(each.delta for each in shown if each.type == "response.output_text.delta") == whole.output_text
    final = shown[-1].response
    assert [each.status for each in (shown[0].response, shown[1].response)] == ["in_progress"] * 2
    own = {"id", "created_at", "completed_at", "output", "usage"}
    assert final.model_dump(exclude=own) == whole.model_dump(exclude=own)
    assert final.output_text == whole.output_text
    assert [each.model_dump(exclude={"id"}) for each in final.output] == [
        each.model_dump(exclude={"id"}) for each in whole.output
    ]
    done = [each.item for each in shown if each.type == "response.output_item.done"]
    assert [each.model_dump() for each in done] == [each.model_dump() for each in final.output]


def test_the_clients_stream_joins_them(ai: openai.OpenAI) -> None:
    """Of a text that ends by itself: the client waits for `response.completed`, as it does at OpenAI."""
    asked = [
        {"model": "tiny", "input": QUESTION, "temperature": 1.5, "extra_body": {"seed": each}} for each in range(99)
    ]
    wholes = ((each, ai.responses.create(**each)) for each in asked)
    ended, whole = next(pair for pair in wholes if pair[1].status == "completed")
    with ai.responses.stream(**ended) as stream:
        joined = stream.get_final_response()
    assert (joined.status, joined.output_text) == ("completed", whole.output_text)
    assert whole.incomplete_details is None


def test_a_text_has_the_form_that_is_asked_for(ai: openai.OpenAI) -> None:
    form = {"type": "json_schema", "name": "numbers", "schema": {"enum": [1, 2]}, "strict": True}
    response = ai.responses.create(**{**ASKED, "max_output_tokens": 30}, text={"format": form}, tools=[SEARCH])
    assert json.loads(response.output_text) in (1, 2)
    assert (response.status, response.text.format.name) == ("completed", "numbers")
    assert response.output[1].content[0].annotations
    parsed = ai.responses.parse(**{**ASKED, "max_output_tokens": 30}, text_format=Short)
    assert parsed.output_parsed.it in (1, 2)


def test_a_response_goes_on_from_one_that_is_kept(ai: openai.OpenAI, server: RunningServer) -> None:
    """As the whole conversation would, without the instructions of before, and with equal answers by `get`."""
    first = ai.responses.create(**ASKED, instructions="Be brief.")
    options = {
        **ASKED,
        "input": [{"role": "developer", "content": "Be kind."}, {"role": "user", "content": "the sea?"}],
    }
    second = ai.responses.create(**options, previous_response_id=first.id)
    third = ai.responses.create(**{**ASKED, "input": "and the roof?"}, previous_response_id=second.id)
    talk = [
        {"role": "user", "content": QUESTION},
        {"role": "assistant", "content": first.output_text},
        {"role": "system", "content": "Be kind."},
        {"role": "user", "content": "the sea?"},
        {"role": "assistant", "content": second.output_text},
        {"role": "user", "content": "and the roof?"},
    ]
    with Client(server.address, token=ANN) as ours:
        wanted = ours.chat(talk, max_tokens=6, temperature=0).result()
    assert third.output_text == wanted.text
    assert third.usage.input_tokens == wanted.finished.usage.prompt_tokens
    assert third.previous_response_id == second.id
    assert ai.responses.retrieve(third.id).to_dict() == third.to_dict()
    with ai.responses.create(**ASKED, stream=True) as events:
        *_, last = events
    assert ai.responses.retrieve(last.response.id).to_dict() == last.response.to_dict()


def test_the_items_of_a_response_may_come_back(ai: openai.OpenAI, server: RunningServer) -> None:
    first = ai.responses.create(**ASKED, tools=[SEARCH], include=["file_search_call.results"], store=False)
    said = [{"role": "user", "content": QUESTION}, *first.output, {"role": "user", "content": "the sea?"}]
    assert len(said) == 4
    again = ai.responses.create(**{**ASKED, "input": said})
    talk = [(QUESTION, "user"), (first.output_text, "assistant"), ("the sea?", "user")]
    with Client(server.address, token=ANN) as ours:
        messages = [{"role": role, "content": text} for text, role in talk]
        wanted = ours.chat(messages, max_tokens=6, temperature=0).result()
    assert (again.output_text, again.usage.input_tokens) == (wanted.text, wanted.finished.usage.prompt_tokens)


def test_what_is_kept_is_the_callers_own(ai: openai.OpenAI, server: RunningServer) -> None:
    mine = ai.responses.create(**ASKED)
    with client_of(server, BEN) as ben:
        for call in (
            lambda: ben.responses.retrieve(mine.id),
            lambda: ben.responses.delete(mine.id),
            lambda: ben.responses.create(**ASKED, previous_response_id=mine.id),
            lambda: ai.responses.retrieve("resp_none"),
        ):
            with pytest.raises(openai.NotFoundError, match="no response 'resp_") as caught:
                call()
            assert caught.value.code == "NotFound"
    assert ai.responses.retrieve(mine.id).id == mine.id
    ai.responses.delete(mine.id)
    with pytest.raises(openai.NotFoundError):
        ai.responses.retrieve(mine.id)
    with pytest.raises(openai.NotFoundError):
        ai.responses.delete(mine.id)
    passing = ai.responses.create(**ASKED, store=False)
    assert passing.to_dict()["store"] is False
    with pytest.raises(openai.NotFoundError):
        ai.responses.retrieve(passing.id)


def test_rights_hold_as_in_a_chat(server: RunningServer) -> None:
    with client_of(server, BEN) as ben:
        with pytest.raises(openai.PermissionDeniedError, match="may not use the datastore 'stored'"):
            ben.responses.create(**ASKED, tools=[SEARCH])
        assert ben.responses.create(**ASKED).output[0].content[0].annotations == []
    with client_of(server, DOT) as dot:
        for call in (lambda: dot.responses.create(**ASKED), lambda: dot.responses.retrieve("resp_x")):
            with pytest.raises(openai.PermissionDeniedError, match="may not call Chat"):
                call()
    with client_of(server, "none") as nobody, pytest.raises(openai.AuthenticationError):
        nobody.responses.retrieve("resp_x")


def refused(reply: httpx.Response, param: str, *words: str) -> None:
    assert reply.status_code == 400, reply.text
    error = reply.json()["error"]
    assert (error["param"], error["type"], error["code"]) == (param, "invalid_request_error", "InvalidInput")
    for word in words:
        assert word in error["message"]


@pytest.mark.parametrize("name", [name for name, each in RESPONSE["properties"].items() if "x-unsupported" in each])
def test_what_responses_lack_is_refused_by_name(http: httpx.Client, name: str) -> None:
    for value in (7, "x", ["x"], {"x": 1}):
        refused(http.post("/v1/responses", json={**ASKED, name: value}), name, "not supported")


FUNCTION = {"type": "function", "name": "f", "parameters": {}}


@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({"messages": []}, "messages"),
        ({"input": None}, "input"),
        ({"input": []}, "input"),
        ({"input": [{"role": "user"}]}, "input[0].content"),
        ({"input": [{"content": "a"}]}, "input[0].role"),
        ({"input": [{"role": "robot", "content": "a"}]}, "input[0].role"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "input[0].type"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input[0].content[0].type"),
        ({"input": [{"role": "user", "content": [{"type": "input_file"}]}]}, "input[0].content[0].type"),
        ({"input": [{"type": "file_search_call"}]}, "messages"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
        ({"tools": [{"type": "function"}]}, "tools[0].name"),
        ({"tools": [{**FUNCTION, "vector_store_ids": ["stored"]}]}, "tools[0].vector_store_ids"),
        ({"tools": [{**SEARCH, "name": "f"}]}, "tools[0].name"),
        ({"tools": [{**FUNCTION, "name": "f g"}]}, "tools.name"),
        ({"tools": [FUNCTION], "tool_choice": {"type": "function"}}, "tool_choice.name"),
        ({"tools": [FUNCTION], "tool_choice": {"type": "function", "name": "g"}}, "tool_choice"),
        ({"input": [{"type": "function_call", "name": "f", "arguments": "{}"}]}, "input[0].call_id"),
        ({"input": [{"type": "function_call_output", "call_id": "1"}]}, "input[0].output"),
        ({"tools": [SEARCH, SEARCH]}, "tools"),
        ({"tools": [{"type": "file_search"}]}, "tools[0].vector_store_ids"),
        ({"tools": [{**SEARCH, "filters": {"type": "eq"}}]}, "tools[0].filters"),
        (
            {"tools": [{**SEARCH, "ranking_options": {"score_threshold": 1}}]},
            "tools[0].ranking_options.score_threshold",
        ),
        ({"tools": [SEARCH], "memory": {"stores": ["stored"]}}, "memory.stores"),
        ({"tools": [SEARCH], "memory": {"passages": 1}}, "memory.passages"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tool_choice": {"type": "function"}}, "tool_choice"),
        ({"include": ["message.output_text.logprobs"]}, "include"),
        ({"text": {"format": {"type": "xml"}}}, "text.format.type"),
        ({"text": {"format": {"type": "json_schema"}}}, "text.format.schema"),
        ({"text": {"verbosity": "low"}}, "text.verbosity"),
        ({"reasoning": {"effort": "most"}}, "reasoning.effort"),
        ({"metadata": {"a": 1}}, "metadata.a"),
        ({"metadata": {str(number): "" for number in range(17)}}, "metadata"),
        ({"top_p": 0}, "top_p"),
    ],
)
def test_bad_parameters_are_refused_by_name(http: httpx.Client, change: dict[str, Any], param: str) -> None:
    refused(http.post("/v1/responses", json={**ASKED, **change}), param)


def test_values_that_ask_for_nothing_are_accepted(http: httpx.Client) -> None:
    neutral = {"background": False, "conversation": None, "prompt": None, "reasoning": {"effort": None}, "top_k": 0,
               "text": {"format": {"type": "text"}}, "truncation": "disabled", "parallel_tool_calls": True,
               "max_tool_calls": None, "user": "me", "service_tier": "auto", "prompt_cache_key": "k",
               "include": ["reasoning.encrypted_content"], "stream_options": None, "top_logprobs": 0}  # fmt: skip
    reply = http.post("/v1/responses", json={**ASKED, **neutral, "seed": 1})
    assert reply.status_code == 200, reply.text
    assert reply.json()["user"] == "me"
    assert set(SAMPLING) <= set(RESPONSE["properties"])


def test_a_number_that_is_infinite_is_refused(http: httpx.Client) -> None:
    """It could be in a schema, which the response repeats."""
    body = json.dumps({**ASKED, "text": {"format": {"type": "json_schema", "schema": {"default": 0.5}}}})
    headers = {"content-type": "application/json"}
    assert http.post("/v1/responses", content=body, headers=headers).status_code == 200
    reply = http.post("/v1/responses", content=body.replace("0.5", "1e999"), headers=headers)
    assert reply.status_code == 400
    assert "1e999" in reply.json()["error"]["message"]


def test_errors_are_those_of_openai(ai: openai.OpenAI, http: httpx.Client) -> None:
    with pytest.raises(openai.NotFoundError, match="this server has 'tiny'"):
        ai.responses.create(**{**ASKED, "model": "gpt-9"})
    with pytest.raises(openai.NotFoundError, match="no datastore 'x'"):
        ai.responses.create(**ASKED, tools=[{**SEARCH, "vector_store_ids": ["x"]}])
    assert http.get("/v1/responses").status_code == 405
    assert http.post("/v1/responses/resp_x").status_code == 405
