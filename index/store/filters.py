"""Which documents of a store a search looks at: by their ids, their metadata, and the time at which they hold.

Two fields of the metadata tell versions apart: `valid_from`, a time from which a document holds, and `supersedes`, the
ids of the documents whose place it takes (`memlm.index.store.derived.versions`).
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any

from memlm.errors import InvalidInput
from memlm.index.store.document_names import is_named

if TYPE_CHECKING:
    from memlm.index.store.documents import DocumentRow

TITLE = "title"
VALID_FROM, SUPERSEDES, TODAY = "valid_from", "supersedes", "today"
A_TIME = "a date, as 2024-05-01, or a date and a time, as 2024-05-01T09:30+02:00"
EXACT = 1 << 53  # whole numbers from here on lose digits as floats
SHOWN_CHARACTERS = 80  # of a malformed value

_DAY = re.compile("[0-9]{4}-[0-9]{2}-[0-9]{2}")
_EPOCH, _TICK = datetime(1970, 1, 1, tzinfo=UTC), timedelta(microseconds=1)


@dataclass(frozen=True, slots=True)
class DocumentFilter:
    """Chooses the documents that match any of the `documents`, if there are some, and all of the fields of `where`.

    One of `documents` is an id, the folder that ids begin with (`docs` or `docs/`), or a glob (`docs/*.md`, in which *
    crosses folders). A field matches by its text, its JSON, or an item of its list; `title` is a field too, unless the
    metadata has one of that name.
    """

    documents: tuple[str, ...] = ()
    where: tuple[tuple[str, str], ...] = ()

    def __bool__(self) -> bool:
        return bool(self.documents or self.where)

    def accepts(self, document: DocumentRow) -> bool:
        """Whether a document is chosen."""
        if self.documents and not any(is_named(document.id, name) for name in self.documents):
            return False
        return all(
            any(value in (item, json.dumps(item)) for item in items_of_field(document, name))
            for name, value in self.where
        )


def items_of_field(document: DocumentRow, name: str) -> Sequence[Any]:
    """The values of a field of a document: the items of a list, or the only value. Empty for a field that it lacks."""
    if name in document.metadata:
        found = document.metadata[name]
        return found if isinstance(found, list) else (found,)
    return (document.title,) if name == TITLE else ()


def as_of_day(text: object) -> str | None:
    """Checks the time of a request: a date, a date and a time, or `today`, which becomes the date on this computer.
    None stays None. Raises InvalidInput.
    """
    if text == TODAY:
        return datetime.now().astimezone().date().isoformat()
    if text is not None and begin_of(text) is None:
        raise InvalidInput(f"as_of is {_shown(text)}; expected {A_TIME}, or {TODAY}", field="as_of")
    return None if text is None else str(text)


def moment_of(as_of: str) -> int:
    """The last microsecond since 1970 of a day, or that of a date and a time."""
    begin = begin_of(as_of)
    assert begin is not None  # as_of_day checked it
    return begin + (timedelta(days=1) // _TICK - 1) * bool(_DAY.fullmatch(as_of))


def begin_of(value: object) -> int | None:
    """The microseconds since 1970 at which a day begins, or those of a date and a time, which are of UTC where they
    have no offset. None for any other value.
    """
    if not isinstance(value, str) or not _DAY.match(value):
        return None
    try:
        moment = datetime.fromisoformat(value)
    except ValueError:
        return None
    return ((moment if moment.tzinfo else moment.replace(tzinfo=UTC)) - _EPOCH) // _TICK


def ids_of(metadata: Mapping[str, Any]) -> list[str]:
    """The ids of the documents that one with this metadata supersedes, each once."""
    return list(dict.fromkeys(filter(None, map(id_of, _items(metadata.get(SUPERSEDES))))))


def id_of(value: object) -> str | None:
    """An id as it is given in metadata: a text, or a whole number. None for anything else, as one of more digits than
    Python writes.
    """
    if isinstance(value, float) and value.is_integer() and abs(value) < EXACT:  # of a column that had a gap
        return str(int(value))
    with suppress(ValueError):
        return str(value) if isinstance(value, str | int) and not isinstance(value, bool) else None
    return None


def problems_of(metadata: Mapping[str, Any]) -> dict[str, str]:
    """What is wrong with the fields that tell versions apart, by field. None and "" stand for no value."""
    problems = dict[str, str]()
    begin, ids = metadata.get(VALID_FROM), metadata.get(SUPERSEDES)
    if begin not in (None, "") and begin_of(begin) is None:
        problems[VALID_FROM] = f"{VALID_FROM} is {_shown(begin)}; expected {A_TIME}"
    if None in map(id_of, _items(ids)):
        problems[SUPERSEDES] = f"{SUPERSEDES} is {_shown(ids)}; expected the id of a document, or a list of ids"
    return problems


def _items(ids: object) -> Sequence[object]:
    if isinstance(ids, list | tuple):
        return ids
    return () if ids in (None, "") else (ids,)


def _shown(value: object) -> str:
    try:
        return repr(value)[:SHOWN_CHARACTERS]
    except ValueError:  # a number
        return "a value with too many digits"
