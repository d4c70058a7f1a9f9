"""The schemas of /v1/messages, and the chat that such a body asks for."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from memlm.api.params import MAX_STOP_STRINGS
from memlm.errors import InvalidInput
from memlm.server.http.bodies import CHAT, SAMPLING
from memlm.server.http.chat_bodies import content_of
from memlm.server.http.fields import ignored, object_with, text, unsupported, whole
from memlm.server.http.forms import response_format
from memlm.server.http.schema import Schema

_SAME = ("model", *SAMPLING, "stream", "memory")  # as in a chat completion

_TEXT_OR_BLOCKS: Schema = {
    "anyOf": [
        {"type": "string"},
        {
            "type": "array",
            "items": object_with(
                {
                    "type": {
                        "type": "string",
                        "enum": ["text"],
                        "x-expected": "text; images, documents, search results, tools and thinking are not supported",
                    },
                    "text": text(""),
                    "citations": ignored("array"),
                    "cache_control": ignored("object"),
                },
                ("type", "text"),
            ),
        },
    ],
    "x-expected": "a text, or blocks of the type text",
    "description": "A text, or blocks of the type text.",
}
_TURN = object_with(
    {
        "role": {"type": "string", "enum": ["user", "assistant", "system"]},
        "content": _TEXT_OR_BLOCKS,
        "cache_control": ignored("object"),
    },
    ("role", "content"),
)
_UNSUPPORTED: dict[str, Schema] = {
    "tools": unsupported({"type": "array", "maxItems": 0}),
    "tool_choice": unsupported(
        object_with({"type": unsupported({"type": "string", "enum": ["none", "auto"]})}, ("type",))
    ),
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
    "memory": CHAT["properties"]["memory"],
    "cache_control": ignored("object"),
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
    turns = _joined(body["messages"])
    if turns[-1]["role"] == "assistant":
        raise InvalidInput(
            "the last message is the assistant's; this server does not continue it: end with a message of the user",
            field="messages",
        )
    return {**chat, "messages": [*system, *turns]}


def _joined(messages: list[dict[str, Any]]) -> list[dict[str, str]]:
    """Messages of one role behind each other are one turn, as Anthropic has it: many templates take no others."""
    turns = list[dict[str, str]]()
    for message in messages:
        content = content_of(message["content"])
        if turns and turns[-1]["role"] == message["role"]:
            turns[-1]["content"] += f"\n\n{content}"
        else:
            turns.append({"role": message["role"], "content": content})
    return turns
