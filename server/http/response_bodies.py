"""The schema of /v1/responses, and the chat that such a body asks for."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from memlm.api.params import MAX_STORES
from memlm.api.passages import MAX_PASSAGES
from memlm.api.tools import MAX_TOOLS
from memlm.errors import InvalidInput
from memlm.server.http.bodies import CHAT, SAMPLING
from memlm.server.http.chat_bodies import content_of
from memlm.server.http.fields import ignored, object_with, switch, text, unsupported, whole
from memlm.server.http.forms import response_format
from memlm.server.http.schema import Schema

RESULTS = "file_search_call.results"
_SAME = ("model", *SAMPLING, "stream", "parallel_tool_calls", "chat_template_kwargs")  # as in a chat completion
_IGNORED = ("user", "safety_identifier", "prompt_cache_key", "prompt_cache_retention", "service_tier")
_ROLES = {"developer": "system"}  # by which templates know it

_TEXT_TYPES = ["input_text", "output_text", "reasoning_text", "summary_text"]
_PART = object_with(
    {
        "type": {
            "type": "string",
            "enum": _TEXT_TYPES,
            "x-expected": "input_text or output_text; images, audio and files are not supported",
        },
        "text": text(""),
        "annotations": ignored("array"),
        "logprobs": ignored("array"),
    },
    ("type", "text"),
)
_CONTENT: Schema = {
    "anyOf": [{"type": "string"}, {"type": "array", "items": _PART}],
    "x-expected": "a text, or parts of the types input_text and output_text",
    "description": "A text, or parts of it.",
}
_NEEDED = {
    "message": ("role", "content"),
    "reasoning": (),
    "function_call": ("call_id", "name", "arguments"),
    "function_call_output": ("call_id", "output"),
    "file_search_call": (),
}
_ITEM = object_with(
    {
        "type": {
            "type": "string",
            "enum": list(_NEEDED),
            "x-expected": f"one of {', '.join(_NEEDED)}; other items are not supported",
        },
        "role": {"type": "string", "enum": ["user", "assistant", "system", "developer"]},
        "content": _CONTENT,
        "call_id": text("The id of a call, which its output has too."),
        "name": text("Of a call: the tool."),
        "arguments": text("Of a call: the text of a JSON object."),
        "output": {**_CONTENT, "description": "The result of a call: a text, or parts of it."},
        **{name: ignored("string") for name in ("id", "status", "phase", "encrypted_content")},
        **{name: ignored("array") for name in ("queries", "results", "summary")},
    }
)
_RANKING: dict[str, Schema] = {
    "ranker": {"type": "string", "enum": ["auto"]},
    "score_threshold": {"type": "number", "enum": [0]},
}
_FILE_SEARCH: dict[str, Schema] = {
    "vector_store_ids": {
        "type": "array",
        "items": {"type": "string"},
        "minItems": 1,
        "maxItems": MAX_STORES,
        "description": "Of file_search: the datastores to find passages in.",
    },
    "max_num_results": whole("Of file_search: passages to find.", 1, MAX_PASSAGES),
    "filters": unsupported({"type": "object", "maxProperties": 0}),
    "ranking_options": object_with({name: unsupported(each) for name, each in _RANKING.items()}),
}
_FUNCTION: dict[str, Schema] = {
    "name": text("Of a function: up to 128 letters, digits, '_', '-' and '.'."),
    "description": text("Of a function: what it does, for the model."),
    "parameters": {"type": "object", "description": "Of a function: the JSON Schema of its arguments."},
    "strict": ignored("boolean"),
}
_TOOL = object_with(
    {
        "type": {
            "type": "string",
            "enum": ["file_search", "function"],
            "x-expected": "file_search or function; other tools are not supported",
        },
        **_FILE_SEARCH,
        **_FUNCTION,
    },
    ("type",),
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
            "effort": CHAT["properties"]["reasoning_effort"],
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
        "tools": {
            "type": "array",
            "items": _TOOL,
            "maxItems": MAX_TOOLS + 1,
            "description": "Functions that the model may call, and at most one file_search.",
        },
        "tool_choice": {
            "anyOf": [
                {"type": "string", "enum": ["auto", "none", "required"]},
                object_with(
                    {
                        "type": {"type": "string", "enum": ["file_search", "function"]},
                        "name": text("The function to call."),
                    },
                    ("type",),
                ),
            ],
            "x-expected": "auto, none, required, or an object with the type file_search or function",
            "description": "none: finds and calls nothing. Else passages are found in any case.",
        },
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
    """The tool that finds passages, None where there is none or none may be used. Raises InvalidInput for two."""
    found = [(place, tool) for place, tool in enumerate(body.get("tools", ())) if tool["type"] == "file_search"]
    if len(found) > 1:
        raise InvalidInput("there are two file_search tools; name all datastores in one", field="tools")
    for place, tool in found:
        _check_tool(tool, f"tools[{place}]", "vector_store_ids", _FUNCTION)
    return found[0][1] if found and body.get("tool_choice") != "none" else None


def chat_of(body: Mapping[str, Any], earlier: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The body of a chat completion that asks for the same, behind the `earlier` messages of a conversation."""
    chat: dict[str, Any] = {name: body[name] for name in _SAME if name in body}
    if "max_output_tokens" in body:
        chat["max_completion_tokens"] = body["max_output_tokens"]
    if form := body.get("text", {}).get("format"):
        if form["type"] == "json_schema" and "schema" not in form:
            raise InvalidInput("text.format.schema is missing; give it", field="text.format.schema")
        chat["response_format"] = response_format(form)
    if "effort" in body.get("reasoning", ()):
        chat["reasoning_effort"] = body["reasoning"]["effort"]
    if memory := _memory(body):
        chat["memory"] = memory
    said = [{"role": "system", "content": body["instructions"]}] if body.get("instructions") else []
    return {**chat, **_tools(body), "messages": [*said, *earlier, *messages_of(body["input"])]}


def messages_of(given: str | list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The messages of an input. The thought, the text and the calls of one turn are one message."""
    if isinstance(given, str):
        return [{"role": "user", "content": given}]
    messages = list[dict[str, Any]]()
    for place, item in enumerate(given):
        kind = item.get("type", "message")
        for name in _NEEDED[kind]:
            if name not in item:
                raise InvalidInput(f"input[{place}].{name} is missing; give it", field=f"input[{place}].{name}")
        _ADDERS[kind](messages, item)
    return messages


def _add_message(messages: list[dict[str, Any]], item: Mapping[str, Any]) -> None:
    role, content = _ROLES.get(item["role"], item["role"]), content_of(item["content"])
    if role == "assistant" and messages and messages[-1].keys() == {"role", "content", "reasoning_content"}:
        messages[-1]["content"] += content
    else:
        messages.append({"role": role, "content": content})


def _add_thought(messages: list[dict[str, Any]], item: Mapping[str, Any]) -> None:
    if thought := content_of(item.get("content", "")):
        messages.append({"role": "assistant", "content": "", "reasoning_content": thought})


def _add_call(messages: list[dict[str, Any]], item: Mapping[str, Any]) -> None:
    if not messages or messages[-1]["role"] != "assistant":
        messages.append({"role": "assistant", "content": ""})
    function = {"name": item["name"], "arguments": item["arguments"]}
    messages[-1].setdefault("tool_calls", []).append({"id": item["call_id"], "type": "function", "function": function})


def _add_output(messages: list[dict[str, Any]], item: Mapping[str, Any]) -> None:
    messages.append({"role": "tool", "tool_call_id": item["call_id"], "content": content_of(item["output"])})


def _pass_over(messages: list[dict[str, Any]], item: Mapping[str, Any]) -> None:
    """A search that an earlier response shows is no part of the conversation."""


_ADDERS = {
    "message": _add_message,
    "reasoning": _add_thought,
    "function_call": _add_call,
    "function_call_output": _add_output,
    "file_search_call": _pass_over,
}


def _memory(body: Mapping[str, Any]) -> dict[str, Any]:
    """The memory of the chat, whose datastores and number of passages are those of the tool, if there is one."""
    memory, search = dict(body.get("memory", {})), file_search_of(body)
    has_tool = any(tool["type"] == "file_search" for tool in body.get("tools", ()))
    for name in ("stores", "passages") if has_tool else ():
        if name in memory:
            raise InvalidInput(f"memory.{name} is given with file_search; leave out one", field=f"memory.{name}")
    if search is None:
        return {**memory, "passages": 0} if has_tool else memory
    most = {"passages": search["max_num_results"]} if "max_num_results" in search else {}
    return {**memory, "stores": search["vector_store_ids"], **most}


def _tools(body: Mapping[str, Any]) -> dict[str, Any]:
    """The functions of a chat completion, and which of them to call."""
    tools, choice = list[dict[str, Any]](), body.get("tool_choice", "auto")
    for place, tool in enumerate(body.get("tools", ())):
        if tool["type"] == "function":
            _check_tool(tool, f"tools[{place}]", "name", _FILE_SEARCH)
            function = {name: tool[name] for name in ("name", "description", "parameters") if name in tool}
            tools.append({"type": "function", "function": function})
    if choice not in ("auto", "none") and not body.get("tools"):
        raise InvalidInput(f"tool_choice is {choice!r}, and there are no tools; leave it out", field="tool_choice")
    if isinstance(choice, str):
        return {"tools": tools, "tool_choice": choice if tools else "auto"}
    if choice["type"] == "file_search":  # which is done in any case
        return {"tools": tools}
    if "name" not in choice:
        raise InvalidInput("tool_choice.name is missing; give it", field="tool_choice.name")
    return {"tools": tools, "tool_choice": {"type": "function", "function": {"name": choice["name"]}}}


def _check_tool(tool: Mapping[str, Any], name: str, needed: str, others: Mapping[str, Any]) -> None:
    """Raises InvalidInput for a tool without its parameter, or with those of the other type."""
    if needed not in tool:
        raise InvalidInput(f"{name}.{needed} is missing; give it", field=f"{name}.{needed}")
    for other in others:
        if other in tool:
            raise InvalidInput(f"{name}.{other} is none of {tool['type']}; leave it out", field=f"{name}.{other}")
