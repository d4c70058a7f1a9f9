"""A text -> the places of its sentences: those of paragraphs, and in text without sentences the items that stand for
them, which are list items, rows of tables, headings and blocks of code.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import NamedTuple

STOPS = "|".join("。！？｡।॥؟۔")  # behind which no space has to follow
LONGEST = 400  # characters of a sentence, above which the ends of its lines count too

_END = re.compile(rf"(?<=[\w\"')\]%])[.!?][\"')\]]*\s+(?![a-z\s])|(?:{STOPS})(?:」|』|[\"')\]])*\s*")
_LINES = re.compile(r"[^\n\f]+")
_ITEM = re.compile(r"[ \t]*(?:[-*+•][ \t]|\d{1,3}[.)][ \t]|#{1,6}[ \t]|\|| {4}|\t)")
_HEADING, _FENCE = re.compile(r"#{1,6}[ \t]"), re.compile(r"[ \t]*(?:```|~~~)")
# Words that a period follows within a sentence, and single letters, as of initials and "e.g.".
_SHORT = re.compile(r"(?:\b(?:[A-Za-z]|cf|vs|etc|al|Dr|Mr|Mrs|Ms|Prof|St|Jr|Sr|Fig|Eq|Sec|Nr|No|approx|incl))\.$")


class Span(NamedTuple):
    """The first and last character (exclusive) of a sentence, without the space around it."""

    begin: int
    end: int
    is_heading: bool = False

    def of(self, text: str) -> str:
        """The sentence in its text."""
        return text[self.begin : self.end]


def sentences_of(text: str) -> list[Span]:
    """The places of the sentences of a text."""
    found = list[Span]()
    for begin, end, is_code in _blocks(text):
        is_heading = not is_code and _HEADING.match(text, begin) is not None
        for first, last in [(begin, end)] if is_code or is_heading else _within(text, begin, end):
            places = _lines(text, first, last) if last - first > LONGEST else [(first, last)]
            found += [Span(*place, is_heading) for place in places]
    return found


def _blocks(text: str) -> Iterator[tuple[int, int, bool]]:
    """Paragraphs, whose lines go on in the next one, items, and code, which is what stands between two fences."""
    begin = end = -1
    is_code = False
    for line in _LINES.finditer(text):
        is_fence = _FENCE.match(line.group()) is not None
        goes_on = is_code or (
            text[end : line.start()] == "\n" and not _ITEM.match(line.group()) and not _HEADING.match(text, begin, end)
        )
        if end >= 0 and (is_fence or not goes_on):
            yield begin, end, is_code
            begin = end = -1
        if is_fence:
            is_code = not is_code
        elif line.group().strip():
            begin, end = line.start() if end < 0 else begin, line.end()
    if end >= 0:
        yield begin, end, is_code


def _within(text: str, begin: int, end: int) -> Iterator[tuple[int, int]]:
    first = begin
    for match in _END.finditer(text, begin, end):
        if not _SHORT.search(text[max(first, match.start() - 8) : match.start() + 1]):
            yield from _trimmed(text, first, match.end())
            first = match.end()
    yield from _trimmed(text, first, end)


def _lines(text: str, begin: int, end: int) -> Iterator[tuple[int, int]]:
    for line in _LINES.finditer(text, begin, end):
        yield from _trimmed(text, line.start(), line.end())


def _trimmed(text: str, begin: int, end: int) -> Iterator[tuple[int, int]]:
    piece = text[begin:end]
    if kept := piece.strip():
        begin += len(piece) - len(piece.lstrip())
        yield begin, begin + len(kept)
