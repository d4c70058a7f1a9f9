"""Vectors of the chunks of a segment's documents, by which other chunks find them: derived from its tokens, and
disposable.

Chunks follow each other without overlap, each document's from its begin. Another size, or another embedding than the
one that made them, makes them anew.

Shapes: P chunks of the segment, n chunks at once, m tokens of a chunk, E width of an embedding.
"""

from __future__ import annotations

import sqlite3
from functools import cached_property
from pathlib import Path
from typing import Protocol

import numpy as np
from jaxtyping import Float32, Int64

from memlm.errors import Corrupt
from memlm.index.store.derived.tables import DerivedTables
from memlm.index.store.manifest import CHUNKS
from memlm.index.store.segment import Segment

FORMAT = "1"
CHUNKS_AT_ONCE = 1024
NO_TOKEN = -1  # behind a short chunk


class ChunkEmbedding(Protocol):
    """Tokens of chunks (n, m) -> vectors (n, E), which depend on nothing but the tokens and the `fingerprint`."""

    @property
    def fingerprint(self) -> str: ...

    def __call__(self, chunks_nm: np.ndarray, /) -> np.ndarray: ...


class SegmentChunks(DerivedTables[np.ndarray]):
    """A vector for each chunk of one segment, in the order of its documents, deleted ones too."""

    def __init__(self, store: Path, segment: Segment, chunk: int, embed: ChunkEmbedding) -> None:
        self._segment, self._chunk, self._embed = segment, chunk, embed
        self.begin_P, self.document_P = chunks_of(segment.starts, chunk)
        form = f"{FORMAT} {chunk} {embed.fingerprint}"
        super().__init__(store, segment, CHUNKS, form=form, pieces=self.begin_P, at_once=CHUNKS_AT_ONCE)

    @cached_property
    def vectors_PE(self) -> Float32[np.ndarray, "P E"]:
        """The vectors. Raises Corrupt for a damaged file."""
        assert self._base is not None
        try:
            rows = self._base.execute("select vector from vectors order by chunk").fetchall()
        except sqlite3.DatabaseError as error:
            raise Corrupt(self._damaged.format(error)) from error
        if len(rows) != len(self.begin_P):
            raise Corrupt(self._damaged.format(f"{len(rows)} vectors, expected {len(self.begin_P)}"))
        if len(sizes := {len(vector) for (vector,) in rows}) > 1 or any(size % 4 for size in sizes):
            raise Corrupt(self._damaged.format(f"vectors of {' and '.join(map(str, sorted(sizes)))} bytes"))
        vectors = np.frombuffer(b"".join(vector for (vector,) in rows), "<f4")
        return vectors.reshape(len(rows), len(vectors) // max(1, len(rows)))

    def _create(self, base: sqlite3.Connection) -> None:
        base.execute("create table vectors (chunk integer primary key, vector blob)")

    def _add(self, base: sqlite3.Connection, pieces: range) -> None:
        places = slice(pieces.start, pieces.stop)
        ends_n = self._segment.starts[self.document_P[places] + 1]
        tokens_nm = texts_from(self._segment.values_N, self.begin_P[places], ends_n, self._chunk)
        vectors_nE = self._embed(tokens_nm)
        rows = [(piece, row.astype("<f4").tobytes()) for piece, row in zip(pieces, vectors_nE, strict=True)]
        base.executemany("insert into vectors values (?, ?)", rows)


def chunks_of(
    starts: Int64[np.ndarray, " docs+1"], chunk: int
) -> tuple[Int64[np.ndarray, " P"], Int64[np.ndarray, " P"]]:
    """Returns where each chunk of some documents begins, and the number of its document."""
    counts = -(-np.diff(starts) // chunk)
    document_P = np.repeat(np.arange(len(counts)), counts)
    number_P = np.arange(len(document_P)) - np.repeat(np.cumsum(counts) - counts, counts)
    return starts[:-1][document_P] + chunk * number_P, document_P


def texts_from(
    tokens: Int64[np.ndarray, " N"], begin_n: Int64[np.ndarray, " n"], end_n: Int64[np.ndarray, " n"], length: int
) -> Int64[np.ndarray, "n r"]:
    """Returns the tokens from some places up to others, NO_TOKEN behind them."""
    place_nr = begin_n[:, None] + np.arange(length)
    return np.where(place_nr < end_n[:, None], tokens[np.minimum(place_nr, len(tokens) - 1)].astype(np.int64), NO_TOKEN)
