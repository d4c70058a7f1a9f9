"""The tokens of a document -> where its passages begin, and the headings above each.

A passage begins at a heading, a paragraph or a list item. What stands together under one heading, and on one page, is
joined while it has four fifths of `limit` tokens, and a heading without text goes with the next block. Code in fences
is one block, a table too. A block that is longer is cut at the ends of sentences, else of lines, else of words, else of
characters. The last fifth is for text that would be left alone otherwise: a short begin before a long block, or a short
end.

Bytes are read, which every tokenizer has, and a window of tokens at a time, so that a document may be of any length.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Generator, Iterator
from typing import NamedTuple, TypeAlias

import numpy as np
from jaxtyping import Int64

from memlm.base.sentences import STOPS
from memlm.index.store.derived.front_matter import (
    MOST_CHARACTERS,
    may_begin_front_matter,
    size_of_front_matter,
)
from memlm.index.store.derived.text_blocks import CODE, blocks_of

DecodeBytes: TypeAlias = Callable[[list[int]], bytes]
Path: TypeAlias = tuple[tuple[int, str], ...]  # the level and the title of each heading above a place

WINDOW_TOKENS = 1 << 16
TOKENS_BEFORE = 16  # of a window, which tell whether it begins a line
FIRST_TOKENS = 8  # have the sign of front matter
HEADING_TOKENS = 512  # at most, with a line below
_CODE_LINE = re.compile(rb" {4}|\t|[ \t]*\|")
_SENTENCES = re.compile(rf"[.!?][\"')\]]*\s+(?![a-z\s])|(?:{STOPS})(?:」|』|[\"')\]])*\s*".encode())
_LINES, _WORDS = re.compile(rb"[\n\f]+"), re.compile(rb"\s+")


class Cut(NamedTuple):
    """Where a passage begins: in a token of its document, whose first `skip` bytes are of the passage before.

    `headings` are those above its text and those with which it begins, the highest first. `line_ends` and `page_ends`
    (form feeds) stand before it in its document.
    """

    row: int
    skip: int
    headings: tuple[str, ...]
    line_ends: int
    page_ends: int


class TokenLengths:
    """Tokens -> the number of bytes of each. It learns them as they come."""

    def __init__(self, decode_bytes: DecodeBytes) -> None:
        self._decode_bytes = decode_bytes
        self._lengths_V = np.zeros(0, np.int64)

    def __call__(self, tokens_T: Int64[np.ndarray, " T"]) -> Int64[np.ndarray, " T"]:
        """The number of bytes of each token."""
        if (missing := int(tokens_T.max(initial=0)) + 1 - len(self._lengths_V)) > 0:
            self._lengths_V = np.concatenate([self._lengths_V, np.full(missing, -1)])
        lengths_T = self._lengths_V[tokens_T]
        if (lengths_T < 0).any():
            for token in np.unique(tokens_T[lengths_T < 0]).tolist():
                self._lengths_V[token] = len(self._decode_bytes([token]))
            lengths_T = self._lengths_V[tokens_T]
        return lengths_T


class Cutter:
    """Cuts documents of one tokenizer into passages of at most `limit` tokens, of 8 or more."""

    def __init__(self, decode_bytes: DecodeBytes, limit: int) -> None:
        self._decode_bytes, self._lengths_of, self._limit = decode_bytes, TokenLengths(decode_bytes), limit
        self._ahead = 3 * limit + HEADING_TOKENS  # decide where a passage ends

    def cuts(self, tokens_T: Int64[np.ndarray, " T"], *, markdown: bool, fields: Collection[str] = ()) -> Iterator[Cut]:
        """Yields where the passages of a document begin, in order, the first one at its first token, or behind front
        matter with one of some `fields`. A document without tokens has none. Any integers will do as tokens, also of a
        mapped file.
        """
        place = self._begin(tokens_T, fields) if len(tokens_T) else None
        while place is not None:
            place = yield from self._window(tokens_T, place, markdown=markdown).cuts()

    def _begin(self, tokens_T: Int64[np.ndarray, " T"], fields: Collection[str]) -> _Place:
        head_T = tokens_T[: 4 * MOST_CHARACTERS]  # which has as many bytes at least, and so the block
        may_have = fields and may_begin_front_matter(self._decode_bytes(head_T[:FIRST_TOKENS].tolist()))
        content = self._decode_bytes(head_T.tolist()) if may_have else b""
        if not (size := size_of_front_matter(content, fields)):
            return _Place(0, 0, (), b"", 0, 0)
        ends_T = self._lengths_of(head_T).cumsum()
        row = int(np.searchsorted(ends_T, size, side="right"))
        skip = size - int(ends_T[row - 1]) if row else size
        return _Place(row, skip, (), b"", content.count(b"\n", 0, size), content.count(b"\f", 0, size))

    def _window(self, tokens_T: Int64[np.ndarray, " T"], place: _Place, *, markdown: bool) -> _Window:
        first = max(0, place.row - TOKENS_BEFORE)
        last = place.row + max(WINDOW_TOKENS, 2 * self._ahead)
        before, ahead = b"" if first else b"\n\n", self._ahead if last < len(tokens_T) else None
        content = before + self._decode_bytes(tokens_T[first:last].tolist())
        ends_T = len(before) + self._lengths_of(tokens_T[first:last]).cumsum()
        bounds_T = np.concatenate([[len(before)], ends_T])
        return _Window(content, bounds_T, first, place, self._limit, markdown=markdown, ahead=ahead)


class _Place(NamedTuple):
    """Where the next passage begins, the headings and the fence of code that are open there, and the ends before it."""

    row: int
    skip: int
    path: Path
    fence: bytes
    line_ends: int
    page_ends: int


class _Window:
    """Some tokens of a document, from a little before a passage on."""

    def __init__(
        self,
        content: bytes,
        bounds_T: Int64[np.ndarray, " T+1"],
        first_row: int,
        place: _Place,
        limit: int,
        *,
        markdown: bool,
        ahead: int | None,
    ) -> None:
        self._content, self._bounds_T, self._first_row = content, bounds_T, first_row
        self._last_row = np.inf if ahead is None else len(bounds_T) - 1 - ahead  # that has enough behind it
        self._limit, self._usual, self._little = limit, limit * 4 // 5, limit // 5
        self._place, self._path, self._begin = place, place.path, self._start_of(place.row - first_row) + place.skip
        self._blocks = blocks_of(content, self._begin, place.fence, markdown=markdown)
        self._starts = [*self._blocks.starts, len(content)]
        self._rows: list[int] = np.searchsorted(bounds_T[1:], self._starts, side="right").tolist()

    def cuts(self) -> Generator[Cut, None, _Place | None]:
        """Yields where passages begin. Returns where the next window goes on, None at the end of the document."""
        begin, row, skip, block = self._begin, self._place.row - self._first_row, self._place.skip, 0
        lines, pages = self._place.line_ends, self._place.page_ends
        while row <= self._last_row:
            end, block = self._end(begin, row, block)
            yield Cut(self._first_row + row, skip, tuple(title for _, title in self._path), lines, pages)
            lines += self._content.count(b"\n", begin, end)
            pages += self._content.count(b"\f", begin, end)
            begin, row = end, int(np.searchsorted(self._bounds_T[1:], end, side="right"))
            if end >= len(self._content):
                return None
            skip = begin - self._start_of(row)
        is_inside = begin > self._starts[block] and self._blocks.levels[block] == CODE
        fence = self._blocks.fences[self._starts[block]] if is_inside else b""
        return _Place(self._first_row + row, skip, self._path, fence, lines, pages)

    def _end(self, begin: int, row: int, block: int) -> tuple[int, int]:
        """Where a passage ends, and the block that follows or goes on there. Goes below the headings of the passage."""
        has_text = False
        for index in range(block, len(self._starts) - 1):
            level = self._blocks.levels[index]
            if has_text and self._begins_passage(index, begin):
                return self._starts[index], index
            if is_heading := level >= 0 and self._starts[index] >= begin:
                self._go_below(level, self._starts[index])
            is_alone = not has_text or self._rows[index] - row < self._little
            if not self._fits(index, row, is_alone=is_alone):
                return (self._inside(begin, row, index) if is_alone else self._starts[index]), index
            has_text |= not is_heading
        return len(self._content), len(self._starts) - 1

    def _begins_passage(self, block: int, begin: int) -> bool:
        """Whether text before a block is another passage than the block."""
        start = self._starts[block]
        return start >= begin and (self._blocks.levels[block] >= 0 or start in self._blocks.pages)

    def _go_below(self, level: int, start: int) -> None:
        above = (each for each in self._path if each[0] < level)
        self._path = (*above, (level, self._blocks.titles[start]))

    def _fits(self, block: int, row: int, *, is_alone: bool) -> bool:
        """Whether a passage from a row on takes a block too, before which it `is_alone`, with a heading or a little."""
        begin, end = self._rows[block], self._rows[block + 1]
        if end - row <= self._usual or end - row > self._limit:
            return end - row <= self._usual
        is_last = block + 2 == len(self._starts) or self._begins_passage(block + 1, 0)
        return is_alone or (is_last and end - begin < self._little)

    def _inside(self, begin: int, row: int, block: int) -> int:
        """Where a passage ends in a block that it cannot take whole: near the middle of the text of two passages."""
        start, size = self._starts[block], self._rows[block + 1] - row
        wanted = self._start_of(row + (self._usual if size > 2 * self._usual else (size + 1) // 2))
        last = self._start_of(row + self._usual)
        first = max((begin + wanted) // 2, start)
        is_code = self._blocks.levels[block] == CODE or _CODE_LINE.match(self._content, max(begin, start))
        for ends in (_LINES, _WORDS) if is_code else (_SENTENCES, _LINES, _WORDS):
            # The pattern sees a little more, so that it does not take the end of its view for that of the text.
            found = [match.end() for match in ends.finditer(self._content, first, last + 8)]
            if within := [end for end in found if first < end <= last]:
                return min(within, key=lambda end: abs(end - wanted))
        return start if start > begin else self._character_before(begin, last)

    def _character_before(self, begin: int, place: int) -> int:
        """Where a character begins, at a place or before it, but behind `begin`."""
        content, end = self._content, place
        while end > begin and content[end : end + 1] and 0x80 <= content[end] < 0xC0:
            end -= 1
        if end > begin:
            return end
        end = begin + 1
        while end < len(content) and 0x80 <= content[end] < 0xC0:
            end += 1
        return end

    def _start_of(self, row: int) -> int:
        """The first byte of a token."""
        return int(self._bounds_T[row])
