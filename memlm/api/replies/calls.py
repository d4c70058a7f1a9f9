"""The text of one call, or of several in one piece -> the names of the tools and the arguments."""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

from memlm.api.replies.families import CODER, GEMMA, HERMES, LLAMA, MISTRAL
from memlm.api.tools import Tool, arguments_of

Call: TypeAlias = "tuple[str, str]"  # a tool's name, and its arguments as JSON
MAX_CODE_CHARACTERS = 1 << 14  # of calls as code of Python
_FUNCTION = re.compile(r"<function=([^>\s]+)>(.*?)</function>", re.DOTALL)
_PARAMETER = re.compile(r"<parameter=([^>\s]+)>\n?(.*?)\n?</parameter>", re.DOTALL)
_HEAD = re.compile(r"\s*([A-Za-z0-9_.-]+)\s*(?:\[CALL_ID\]\s*[A-Za-z0-9_-]*\s*)?\[ARGS\]")


def calls_in(family: str, text: str, tools: Mapping[str, Tool]) -> list[Call] | None:
    """The calls in a piece of an answer that begins as a call does. None where it is none: for broken JSON, arguments
    that are no object, and a tool that was not offered.
    """
    try:
        found = _READERS[family](text, tools)
    except (ValueError, TypeError, RecursionError, SyntaxError, MemoryError):
        return None
    return found if found and all(name in tools for name, _ in found) else None


def checked_arguments(value: Any) -> str:
    """Arguments as the text of a JSON object. Raises ValueError for anything else."""
    if isinstance(value, str):
        value = arguments_of(value)
    if not isinstance(value, dict):
        raise ValueError("arguments are no object")
    text = json.dumps(value, ensure_ascii=False, allow_nan=False)
    text.encode()  # half of a surrogate pair
    if "\0" in text:
        raise ValueError("arguments have a NUL")
    return text


def _json_calls(text: str, *, needs_arguments: bool = False) -> list[Call]:
    value = json.loads(text)
    return [_json_call(each, needs_arguments) for each in (value if isinstance(value, list) else [value])]


def _json_call(value: Any, needs_arguments: bool) -> Call:
    if not isinstance(value, dict) or not isinstance(value.get("name"), str):
        raise ValueError("a call has no name")
    arguments = value.get("arguments", value.get("parameters"))
    if arguments is None and not needs_arguments:
        arguments = {}
    return value["name"], checked_arguments(arguments)


def _hermes(text: str, tools: Mapping[str, Tool]) -> list[Call]:
    return _json_calls(text.removeprefix("<tool_call>").removesuffix("</tool_call>"))


def _coder(text: str, tools: Mapping[str, Tool]) -> list[Call]:
    calls = list[Call]()
    for name, body in _FUNCTION.findall(text):
        kinds = _kinds(tools[name]) if name in tools else {}
        given = {key: _typed(value, kinds.get(key, "string")) for key, value in _PARAMETER.findall(body)}
        calls.append((name, checked_arguments(given)))
    return calls


def _kinds(tool: Tool) -> dict[str, Any]:
    """The types of a tool's parameters, by name."""
    properties = tool.parameters.get("properties")
    if not isinstance(properties, Mapping):
        return {}
    return {key: schema.get("type", "") if isinstance(schema, Mapping) else "" for key, schema in properties.items()}


def _typed(text: str, kind: Any) -> Any:
    """A parameter's value: a text where its schema says so or where it is no JSON."""
    if kind == "string":
        return text
    try:
        return json.loads(text)
    except ValueError:
        return text


def _llama(text: str, tools: Mapping[str, Tool]) -> list[Call]:
    return _json_calls(text.removeprefix("<|python_tag|>"), needs_arguments=True)


def _mistral(text: str, tools: Mapping[str, Tool]) -> list[Call]:
    text = text.removeprefix("[TOOL_CALLS]")
    if head := _HEAD.match(text):
        return [(head[1], checked_arguments(json.loads(text[head.end() :])))]
    return _json_calls(text)


def _gemma(text: str, tools: Mapping[str, Tool]) -> list[Call]:
    if text.startswith("```"):
        text = re.sub(r"^```\w+", "", text).removesuffix("```").strip()
    try:
        return _json_calls(text, needs_arguments=True)
    except ValueError:
        return _python_calls(text, tools)


def _python_calls(text: str, tools: Mapping[str, Tool]) -> list[Call]:
    """Calls as code, such as `print(weather(city="Rome"))`: only literals as arguments."""
    if len(text) > MAX_CODE_CHARACTERS:
        raise ValueError("the code is too long")
    calls = list[Call]()
    for statement in ast.parse(text).body:
        if not isinstance(statement, ast.Expr):
            raise ValueError("the code has other statements than calls")
        listed = statement.value.elts if isinstance(statement.value, ast.List) else [statement.value]
        calls += [_python_call(each, tools) for each in listed]
    return calls


def _python_call(node: ast.expr, tools: Mapping[str, Tool]) -> Call:
    if not isinstance(node, ast.Call):
        raise ValueError("the code is no call")
    name = ast.unparse(node.func)
    if name == "print" and name not in tools and len(node.args) == 1:
        return _python_call(node.args[0], tools)
    if node.args or any(each.arg is None for each in node.keywords):
        raise ValueError("an argument has no name")
    return name, checked_arguments({str(each.arg): ast.literal_eval(each.value) for each in node.keywords})


_READERS: dict[str, Callable[[str, Mapping[str, Tool]], list[Call]]] = {
    HERMES: _hermes, CODER: _coder, LLAMA: _llama, MISTRAL: _mistral, GEMMA: _gemma,
}  # fmt: skip
