"""The means of the model's keys over each passage of a segment: derived from its keys, and disposable.

A store with keys is searched by them where no encoder is there.
"""

from __future__ import annotations

import sqlite3
from functools import cached_property
from pathlib import Path

import numpy as np
from jaxtyping import Float32

from memlm.errors import Corrupt
from memlm.index.store.derived.cuts import SegmentCuts
from memlm.index.store.derived.tables import DerivedTables
from memlm.index.store.manifest import MEANS
from memlm.index.store.segment import Segment

FORMAT = "1"
PASSAGES_AT_ONCE = 512


class SegmentMeans(DerivedTables[SegmentCuts]):
    """The mean of the keys of each passage of one segment, as complete `cuts` number them. Raises Incompatible for a
    segment without keys.
    """

    def __init__(self, store: Path, segment: Segment, cuts: SegmentCuts) -> None:
        self._keys_ND, self._cuts = segment.stored_keys(), cuts
        form = f"{FORMAT} {cuts.form}"
        super().__init__(store, segment, MEANS, form=form, pieces=cuts, at_once=PASSAGES_AT_ONCE)

    @cached_property
    def keys_PD(self) -> Float32[np.ndarray, "P D"]:
        """The means. Raises Corrupt for a damaged file."""
        assert self._base is not None
        try:
            rows = self._base.execute("select mean from means order by passage").fetchall()
        except sqlite3.DatabaseError as error:
            raise Corrupt(self._damaged.format(error)) from error
        return np.frombuffer(b"".join(mean for (mean,) in rows), "<f4").reshape(len(rows), self._keys_ND.shape[1])

    def _create(self, base: sqlite3.Connection) -> None:
        base.execute("create table means (passage integer primary key, mean blob)")

    def _add(self, base: sqlite3.Connection, pieces: range) -> None:
        rows = ((piece, self._keys_ND[slice(*self._cuts.rows(piece))]) for piece in pieces)
        means = ((piece, keys_ND.mean(axis=0, dtype=np.float32).astype("<f4").tobytes()) for piece, keys_ND in rows)
        base.executemany("insert into means values (?, ?)", means)
