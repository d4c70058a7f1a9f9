"""Bytes of a text -> its blocks: headings, paragraphs, list items, fenced code.

Headings are lines of Markdown that begin with `#`, and in every text lines of equal length with a line of one sign
below them, as in reStructuredText. Up to three spaces before them do not count: some tokenizers begin a text with one.
A form feed ends a page, and a block as an empty line does.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from memlm.base.passage_texts import format_of

TEXT, CODE, REST = -1, -2, -3  # the levels of blocks that are no headings
UNDERLINES = b"#*=-~^\"'+"  # the highest first, as Python's documentation has them
SIGNS_LEVEL = len(UNDERLINES)  # of `#`, below all that are underlined
TITLE_CHARACTERS = 200  # at most; a longer line is text

_FIRST = rb"(?:\f|\n(?=[ \t\r]*[\n\f]|[ \t]*[-*+=~^\"'`#\d]))"  # quickly passes over other lines
_BLANK = rb"(?P<blank>(?:[ \t\r]*[\n\f])*)"
_HEADING = rb" {0,3}(?P<signs>\#{1,6})[ \t]+(?P<title>[^ \t\n\f][^\n\f]{0,199})(?=[\n\f]|\Z)"
_FENCE = rb"[ \t]*(?P<fence>`{3,}|~{3,})"
_UNDERLINE = rb"(?P<line>(?P<sign>[#*=~^\"'+-])(?P=sign){2,})[ \t\r]*(?=[\n\f]|\Z)"
_ITEM = rb"(?P<item>[ \t]*(?:[-*+]|\d{1,3}[.)])[ \t])"
_IN_PLAIN = re.compile(_FIRST + _BLANK + b"(?:" + b"|".join([_UNDERLINE, _ITEM]) + b")?")
_IN_MARKDOWN = re.compile(_FIRST + _BLANK + b"(?:" + b"|".join([_HEADING, _FENCE, _UNDERLINE, _ITEM]) + b")?")
_LINE_END = re.compile(rb"[\n\f]")
_AFTER_BLANK = re.compile(rb"(?:[\n\f][ \t\r]*\n|\f)\Z")


def is_markdown(document_id: str, metadata: Mapping[str, Any]) -> bool:
    """Whether lines of a document that begin with `#` are headings: by its name, or because it was converted."""
    return bool(format_of(metadata)) or document_id.lower().endswith((".md", ".markdown"))


@dataclass(slots=True)
class Blocks:
    """Where the blocks of a text begin, in order, and what each is: a heading of some level, TEXT, CODE, or the REST of
    a block that began before.
    """

    starts: list[int]
    levels: list[int]
    titles: dict[int, str] = field(default_factory=dict)  # of headings, by where they begin
    fences: dict[int, bytes] = field(default_factory=dict)  # that opened code, by where it begins
    pages: set[int] = field(default_factory=set)  # where text begins a page, in which no sentence goes on

    def add(self, content: bytes, start: int, level: int = TEXT) -> None:
        """Adds a block. Empty text before it goes to the block before that."""
        while self.starts and self.starts[-1] >= start:
            self._drop_last()
        self.drop_empty(content, start)
        self.starts.append(start)
        self.levels.append(level)

    def add_heading(self, content: bytes, start: int, end: int, level: int, title: bytes) -> None:
        """Adds a heading, and the text behind the end of its line."""
        self.add(content, start, level)
        self.titles[start] = title.decode(errors="replace")
        self.add(content, line_after(content, end))

    def drop_empty(self, content: bytes, end: int) -> None:
        """Drops the last block if it is text without anything up to `end`."""
        if self.levels and self.levels[-1] == TEXT and not content[self.starts[-1] : end].strip():
            self._drop_last()

    def _drop_last(self) -> None:
        self.starts.pop()
        self.levels.pop()


def blocks_of(content: bytes, begin: int, fence: bytes, *, markdown: bool) -> Blocks:
    """The blocks of a text from `begin` on, in code if a `fence` is open there. Two line ends stand before the first
    byte of a text.
    """
    first = CODE if fence else TEXT if begin == 2 else REST
    blocks = Blocks([begin], [first], fences={begin: fence})
    for match in (_IN_MARKDOWN if markdown else _IN_PLAIN).finditer(content, begin - 1):
        start, kind = match.end("blank"), match.lastgroup
        if b"\f" in content[match.start() : start] and not _is_small(content, start):
            blocks.pages.add(start)
        if fence:
            if kind == "fence" and _closes(content, match, fence):
                fence = b""
                blocks.add(content, line_after(content, match.end()))
        elif kind == "fence":
            fence = blocks.fences[start] = match["fence"]
            blocks.add(content, start, CODE)
        elif kind == "title" and (title := match["title"].rstrip().rstrip(b"#").strip()):
            blocks.add_heading(content, start, match.end(), SIGNS_LEVEL + len(match["signs"]), title)
        elif kind == "line" and (title_start := _title_above(content, begin, match)) is not None:
            title = content[title_start : match.start()].lstrip(match["sign"]).strip()
            blocks.add_heading(content, title_start, match.end(), UNDERLINES.index(match["sign"]), title)
        elif kind == "item" or match.end("blank") > match.start("blank") or content[match.start()] == ord("\f"):
            blocks.add(content, start)
    blocks.drop_empty(content, len(content))
    return blocks


def line_after(content: bytes, place: int) -> int:
    """Where the next line begins. A form feed ends a line too."""
    end = _LINE_END.search(content, place)
    return end.end() if end else len(content)


def _line_of(content: bytes, end: int) -> int:
    """Where the line begins that goes up to a place. A longer one than a title begins somewhere before that."""
    least = max(0, end - 4 * TITLE_CHARACTERS - 4)
    begin = content.rfind(b"\n", least, end) + 1 or least
    return max(begin, content.rfind(b"\f", begin, end) + 1)


def _is_small(content: bytes, place: int) -> bool:
    """Whether a small letter stands at a place."""
    return content[place : place + 4].decode(errors="replace")[:1].islower()


def _closes(content: bytes, match: re.Match[bytes], fence: bytes) -> bool:
    return match["fence"].startswith(fence) and not content[match.end() : line_after(content, match.end())].strip()


def _title_above(content: bytes, begin: int, match: re.Match[bytes]) -> int | None:
    """Where the title of an underline begins, with a line above it that is alike. None if the line is no underline: its
    title has another length, or stands in a paragraph.
    """
    if match["blank"]:
        return None
    start = _line_of(content, match.start())
    line = content[start : match.start()].rstrip()
    title = line.lstrip(b" ").decode(errors="replace")
    if not title.strip(match["sign"].decode()) or title[0].isspace() or len(title) > TITLE_CHARACTERS:
        return None
    if line.startswith(b"    ") or abs(len(title) - len(match["line"])) > 2:
        return None
    above = _line_of(content, max(0, start - 1))
    if content[above:start].rstrip() == match["line"]:
        start = above
    return start if start >= begin and _AFTER_BLANK.search(content, max(0, start - 64), start) else None
