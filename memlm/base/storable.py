"""The values that a datastore can hold: text that is UTF-8, metadata that is JSON.

Python strings may hold half a surrogate pair, and Python's JSON reader gives NaN and infinities. SQLite, protobuf and
readers of JSON in other languages refuse both, so they are refused where a document comes in.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from memlm.errors import InvalidInput

MAX_DEPTH = 100  # of metadata: JSON readers of other languages stop there
SHOWN_CHARACTERS = 80  # of a key in a message
SHOWN_KEYS = 5  # of a path in a message
HALF_PAIR = re.compile("[\ud800-\udfff]")
REPLACEMENT = "\ufffd"

_KINDS = {str: "a text", Mapping: "fields by name"}
_DECODER = json.JSONDecoder(parse_constant=lambda _: None)


def problem_in(value: Any, name: str = "") -> str:
    """Describes the first part of a value that JSON in UTF-8 cannot hold, by its path from `name`. Empty if there is
    none.
    """
    waiting = [_Part(value, name)]
    while waiting:
        part = waiting.pop()
        if problem := _problem_of(part):
            return f"{part.path} {problem}".lstrip()
        if isinstance(part.value, Mapping):
            waiting += [_Part(item, key, part, part.depth + 1) for key, item in part.value.items()]
        elif isinstance(part.value, list | tuple):
            waiting += [_Part(item, number, part, part.depth + 1) for number, item in enumerate(part.value)]
    return ""


def check_document(document_id: str, title: str, metadata: Mapping[str, Any]) -> None:
    """Raises InvalidInput, naming the document and the field, where a datastore could not hold one of these: an id and
    a title are texts.
    """
    for name, value, kind in (("id", document_id, str), ("title", title, str), ("metadata", metadata, Mapping)):
        other = f"{name} is of the type {type(value).__name__}; expected {_KINDS[kind]}"
        if problem := problem_in(value, name) if isinstance(value, kind) else other:
            raise InvalidInput(f"document {document_id!r}: {problem}", field=f"documents.{name}")


def read_metadata(stored: str) -> Any:
    """Reads metadata from a document table. Tables of older versions may hold NaN, infinities (read as None) and half
    surrogate pairs (read as U+FFFD). Raises ValueError for other text that is no JSON.
    """
    metadata = _DECODER.decode(stored)
    if "\\ud" not in stored:
        return metadata
    return json.loads(HALF_PAIR.sub(REPLACEMENT, json.dumps(metadata, ensure_ascii=False)))


def is_utf8(text: str) -> bool:
    """Whether UTF-8 can hold a text. An id that it cannot hold names no document."""
    return not HALF_PAIR.search(text)


@dataclass(frozen=True, slots=True)
class _Part:
    """A part of a value under its key or number within `outer`."""

    value: Any
    key: Any
    outer: _Part | None = None
    depth: int = 0

    @property
    def path(self) -> str:
        """The keys that lead to this part, the last few of them, on one line."""
        keys, part = list[str](), self
        while part.outer is not None and len(keys) < SHOWN_KEYS:
            is_key = isinstance(part.key, str)
            keys.insert(0, f".{repr(part.key[:SHOWN_CHARACTERS])[1:-1]}" if is_key else f"[{part.key}]")
            part = part.outer
        return ((str(part.key) if part.outer is None else "(...)") + "".join(keys)).removeprefix(".")


def _problem_of(part: _Part) -> str:
    value = part.value
    if isinstance(value, str):
        return "has half a surrogate pair, which is no Unicode text" if HALF_PAIR.search(value) else ""
    if isinstance(value, float):
        return "" if math.isfinite(value) else f"is {value}, which is no JSON number"
    if isinstance(value, Mapping | list | tuple):
        if part.depth >= MAX_DEPTH:
            return f"is nested more than {MAX_DEPTH} levels deep"
        keys = value if isinstance(value, Mapping) else ()
        strange = next((key for key in keys if not isinstance(key, str) or HALF_PAIR.search(key)), None)
        return "" if strange is None else f"has the key {repr(strange)[:SHOWN_CHARACTERS]}, which is no Unicode text"
    return "" if value is None or isinstance(value, int) else f"is a {type(value).__name__}, which JSON does not have"
