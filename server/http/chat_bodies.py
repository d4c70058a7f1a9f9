"""The messages and tools of a chat's body -> ours."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from memlm.api.chat import Message
from memlm.api.tools import calls_of, check_template_options, tools_of
from memlm.errors import InvalidInput


def chat_fields(body: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of a `ChatRequest` that no other request has. Raises InvalidInput, naming the parameter."""
    choice = body.get("tool_choice", "auto")
    tools, options = tools_of(body.get("tools", ())), body.get("chat_template_kwargs", {})
    check_template_options(options, name="chat_template_kwargs")
    if not tools and choice == "required":
        raise InvalidInput("tool_choice goes with tools; give tools", field="tool_choice")
    return {
        "messages": tuple(_message(each, place) for place, each in enumerate(body["messages"])),
        "num_passages": body.get("memory", {}).get("passages"),
        "tools": tools,
        "tool_choice": choice if isinstance(choice, str) else choice["function"]["name"],
        "parallel_tool_calls": body.get("parallel_tool_calls", True),
        "reasoning_effort": body.get("reasoning_effort"),
        "template_options": options,
    }


def _message(given: Mapping[str, Any], place: int) -> Message:
    calls = calls_of(given.get("tool_calls", ()))
    if "content" not in given and not calls:
        name = f"messages[{place}].content"
        raise InvalidInput(f"{name} is missing; give it, or tool_calls", field=name)
    has_name = given["role"] in ("tool", "function")
    return Message(
        given["role"],
        content_of(given.get("content", "")),
        calls,
        given.get("tool_call_id", ""),
        given.get("name", "") if has_name else "",
        given.get("reasoning_content", given.get("reasoning", "")),
    )


def content_of(content: Any) -> str:
    """The text of a content, which may come in parts."""
    return content if isinstance(content, str) else "".join(part["text"] for part in content)
