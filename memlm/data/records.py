"""A JSON object, or the row of a table -> the fields of a document. Files, tables and uploads follow these rules.

`text` is required. An `id` is a text or a whole number, and without one, or with null or "", the document goes by its
place. A `title` is a text, and any other value of it is metadata, as all further fields are. Of these, `valid_from` is
a time and `supersedes` one or several ids: a document that seems to hold when it does not is worse than none.
"""

from __future__ import annotations

import json
from typing import Any, NamedTuple

from memlm.base.storable import problem_in
from memlm.index.store.filters import id_of, problems_of


class Record(NamedTuple):
    """The fields of a document."""

    id: str
    text: str
    title: str
    metadata: dict[str, Any]


def read_record(value: Any, place: str) -> Record:
    """Reads the fields of a document, whose id is `place` where it has none. Raises ValueError, naming the first thing
    that is wrong with it.
    """
    if not isinstance(value, dict):
        raise ValueError(f"expected an object with a text, got {type(value).__name__}")
    fields = dict(value)
    text, given_id, title = fields.pop("text", None), fields.pop("id", None), fields.get("title")
    if not isinstance(text, str) or not text.strip():
        raise ValueError('"text" is missing, empty or no string')
    if "\0" in text:
        raise ValueError('"text" has a NUL')
    id_ = _id_of(given_id, place)
    if problem := problem_in(value) or next(iter(problems_of(fields).values()), ""):
        raise ValueError(problem)
    if title is None or isinstance(title, str):
        fields.pop("title", None)
    return Record(id_, text, title if isinstance(title, str) else "", fields)


def without_infinite(value: Any) -> tuple[Any, list[str]]:
    """A record without the fields that hold NaN or an infinity, which JSON does not have, and their names."""
    if not isinstance(value, dict) or not problem_in(value):
        return value, []
    names = [name for name, field in value.items() if not _is_finite(field)]
    return {name: field for name, field in value.items() if name not in names}, names


def _id_of(given: Any, place: str) -> str:
    if given is None or given == "":
        return place
    if (id_ := id_of(given)) is not None:
        return id_
    raise ValueError(f'"id" is {json.dumps(given)[:80]}; expected a text or a whole number')


def _is_finite(value: Any) -> bool:
    try:
        json.dumps(value, allow_nan=False)
    except ValueError:
        return False
    except RecursionError:
        return True
    return True
