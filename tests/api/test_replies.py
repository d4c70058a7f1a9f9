"""Calls and thoughts are read from the texts of each family, however they are cut."""

import json
import random
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from memlm.api.chat import Message
from memlm.api.replies.families import MARKERS, family_of, markers_of, thought_of
from memlm.api.replies.reading import Delta, ReplyReader, read_reply
from memlm.api.tools import ReplyFormat, Tool

WEATHER = Tool(
    "weather",
    "The weather of a city.",
    {"type": "object", "properties": {"city": {"type": "string"}, "days": {"type": "integer"}}, "required": ["city"]},
)
TOOLS = (WEATHER, Tool("time"))
ROME, NOW = ("weather", {"city": "Rome"}), ("time", {})
HERMES_ROME = '<tool_call>\n{"name": "weather", "arguments": {"city": "Rome"}}\n</tool_call>'
CODER_ROME = "<tool_call>\n<function=weather>\n<parameter=city>\nRome\n</parameter>\n</function>\n</tool_call>"
HARMONY_ROME = '<|channel|>commentary to=functions.weather <|constrain|>json<|message|>{"city": "Rome"}<|call|>'
CALLS = [
    ("hermes", HERMES_ROME, "", [ROME]),
    ("hermes", f'Let me see.\n{HERMES_ROME}\n<tool_call>{{"name": "time"}}</tool_call>\n', "Let me see.", [ROME, NOW]),
    ("hermes", '<tool_call>{"name": "weather", "parameters": "{\\"city\\": \\"Rome\\"}"}', "", [ROME]),
    ("qwen3_coder", CODER_ROME, "", [ROME]),
    (
        "qwen3_coder",
        CODER_ROME.replace("</function>", "<parameter=days>\n3\n</parameter>\n</function>"),
        "",
        [("weather", {"city": "Rome", "days": 3})],
    ),
    ("qwen3_coder", CODER_ROME.replace("Rome", "7"), "", [("weather", {"city": "7"})]),
    ("llama3", ' {"name": "weather", "parameters": {"city": "Rome"}}', "", [ROME]),
    (
        "llama3",
        '{"name": "weather", "parameters": {"city": "Rome"}}; {"name": "time", "parameters": {}};',
        "",
        [ROME, NOW],
    ),
    ("llama3", 'So:<|python_tag|>{"name": "weather", "parameters": {"city": "Rome"}}', "So:", [ROME]),
    ("mistral", '[TOOL_CALLS] [{"name": "weather", "arguments": {"city": "Rome"}}, {"name": "time"}]', "", [ROME, NOW]),
    ("mistral", 'So:[TOOL_CALLS]weather[ARGS]{"city": "Rome"}[TOOL_CALLS]time[CALL_ID]a1[ARGS]{}', "So:", [ROME, NOW]),
    ("gemma", '```json\n{"name": "weather", "parameters": {"city": "Rome"}}\n```', "", [ROME]),
    ("gemma", '{"name": "weather", "parameters": {"city": "Rome"}}', "", [ROME]),
    ("gemma", 'So:\n```tool_code\nprint(weather(city="Rome"))\ntime()\n```', "So:", [ROME, NOW]),
    ("gemma", '[weather(city="Rome"), time()]', "", [ROME, NOW]),
    ("harmony", HARMONY_ROME, "", [ROME]),
    ("harmony", ' to=functions.weather<|channel|>commentary json<|message|>{"city": "Rome"}', "", [ROME]),
    ("harmony", f"<|channel|>final<|message|>So:<|end|><|start|>assistant{HARMONY_ROME}", "So:", [ROME]),
]
# Pieces that look like calls and are none: an unknown tool, broken or cut JSON, arguments that are no object.
CONTENTS = [
    ("hermes", HERMES_ROME.replace("weather", "rm")),
    ("hermes", HERMES_ROME.replace("}}", "}")),
    ("hermes", HERMES_ROME[:50]),
    ("hermes", HERMES_ROME.replace('{"city": "Rome"}', "[1]")),
    ("hermes", HERMES_ROME.replace('"Rome"', "NaN")),
    ("hermes", HERMES_ROME.replace('"Rome"', "1e999")),
    ("hermes", HERMES_ROME.replace('"Rome"', '"\\ud800"')),
    ("hermes", "1 < 2 <tool_ it's \n\n"),
    ("qwen3_coder", CODER_ROME.replace("=weather", "=rm")),
    ("llama3", '{"city": "Rome"}'),
    ("llama3", '\n {"name": "weather"} and more'),
    ("llama3", 'An object: {"name": "weather", "parameters": {}}'),
    ("llama3", "<|python_tag|>print(1)"),
    ("mistral", "[TOOL_CALLS]" + "a" * 400),
    ("mistral", '[TOOL_CALLS][{"name": "time"}, {"name": "rm"}]'),
    ("mistral", 'a [TOOL_CALLS]time[ARGS]"a"'),
    ("gemma", "```json\n[1, 2]\n``` is a list"),
    ("gemma", "```tool_code\nimport os\nos.remove('a')\n```"),
    ("gemma", "```tool_code\nweather(open('a'))\n```"),
]


def calls_of(message: Message) -> list[tuple[str, dict]]:
    return [(call.name, json.loads(call.arguments)) for call in message.tool_calls]


def read_in(pieces: list[str], reply: ReplyFormat) -> tuple[Message, list[Delta]]:
    reader = ReplyReader(reply, TOOLS)
    deltas = [*(reader.feed(piece) for piece in pieces), reader.finish()]
    return reader.message, deltas


@pytest.mark.parametrize(("family", "text", "content", "calls"), CALLS)
def test_calls_come_apart_from_the_content(family, text, content, calls):
    message = read_reply(text, ReplyFormat(family), TOOLS)
    assert (message.content, calls_of(message)) == (content, calls)


@pytest.mark.parametrize(("family", "text"), CONTENTS)
def test_what_is_no_call_stays_content(family, text):
    assert read_reply(text, ReplyFormat(family), TOOLS) == Message("assistant", text)


@pytest.mark.parametrize("family", ["gemma", "llama3", "hermes", "mistral"])
@pytest.mark.parametrize("text", ["[" * 100_000, '{"name": "time", "arguments": ' + '{"a": ' * 50_000 + "}" * 50_002])
def test_deep_nesting_stays_content(family, text):
    text = {"hermes": "<tool_call>", "mistral": "[TOOL_CALLS]"}.get(family, "") + text
    assert read_reply(text, ReplyFormat(family), TOOLS) == Message("assistant", text)


@pytest.mark.parametrize(
    ("text", "reply", "thought", "content"),
    [
        ("\n<think>\nhm <b>\n</think>\n\nHi </think>\n", ReplyFormat("", "think"), "hm <b>", "Hi </think>\n"),
        ("hm\n</think>\n\nHi", ReplyFormat("", "think", in_thought=True), "hm", "Hi"),
        ("<think>hm</think>", ReplyFormat("", "think", in_thought=True), "hm", ""),
        ("hm, cut off </thi", ReplyFormat("", "think", in_thought=True), "hm, cut off </thi", ""),
        ("Hi <think>no</think>", ReplyFormat("hermes", "think"), "", "Hi <think>no</think>"),
        ("[THINK]hm[/THINK]Hi", ReplyFormat("mistral", "THINK"), "hm", "Hi"),
        (" <thi", ReplyFormat("", "think"), "", " <thi"),
        (
            "<|channel|>analysis<|message|>hm<|end|><|start|>assistant<|channel|>analysis<|message|>so<|end|>"
            "<|start|>assistant<|channel|>final<|message|>Hi \n",
            ReplyFormat("harmony"),
            "hm\nso",
            "Hi \n",
        ),
        ("Hi <|end", ReplyFormat("harmony"), "", "Hi <|end"),
        (HARMONY_ROME.replace("weather", "rm"), ReplyFormat("harmony"), "", '{"city": "Rome"}'),
        ("<think>hm <tool_call></think>Hi", ReplyFormat("hermes", "think"), "hm <tool_call>", "Hi"),
    ],
)
def test_thoughts_come_apart_from_the_content(text, reply, thought, content):
    assert read_reply(text, reply, TOOLS) == Message("assistant", content, reasoning=thought)
    assert read_in(list(text), reply)[0] == Message("assistant", content, reasoning=thought)


@pytest.mark.parametrize(("family", "text"), [*((case[0], case[1]) for case in CALLS), *CONTENTS])
@pytest.mark.parametrize("thought", ["", "think"])
def test_a_text_cut_at_every_character_reads_the_same(family, text, thought):
    reply = ReplyFormat(family, thought)
    whole = read_reply(text, reply, TOOLS)
    message, deltas = read_in(list(text), reply)
    assert message == whole
    assert "".join(delta.content for delta in deltas) == whole.content
    assert [call for delta in deltas for call in delta.tool_calls] == [*whole.tool_calls]
    for place in range(len(text)):
        assert read_in([text[:place], text[place:]], reply)[0] == whole


SNIPPETS = [
    *(text for _, text, _, _ in CALLS), *(marker for markers in MARKERS.values() for marker in markers),
    *("<think>", "</think>", "{", "}", "[", '"', "\\", "\n", " ", ";", "Hi", "weather", "```json", "```", "<", "to="),
    *('{"name": "time", "parameters": {}}', "<|channel|>final", "assistant", "\0"),
]  # fmt: skip


@settings(max_examples=400, deadline=None)
@given(
    snippets=st.lists(st.sampled_from(SNIPPETS), max_size=8),
    family=st.sampled_from(["", *MARKERS]),
    thought=st.sampled_from([("", False), ("think", False), ("think", True)]),
    seed=st.integers(0, 1000),
)
def test_any_text_reads_the_same_in_any_cuts(snippets, family, thought, seed):
    text, generator, reply = "".join(snippets), random.Random(seed), ReplyFormat(family, *thought)
    pieces, rest = [], text
    while rest:
        size = generator.randint(1, 9)
        pieces.append(rest[:size])
        rest = rest[size:]
    assert read_in(pieces, reply)[0] == read_reply(text, reply, TOOLS)


def test_content_is_shown_before_a_call_begins():
    reader = ReplyReader(ReplyFormat("hermes"), TOOLS)
    assert [reader.feed(piece).content for piece in ("Hi", " a", " <", "b> ", "<tool_c")] == [
        "Hi",
        " a",
        "",
        " <b>",
        "",
    ]
    assert reader.feed('all>{"name": "time"}</tool_call>').tool_calls[0].name == "time"


def test_ids_of_calls_follow_from_the_request():
    text = HERMES_ROME * 2
    first, again, other = (read_reply(text, ReplyFormat("hermes"), TOOLS, request_id=i) for i in ("a", "a", "b"))
    assert first == again
    ids = [call.id for call in (*first.tool_calls, *other.tool_calls)]
    assert len(set(ids)) == 4
    assert all(len(each) == 9 and each.isalnum() for each in ids)


def test_without_parallel_calls_only_the_first_counts():
    message = read_reply(HERMES_ROME * 3, ReplyFormat("hermes"), TOOLS, parallel=False)
    assert calls_of(message) == [ROME]


@pytest.mark.parametrize("family", MARKERS)
@pytest.mark.parametrize("piece", ["{", '"', "\\", "<tool_call>", "```json", "<|message|>", "[TOOL_CALLS]", " ", "a["])
def test_a_long_answer_takes_time_in_proportion(family, piece):
    """Cut into tokens: in the square of its length, this would take minutes."""
    reader, begin = ReplyReader(ReplyFormat(family, "think"), TOOLS), time.thread_time()
    reader.feed("<tool_call>{[TOOL_CALLS]{" if piece != "a[" else "")
    for _ in range(20_000):
        reader.feed(piece)
    reader.finish()
    assert time.thread_time() - begin < 30


TEMPLATES = [
    ('{{ \'<|im_start|>\' }}<tool_call>{"name": ..., "arguments": ...}</tool_call> <think>', "hermes", "think"),
    ("<tool_call>\n<function=example>\n<parameter=a>", "qwen3_coder", ""),
    ("{% if builtin_tools %}<|python_tag|>{% endif %}", "llama3", ""),
    ('Environment: ipython {"name": "f", "parameters": {}}', "llama3", ""),
    ("[AVAILABLE_TOOLS][TOOL_CALLS][INST]", "mistral", ""),
    ("<start_of_turn>model", "gemma", ""),
    ("<|start|>assistant<|channel|>analysis", "harmony", ""),
    ("<tool_call>{{ name }}<arg_key></tool_call>arguments", None, ""),
    ("<|im_start|>user", None, ""),
]


@pytest.mark.parametrize(("template", "family", "thought"), TEMPLATES)
def test_the_template_shows_the_family(template, family, thought):
    assert (family_of(template), thought_of(template)) == (family, thought)


def test_the_markers_of_a_format_are_those_of_its_calls_and_thoughts():
    assert markers_of(ReplyFormat("mistral", "THINK")) == (*MARKERS["mistral"], "[THINK]", "[/THINK]")
    assert markers_of(ReplyFormat("", "think")) == ("<think>", "</think>")
