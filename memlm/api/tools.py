"""Tools that a model may call, the calls that it makes, and the syntax of an answer that has them."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from memlm.api.prompts import check_text
from memlm.errors import InvalidInput

MAX_TOOLS, MAX_CALLS = 128, 128  # of a request, and of a message
MAX_ID_CHARACTERS = 256
MAX_TEMPLATE_OPTIONS, MAX_OPTION_CHARACTERS = 16, 1000
TOOL_NAME = re.compile(r"[A-Za-z0-9_.-]{1,128}")
TOOL_CHOICES = ("auto", "none", "required")
EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh")
OWN_VARIABLES = frozenset({"messages", "tools", "documents", "add_generation_prompt", "reasoning_effort"})


@dataclass(frozen=True, slots=True)
class Tool:
    """A function that the caller offers. `parameters` is the JSON Schema of the object of its arguments."""

    name: str
    description: str = ""
    parameters: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Raises InvalidInput, naming the field."""
        check_tool_name(self.name, field="tools.name")
        check_text("description", self.description, field="tools.description")
        if self.name in TOOL_CHOICES:
            raise InvalidInput(
                f"a tool is called {self.name!r}, which is a value of tool_choice; expected another name",
                field="tools.name",
            )
        if not isinstance(self.parameters, Mapping):
            raise InvalidInput(
                f"parameters of the tool {self.name} is of the type {type(self.parameters).__name__}; expected a JSON"
                " Schema, such as {'type': 'object', 'properties': {}}",
                field="tools.parameters",
            )
        _json_of(self.parameters, f"parameters of the tool {self.name}", "tools.parameters")

    @property
    def as_function(self) -> dict[str, Any]:
        """The tool as chat templates and OpenAI's requests have it."""
        function = {"name": self.name, "description": self.description, "parameters": dict(self.parameters)}
        return {"type": "function", "function": function}


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A call of an assistant's message: `arguments` is the text of a JSON object. The result's message has its `id`."""

    id: str
    name: str
    arguments: str

    def __post_init__(self) -> None:
        """Raises InvalidInput, naming the field."""
        check_call_id(self.id, field="messages.tool_calls.id")
        check_tool_name(self.name, field="messages.tool_calls.name")
        check_text("arguments", self.arguments, field="messages.tool_calls.arguments")
        if arguments_of(self.arguments) is None:
            raise InvalidInput(
                f"arguments of the call of {self.name} are {self.arguments[:100]!r}; expected the text of a JSON"
                " object",
                field="messages.tool_calls.arguments",
            )


@dataclass(frozen=True, slots=True)
class ReplyFormat:
    """The syntax of an answer that may hold calls or a thought. `memlm.api.replies` reads it.

    `calls` is the family of the calls' syntax, "" where no tool is offered. `thought` is the tag that a thought stands
    in, "" where the model writes none, and `in_thought` says that the prompt ended behind the first one.
    """

    calls: str = ""
    thought: str = ""
    in_thought: bool = False


def arguments_of(text: str) -> dict[str, Any] | None:
    """The object in a call's arguments, {} of an empty text, None where the text is no object of JSON."""
    try:
        value = json.loads(text or "{}", parse_constant=_refuse_constant)
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None


def check_tool_name(name: object, *, field: str) -> None:
    """Raises InvalidInput for anything but a name of a function."""
    check_text("name", name, field=field)
    if not TOOL_NAME.fullmatch(str(name)):
        raise InvalidInput(
            f"the name of a tool is {str(name)[:150]!r}; expected up to 128 letters, digits, '_', '-' and '.'",
            field=field,
        )


def check_call_id(call_id: object, *, field: str) -> None:
    """Raises InvalidInput for anything but an id of a call."""
    check_text("the id of a call", call_id, field=field)
    if len(str(call_id)) > MAX_ID_CHARACTERS:
        raise InvalidInput(
            f"the id of a call has {len(str(call_id)):,} characters; at most {MAX_ID_CHARACTERS}", field=field
        )


def check_tools(tools: Sequence[Tool], choice: str) -> None:
    """Raises InvalidInput for too many tools, two of one name, and a choice that is none of them."""
    names = [tool.name for tool in tools]
    if len(names) > MAX_TOOLS:
        raise InvalidInput(f"there are {len(names)} tools; at most {MAX_TOOLS}", field="tools")
    if twice := {name for name in names if names.count(name) > 1}:
        raise InvalidInput(f"two tools are called {min(twice)!r}; give each another name", field="tools")
    if choice in ("auto", "none"):
        return
    if choice != "required" and choice not in names:
        given = ", ".join(names[:20]) or "none"
        raise InvalidInput(
            f"tool_choice is {choice[:150]!r}; expected auto, none, required, or the name of a tool: {given}",
            field="tool_choice",
        )
    if not names:
        raise InvalidInput("tool_choice is 'required', and there are no tools; give tools", field="tool_choice")


def check_template_options(options: Mapping[str, Any], *, name: str = "template_options") -> None:
    """Raises InvalidInput for anything but a few scalar values by name, and for names that the server sets."""
    if not isinstance(options, Mapping):
        raise InvalidInput(f"{name} is of the type {type(options).__name__}; expected values by name", field=name)
    if len(options) > MAX_TEMPLATE_OPTIONS:
        raise InvalidInput(f"{name} has {len(options)} values; at most {MAX_TEMPLATE_OPTIONS}", field=name)
    for key, value in options.items():
        if not re.fullmatch(r"[A-Za-z][A-Za-z0-9_]{0,63}", str(key)) or key in OWN_VARIABLES:
            raise InvalidInput(f"{name} has {str(key)[:100]!r}, which it may not set; leave it out", field=name)
        if not isinstance(value, bool | int | float | str) or len(str(value)) > MAX_OPTION_CHARACTERS:
            raise InvalidInput(
                f"{key} of {name} is no boolean, number or text of up to {MAX_OPTION_CHARACTERS:,} characters",
                field=name,
            )
        check_text(key, str(value), field=name)


def tools_of(given: object) -> tuple[Tool, ...]:
    """Tools from objects, or from dicts as OpenAI has them, with or without the outer `function`.

    Raises InvalidInput for anything else.
    """
    if isinstance(given, str | Mapping | Tool) or not isinstance(given, Iterable):
        raise InvalidInput(f"tools is of the type {type(given).__name__}; expected a list of tools", field="tools")
    return tuple(map(_tool_of, given))


def _tool_of(given: object) -> Tool:
    if isinstance(given, Tool):
        return given
    function = given.get("function", given) if isinstance(given, Mapping) else None
    if not isinstance(function, Mapping) or "name" not in function:
        raise InvalidInput(
            "a tool is no object with a name; expected name, description and parameters, or"
            " {'type': 'function', 'function': {...}}",
            field="tools",
        )
    return Tool(function["name"], function.get("description") or "", function.get("parameters") or {})


def calls_of(given: object) -> tuple[ToolCall, ...]:
    """Calls from objects, or from dicts as OpenAI has them. Raises InvalidInput for anything else."""
    if isinstance(given, str | Mapping | ToolCall) or not isinstance(given, Iterable):
        raise InvalidInput(
            f"tool_calls is of the type {type(given).__name__}; expected a list of calls", field="messages.tool_calls"
        )
    return tuple(map(_call_of, given))


def _call_of(given: object) -> ToolCall:
    if isinstance(given, ToolCall):
        return given
    function = given.get("function", given) if isinstance(given, Mapping) else None
    if (
        not isinstance(given, Mapping)
        or not isinstance(function, Mapping)
        or not {"name", "arguments"} <= set(function)
    ):
        raise InvalidInput(
            "a call is no object with id, name and arguments; expected these, or"
            " {'id': '...', 'type': 'function', 'function': {'name': '...', 'arguments': '{}'}}",
            field="messages.tool_calls",
        )
    assert isinstance(given, Mapping)
    arguments = function["arguments"]
    if isinstance(arguments, Mapping):
        arguments = _json_of(arguments, "arguments", "messages.tool_calls.arguments")
    return ToolCall(given.get("id") or "", function["name"], arguments)


def _json_of(value: object, what: str, field: str) -> str:
    try:
        text = json.dumps(value, ensure_ascii=False, allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise InvalidInput(f"{what} cannot be written as JSON ({error})", field=field) from None
    check_text(what, text, field=field)
    return text


def _refuse_constant(name: str) -> float:
    raise ValueError(f"{name} is no number of JSON")
