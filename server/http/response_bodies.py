"""The schema of /v1/responses, and the chat that such a body asks for."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from memlm.api.params import MAX_STORES
from memlm.api.passages import MAX_PASSAGES
from memlm.errors import InvalidInput
from memlm.server.http.bodies import CHAT, SAMPLING
from memlm.server.http.chat_bodies import content_of
from memlm.server.http.fields import ignored, object_with, switch, text, unsupported, whole
from memlm.server.http.forms import response_format
from memlm.server.http.schema import Schema

RESULTS = "file_search_call.results"
_SAME = ("model", *SAMPLING, "stream")  # as in a chat completion
_IGNORED = ("user", "safety_identifier", "prompt_cache_key", "prompt_cache_retention", "service_tier")
_ROLES = {"developer": "system"}  # by which templates know it

_PART = object_with(
    {
        "type": {
            "type": "string",
            "enum": ["input_text", "output_text"],
            "x-expected": "input_text or output_text; images, audio and files are not supported",
        },
        "text": text(""),
        "annotations": ignored("array"),
        "logprobs": ignored("array"),
    },
    ("type", "text"),
)
_ITEM = object_with(
    {
        "type": {
            "type": "string",
            "enum": ["message", "file_search_call"],
            "x-expected": "message or file_search_call; other items are not supported",
        },
        "role": {"type": "string", "enum": ["user", "assistant", "system", "developer"]},
        "content": {
            "anyOf": [{"type": "string"}, {"type": "array", "items": _PART}],
            "x-expected": "a text, or parts of the types input_text and output_text",
        },
        "id": ignored("string"),
        "status": ignored("string"),
        "phase": ignored("string"),
        "queries": ignored("array"),
        "results": ignored("array"),
    }
)
_RANKING: dict[str, Schema] = {
    "ranker": {"type": "string", "enum": ["auto"]},
    "score_threshold": {"type": "number", "enum": [0]},
}
_TOOL = object_with(
    {
        "type": {
            "type": "string",
            "enum": ["file_search"],
            "x-expected": "file_search; other tools are not supported",
        },
        "vector_store_ids": {
            "type": "array",
            "items": {"type": "string"},
            "minItems": 1,
            "maxItems": MAX_STORES,
            "description": "The datastores to find passages in.",
        },
        "max_num_results": whole("Passages to find.", 1, MAX_PASSAGES),
        "filters": unsupported({"type": "object", "maxProperties": 0}),
        "ranking_options": object_with({name: unsupported(each) for name, each in _RANKING.items()}),
    },
    ("type", "vector_store_ids"),
)
_FORMAT = object_with(
    {
        "type": {"type": "string", "enum": ["text", "json_object", "json_schema"]},
        "schema": {"type": "object", "description": "A JSON Schema."},
        "name": ignored("string"),
        "description": ignored("string"),
        "strict": ignored("boolean"),
    },
    ("type",),
)
_UNSUPPORTED: dict[str, Schema] = {
    "background": unsupported({"type": "boolean", "enum": [False]}),
    "conversation": unsupported({"type": "string", "enum": [""]}, advice="use previous_response_id"),
    "context_management": unsupported({"type": "array", "maxItems": 0}),
    "prompt": unsupported({"type": "object", "maxProperties": 0}),
    "reasoning": object_with(
        {
            "effort": unsupported({"type": "string", "enum": ["none"]}),
            "summary": unsupported({"type": "string", "enum": [""]}),
        }
    ),
    "top_logprobs": unsupported({"type": "integer", "enum": [0]}),
    "truncation": unsupported({"type": "string", "enum": ["disabled"]}),
}
RESPONSE = object_with(
    {
        "model": CHAT["properties"]["model"],
        "input": {
            "anyOf": [{"type": "string"}, {"type": "array", "items": _ITEM, "minItems": 1}],
            "x-expected": "a text, or items in a list",
            "description": "A text of the user, or messages.",
        },
        "instructions": text("Stands before the conversation. The next response does not inherit it."),
        "previous_response_id": text("The response that this one goes on from."),
        "store": switch("Keep the response for an hour after its last use. Left out: true."),
        "max_output_tokens": whole("Maximum number of tokens. Left out: the room in the context.", 1),
        **{name: CHAT["properties"][name] for name in (*_SAME, *_IGNORED)},
        "stream_options": object_with({"include_obfuscation": unsupported({"type": "boolean", "enum": [False]})}),
        "memory": CHAT["properties"]["memory"],
        "tools": {"type": "array", "items": _TOOL, "maxItems": 1, "description": "One file_search, or none."},
        "tool_choice": {
            "anyOf": [
                {"type": "string", "enum": ["auto", "none", "required"]},
                object_with({"type": {"type": "string", "enum": ["file_search"]}}, ("type",)),
            ],
            "x-expected": "auto, none, required, or an object with the type file_search",
            "description": "none: finds nothing. Else passages are found in any case.",
        },
        "parallel_tool_calls": ignored("boolean"),
        "max_tool_calls": ignored("integer"),
        "include": {
            "type": "array",
            "items": {"type": "string", "enum": [RESULTS, "reasoning.encrypted_content"]},
            "description": f"{RESULTS}: the passages that were found.",
        },
        "metadata": {
            "type": "object",
            "additionalProperties": {"type": "string", "maxLength": 512},
            "maxProperties": 16,
            "description": "Texts by name, which the response repeats.",
        },
        "text": object_with(
            {"format": _FORMAT, "verbosity": unsupported({"type": "string", "enum": ["medium"]})},
            description="The form of the text: any, a JSON object, or JSON of a schema.",
        ),
        **_UNSUPPORTED,
    },
    ("model", "input"),
)


def file_search_of(body: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """The tool that finds passages, None where it may not be used."""
    tools, choice = body.get("tools", ()), body.get("tool_choice", "auto")
    if not tools and choice not in ("auto", "none"):
        raise InvalidInput(f"tool_choice is {choice!r}, and there are no tools; leave it out", field="tool_choice")
    return tools[0] if tools and choice != "none" else None


def chat_of(body: Mapping[str, Any], earlier: Sequence[Mapping[str, str]]) -> dict[str, Any]:
    """The body of a chat completion that asks for the same, behind the `earlier` messages of a conversation."""
    chat: dict[str, Any] = {name: body[name] for name in _SAME if name in body}
    if "max_output_tokens" in body:
        chat["max_completion_tokens"] = body["max_output_tokens"]
    if form := body.get("text", {}).get("format"):
        if form["type"] == "json_schema" and "schema" not in form:
            raise InvalidInput("text.format.schema is missing; give it", field="text.format.schema")
        chat["response_format"] = response_format(form)
    if memory := _memory(body):
        chat["memory"] = memory
    said = [{"role": "system", "content": body["instructions"]}] if body.get("instructions") else []
    return {**chat, "messages": [*said, *earlier, *messages_of(body["input"])]}


def messages_of(given: str | list[dict[str, Any]]) -> list[dict[str, str]]:
    """The messages of an input. A search that an earlier response shows is no part of the conversation."""
    if isinstance(given, str):
        return [{"role": "user", "content": given}]
    messages = []
    for number, item in enumerate(given):
        if item.get("type", "message") == "message":
            for name in ("role", "content"):
                if name not in item:
                    raise InvalidInput(f"input[{number}].{name} is missing; give it", field=f"input[{number}].{name}")
            role = item["role"]
            messages.append({"role": _ROLES.get(role, role), "content": content_of(item["content"])})
    return messages


def _memory(body: Mapping[str, Any]) -> dict[str, Any]:
    """The memory of the chat, whose datastores and number of passages are those of the tool, if there is one."""
    memory, search = dict(body.get("memory", {})), file_search_of(body)
    if body.get("tools"):
        for name in ("stores", "passages"):
            if name in memory:
                raise InvalidInput(f"memory.{name} is given with file_search; leave out one", field=f"memory.{name}")
    if search is None:
        return {**memory, "passages": 0} if body.get("tools") else memory
    most = {"passages": search["max_num_results"]} if "max_num_results" in search else {}
    return {**memory, "stores": search["vector_store_ids"], **most}
