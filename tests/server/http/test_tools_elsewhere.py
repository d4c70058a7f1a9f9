"""Tools over /v1/messages and /v1/responses, by the official clients: calls, results sent back, and thoughts apart."""

import json
from collections.abc import Iterator
from typing import Any

import anthropic
import httpx
import openai
import pytest
from anthropic.types import Message, RawMessageStreamEvent
from chats import CHATML
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import TypeAdapter
from running import PATIENCE_S, RunningServer
from speakers import save_speaker

CITY = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
TOOLS: list[Any] = [
    {"name": "weather", "description": "The weather of a city.", "input_schema": CITY},
    {"name": "time", "input_schema": {"type": "object"}},
]
FUNCTIONS: list[Any] = [
    {"type": "function", "name": "weather", "description": "The weather.", "parameters": CITY, "strict": True},
    {"type": "function", "name": "time"},
]
QUESTION = "How is it in Rome?"
ASKED: list[Any] = [{"role": "user", "content": QUESTION}]
LINES = {
    "CALLS": ["I look.", '\n<tool_call>{"name": "weather",', '"arguments": {"city":', ' "Rome"}}</tool_call>',
              '\n<tool_call>{"name": "time"}', "</tool_call>"],
    "ONLY": ["\n<tool_call>", '{"name": "time", "arguments": {}}', "\n</tool_call>\n"],
    "THINKS": ["<think>\n", "hm", " so ", "</think>\n\n", "It is", " warm."],
    "LONG": ["Only", " words", " <to", "ols>"],
}  # fmt: skip
CALLED = [("weather", {"city": "Rome"}), ("time", {})]


@pytest.fixture(scope="module")
def speaking(tmp_path_factory: pytest.TempPathFactory, tokenizer: Any) -> Iterator[RunningServer]:
    folder = tmp_path_factory.mktemp("speaking")
    template = CHATML.replace("{{ '<|im_start|>assistant\n' }}", "{{ '<|im_start|>assistant\n' ~ cue }}")
    model = save_speaker(folder / "speaker", tokenizer, template + "{# <think> #}", LINES)
    with RunningServer(folder / "log", model, options=("--threads", "1", "--http-port", "0")) as server:
        yield server


@pytest.fixture
def claude(speaking: RunningServer) -> Iterator[anthropic.Anthropic]:
    with anthropic.Anthropic(base_url=speaking.http_url, api_key="none", max_retries=0) as client:
        yield client


@pytest.fixture
def gpt(speaking: RunningServer) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{speaking.http_url}/v1", api_key="none", max_retries=0) as client:
        yield client


@pytest.fixture
def http(speaking: RunningServer) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=speaking.http_url, timeout=PATIENCE_S) as http:
        yield http


def extra(cue: str) -> dict[str, Any]:
    return {"chat_template_kwargs": {"cue": cue}, "temperature": 0}


def message_to(claude: anthropic.Anthropic, cue: str, **options: Any) -> Message:
    asked: dict[str, Any] = {"model": "speaker", "max_tokens": 100, "messages": ASKED, "tools": TOOLS, **options}
    reply = claude.messages.with_raw_response.create(extra_body=extra(cue), **asked)
    return Message.model_validate_json(reply.http_response.text, strict=True)


def response_to(gpt: openai.OpenAI, cue: str, **options: Any) -> Response:
    asked: dict[str, Any] = {"model": "speaker", "input": QUESTION, "tools": FUNCTIONS, **options}
    reply = gpt.responses.with_raw_response.create(extra_body=extra(cue), **asked)
    return Response.model_validate_json(reply.text, strict=True)


def test_a_message_has_the_uses_of_tools_behind_its_text(claude: anthropic.Anthropic) -> None:
    message = message_to(claude, "CALLS")
    text, *uses = message.content
    assert (text.text, message.stop_reason) == ("I look.", "tool_use")
    assert [(each.name, each.input) for each in uses] == CALLED
    assert len({each.id for each in uses}) == 2
    alone = message_to(claude, "ONLY")
    assert [each.type for each in alone.content] == ["tool_use"]
    one = message_to(claude, "CALLS", tool_choice={"type": "auto", "disable_parallel_tool_use": True})
    assert [each.type for each in one.content] == ["text", "tool_use"]
    for options in ({"tool_choice": {"type": "none"}}, {"tools": []}):
        (text,) = message_to(claude, "CALLS", **options).content
        assert text.text == "".join(LINES["CALLS"])


@pytest.mark.parametrize("cue", LINES)
def test_a_streamed_message_is_the_whole_one(claude: anthropic.Anthropic, http: httpx.Client, cue: str) -> None:
    whole = message_to(claude, cue)
    asked: dict[str, Any] = {"model": "speaker", "max_tokens": 100, "messages": ASKED, "tools": TOOLS}
    with claude.messages.stream(extra_body=extra(cue), **asked) as stream:
        joined = stream.get_final_message()
    assert joined.stop_reason == whole.stop_reason
    assert [each.to_dict() | {"id": ""} for each in joined.content] == [
        each.to_dict() | {"id": ""} for each in Message(**whole.to_dict()).content
    ]
    body = {**asked, **extra(cue), "stream": True}
    adapter = TypeAdapter[RawMessageStreamEvent](RawMessageStreamEvent)
    lines = http.post("/v1/messages", json=body).text.splitlines()
    shown = [adapter.validate_json(line[6:], strict=True) for line in lines if line.startswith("data: ")]
    opened = None
    for event in shown:  # one block behind the other
        if event.type == "content_block_start":
            assert opened is None
            opened = event.index
        elif event.type.startswith("content_block"):
            assert event.index == opened
            opened = None if event.type == "content_block_stop" else opened
    assert opened is None


def test_a_thought_is_a_block_before_the_text(claude: anthropic.Anthropic) -> None:
    thought, text = message_to(claude, "THINKS").content
    assert (thought.type, thought.thinking.strip(), text.text) == ("thinking", "hm so", "It is warm.")


def test_results_of_tools_are_read_as_in_a_chat(claude: anthropic.Anthropic, http: httpx.Client) -> None:
    """A thought too. What the model reads is counted, since this one says the same to any prompt."""
    calls = message_to(claude, "CALLS")
    ids = [each.id for each in calls.content[1:]]
    thought = {"type": "thinking", "thinking": "hm", "signature": ""}
    results = [
        {"type": "tool_result", "tool_use_id": ids[0], "content": [{"type": "text", "text": "warm"}]},
        {"type": "tool_result", "tool_use_id": ids[1], "content": "9", "is_error": False},
        {"type": "text", "text": "And now?"},
    ]
    talk = [*ASKED, {"role": "assistant", "content": [thought, *calls.content]}, {"role": "user", "content": results}]
    counted = claude.messages.count_tokens(
        model="speaker", messages=talk, tools=TOOLS, extra_body={"chat_template_kwargs": {"cue": "LONG"}}
    )
    functions = [{"name": name, "arguments": json.dumps(arguments)} for name, arguments in CALLED]
    said = {"role": "assistant", "content": "I look.", "reasoning_content": "hm"}
    said["tool_calls"] = [{"id": id_, "function": each} for id_, each in zip(ids, functions, strict=True)]
    chat = [
        *ASKED,
        said,
        {"role": "tool", "tool_call_id": ids[0], "content": "warm"},
        {"role": "tool", "tool_call_id": ids[1], "content": "9"},
        {"role": "user", "content": "And now?"},
    ]
    given = [
        {
            "type": "function",
            "function": {("parameters" if name == "input_schema" else name): each[name] for name in each},
        }
        for each in TOOLS
    ]
    body = {"model": "speaker", "messages": chat, "tools": given, "max_tokens": 1, **extra("LONG")}
    reply = http.post("/v1/chat/completions", json=body)
    assert reply.status_code == 200, reply.text
    assert counted.input_tokens == reply.json()["usage"]["prompt_tokens"]
    assert message_to(claude, "LONG", messages=talk).content[0].text == "".join(LINES["LONG"])


def test_a_response_has_its_calls_as_items(gpt: openai.OpenAI) -> None:
    response = response_to(gpt, "CALLS")
    message, *calls = response.output
    assert (message.content[0].text, response.status) == ("I look.", "completed")
    assert [(each.type, each.status) for each in calls] == [("function_call", "completed")] * 2
    assert [(each.name, json.loads(each.arguments)) for each in calls] == CALLED
    assert len({each.call_id for each in calls} | {each.id for each in response.output}) == 5
    one = response_to(gpt, "CALLS", parallel_tool_calls=False)
    assert [each.type for each in one.output] == ["message", "function_call"]
    for options in ({"tool_choice": "none"}, {"tools": []}):
        (message,) = response_to(gpt, "CALLS", **options).output
        assert message.content[0].text == "".join(LINES["CALLS"])
    thought, text = response_to(gpt, "THINKS").output
    assert (thought.type, thought.content[0].text.strip()) == ("reasoning", "hm so")
    assert text.content[0].text == "It is warm."


@pytest.mark.parametrize("cue", LINES)
def test_a_streamed_response_is_the_whole_one(gpt: openai.OpenAI, http: httpx.Client, cue: str) -> None:
    whole = response_to(gpt, cue)
    body = {"model": "speaker", "input": QUESTION, "tools": FUNCTIONS, **extra(cue), "stream": True}
    lines = http.post("/v1/responses", json=body).text.splitlines()
    adapter = TypeAdapter[ResponseStreamEvent](ResponseStreamEvent)
    shown = [adapter.validate_json(line[6:], strict=True) for line in lines if line.startswith("data: ")]
    assert [each.sequence_number for each in shown] == list(range(len(shown)))
    final = shown[-1].response
    own = {"id", "call_id"}
    assert [each.model_dump(exclude=own) for each in final.output] == [
        each.model_dump(exclude=own) for each in whole.output
    ]
    done = [each.item for each in shown if each.type == "response.output_item.done"]
    assert done == final.output
    for number, item in enumerate(final.output):
        deltas = [each.delta for each in shown if each.type.endswith(".delta") and each.output_index == number]
        text = item.arguments if item.type == "function_call" else item.content[0].text
        assert "".join(deltas) == text
    with gpt.responses.stream(model="speaker", input=QUESTION, tools=FUNCTIONS[1:], extra_body=extra(cue)) as stream:
        assert stream.get_final_response().status == "completed"


def test_a_kept_response_takes_the_results_of_its_calls(gpt: openai.OpenAI, http: httpx.Client) -> None:
    first = response_to(gpt, "CALLS")
    outputs = [
        {"type": "function_call_output", "call_id": first.output[1].call_id, "output": "warm"},
        {"type": "function_call_output", "call_id": first.output[2].call_id,
         "output": [{"type": "input_text", "text": "9"}]},
    ]  # fmt: skip
    kept = response_to(gpt, "LONG", input=outputs, previous_response_id=first.id)
    items = [{"role": "user", "content": QUESTION}, *(each.to_dict() for each in first.output), *outputs]
    whole = response_to(gpt, "LONG", input=items)
    assert kept.output_text == whole.output_text == "".join(LINES["LONG"])
    assert kept.usage.input_tokens == whole.usage.input_tokens
    calls = [
        {"id": each.call_id, "function": {"name": each.name, "arguments": each.arguments}} for each in first.output[1:]
    ]
    chat = [*ASKED, {"role": "assistant", "content": "I look.", "tool_calls": calls},
            {"role": "tool", "tool_call_id": calls[0]["id"], "content": "warm"},
            {"role": "tool", "tool_call_id": calls[1]["id"], "content": "9"}]  # fmt: skip
    tools = [
        {"type": "function", "function": {name: each[name] for name in each if name != "type"}} for each in FUNCTIONS
    ]
    body = {"model": "speaker", "messages": chat, "tools": tools, "max_tokens": 1, **extra("LONG")}
    reply = http.post("/v1/chat/completions", json=body)
    assert reply.status_code == 200, reply.text
    assert kept.usage.input_tokens == reply.json()["usage"]["prompt_tokens"]


def test_a_thought_comes_back_with_its_answer(gpt: openai.OpenAI) -> None:
    first = response_to(gpt, "THINKS")
    again = {"role": "user", "content": "And now?"}
    kept = response_to(gpt, "LONG", input=[again], previous_response_id=first.id)
    items = [{"role": "user", "content": QUESTION}, *(each.to_dict() for each in first.output), again]
    assert response_to(gpt, "LONG", input=items).usage.input_tokens == kept.usage.input_tokens
