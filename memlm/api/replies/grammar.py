"""The grammar of an answer that must call a tool or have a form, in the family's own syntax, behind a thought: Lark as
llguidance has it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from memlm.api.constraint import WHITESPACE, Constraint
from memlm.api.replies.families import CODER, GEMMA, HARMONY, LLAMA, MISTRAL, tags_of
from memlm.api.tools import ReplyFormat, Tool

# As models were shown calls. Some would write spaces to the end where these are free.
ONE_LINE = {"x-guidance": {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}}
ANY_TEXT = "/(?s:.*)/"
_PARAMETER = re.compile(r"[A-Za-z0-9_.-]+")


def reply_grammar(
    reply: ReplyFormat,
    tools: Sequence[Tool],
    tool_choice: str,
    *,
    parallel: bool = True,
    special: Mapping[str, int] | None = None,
    form: Constraint | None = None,
) -> str:
    """A grammar whose texts call a tool, as `reply` reads it: the chosen one once, or else one of all, and several if
    they may be `parallel`. With a `form` (no grammar), a content that has it may stand in place of
    calls, and does without tools. `special` are the ids of control tokens by their texts, which a grammar names by
    their ids. A thought may come first.
    """
    chosen = [tool for tool in tools if tool_choice in ("auto", "required", tool.name)]
    parallel = parallel and tool_choice in ("auto", "required")
    return "\n".join(_Grammar(reply, special or {}).lines(chosen, form, parallel=parallel)) + "\n"


class _Grammar:
    def __init__(self, reply: ReplyFormat, special: Mapping[str, int]) -> None:
        self._reply, self._special = reply, special

    def lines(self, tools: Sequence[Tool], form: Constraint | None, *, parallel: bool) -> list[str]:
        """The rules, `start` first."""
        names = [f"call_{number}" for number in range(len(tools))]
        calls = [rule for name, tool in zip(names, tools, strict=True) for rule in self._call(name, tool)]
        thought, ways = self._thought(), list[str]()
        if tools:
            calls.insert(0, f"call: {' | '.join(names)}")
            ways.append(self._around("call", parallel=parallel))
        if form is not None:
            calls.append(f"form: {_form(form)}")
            ways.append(self._content("form"))
        start = f"{'thought ' if thought else ''}({' | '.join(ways)})"
        return ["%llguidance {}", f"start: {start}", *thought, *calls]

    def _content(self, form: str) -> str:
        if self._reply.calls != HARMONY:
            return form
        channel, message = map(self._marker, ("<|channel|>", "<|message|>"))
        return f'{channel} "final" {message} {form}'

    def _around(self, call: str, *, parallel: bool) -> str:
        """One call, or several as the family joins them."""
        family, is_list = self._reply.calls, self._reply.calls == MISTRAL and not self._has_heads
        if family == HARMONY or not (parallel or is_list):
            return call
        if is_list:
            more = f' (", " {call})*' if parallel else ""
            opener = self._marker("[TOOL_CALLS]")
            return f'{opener} "[" {call}{more} "]"'
        if family == GEMMA:
            return f'({call} | "[" {call} (", " {call})* "]")'
        joined = {LLAMA: '"; " ', MISTRAL: ""}.get(family, '"\\n" ')
        return f"{call} ({joined}{call})*"

    def _call(self, name: str, tool: Tool) -> list[str]:
        schema = json.dumps({**tool.parameters, "type": "object", **ONE_LINE})
        arguments, shown = f"arguments_{name}", json.dumps(tool.name)
        family = self._reply.calls
        if family == CODER:
            return self._coder_call(name, tool)
        rule = f"{arguments}: %json {schema}"
        if family == HARMONY:
            channel, constrain, message = map(self._marker, ("<|channel|>", "<|constrain|>", "<|message|>"))
            head = _text(f"commentary to=functions.{tool.name} ")
            return [f'{name}: {channel} {head} {constrain} "json" {message} {arguments}', rule]
        if family == MISTRAL and self._has_heads:
            head, after = self._marker("[TOOL_CALLS]"), self._marker("[ARGS]")
            return [f"{name}: {head} {_text(tool.name)} {after} {arguments}", rule]
        key = "parameters" if family in (LLAMA, GEMMA) else "arguments"
        head = _text(f'{{"name": {shown}, "{key}": ')
        body = f'{head} {arguments} "}}"'
        if family in (LLAMA, GEMMA, MISTRAL):
            return [f"{name}: {body}", rule]
        before, after = self._marker("<tool_call>"), self._marker("</tool_call>")
        return [f'{name}: {before} "\\n" {body} "\\n" {after}', rule]

    def _coder_call(self, name: str, tool: Tool) -> list[str]:
        properties = tool.parameters.get("properties")
        required = tool.parameters.get("required") or ()
        shared = {key: tool.parameters[key] for key in ("$defs", "definitions") if key in tool.parameters}
        values, rules = list[str](), list[str]()
        for place, (key, schema) in enumerate(properties.items() if isinstance(properties, Mapping) else ()):
            if _PARAMETER.fullmatch(key):
                value = f"{name}_{place}"
                values.append(value if key in required else f"{value}?")
                rules += _parameter(value, key, schema if isinstance(schema, Mapping) else {}, shared)
        before, after = self._marker("<tool_call>"), self._marker("</tool_call>")
        body = " ".join([_text(f"\n<function={tool.name}>\n"), *values, _text("</function>\n")])
        return [f"{name}: {before} {body} {after}", *rules]

    def _thought(self) -> list[str]:
        """A thought may come first, and does where the prompt began one."""
        if self._reply.calls == HARMONY:
            channel, message, end, start = map(self._marker, ("<|channel|>", "<|message|>", "<|end|>", "<|start|>"))
            if "<|end|>" not in self._special:
                return []
            thought = f'{channel} "analysis" {message} {ANY_TEXT} {end} {start} "assistant"'
            return [f"thought: ({thought})?"]
        if not self._reply.thought:
            return []
        opened, closed = tags_of(self._reply.thought)
        if closed in self._special:
            inner = [f"inner: {ANY_TEXT} {self._marker(closed)}"]
        else:
            inner = [f"inner[suffix={_text(closed)}]: {ANY_TEXT}"]
        space = "/\\n*/"
        thought = f"inner {space}" if self._reply.in_thought else f"({self._marker(opened)} inner {space})?"
        return [f"thought: {thought}", *inner]

    @property
    def _has_heads(self) -> bool:
        """Whether calls of Mistral's are `name[ARGS]{}`, as its newer models have them, and no list."""
        return "[ARGS]" in self._special

    def _marker(self, text: str) -> str:
        return f"<[{self._special[text]}]>" if text in self._special else _text(text)


def _parameter(name: str, key: str, schema: Mapping[str, Any], shared: Mapping[str, Any]) -> list[str]:
    head, end = _text(f"<parameter={key}>\n"), _text("\n</parameter>\n")
    if schema.get("type") != "string":
        value = f"{name}_value: %json {json.dumps({**schema, **shared, **ONE_LINE})}"
        return [f"{name}: {head} {name}_value {end}", value]
    if choices := [each for each in schema.get("enum", ()) if isinstance(each, str)]:
        value = " | ".join(map(_text, choices))
        return [f"{name}: {head} ({value}) {end}"]
    return [f"{name}: {head} {name}_value", f"{name}_value[suffix={end}]: {ANY_TEXT}"]


def _form(form: Constraint) -> str:
    if form.json_schema:
        schema = json.loads(form.json_schema)
        spaced = {"x-guidance": {"whitespace_pattern": WHITESPACE}}
        return f"%json {json.dumps({**spaced, **(schema if isinstance(schema, dict) else {})})}"
    if form.regex:
        return f"/{_slashed(form.regex)}/"
    return " | ".join(map(_text, form.choices))


def _slashed(pattern: str) -> str:
    """A pattern between the slashes of a grammar, in one line."""
    escaped = re.sub(r"\\.|/", lambda found: "\\/" if found[0] == "/" else found[0], pattern, flags=re.DOTALL)
    return escaped.replace("\n", "\\n")


def _text(text: str) -> str:
    """A literal of Lark, which is one of JSON."""
    return json.dumps(text)
