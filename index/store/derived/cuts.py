"""Where the passages of a segment begin, and the headings above each: derived from its tokens, and disposable.

A passage is the unit that a search finds. The indexes of their words and of their vectors both go by these numbers, so
a segment has this file before it has one of them.
"""

from __future__ import annotations

import json
import sqlite3
import zlib
from collections.abc import Iterator, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Int64

from memlm.base.passage_texts import PASSAGE_TOKENS, format_of, lines_above
from memlm.errors import Corrupt
from memlm.index.store.derived.tables import DerivedTables
from memlm.index.store.derived.text_blocks import is_markdown
from memlm.index.store.derived.text_cuts import Cut, Cutter, DecodeBytes
from memlm.index.store.filters import TITLE
from memlm.index.store.manifest import CUTS
from memlm.index.store.segment import Segment

FORMAT = "2"  # of the places, by which what is made of them is named
TABLES = "3"  # the format of the tables
LIMIT_TOKENS = PASSAGE_TOKENS
PIECE_TOKENS, PIECES_AT_ONCE = 1 << 16, 4  # a fifth of a second
DOCUMENTS_AT_ONCE = 256


class SegmentCuts(DerivedTables[range]):
    """The passages of one segment, numbered in the order of its documents, deleted ones too.

    Each takes the rows from its begin to the next one's, so the passages of a document hold all of its text but front
    matter, which is read as title and metadata. `len` and all other methods are for cuts that are complete.
    """

    def __init__(self, store: Path, segment: Segment, decode_bytes: DecodeBytes) -> None:
        self._segment, self._decode_bytes = segment, decode_bytes
        self._cutter = Cutter(decode_bytes, LIMIT_TOKENS)
        # A generator of its own method would keep it, with the files of the segment, until a garbage collection.
        self._new, self._num_cuts, self._num_headings = _cuts_of(segment, self._cutter), 0, 0
        self._last_headings: tuple[str, ...] | None = None
        self.form = f"cuts {FORMAT} {LIMIT_TOKENS}"  # for what is made of them
        pieces = range(-(-segment.record.entries // PIECE_TOKENS))
        form = f"{self.form} {TABLES} {PIECE_TOKENS}"
        super().__init__(store, segment, CUTS, form=form, pieces=pieces, at_once=PIECES_AT_ONCE)

    def __len__(self) -> int:
        return len(self.begins_P)

    @property
    def begins_P(self) -> Int64[np.ndarray, " P"]:
        """The first entry row of each passage."""
        return self._columns_3P[0]

    @cached_property
    def documents_P(self) -> Int64[np.ndarray, " P"]:
        """The row of the document of each passage."""
        return self._segment.document_at(self.begins_P)

    def rows(self, passage: int) -> tuple[int, int]:
        """The first entry row of a passage, and the end of its rows. It has one at least."""
        begin, end = int(self.begins_P[passage]), int(self._segment.starts[self.documents_P[passage] + 1])
        if passage + 1 < len(self):
            end = min(end, int(self.begins_P[passage + 1]))
        return begin, max(begin + 1, end)

    def headings(self, passages: range) -> list[tuple[str, ...]]:
        """The headings of some passages: those above the text, and those with which it begins, the highest first."""
        numbers_n = self._columns_3P[2][passages.start : passages.stop]
        low, high = int(numbers_n.min(initial=1 << 62)), int(numbers_n.max(initial=-1))
        rows = self._rows("select number, path, checksum from headings where number between ? and ?", low, high)
        found = {number: path for number, path, checksum in rows if checksum == _checksum(number, path)}
        lost = sorted({*numbers_n.tolist()} - found.keys())
        if lost:
            raise Corrupt(self._damaged.format(f"headings {lost[0]} are not as they were written"))
        return [tuple(json.loads(found[number])) for number in numbers_n.tolist()]

    def ends_before(self, passage: int) -> tuple[int, int]:
        """How many line ends and form feeds stand before a passage in its document."""
        statement = "select first, ends, checksum from ends where first <= ? order by first desc limit 1"
        for first, ends, checksum in self._rows(statement, passage):
            ends_P2 = np.frombuffer(ends, "<i4").reshape(-1, 2) if checksum == _checksum(first, ends) else ()
            if passage - first < len(ends_P2):
                lines, pages = ends_P2[passage - first].tolist()
                return lines, pages
        raise Corrupt(self._damaged.format(f"the lines before passage {passage} are not as they were written"))

    def texts(self, passages: Sequence[int]) -> list[str]:
        """The texts of some passages, with the space between them."""
        return [self._bytes(passage).decode(errors="replace") for passage in passages]

    def skipped(self, passage: int) -> bytes:
        """The bytes of a passage's first token that belong to the passage before."""
        begin, skip = int(self.begins_P[passage]), int(self._columns_3P[1][passage])
        return self._decode_bytes(self._segment.values_N[begin : begin + 1].tolist())[:skip] if skip else b""

    def searched_texts(self, passages: range) -> list[str]:
        """What is searched of some passages: the title of the document, the headings, and the text, a line each.
        Headings with which the text begins are not said twice.
        """
        documents = self.documents_P[passages.start : passages.stop].tolist()
        titles = {row: each.title for row, each in self._segment.documents.at_each(documents).items()}
        rows = zip(documents, self.headings(passages), self.texts(passages), strict=True)
        return ["\n".join((*lines_above(titles[row], above, text), text.strip())) for row, above, text in rows]

    def _bytes(self, passage: int) -> bytes:
        begin, end = self.rows(passage)
        skip = int(self._columns_3P[1][passage])
        if passage + 1 == len(self) or self.documents_P[passage + 1] != self.documents_P[passage]:
            return self._decode_bytes(self._segment.values_N[begin:end].tolist())[skip:]
        end = int(self.begins_P[passage + 1])  # the same row where a token holds the begins of both
        return (self._decode_bytes(self._segment.values_N[begin:end].tolist()) + self.skipped(passage + 1))[skip:]

    @cached_property
    def _columns_3P(self) -> list[Int64[np.ndarray, " P"]]:
        rows = self._rows("select piece, stop, begins, skips, headings, checksum from cuts order by piece")
        stops = [0, *(row[1] for row in rows)]
        if [row[0] for row in rows] != stops[:-1] or stops[-1] != len(self._pieces):
            raise Corrupt(self._damaged.format(f"its rows are not those of {len(self._pieces)} pieces"))
        for *row, checksum in rows:
            if checksum != _checksum(*row):
                raise Corrupt(self._damaged.format(f"the places of piece {row[0]} are not as they were written"))
        columns = zip(*(row[2:5] for row in rows), strict=True) if rows else [()] * 3
        return [np.frombuffer(b"".join(column), "<i8") for column in columns]

    def _rows(self, statement: str, *values: int) -> list[tuple[Any, ...]]:
        assert self._base is not None
        try:
            return self._base.execute(statement, values).fetchall()
        except (sqlite3.DatabaseError, UnicodeDecodeError) as error:  # the other is of a name in a message of SQLite
            raise Corrupt(self._damaged.format(error)) from error

    def _create(self, base: sqlite3.Connection) -> None:
        base.execute(
            "create table cuts (piece integer primary key, stop integer, begins blob, skips blob, headings blob, "
            "checksum integer)"
        )
        base.execute("create table ends (first integer primary key, ends blob, checksum integer)")
        base.execute("create table headings (number integer primary key, path text, checksum integer)")

    def _add(self, base: sqlite3.Connection, pieces: range) -> None:
        if pieces.start == 0:
            self._new, self._last_headings, self._num_headings = _cuts_of(self._segment, self._cutter), None, 0
            self._num_cuts = 0
        is_last, stop = pieces.stop == len(self._pieces), pieces.stop * PIECE_TOKENS
        cuts, ends = list[tuple[int, int, int]](), list[tuple[int, int]]()
        for cut in self._new:
            if cut.headings != self._last_headings:
                self._last_headings, self._num_headings = cut.headings, self._num_headings + 1
                heading = self._num_headings, json.dumps(cut.headings)
                base.execute("insert into headings values (?, ?, ?)", (*heading, _checksum(*heading)))
            cuts.append((cut.row, cut.skip, self._num_headings))
            ends.append((cut.line_ends, cut.page_ends))
            if cut.row >= stop and not is_last:
                break
        columns = np.array(cuts, "<i8").reshape(-1, 3).T
        row = pieces.start, pieces.stop, *(column.tobytes() for column in columns)
        base.execute("insert into cuts values (?, ?, ?, ?, ?, ?)", (*row, _checksum(*row)))
        if ends:
            counts = self._num_cuts, np.array(ends, "<i4").tobytes()
            base.execute("insert into ends values (?, ?, ?)", (*counts, _checksum(*counts)))
            self._num_cuts += len(ends)


def _checksum(*values: Any) -> int:
    """Of a row, whatever types a damaged one has. What SQLite does not notice of damage gives wrong places."""
    return zlib.crc32(repr(values).encode())


def _cuts_of(segment: Segment, cutter: Cutter) -> Iterator[Cut]:
    """Cuts all documents. The rows of the cuts are those of the segment."""
    starts = segment.starts.tolist()
    for begin in range(0, len(starts) - 1, DOCUMENTS_AT_ONCE):
        documents = range(begin, min(begin + DOCUMENTS_AT_ONCE, len(starts) - 1))
        for row, document in sorted(segment.documents.at_each(documents).items()):
            tokens_T = segment.values_N[starts[row] : starts[row + 1]]
            markdown = is_markdown(document.id, document.metadata)
            is_plain = markdown and not format_of(document.metadata)
            fields = {*document.metadata, *([TITLE] if document.title else [])} if is_plain else ()
            for cut in cutter.cuts(tokens_T, markdown=markdown, fields=fields):
                yield cut._replace(row=starts[row] + cut.row)
