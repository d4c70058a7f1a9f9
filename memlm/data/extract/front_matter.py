"""The fields at the beginning of a file in Markdown, as Jekyll, Hugo and Obsidian have them:

    ---
    title: Paid leave
    valid_from: 2024-07-01
    supersedes: [leave-2023.md]
    tags:
      - people
    ---

This is a small part of YAML. A field is a line `name: value` at the very left. Its value is a text, with or without
quotes, or a list of texts: in brackets, or an item behind `- ` on each of the next lines. Numbers, dates and `true` are
texts too. `#` behind a space begins a comment. A field of any other form is left out, as one with fields of its own is,
one of several lines, or one without a value. Another line at the left says that this is no such block but text between
two rules. The block stays a part of the text, so that lines keep their numbers. It is in no passage where all of its
fields are read.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from typing import Any, TypeAlias

from memlm.base.storable import is_utf8
from memlm.data.extract.kinds import title_of_markdown
from memlm.data.extract.outcome import Unreadable
from memlm.index.store.derived.front_matter import front_matter_of
from memlm.index.store.filters import TITLE, problems_of

OWN = frozenset({"format", "question", "feedback"})  # of how a text came out of its file, and of a user's feedback

_DOUBLE = re.compile(r'"((?:[^"\\]|\\.)*)"')
_SINGLE = re.compile(r"'((?:[^']|'')*)'")
_NO_TEXT = tuple("[]{}&*!|>%@`\"',?")  # what begins other forms of YAML
_NOTHING = frozenset({"", "~", "null", "Null", "NULL"})

Value: TypeAlias = str | list[str] | None


def fields_of_markdown(text: str) -> tuple[str, dict[str, Any]]:
    """The title of a text, that of its fields or else its first heading, and its other fields. Raises Unreadable where
    those that tell versions apart are malformed.
    """
    found, end = front_matter_of(text)
    values = {name: _value(lines) for name, lines in found}
    fields = {name: value for name, value in values.items() if value is not None and name not in OWN}
    if problem := next(iter(problems_of(fields).values()), ""):
        raise Unreadable(problem)
    title = fields.pop(TITLE) if isinstance(fields.get(TITLE), str) else ""
    return str(title) or title_of_markdown(text[end:]), fields


def _value(lines: Sequence[str]) -> Value:
    value, *below = lines
    if value.startswith("["):
        whole = " ".join(map(_without_comment, lines))
        return _texts(_items(whole[1:-1])) if whole.endswith("]") else None
    if below:
        is_list = not _without_comment(value) and all(line.startswith("- ") for line in below)
        return _texts(line[2:].strip() for line in below) if is_list else None
    return _text(value)


def _texts(items: Iterator[str]) -> list[str] | None:
    """The texts of a list, None if one of its items is none."""
    texts = [_text(item) for item in items]
    return None if None in texts else [text for text in texts if text is not None]


def _items(inside: str) -> Iterator[str]:
    """The texts between commas outside of quotes."""
    begin, quote = 0, ""
    for place, sign in enumerate(inside):
        if quote:
            quote = "" if sign == quote and (quote == "'" or inside[place - 1] != "\\") else quote
        elif sign in "\"'" and not inside[begin:place].strip():
            quote = sign
        elif sign == ",":
            yield inside[begin:place].strip()
            begin = place + 1
    if inside[begin:].strip():
        yield inside[begin:].strip()


def _text(value: str) -> str | None:
    """A text with or without quotes. None for no value and for other forms."""
    for quoted in (_DOUBLE, _SINGLE):
        if (match := quoted.match(value)) and not _without_comment(value[match.end() :]):
            return match[1].replace("''", "'") if quoted is _SINGLE else _unescaped(match[0])
    plain = _without_comment(value)
    is_other = plain in _NOTHING or plain.startswith(_NO_TEXT) or (plain + " ").startswith("- ") or ": " in plain + " "
    return None if is_other else plain


def _unescaped(quoted: str) -> str | None:
    try:
        text = str(json.loads(quoted, strict=False))
    except ValueError:
        return None
    return text if is_utf8(text) else None


def _without_comment(value: str) -> str:
    if value.startswith("#"):
        return ""
    return re.split(r"[ \t]#", value, maxsplit=1)[0].rstrip()
