"""Vectors of the passages of a segment, from an encoder of texts: derived from its tokens, and disposable.

They stand in a file that grows by some passages at a time, in their order. A search uses those that are there, and a
maker goes on behind them, also after a kill. Another encoder than the one that made them makes them anew.
"""

from __future__ import annotations

import fcntl
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import cached_property
from pathlib import Path
from typing import BinaryIO, Literal, Protocol

import numpy as np
from jaxtyping import Float32, Int64

from memlm.base.files import create, storage, sync
from memlm.errors import MemlmError
from memlm.index.store.derived.cuts import SegmentCuts
from memlm.index.store.derived.files import DerivedFile
from memlm.index.store.derived.twins import twins_of
from memlm.index.store.manifest import VECTORS
from memlm.index.store.segment import VALUES, Segment

FORMAT, HEADER_BYTES = 2, 256
PASSAGES_AT_ONCE = 16  # a fifth of a second of a small encoder on one core
LENGTH_TOLERANCE = 0.1  # of a vector, which has the length 1; one that a crash left unwritten has not


class PassageEncoder(Protocol):
    """Texts -> vectors of length 1, which depend on nothing but the text and the `fingerprint`."""

    @property
    def fingerprint(self) -> str: ...

    @property
    def dim(self) -> int: ...

    @property
    def close_cosine(self) -> float | None: ...

    def vectors(self, texts: list[str]) -> Float32[np.ndarray, "P D"]: ...


class SegmentVectors:
    """The vectors of the first passages of one segment, as complete `cuts` number them: of the text behind the title
    and the headings. `build` makes some more.

    Where the folder cannot be written, they live in RAM. Any thread may call the methods, and any process may make
    them: one at a time does, and the others see its vectors.
    """

    def __init__(self, store: Path, segment: Segment, cuts: SegmentCuts, encoder: PassageEncoder) -> None:
        self._encoder, self._cuts, self._segment = encoder, cuts, segment
        self._file = DerivedFile(store, segment, VECTORS)
        checksum = segment.record.files[VALUES].checksum
        identity = f"memlm vectors {FORMAT} float32 {encoder.dim} {cuts.form} {encoder.fingerprint} {checksum}"
        self._header = identity.encode().ljust(HEADER_BYTES)
        self._lock = threading.Lock()
        self._in_ram: Float32[np.ndarray, "P D"] | None = None
        self._seen_PD: Float32[np.ndarray, "P D"] = np.zeros((0, encoder.dim), np.float32)

    def __len__(self) -> int:
        return len(self._cuts)

    @property
    def is_complete(self) -> bool:
        """Whether all passages have a vector."""
        return len(self.vectors_PD) == len(self)

    @property
    def vectors_PD(self) -> Float32[np.ndarray, "P D"]:
        """The vectors of the first P passages, all that are made by now."""
        if self._in_ram is not None:
            return self._in_ram
        seen_PD = self._seen_PD
        if len(seen_PD) < len(self):
            self._seen_PD = seen_PD = self._read()
        return seen_PD

    def build(self, at_once: int = PASSAGES_AT_ONCE) -> bool:
        """Makes the vectors of some more passages. Returns False if there are none left, or another process is making
        some.
        """
        with self._lock:
            if self.is_complete:
                return False
            if self._in_ram is None:
                try:
                    with storage(self._file.path), self._growing() as file:
                        return file is not None and self._append(file, at_once)
                except (MemlmError, OSError):  # of a folder that cannot be written, or a full disk
                    self._in_ram = np.array(self._read())
            self._in_ram = np.concatenate([self._in_ram, self._made(self._in_ram, at_once)])
            return True

    def _append(self, file: BinaryIO, at_once: int) -> bool:
        written_PD = self._read()
        whole = len(written_PD)
        while whole and abs(np.linalg.norm(written_PD[whole - 1]) - 1) > LENGTH_TOLERANCE:
            whole -= 1  # a crash left it unwritten
        vectors_PD = self._made(written_PD[:whole], at_once)
        file.seek(HEADER_BYTES + written_PD[:whole].nbytes)
        file.write(vectors_PD.astype("<f4").tobytes())
        file.flush()
        sync(file.fileno())
        return True

    def _made(self, known_PD: Float32[np.ndarray, "P D"], at_once: int) -> Float32[np.ndarray, "n D"]:
        """The vectors of the next n passages. That of a text that has one is copied."""
        first, end = len(known_PD), min(len(known_PD) + at_once, len(self))
        texts = self._cuts.searched_texts(range(first, end))
        twins = [self._twin_of(first + number, text) for number, text in enumerate(texts)]
        new = [number for number, twin in enumerate(twins) if twin < 0]
        vectors_nD = np.empty((len(texts), self._encoder.dim), np.float32)
        if new:
            vectors_nD[new] = self._encoder.vectors([texts[number] for number in new])
        for number, twin in enumerate(twins):
            if twin >= 0:  # of these very passages, or of those before
                vectors_nD[number] = vectors_nD[twin - first] if twin >= first else known_PD[twin]
        return vectors_nD

    def _twin_of(self, passage: int, text: str) -> int:
        """An earlier passage with the same text, -1 if none is known."""
        twin = int(self._twins_P[passage])
        return twin if twin >= 0 and self._cuts.searched_texts(range(twin, twin + 1)) == [text] else -1

    @cached_property
    def _twins_P(self) -> Int64[np.ndarray, " P"]:
        return twins_of(self._segment, self._cuts)

    @contextmanager
    def _growing(self) -> Iterator[BinaryIO | None]:
        """Opens and locks the file, or a new one. None if another process has locked it."""
        if (file := self._opened("r+b")) is None:
            with self._file.begun():  # or a purge of the segment might miss it
                if (file := self._opened("r+b")) is None:
                    file = create(self._file.path)
                    file.write(self._header)
                    file.flush()
        with file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)  # until it is closed
            except BlockingIOError:
                yield None
                return
            yield file

    def _opened(self, mode: Literal["rb", "r+b"]) -> BinaryIO | None:
        """Opens a file of this very segment and encoder, if there is one."""
        with suppress(FileNotFoundError):
            file = self._file.path.open(mode)
            if file.read(HEADER_BYTES) == self._header:
                return file
            file.close()
        return None

    def _read(self) -> Float32[np.ndarray, "P D"]:
        """Maps the whole vectors of the file."""
        if (file := self._opened("rb")) is None:
            return self._seen_PD[:0]
        with file:
            size, dim = os.fstat(file.fileno()).st_size - HEADER_BYTES, self._encoder.dim
            if not (rows := min(size // (4 * dim), len(self))):
                return self._seen_PD[:0]
            return np.memmap(file, "<f4", "r", offset=HEADER_BYTES, shape=(rows, dim))
