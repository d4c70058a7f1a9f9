"""Headings, paragraphs, list items, tables and code, as they come -> one text, like Markdown."""

from __future__ import annotations

import re
from collections.abc import Iterable

from memlm.data.extract.outcome import Unreadable

MAX_CHARACTERS = 50_000_000  # of a document's text
FENCE = "```"
PAGE_END = "\n\f\n"  # a page begins with a line of its own
BLANKS = re.compile(r"[^\S\n]+")
AROUND_LINE_END = re.compile(r" ?\n ?")
LIKE_A_HEADING = re.compile(r"^(?=#{1,6} )", re.MULTILINE)


class Blocks:
    """Collects the blocks of a document. Raises Unreadable for more than MAX_CHARACTERS of text."""

    def __init__(self) -> None:
        self._pieces, self._characters, self._gap = list[str](), 0, ""
        self._ends_in_row = False

    def heading(self, text: str, level: int) -> None:
        """A heading of a level from 1; those below 6 are of level 6."""
        if text := " ".join(text.split()):
            self._add("\n\n", f"{'#' * max(1, min(level, 6))} {text}")
            self._gap = "\n\n"

    def paragraph(self, text: str, *, gap: str = "\n\n") -> None:
        """A paragraph. A line end within it is one of the original."""
        if text := clean(text):
            self._add(gap, LIKE_A_HEADING.sub(r"\\", text))

    def item(self, text: str, depth: int = 0) -> None:
        """A list item, within `depth` others."""
        if text := clean(text):
            indent = "  " * depth
            self._add("\n", f"{indent}- " + text.replace("\n", f"\n{indent}  "))

    def code(self, text: str) -> None:
        """Code, or another text whose lines stay as they are."""
        if (text := text.strip("\n").rstrip()).strip():
            fence = FENCE
            while fence in text:
                fence += "`"
            self._add("\n\n", f"{fence}\n{text}\n{fence}")

    def row(self, cells: Iterable[str]) -> None:
        """A row of a table. One without text is left out."""
        texts = [" ".join(cell.split()) for cell in cells]
        if any(texts):
            self._add("\n" if self._ends_in_row else "\n\n", f"| {' | '.join(texts)} |")
            self._ends_in_row = True

    def markdown(self, text: str) -> None:
        """A text with marks of its own, or lines that mean something, as it is."""
        if text := text.strip("\n").rstrip():
            self._add("\n\n", text)
            self._gap = "\n\n"

    def part(self) -> None:
        """Ends a list, or a table: an empty line follows."""
        self._gap = "\n\n"

    def page(self) -> None:
        """Ends a page, also one without text."""
        self._count(1)
        self._pieces.append(PAGE_END)
        self._gap = ""

    @property
    def is_blank(self) -> bool:
        """Whether no text has come yet."""
        return not any(piece.strip() for piece in self._pieces)

    def text(self) -> str:
        """The whole text."""
        return "".join(self._pieces)

    def _add(self, gap: str, text: str) -> None:
        begins = not self._pieces or self._pieces[-1] == PAGE_END
        gap = "" if begins else max(gap, self._gap, key=len)
        self._count(len(gap) + len(text))
        self._pieces += [gap, text]
        self._gap, self._ends_in_row = "", False

    def _count(self, characters: int) -> None:
        self._characters += characters
        if self._characters > MAX_CHARACTERS:
            raise Unreadable(f"has more than {MAX_CHARACTERS:,} characters of text; split it")


def clean(text: str) -> str:
    """A text whose blanks are one space each, with no blanks around its lines, and no empty lines."""
    text = AROUND_LINE_END.sub("\n", BLANKS.sub(" ", text).strip())
    while "\n\n" in text:
        text = text.replace("\n\n", "\n")
    return text
