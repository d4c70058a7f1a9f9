"""The words of a segment, in which phrases are found: derived from its tokens, and disposable.

A store keeps tokens, so the caller gives a function that decodes them. The index is a contentless SQLite FTS5 table of
overlapping pieces of the documents. Where the folder cannot be written, it lives in RAM. It has deleted documents too,
which the caller filters.
"""

from __future__ import annotations

import re
import sqlite3
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TypeAlias
from urllib.parse import quote

import numpy as np
from jaxtyping import Int64

from memlm.base.phrases import words_of
from memlm.errors import Corrupt, MemlmError
from memlm.index.store.derived import DerivedFile
from memlm.index.store.manifest import WORDS
from memlm.index.store.segment import VALUES, Segment

DecodeBytes: TypeAlias = Callable[[list[int]], bytes]

FORMAT = "1"
PIECE_TOKENS, OVERLAP_TOKENS = 8192, 512  # a phrase of at most OVERLAP_TOKENS lies whole in a piece
PIECES_AT_ONCE = 8
_CONTINUATION_BYTES = bytes(range(0x80, 0xC0))


class SegmentWords:
    """The words of one segment. `build` completes the index piece by piece, and `pieces` finds those with a phrase.

    Any thread may call both. `is_complete` says whether `build` is done.
    """

    def __init__(self, store: Path, segment: Segment, decode_bytes: DecodeBytes) -> None:
        self._segment, self._decode_bytes = segment, decode_bytes
        self._file = DerivedFile(store, segment, WORDS)
        self._identity = f"{FORMAT} {segment.record.files[VALUES].checksum} {PIECE_TOKENS} {OVERLAP_TOKENS}"
        sizes = np.diff(segment.starts)
        step = PIECE_TOKENS - OVERLAP_TOKENS
        counts = np.where(sizes > 0, np.maximum(1, -(-(sizes - OVERLAP_TOKENS) // step)), 0)
        self._first_pieces: Int64[np.ndarray, " docs+1"] = np.concatenate([[0], counts.cumsum()])
        self._done, self._lock = 0, threading.Lock()
        self._base = self._opened()
        self.is_complete = self._base is not None

    @property
    def num_pieces(self) -> int:
        """Pieces of all documents."""
        return int(self._first_pieces[-1])

    def build(self) -> None:
        """Adds some pieces to the index, and completes it with the last ones."""
        with self._lock:
            if self.is_complete:
                return
            if self._base is None:
                self._base = self._begun()
            end = min(self._done + PIECES_AT_ONCE, self.num_pieces)
            rows = [(piece + 1, " ".join(words_of(self.text(piece)[0]))) for piece in range(self._done, end)]
            try:
                self._base.executemany("insert into words (rowid, text) values (?, ?)", rows)
            except sqlite3.OperationalError:  # the disk is full
                self._restart_in_ram()
                return
            self._done = end
            if end == self.num_pieces:
                self._base.execute("commit")
                self._file.publish()
                self.is_complete = True

    def pieces(self, phrase: Sequence[str]) -> Iterator[tuple[int, int]]:
        """The row of the document and the number of each piece that may hold the phrase, in order."""
        assert self._base is not None
        query = '"' + " ".join(phrase) + '"'  # of letters and digits: nothing in it is an operator
        try:
            for (row,) in self._base.execute("select rowid from words where words match ? order by rowid", (query,)):
                yield int(np.searchsorted(self._first_pieces, row - 1, side="right")) - 1, row - 1
        except sqlite3.DatabaseError as error:
            problem = f"{self._file.path} is damaged ({error}); remove it, and the next search makes it anew"
            raise Corrupt(problem) from error

    def text(self, piece: int) -> tuple[str, int, int]:
        """The text of a piece without the words that its ends cut, the first entry row of the piece, and how many
        characters were left out before the text.
        """
        document = int(np.searchsorted(self._first_pieces, piece, side="right")) - 1
        first, last = self._segment.starts[document : document + 2].tolist()
        begin = first + (piece - int(self._first_pieces[document])) * (PIECE_TOKENS - OVERLAP_TOKENS)
        end = min(begin + PIECE_TOKENS, last)
        content = self._decode_bytes(self._segment.values_N[begin:end].tolist())
        text = content.lstrip(_CONTINUATION_BYTES).decode(errors="replace")  # no character begins with them
        cut = 0
        if begin > first and (space := re.search(r"\s", text[: len(text) // 8])):
            cut = space.start()
        if end < last and (space := re.search(r"\s\S*\Z", text[-len(text) // 8 :])):
            text = text[: len(text) - len(space.group())]
        return text[cut:], begin, cut

    def close(self) -> None:
        """Closes the file. An incomplete one is removed."""
        with self._lock:
            if self._base is not None:
                self._base.close()
            if not self.is_complete:
                self._file.discard()

    def _opened(self) -> sqlite3.Connection | None:
        """Opens a complete index of this very segment, if there is one."""
        if not self._file.path.is_file():
            return None
        base = None
        try:
            where = f"file:{quote(str(self._file.path))}?mode=ro&immutable=1"
            base = sqlite3.connect(where, uri=True, check_same_thread=False)
            found = base.execute("select identity from origin").fetchone()
            if found == (self._identity,):
                return base
        except sqlite3.DatabaseError:
            pass
        if base is not None:
            base.close()
        return None

    def _begun(self) -> sqlite3.Connection:
        try:
            with self._file.begun() as temporary:
                return self._created(str(temporary))
        except (MemlmError, OSError, sqlite3.OperationalError):
            return self._created(":memory:")

    def _created(self, where: str) -> sqlite3.Connection:
        base = sqlite3.connect(where, isolation_level=None, check_same_thread=False)
        base.execute("pragma journal_mode = off")
        base.execute("pragma synchronous = off")
        base.execute("create table origin (identity text)")
        base.execute("insert into origin values (?)", (self._identity,))
        base.execute(
            "create virtual table words using fts5"
            "(text, content='', columnsize=0, tokenize=\"unicode61 remove_diacritics 0\")"
        )
        base.execute("begin")
        return base

    def _restart_in_ram(self) -> None:
        assert self._base is not None
        self._base.close()
        self._file.discard()
        self._base, self._done = self._created(":memory:"), 0
