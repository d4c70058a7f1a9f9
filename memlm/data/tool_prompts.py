"""Tools, calls and their results, as chat templates take them, and as text for templates that know none."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from memlm.api.chat import Message
from memlm.api.replies.families import GEMMA, HARMONY
from memlm.api.tools import Tool, arguments_of

# As Qwen 2.5 and Hermes were trained, which other models imitate best.
_LISTED = """# Tools

You may call one or more functions to assist with the user query.

You are provided with function signatures within <tools></tools> XML tags:
<tools>
{tools}
</tools>

For each function call, return a json object with function name and arguments within <tool_call></tool_call> XML \
tags:
<tool_call>
{{"name": <function-name>, "arguments": <args-json-object>}}
</tool_call>"""
# As Google's documentation of Gemma 3 asks for calls.
_LISTED_FOR_GEMMA = """You have access to functions. If you decide to invoke any of the function(s), you MUST put it \
in the format of
{{"name": function name, "parameters": dictionary of argument name and its value}}

You SHOULD NOT include any other text in the response if you call a function
{tools}"""
_PLAIN = re.compile(r"[\w$ .,-]*", re.ASCII)  # makes no control token, whatever stands around it
_HARMONY_EFFORTS = {"none": "low", "minimal": "low", "xhigh": "high"}  # of which it knows three


class Turn(NamedTuple):
    """A message as a template takes it. `others` are its further fields."""

    role: str
    content: str
    others: Mapping[str, Any] = {}


class Variables(NamedTuple):
    """The variables of a template beside the messages."""

    tools: Sequence[Mapping[str, Any]] = ()
    others: Mapping[str, Any] = {}


def others_of(message: Message, shielded: Callable[[str], str], *, has_thinking: bool = False) -> dict[str, Any]:
    """The fields of a message beside its role and content, each text `shielded`. `has_thinking` adds a thought by the
    name that harmony's template has for it.
    """
    fields: dict[str, Any] = {}
    if message.tool_calls:
        fields["tool_calls"] = [
            call_fields(call.id, call.name, shielded_all(arguments_of(call.arguments), shielded))
            for call in message.tool_calls
        ]
    if message.tool_call_id:
        fields["tool_call_id"] = shielded(message.tool_call_id)
    if message.name:
        fields["name"] = shielded(message.name)
    if message.reasoning:
        fields["reasoning_content"] = shielded(message.reasoning)
        if has_thinking and not message.content:
            fields["thinking"] = fields["reasoning_content"]
    return fields


def call_fields(call_id: str, name: str, arguments: Any) -> dict[str, Any]:
    """A call as templates take it: with arguments as an object."""
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}


def shielded_all(value: Any, shielded: Callable[[str], str]) -> Any:
    """JSON with all its texts shielded, but for those that are words: templates compare them."""
    if isinstance(value, str):
        return value if _PLAIN.fullmatch(value) else shielded(value)
    if isinstance(value, Mapping):
        return {shielded_all(str(key), shielded): shielded_all(each, shielded) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [shielded_all(each, shielded) for each in value]
    return value


def variables_of(effort: str | None, options: Mapping[str, Any], family: str | None) -> dict[str, Any]:
    """The variables of a template that say how much to think, and those that a request names."""
    if effort is None:
        return dict(options)
    shown = _HARMONY_EFFORTS.get(effort, effort) if family == HARMONY else effort
    thinks = {"enable_thinking": False} if effort == "none" else {}
    return {**thinks, "reasoning_effort": shown, **options}


def texts_of(value: Any) -> Iterable[str]:
    """All texts in JSON."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for key, each in value.items():
            yield str(key)
            yield from texts_of(each)
    elif isinstance(value, list | tuple):
        for each in value:
            yield from texts_of(each)


def in_words(
    messages: Sequence[Message], tools: Sequence[Tool], family: str, *, takes_system: bool
) -> tuple[Message, ...]:
    """A conversation for a template that knows no tools: they are listed in the system message, or in the first one
    where the template takes none, and calls and results are texts of messages.
    """
    turns = [_in_words(message, family) for message in messages]
    if not tools:
        return tuple(turns)
    shown = "\n".join(json.dumps(tool.as_function, ensure_ascii=False) for tool in tools)
    listed = (_LISTED_FOR_GEMMA if family == GEMMA else _LISTED).format(tools=shown)
    first = turns[0]
    if first.role == "system":
        return (replace(first, content=f"{first.content}\n\n{listed}"), *turns[1:])
    if takes_system:
        return (Message("system", listed), *turns)
    return (replace(first, content=f"{listed}\n\n{first.content}"), *turns[1:])


def _in_words(message: Message, family: str) -> Message:
    if message.role == "tool":
        named = f"{message.name}: " if message.name else ""
        return Message("user", f"<tool_response>\n{named}{message.content}\n</tool_response>")
    if not message.tool_calls:
        return message
    calls = [_call_in_words(call.name, call.arguments, family) for call in message.tool_calls]
    return Message(message.role, "\n".join(filter(None, [message.content, *calls])), reasoning=message.reasoning)


def _call_in_words(name: str, arguments: str, family: str) -> str:
    if family == GEMMA:
        return json.dumps({"name": name, "parameters": arguments_of(arguments)}, ensure_ascii=False)
    shown = json.dumps({"name": name, "arguments": arguments_of(arguments)}, ensure_ascii=False)
    return f"<tool_call>\n{shown}\n</tool_call>"
