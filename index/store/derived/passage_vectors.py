"""Vectors of the passages of a segment, from an encoder of texts: derived from its tokens, and disposable.

Another encoder than the one that made them makes them anew.
"""

from __future__ import annotations

import sqlite3
from functools import cached_property
from pathlib import Path
from typing import Protocol

import numpy as np
from jaxtyping import Float32

from memlm.errors import Corrupt
from memlm.index.store.derived.cuts import SegmentCuts
from memlm.index.store.derived.tables import DerivedTables
from memlm.index.store.manifest import VECTORS
from memlm.index.store.segment import Segment

FORMAT = "2"
PASSAGES_AT_ONCE = 32  # about a second of a small encoder


class PassageEncoder(Protocol):
    """Texts -> vectors of length 1, which depend on nothing but the text and the `fingerprint`."""

    @property
    def fingerprint(self) -> str: ...

    def vectors(self, texts: list[str]) -> Float32[np.ndarray, "P D"]: ...


class SegmentVectors(DerivedTables[SegmentCuts]):
    """A vector for each passage of one segment, as complete `cuts` number them: of its text behind the title and the
    headings.
    """

    def __init__(self, store: Path, segment: Segment, cuts: SegmentCuts, encoder: PassageEncoder) -> None:
        self._cuts, self._encoder = cuts, encoder
        form = f"{FORMAT} {cuts.form} {encoder.fingerprint}"
        super().__init__(store, segment, VECTORS, form=form, pieces=cuts, at_once=PASSAGES_AT_ONCE)

    @cached_property
    def vectors_PD(self) -> Float32[np.ndarray, "P D"]:
        """The vectors. Raises Corrupt for a damaged file."""
        assert self._base is not None
        try:
            rows = self._base.execute("select vector from vectors order by passage").fetchall()
        except sqlite3.DatabaseError as error:
            raise Corrupt(self._damaged.format(error)) from error
        vectors = np.frombuffer(b"".join(vector for (vector,) in rows), "<f4")
        return vectors.reshape(len(rows), len(vectors) // max(1, len(rows)))

    def _create(self, base: sqlite3.Connection) -> None:
        base.execute("create table vectors (passage integer primary key, vector blob)")

    def _add(self, base: sqlite3.Connection, pieces: range) -> None:
        vectors_PD = self._encoder.vectors(self._cuts.searched_texts(pieces))
        rows = [(piece, row.astype("<f4").tobytes()) for piece, row in zip(pieces, vectors_PD, strict=True)]
        base.executemany("insert into vectors values (?, ?)", rows)
