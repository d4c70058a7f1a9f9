"""The schemas of /v1/messages, and the chat that such a body asks for."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from memlm.api.params import MAX_STOP_STRINGS
from memlm.api.tools import MAX_TOOLS
from memlm.errors import InvalidInput
from memlm.server.http.bodies import CHAT, SAMPLING
from memlm.server.http.chat_bodies import content_of
from memlm.server.http.fields import ignored, object_with, switch, text, unsupported, whole
from memlm.server.http.forms import response_format
from memlm.server.http.schema import Schema

_SAME = ("model", *SAMPLING, "stream", "memory", "chat_template_kwargs")  # as in a chat completion

_WORDS = "images, documents and search results are not supported"
_TEXT_BLOCK: dict[str, Schema] = {
    "type": {"type": "string", "enum": ["text"], "x-expected": f"text; {_WORDS}"},
    "text": text(""),
    "citations": ignored("array"),
    "cache_control": ignored("object"),
}
_TEXT_OR_BLOCKS: Schema = {
    "anyOf": [{"type": "string"}, {"type": "array", "items": object_with(_TEXT_BLOCK, ("type", "text"))}],
    "x-expected": "a text, or blocks of the type text",
    "description": "A text, or blocks of the type text.",
}
_NEEDED = {
    "text": ("text",),
    "thinking": ("thinking",),
    "tool_use": ("id", "name", "input"),
    "tool_result": ("tool_use_id",),
}
_ROLES = {"thinking": "assistant", "tool_use": "assistant", "tool_result": "user"}
_BLOCK = object_with(
    {
        **_TEXT_BLOCK,
        "type": {"type": "string", "enum": list(_NEEDED), "x-expected": f"one of {', '.join(_NEEDED)}; {_WORDS}"},
        "thinking": text("Of thinking: the thought."),
        "signature": ignored("string"),
        "id": text("Of tool_use: the id of the call."),
        "name": text("Of tool_use: the tool."),
        "input": {"type": "object", "description": "Of tool_use: its arguments."},
        "caller": ignored("object"),
        "tool_use_id": text("Of tool_result: the id of the call."),
        "content": {**_TEXT_OR_BLOCKS, "description": "Of tool_result: a text, or blocks of the type text."},
        "is_error": ignored("boolean"),
    },
    ("type",),
)
_TURN = object_with(
    {
        "role": {"type": "string", "enum": ["user", "assistant", "system"]},
        "content": {
            "anyOf": [{"type": "string"}, {"type": "array", "items": _BLOCK}],
            "x-expected": "a text, or blocks in a list",
            "description": "A text, or blocks: text, thinking, tool_use and tool_result.",
        },
        "cache_control": ignored("object"),
    },
    ("role", "content"),
)
_TOOL = object_with(
    {
        "type": {"type": "string", "enum": ["custom"], "x-expected": "custom; tools of a server are not supported"},
        "name": text("Up to 128 letters, digits, '_', '-' and '.'."),
        "description": text("What it does, for the model."),
        "input_schema": {"type": "object", "description": "The JSON Schema of its arguments."},
        "strict": ignored("boolean"),
        "cache_control": ignored("object"),
        "eager_input_streaming": ignored("boolean"),
        "input_examples": ignored("array"),
    },
    ("name", "input_schema"),
)
_CHOICES = {"auto": "auto", "any": "required", "none": "none"}
_UNSUPPORTED: dict[str, Schema] = {
    "thinking": unsupported(object_with({"type": unsupported({"type": "string", "enum": ["disabled"]})}, ("type",))),
    "mcp_servers": unsupported({"type": "array", "maxItems": 0}),
    "context_management": unsupported({"type": "object", "maxProperties": 0}),
    "container": unsupported({"type": "string", "enum": [""]}),
    "speed": unsupported({"type": "string", "enum": ["standard"]}),
}
_ASKED: dict[str, Schema] = {
    "model": CHAT["properties"]["model"],
    "messages": {"type": "array", "items": _TURN, "minItems": 1, "description": "The conversation."},
    "system": {**_TEXT_OR_BLOCKS, "description": "Stands before the conversation: a text, or blocks."},
    **{name: CHAT["properties"][name] for name in ("memory", "chat_template_kwargs")},
    "cache_control": ignored("object"),
    "tools": {"type": "array", "items": _TOOL, "maxItems": MAX_TOOLS, "description": "Tools that the model may call."},
    "tool_choice": object_with(
        {
            "type": {"type": "string", "enum": [*_CHOICES, "tool"]},
            "name": text("Of the type tool: the tool to call."),
            "disable_parallel_tool_use": switch("At most one call."),
        },
        ("type",),
        "auto, any, none, or the tool to call.",
    ),
    "output_config": object_with(
        {
            "format": object_with(
                {"type": {"type": "string", "enum": ["json_schema"]}, "schema": {"type": "object"}},
                ("type", "schema"),
                "The text is JSON of this schema.",
            ),
            "effort": unsupported({"type": "string", "enum": [""]}),
        }
    ),
    **_UNSUPPORTED,
}
COUNT = object_with(_ASKED, ("model", "messages"))
MESSAGE = object_with(
    {
        **_ASKED,
        "max_tokens": whole("Maximum number of tokens. The size of the context or more: the room in it.", 1),
        "stop_sequences": {
            "type": "array",
            "items": {"type": "string"},
            "maxItems": MAX_STOP_STRINGS,
            "description": "The text ends before the first of these.",
        },
        **{name: CHAT["properties"][name] for name in _SAME},
        "metadata": ignored("object"),
        "service_tier": ignored("string"),
        "inference_geo": ignored("string"),
    },
    ("model", "messages", "max_tokens"),
)


def chat_of(body: Mapping[str, Any], context_length: int) -> dict[str, Any]:
    """The body of a chat completion that asks for the same.

    Clients give the most that their models ever write as `max_tokens`: from the size of the context on, it is no limit.
    Raises InvalidInput for a conversation that ends in a text of the assistant, which would have to be continued.
    """
    chat: dict[str, Any] = {name: body[name] for name in _SAME if name in body}
    if body.get("max_tokens", context_length) < context_length:
        chat["max_tokens"] = body["max_tokens"]
    if form := body.get("output_config", {}).get("format"):
        chat["response_format"] = response_format(form)
    if "stop_sequences" in body:
        chat["stop"] = body["stop_sequences"]
    system = [{"role": "system", "content": content_of(body["system"])}] if body.get("system") else []
    turns = _joined(
        turn for place, message in enumerate(body["messages"]) for turn in _turns(message, f"messages[{place}]")
    )
    if turns and turns[-1]["role"] == "assistant":
        raise InvalidInput(
            "the last message is the assistant's; this server does not continue it: end with a message of the user",
            field="messages",
        )
    return {**chat, **_tools(body), "messages": [*system, *turns]}


def _tools(body: Mapping[str, Any]) -> dict[str, Any]:
    """The tools of a chat completion, and which of them to call."""
    tools = [
        {"type": "function", "function": {**_described(tool), "parameters": tool["input_schema"]}}
        for tool in body.get("tools", ())
    ]
    choice = body.get("tool_choice", {})
    chosen: dict[str, Any] = {"tool_choice": _CHOICES.get(choice["type"])} if choice else {}
    if choice.get("type") == "tool":
        if "name" not in choice:
            raise InvalidInput("tool_choice.name is missing; give it", field="tool_choice.name")
        chosen = {"tool_choice": {"type": "function", "function": {"name": choice["name"]}}}
    return {"tools": tools, **chosen, "parallel_tool_calls": not choice.get("disable_parallel_tool_use", False)}


def _described(tool: Mapping[str, Any]) -> dict[str, Any]:
    return {name: tool[name] for name in ("name", "description") if name in tool}


def _turns(message: Mapping[str, Any], name: str) -> Iterator[dict[str, Any]]:
    """The messages of a chat completion that say the same: results of tools are messages of their own."""
    content = message["content"]
    if isinstance(content, str):
        yield {"role": message["role"], "content": content}
        return
    for place, block in enumerate(content):
        role = _ROLES.get(block["type"], message["role"])
        if role != message["role"]:
            field = f"{name}.content[{place}].type"
            raise InvalidInput(
                f"{field} is {block['type']!r} in a message of the role {message['role']}; expected {role}", field=field
            )
        for needed in _NEEDED[block["type"]]:
            if needed not in block:
                field = f"{name}.content[{place}].{needed}"
                raise InvalidInput(f"{field} is missing; give it", field=field)
    by_type = {kind: [block for block in content if block["type"] == kind] for kind in _NEEDED}
    for result in by_type["tool_result"]:
        yield {"role": "tool", "tool_call_id": result["tool_use_id"], "content": content_of(result.get("content", ""))}
    turn: dict[str, Any] = {"role": message["role"], "content": "".join(block["text"] for block in by_type["text"])}
    if by_type["tool_use"]:
        turn["tool_calls"] = [_call(block) for block in by_type["tool_use"]]
    if by_type["thinking"]:
        turn["reasoning_content"] = "".join(block["thinking"] for block in by_type["thinking"])
    if by_type["text"] or len(turn) > 2 or not by_type["tool_result"]:
        yield turn


def _call(block: Mapping[str, Any]) -> dict[str, Any]:
    function = {"name": block["name"], "arguments": json.dumps(block["input"], ensure_ascii=False)}
    return {"id": block["id"], "type": "function", "function": function}


def _joined(messages: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """Texts of one role behind each other are one turn, as Anthropic has it: many templates take no others."""
    turns = list[dict[str, Any]]()
    for message in messages:
        if turns and len(turns[-1]) == len(message) == 2 and turns[-1]["role"] == message["role"]:
            turns[-1]["content"] += f"\n\n{message['content']}"
        else:
            turns.append(message)
    return turns
