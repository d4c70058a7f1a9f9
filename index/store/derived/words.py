"""The words of a segment, in which phrases are found: derived from its tokens, and disposable.

A store keeps tokens, so the caller gives a function that decodes them. The index is a contentless SQLite FTS5 table of
overlapping pieces of the documents. It has deleted documents too, which the caller filters.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from memlm.base.phrases import RULE, words_of
from memlm.errors import Corrupt
from memlm.index.store.derived.pieces import DecodeBytes, Pieces
from memlm.index.store.derived.tables import DerivedTables
from memlm.index.store.manifest import WORDS
from memlm.index.store.segment import Segment

FORMAT = "2"
PIECE_TOKENS, OVERLAP_TOKENS = 8192, 512  # a phrase of at most OVERLAP_TOKENS lies whole in a piece
PIECES_AT_ONCE = 8


class SegmentWords(DerivedTables[Pieces]):
    """The words of one segment. `pieces` finds those with a phrase."""

    def __init__(self, store: Path, segment: Segment, decode_bytes: DecodeBytes) -> None:
        pieces = Pieces(segment, decode_bytes, PIECE_TOKENS, OVERLAP_TOKENS)
        form = f"{FORMAT} {RULE} {PIECE_TOKENS} {OVERLAP_TOKENS}"
        super().__init__(store, segment, WORDS, form=form, pieces=pieces, at_once=PIECES_AT_ONCE)

    def pieces(self, phrase: Sequence[str]) -> Iterator[tuple[int, int]]:
        """The row of the document and the number of each piece that may hold the phrase, in order."""
        assert self._base is not None
        query = '"' + " ".join(phrase) + '"'  # of words: nothing in it is an operator
        try:
            for (row,) in self._base.execute("select rowid from words where words match ? order by rowid", (query,)):
                yield int(self._pieces.documents(np.array(row - 1))), row - 1
        except sqlite3.DatabaseError as error:
            raise Corrupt(self._damaged.format(error)) from error

    def text(self, piece: int) -> tuple[str, int, int]:
        """The text of a piece, as `Pieces.text`."""
        return self._pieces.text(piece)

    def _create(self, base: sqlite3.Connection) -> None:
        # The words come separated by spaces. This tokenizer takes each as it is, whichever letters it has.
        base.execute("create virtual table words using fts5(text, content='', columnsize=0, tokenize='ascii')")

    def _add(self, base: sqlite3.Connection, pieces: range) -> None:
        rows = [(piece + 1, " ".join(words_of(self.text(piece)[0]))) for piece in pieces]
        base.executemany("insert into words (rowid, text) values (?, ?)", rows)
