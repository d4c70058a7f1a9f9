"""Dataclasses as JSON objects: by their own fields, and passages as OpenAI's annotations, which its clients show.

A message of a chat completion has one kind of annotation, `url_citation`. Clients check for it: some of them leave an
annotation of another kind out, others refuse the whole answer for it.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from typing import Any
from urllib.parse import quote

from memlm.api.answers import cited
from memlm.api.passages import AnswerPrompt, Passage
from memlm.errors import MemlmError
from memlm.server.http.errors import body_of

MOST_URL, MOST_TITLE, MOST_PLACE, MOST_QUOTE = 2000, 150, 300, 1000  # characters: the metadata of a document is large
# A name or a number, a port, and a rest without the signs that end an address in a page or a text.
ADDRESS = re.compile(
    r"https?://(?:\[[0-9A-Fa-f:.]+\]|[\w.-]+)(?::\d{1,4}|:[1-5]\d{4}|:6[0-4]\d{3})?(?:[/?#][^\s\"<>\\^`{|}]*)?"
)
ADDRESS_FIELDS = ("url", "source")  # of a document's metadata


def object_of(record: Any) -> dict[str, Any]:
    """A dataclass as an object. Numbers that are not finite are null."""
    return {field.name: _value(getattr(record, field.name)) for field in fields(record)}


def _value(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, MemlmError):
        return body_of(value)["error"]
    if isinstance(value, tuple | list):
        return [_value(each) for each in value]
    if isinstance(value, Mapping):
        return {str(name): _value(each) for name, each in value.items()}
    return object_of(value) if is_dataclass(value) else value


def annotations_of(prompt: AnswerPrompt, text: str) -> list[dict[str, Any]]:
    """A citation of each passage in the prompt of an answer, the best first.

    Its span is the number that the text names the passage by, or the end of the text.
    """
    return [
        {"type": "url_citation", "url_citation": {**_source(passage), **_span(number, text)}}
        for number, passage in zip(prompt.numbers, prompt.passages, strict=True)
    ]


def url_of(passage: Passage) -> str:
    """The address of its document, as that says in its metadata, else a URI that names datastore, document and place.

    Clients parse it, and link to it where it begins with `http`. So it is a URI in any case, and no other scheme of the
    document's own is taken.
    """
    for name in ADDRESS_FIELDS:
        given = passage.metadata.get(name)
        if isinstance(given, str) and _is_address(given):
            return given
    begin, document = f"memlm:{quote(passage.store, safe='')}", quote(passage.document_id)
    place = f"page={passage.first_page}" if passage.first_page else f"L{passage.first_line}-L{passage.last_line}"
    whole = f"{begin}/{document}#{place}"
    return whole if len(whole) <= MOST_URL else begin[:MOST_URL]  # half an id would name another document


def _source(passage: Passage) -> dict[str, str]:
    place = _cut(passage.sentence_place, MOST_PLACE)
    has_title = passage.title not in ("", passage.document_id)
    pointed = passage.text if passage.sentence is None else passage.sentence.text
    return {
        "url": url_of(passage),
        "title": f"{_cut(passage.title, MOST_TITLE)} ({place})" if has_title else place,
        "content": _cut(pointed, MOST_QUOTE),  # which OpenRouter has too
    }


def _span(number: int, text: str) -> dict[str, int]:
    begin = end = len(text)
    for named in re.finditer(r"\[[\d\s,]+\]", text):
        if number in cited(named.group(), number):
            begin, end = named.span()
            break
    return {"start_index": begin, "end_index": end}


def _is_address(text: str) -> bool:
    return len(text) <= MOST_URL and text.isprintable() and ADDRESS.fullmatch(text) is not None


def _cut(text: str, most: int) -> str:
    return text if len(text) <= most else text[: most - 1] + "…"
