"""Parts of the schemas of bodies."""

from __future__ import annotations

from dataclasses import MISSING, fields
from typing import Any, get_args, get_type_hints

from memlm.api.passages import MAX_PASSAGES
from memlm.base.options import OPTION, Bounds, Option, bounds_of
from memlm.server.http.schema import INT32, Schema

_KINDS = {bool: "boolean", int: "integer", float: "number", str: "string"}


def whole(description: str, least: int = 0, most: int = INT32) -> Schema:
    """A whole number."""
    return {"type": "integer", "minimum": least, "maximum": most, "description": description}


def number(description: str, **bounds: float) -> Schema:
    """A number."""
    return {"type": "number", **bounds, "description": description}


def text(description: str) -> Schema:
    """A text."""
    return {"type": "string", "description": description}


def texts(description: str) -> Schema:
    """Texts in a list."""
    return {"type": "array", "items": {"type": "string"}, "maxItems": MAX_PASSAGES, "description": description}


def switch(description: str) -> Schema:
    """True or false."""
    return {"type": "boolean", "description": description}


def object_with(properties: dict[str, Schema], required: tuple[str, ...] = (), description: str = "") -> Schema:
    """An object of these properties, and no others."""
    return {
        "type": "object",
        "properties": properties,
        "required": list(required),
        "additionalProperties": False,
        **({"description": description} if description else {}),
    }


def field_of(record_type: Any, name: str, description: str = "") -> Schema:
    """The schema of a dataclass's field: its type, its bounds, and the help of its command-line option."""
    hint, limits = get_type_hints(record_type)[name], bounds_of(record_type).get(name, Bounds())
    kind = next(kind for each, kind in _KINDS.items() if each in (hint, *get_args(hint)))
    field = next(each for each in fields(record_type) if each.name == name)
    shown = field.metadata.get(OPTION, Option(""))
    default = shown.default or ("" if field.default in (None, False, MISSING) else field.default)
    words = [description or shown.help, "Above 0." if limits.above == 0 else ""]
    words.append(f"Left out: {default}." if default and not description else "")
    most = INT32 if limits.most is None and kind == "integer" else limits.most
    return {
        "type": kind,
        **({} if limits.least is None else {"minimum": limits.least}),
        **({} if most is None else {"maximum": most}),
        "description": " ".join(filter(None, words)),
    }


def limit(description: str) -> Schema:
    """At least 1, or -1 for none."""
    return {
        "anyOf": [{"type": "integer", "minimum": 1, "maximum": INT32}, {"type": "integer", "enum": [-1]}],
        "x-expected": "at least 1, or -1 for no limit",
        "x-none": [-1],
        "description": f"{description} -1: the same.",
    }


def unsupported(neutral: Schema, description: str = "Not supported.", advice: str = "leave it out") -> Schema:
    """An option that is not there. It takes the values of `neutral`, which ask for nothing."""
    return {**neutral, "x-unsupported": advice, "description": description}


def ignored(kind: str) -> Schema:
    """A value of any content."""
    return {"type": kind, "description": "Accepted, and without effect."}
