"""OpenAI's client calls tools: whole and streamed answers, results sent back, thoughts apart."""

import json
from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest
from chats import CHATML
from running import RunningServer
from speakers import save_speaker

from memlm.api.tools import ReplyFormat
from memlm.client import Client

TOOLS: list[Any] = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "description": "The weather of a city.",
            "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
            "strict": True,
        },
    },
    {"type": "function", "function": {"name": "time"}},
]
ASKED: list[Any] = [{"role": "user", "content": "How is it in Rome?"}]
LINES = {
    "CALLS": ["I look.", '\n<tool_call>{"name": "weather",', '"arguments": {"city":', ' "Rome"}}</tool_call>',
              '\n<tool_call>{"name": "time"}', "</tool_call>"],
    "BREAKS": ["<tool_call>{", '"name": "rm"}</', "tool_call> no"],
    "ONLY": ["\n<tool_call>", '{"name": "time", "arguments": {}}', "\n</tool_call>\n"],
    "THINKS": ["<think>\n", "hm", " so ", "</think>\n\n", "It is", " warm."],
    "LONG": ["Only", " words", " <to", "ols>"],
}  # fmt: skip


@pytest.fixture(scope="module")
def speaking(tmp_path_factory: pytest.TempPathFactory, tokenizer) -> Iterator[RunningServer]:
    folder = tmp_path_factory.mktemp("speaking")
    template = CHATML.replace("{{ '<|im_start|>assistant\n' }}", "{{ '<|im_start|>assistant\n' ~ cue }}")
    model = save_speaker(folder / "speaker", tokenizer, template + "{# <think> #}", LINES)
    with RunningServer(folder / "log", model, options=("--threads", "1", "--http-port", "0")) as server:
        yield server


@pytest.fixture
def gpt(speaking: RunningServer) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{speaking.http_url}/v1", api_key="unused", max_retries=0) as client:
        yield client


def ask(client: openai.OpenAI, cue: str, **options: Any) -> Any:
    extra = {"chat_template_kwargs": {"cue": cue}}
    asked: dict[str, Any] = {"model": "speaker", "messages": ASKED, "tools": TOOLS, "temperature": 0, **options}
    return client.chat.completions.create(extra_body=extra, **asked)


def named(calls: Any) -> list[tuple[str, dict[str, Any]]]:
    return [(call.function.name, json.loads(call.function.arguments)) for call in calls]


CALLED = [("weather", {"city": "Rome"}), ("time", {})]


def test_the_calls_of_an_answer_come_apart_from_its_text(gpt: openai.OpenAI) -> None:
    choice = ask(gpt, "CALLS").choices[0]
    assert (choice.message.content, choice.finish_reason) == ("I look.", "tool_calls")
    assert named(choice.message.tool_calls) == CALLED
    assert {call.type for call in choice.message.tool_calls} == {"function"}
    assert len({call.id for call in choice.message.tool_calls}) == 2


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "weather"}}])
def test_an_answer_calls_a_tool_where_the_client_says_so(gpt: openai.OpenAI, choice: Any) -> None:
    cities = {"type": "object", "properties": {"city": {"enum": ["Rome", "Oslo"]}}, "required": ["city"]}
    weather = {"name": "weather", "parameters": {**cities, "additionalProperties": False}}
    tools = [{"type": "function", "function": weather}]
    answer = ask(gpt, "LONG", tools=tools, tool_choice=choice, parallel_tool_calls=False, max_tokens=900).choices[0]
    ((name, arguments),) = named(answer.message.tool_calls)
    assert (answer.finish_reason, answer.message.content) == ("tool_calls", None)
    assert name == "weather"
    assert arguments["city"] in ("Rome", "Oslo")


def test_an_answer_that_is_a_call_alone_has_no_content(gpt: openai.OpenAI) -> None:
    choice = ask(gpt, "ONLY").choices[0]
    assert (choice.message.content, choice.finish_reason) == (None, "tool_calls")
    assert named(choice.message.tool_calls) == [("time", {})]


@pytest.mark.parametrize("options", [{"tool_choice": "none"}, {"tools": openai.omit}, {"tools": []}])
def test_without_tools_the_text_is_content(gpt: openai.OpenAI, options: dict[str, Any]) -> None:
    choice = ask(gpt, "CALLS", **options).choices[0]
    assert (choice.message.content, choice.finish_reason) == ("".join(LINES["CALLS"]), "stop")
    assert choice.message.tool_calls is None


def test_a_call_of_what_was_not_offered_is_content(gpt: openai.OpenAI) -> None:
    choice = ask(gpt, "BREAKS").choices[0]
    assert (choice.message.content, choice.finish_reason) == ("".join(LINES["BREAKS"]), "stop")
    assert choice.message.tool_calls is None


def test_one_call_at_a_time_where_the_client_says_so(gpt: openai.OpenAI) -> None:
    choice = ask(gpt, "CALLS", parallel_tool_calls=False).choices[0]
    assert named(choice.message.tool_calls) == CALLED[:1]


@pytest.mark.parametrize("cue", LINES)
@pytest.mark.parametrize("options", [{}, {"logprobs": True}, {"n": 2}, {"max_tokens": 3}])
def test_a_streamed_answer_is_the_whole_one(gpt: openai.OpenAI, cue: str, options: dict[str, Any]) -> None:
    whole = ask(gpt, cue, **options)
    with gpt.chat.completions.stream(
        model="speaker",
        messages=ASKED,
        tools=[{**tool, "function": {**tool["function"], "strict": False}} for tool in TOOLS],
        temperature=0,
        extra_body={"chat_template_kwargs": {"cue": cue}},
        **options,
    ) as stream:
        try:
            final = stream.get_final_completion()
        except openai.LengthFinishReasonError as error:
            final = error.completion
    for choice, other in zip(whole.choices, final.choices, strict=True):
        assert (other.message.content or None) == (choice.message.content or None)
        assert other.finish_reason == choice.finish_reason
        assert named(other.message.tool_calls or ()) == named(choice.message.tool_calls or ())
        assert getattr(other.message, "reasoning_content", None) == getattr(choice.message, "reasoning_content", None)
        if "logprobs" in options:
            assert other.logprobs is not None
            assert choice.logprobs is not None
            assert [each.token for each in other.logprobs.content] == [each.token for each in choice.logprobs.content]


def test_a_call_comes_as_its_name_and_then_its_arguments(gpt: openai.OpenAI) -> None:
    chunks = [chunk.choices[0] for chunk in ask(gpt, "CALLS", stream=True)]
    assert chunks[0].delta.role == "assistant"
    deltas = [call for chunk in chunks for call in chunk.delta.tool_calls or ()]
    assert [each.index for each in deltas] == [0, 0, 1, 1]
    assert [each.function.name for each in deltas] == ["weather", None, "time", None]
    assert [bool(each.id) for each in deltas] == [True, False, True, False]
    assert [each.function.arguments for each in deltas] == ["", '{"city": "Rome"}', "", "{}"]
    assert [chunk.finish_reason for chunk in chunks] == [None] * (len(chunks) - 1) + ["tool_calls"]
    assert all(len(chunk.delta.tool_calls or ()) <= 1 for chunk in chunks)


def test_a_call_is_forced(gpt: openai.OpenAI) -> None:
    none = {"type": "object", "properties": {}, "additionalProperties": False}
    tools = [*TOOLS, {"type": "function", "function": {"name": "now", "parameters": none}}]
    choice: Any = {"type": "function", "function": {"name": "now"}}
    message = ask(gpt, "LONG", tools=tools, tool_choice=choice).choices[0].message
    assert (message.content, named(message.tool_calls)) == (None, [("now", {})])
    message = ask(gpt, "LONG", tools=tools[2:], tool_choice="required", parallel_tool_calls=False).choices[0].message
    assert (message.content, named(message.tool_calls)) == (None, [("now", {})])
    chunks = [chunk.choices[0] for chunk in ask(gpt, "LONG", tools=tools, tool_choice=choice, stream=True)]
    assert [call.function.name for chunk in chunks for call in chunk.delta.tool_calls or ()] == ["now", None]
    assert chunks[-1].finish_reason == "tool_calls"


def test_a_thought_comes_apart_from_the_content(gpt: openai.OpenAI) -> None:
    message = ask(gpt, "THINKS", tools=openai.omit, reasoning_effort="low").choices[0].message
    assert (message.content, message.reasoning_content) == ("It is warm.", "hm so")
    chunks = [chunk.choices[0].delta for chunk in ask(gpt, "THINKS", stream=True)]
    assert "".join(getattr(delta, "reasoning_content", "") for delta in chunks) == "hm so"
    assert "".join(delta.content or "" for delta in chunks) == "It is warm."


def test_the_result_of_a_call_goes_back(gpt: openai.OpenAI, speaking: RunningServer) -> None:
    message = ask(gpt, "ONLY").choices[0].message
    result = {"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": [{"type": "text", "text": "5"}]}
    reply = ask(gpt, "LONG", messages=[*ASKED, message, result])
    assert reply.choices[0].message.content == "Only words <tools>"
    with Client(speaking.address) as client:
        expected = client.chat(
            [*ASKED, {"role": "assistant", "content": '<tool_call>\n{"name": "time", "arguments": {}}\n</tool_call>'},
             {"role": "user", "content": "<tool_response>\n5\n</tool_response>"}],
            tools=TOOLS, temperature=0, template_options={"cue": "LONG"},
        ).result()  # fmt: skip
    assert reply.usage.prompt_tokens == expected.finished.usage.prompt_tokens


def test_our_client_has_the_same_calls(speaking: RunningServer) -> None:
    with Client(speaking.address) as client:
        options: Any = {"tools": TOOLS, "temperature": 0, "template_options": {"cue": "CALLS"}}
        answer = client.chat(ASKED, **options).result()
        assert [(call.name, json.loads(call.arguments)) for call in answer.tool_calls] == CALLED
        assert answer.message.content == "I look."
        assert answer.accepted.reply == ReplyFormat("hermes", "think")
        with client.session() as session:
            called = session.chat(ASKED, **{**options, "template_options": {"cue": "ONLY"}}).result()
            result = {"role": "tool", "content": "5", "tool_call_id": called.tool_calls[0].id}
            answer = session.chat([result], **{**options, "template_options": {"cue": "LONG"}}).result()
            assert answer.text == "Only words <tools>"


@pytest.mark.parametrize(
    ("change", "param", "says"),
    [
        ({"tool_choice": "required", "guided_regex": "a"}, "regex", "leaves no content"),
        ({"tool_choice": {"type": "function", "function": {"name": "rm"}}}, "tool_choice", "the name of a tool"),
        ({"tool_choice": "any"}, "tool_choice", "auto, none, required, or a function by name"),
        ({"tools": None, "tool_choice": "required"}, "tool_choice", "give tools"),
        ({"tools": [{"type": "custom", "custom": {}}]}, "tools[0].type", "function"),
        ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools.name", "letters, digits"),
        ({"tools": TOOLS * 65}, "tools", "128"),
        ({"functions": [{"name": "time"}]}, "functions", "give tools"),
        ({"reasoning_effort": "much"}, "reasoning_effort", "minimal"),
        ({"chat_template_kwargs": {"a": {}}}, "chat_template_kwargs.a", "a number"),
        ({"chat_template_kwargs": {"messages": "a"}}, "chat_template_kwargs", "may not set"),
        ({"messages": [{"role": "assistant", "content": None}]}, "messages[0].content", "missing"),
        ({"messages": [{"role": "assistant", "tool_calls": [{"id": "1"}]}]}, "messages[0].tool_calls[0].function", ""),
        ({"messages": [{"role": "assistant", "tool_calls": [{"function": {"name": "a", "arguments": "{"}}]}]},
         "messages.tool_calls.arguments", "JSON object"),
    ],
)  # fmt: skip
def test_what_is_wrong_with_tools_is_named(
    speaking: RunningServer, change: dict[str, Any], param: str, says: str
) -> None:
    body = {"model": "speaker", "messages": ASKED, "tools": TOOLS, **change}
    reply = httpx.post(f"{speaking.http_url}/v1/chat/completions", json=body)
    error = reply.json()["error"]
    assert (reply.status_code, error["param"]) == (400, param), error
    assert says in error["message"]


def test_a_deep_schema_is_refused(speaking: RunningServer) -> None:
    deep: Any = {}
    for _ in range(40):
        deep = {"a": deep}
    tool = {"type": "function", "function": {"name": "time", "parameters": deep}}
    reply = httpx.post(
        f"{speaking.http_url}/v1/chat/completions", json={"model": "speaker", "messages": ASKED, "tools": [tool]}
    )
    assert reply.status_code == 400
    assert "nested too deeply" in reply.json()["error"]["message"]
