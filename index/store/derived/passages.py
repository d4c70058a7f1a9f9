"""The passages of a segment, the units that a search finds for a prompt: derived from its tokens, and disposable.

`SegmentCuts` says where each begins. An inverted file of their words, with those of the title and of the headings above
them, is a contentless SQLite FTS5 table. Beside it stand their numbers of words, and the means of their keys where the
segment has keys. Deleted documents are in it too, so the caller weighs words over the passages that are live. The
ranking of FTS5 would count the deleted ones, and those of one segment only.
"""

from __future__ import annotations

import sqlite3
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Float32, Int64

from memlm.base.phrases import RULE, terms_of
from memlm.errors import Corrupt
from memlm.index.store.derived.cuts import SegmentCuts
from memlm.index.store.derived.tables import DerivedTables
from memlm.index.store.manifest import PASSAGES
from memlm.index.store.segment import Segment

FORMAT = "3"
PASSAGES_AT_ONCE = 512


class SegmentPassages(DerivedTables[SegmentCuts]):
    """The passages of one segment, as complete `cuts` number them."""

    def __init__(self, store: Path, segment: Segment, cuts: SegmentCuts) -> None:
        self._segment, self.cuts = segment, cuts
        form = f"{FORMAT} {RULE} {cuts.form} {segment.has_keys}"
        super().__init__(store, segment, PASSAGES, form=form, pieces=cuts, at_once=PASSAGES_AT_ONCE)

    def __len__(self) -> int:
        return len(self.cuts)

    @cached_property
    def num_words_P(self) -> Int64[np.ndarray, " P"]:
        """The number of words of each passage."""
        return np.array([count for (count,) in self._rows("select words from passages order by passage")], np.int64)

    @cached_property
    def keys_PD(self) -> Float32[np.ndarray, "P D"]:
        """The mean of the keys of each passage's entries. Raises Incompatible where there are no keys."""
        width = self._segment.stored_keys().shape[1]
        content = b"".join(mean for (mean,) in self._rows("select mean from passages order by passage"))
        return np.frombuffer(content, "<f4").reshape(len(self), width)

    def counts_P(self, word: str) -> Int64[np.ndarray, " P"]:
        """How often a word, as `terms_of` gives it, stands in each passage."""
        counts_P = np.zeros(len(self), np.int64)
        found = self._rows("select doc, count(*) from temp.places where term = ? group by doc", word)
        if found:
            passages, counts = np.array(found).T
            counts_P[passages - 1] = counts
        return counts_P

    def _rows(self, statement: str, *values: str) -> list[tuple[Any, ...]]:
        assert self._base is not None
        try:
            with self._lock:
                self._base.execute(
                    "create virtual table if not exists temp.places using fts5vocab(main, words, instance)"
                )
            return self._base.execute(statement, values).fetchall()
        except sqlite3.DatabaseError as error:
            raise Corrupt(self._damaged.format(error)) from error

    def _create(self, base: sqlite3.Connection) -> None:
        # The words come separated by spaces. This tokenizer takes each as it is, whichever letters it has.
        base.execute("create virtual table words using fts5(text, content='', columnsize=0, tokenize='ascii')")
        base.execute("create table passages (passage integer primary key, words integer, mean blob)")

    def _add(self, base: sqlite3.Connection, pieces: range) -> None:
        words = [terms_of(text) for text in self.cuts.searched_texts(pieces)]
        texts = [(piece + 1, " ".join(each)) for piece, each in zip(pieces, words, strict=True)]
        base.executemany("insert into words (rowid, text) values (?, ?)", texts)
        rows = [(piece, len(each), self._mean(piece)) for piece, each in zip(pieces, words, strict=True)]
        base.executemany("insert into passages values (?, ?, ?)", rows)

    def _mean(self, piece: int) -> bytes | None:
        if self._segment.keys_ND is None:
            return None
        begin, end = self.cuts.rows(piece)
        mean_D: np.ndarray = self._segment.keys_ND[begin:end].mean(axis=0, dtype=np.float32)
        return mean_D.astype("<f4").tobytes()
