"""The form that a request asks its text to have, in OpenAI's words and in vLLM's -> a constraint."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from memlm.api.constraint import Constraint
from memlm.errors import InvalidInput

ANY_OBJECT = {"type": "object"}
_NAMES = {"json": "json_schema", "regex": "regex", "choice": "choices", "grammar": "grammar"}  # vLLM's, and ours


def constraint_of(body: Mapping[str, Any]) -> Constraint:
    """The constraint of a body. Raises InvalidInput, naming the parameter, for two of them, and for a schema that is
    left out or too large.
    """
    given = list(_given(body))
    if len(given) > 1:
        raise InvalidInput(
            f"{given[0][0]} and {given[1][0]} are given; a text has one form: leave out one", field=given[1][0]
        )
    for parameter, name, value in given:
        try:
            return Constraint.of(**{name: value})
        except InvalidInput as error:
            raise InvalidInput(f"{parameter}: {error}", field=parameter) from None
    return Constraint()


def response_format(form: Mapping[str, Any]) -> dict[str, Any]:
    """A form with its schema beside its type, as newer APIs have it, in the words of a chat completion."""
    if form["type"] != "json_schema":
        return {"type": form["type"]}
    return {"type": "json_schema", "json_schema": {"schema": form["schema"]}}


def _given(body: Mapping[str, Any]) -> Iterator[tuple[str, str, Any]]:
    """Each form that a body asks for: its parameter, the field of a constraint, and the value."""
    form = body.get("response_format", {})
    kind = form.get("type", "text")
    if kind == "json_schema" and "schema" not in form.get("json_schema", {}):
        raise InvalidInput(
            "response_format is json_schema without a schema; put it into json_schema.schema",
            field="response_format.json_schema.schema",
        )
    if kind == "json_schema":
        yield "response_format.json_schema.schema", "json_schema", form["json_schema"]["schema"]
    if kind == "json_object":
        yield "response_format", "json_schema", ANY_OBJECT
    outputs = body.get("structured_outputs", {})
    if outputs.get("json_object"):
        yield "structured_outputs.json_object", "json_schema", ANY_OBJECT
    for theirs, ours in _NAMES.items():
        if theirs in outputs:
            yield f"structured_outputs.{theirs}", ours, outputs[theirs]
        if f"guided_{theirs}" in body:
            yield f"guided_{theirs}", ours, body[f"guided_{theirs}"]
