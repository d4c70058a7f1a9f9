"""The suffix array of a segment, in a file of 4 bytes a token.

A new segment is committed with its file. Where that is missing, as in a copy, it is made when it is first wanted.
"""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property
from pathlib import Path

import numpy as np
from jaxtyping import Bool, Int64

from memlm.base.files import create, storage, sync
from memlm.base.progress import Progress
from memlm.errors import MemlmError
from memlm.index.store.derived.files import DerivedFile
from memlm.index.store.manifest import SUFFIXES, FileRecord
from memlm.index.store.segment import VALUES, Segment
from memlm.index.suffix_array import DEPTH, PIECE_TOKENS, Order, SuffixArray, sorted_piece
from memlm.index.suffix_lookup import SuffixLookup

FORMAT, HEADER_BYTES = 1, 128
SORTED_AT_ONCE = 2  # pieces, each in some 200 MB


class SegmentSuffixes:
    """The suffix array of one segment. `build` completes it piece by piece. It has deleted documents too, which the
    caller filters. Where the folder cannot be written, it stays in RAM.

    Any thread may call the methods. `is_complete` says whether `build` is done.
    """

    def __init__(self, store: Path, segment: Segment) -> None:
        self._segment, self._file = segment, DerivedFile(store, segment, SUFFIXES)
        self._header = _header(segment.record.files[VALUES])
        self._num_pieces = _num_pieces(segment.record.entries)
        self._lock, self._is_written = threading.Lock(), True
        self._counts = np.zeros(0, bool), np.zeros(0, np.int64)
        self._orders = self._opened()
        self.is_complete = len(self._orders) == self._num_pieces

    @cached_property
    def array(self) -> SuffixArray:
        """The complete array."""
        assert self.is_complete
        return SuffixArray(self._segment.values_N, self._segment.starts, self._orders)

    @cached_property
    def lookup(self) -> SuffixLookup:
        """The search of the complete array for one text at a time."""
        return SuffixLookup(self.array)

    def token_counts(self, deleted: Bool[np.ndarray, " docs"]) -> Int64[np.ndarray, " vocab"]:
        """How often each token stands in documents that are not deleted. Ends with the highest token that does."""
        counted_without, total = self._counts
        if np.array_equal(counted_without, deleted):
            return total
        is_live_N, total = np.repeat(~deleted, np.diff(self._segment.starts)), np.zeros(0, np.int64)
        for begin in range(0, len(is_live_N), PIECE_TOKENS):
            piece = slice(begin, begin + PIECE_TOKENS)
            counts = np.bincount(self._segment.values_N[piece][is_live_N[piece]], minlength=len(total))
            counts[: len(total)] += total
            total = counts
        self._counts = deleted, total
        return total

    def build(self) -> None:
        """Sorts another piece, and completes the file with the last one."""
        with self._lock:
            if self.is_complete:
                return
            order = sorted_piece(self._segment.values_N, self._segment.starts, len(self._orders))
            self._write(order)
            self._orders.append(order)
            if len(self._orders) == self._num_pieces:
                if self._is_written:
                    self._file.publish()
                    self._orders = self._opened() or self._orders
                self.is_complete = True

    def _opened(self) -> list[Order]:
        """Opens a complete file of this very segment, if there is one."""
        entries = self._segment.record.entries
        try:
            content = np.memmap(self._file.path, np.uint8, mode="r")
        except (OSError, ValueError):  # an empty file cannot be mapped
            return []
        if len(content) != HEADER_BYTES + 4 * entries or content[:HEADER_BYTES].tobytes() != self._header:
            return []
        order_N = content[HEADER_BYTES:].view("<u4")
        return [order_N[begin : begin + PIECE_TOKENS] for begin in range(0, entries, PIECE_TOKENS)]

    def _write(self, order: Order) -> None:
        """Appends a piece to the temporary file."""
        try:
            if not self._orders:
                with self._file.begun() as path:
                    path.write_bytes(self._header)
            if self._is_written:
                with self._file.temporary.open("r+b") as file:  # one that a commit swept away stays away
                    file.seek(0, 2)
                    file.write(order.astype("<u4").data)
        except (MemlmError, OSError):
            self._is_written = False
            self._file.discard()


def write_suffixes(folder: Path, values: FileRecord, starts: Int64[np.ndarray, " docs+1"], progress: Progress) -> None:
    """Writes the complete file of a new segment beside its values, synced. Raises StorageFull."""
    values_N = np.load(folder / VALUES, mmap_mode="r")
    pieces = range(_num_pieces(len(values_N)))
    with storage(folder / SUFFIXES), create(folder / SUFFIXES) as file, ThreadPoolExecutor(SORTED_AT_ONCE) as pool:
        file.write(_header(values))
        for begin in pieces[::SORTED_AT_ONCE]:  # NumPy sorts without the interpreter's lock
            some = pieces[begin : begin + SORTED_AT_ONCE]
            orders = pool.map(lambda piece: sorted_piece(values_N, starts, piece), some)
            for piece, order in zip(some, orders, strict=True):
                file.write(order.astype("<u4").data)
                progress("sort passages", piece + 1, len(pieces))
        file.flush()
        sync(file.fileno())


def _header(values: FileRecord) -> bytes:
    """Names the tokens that are sorted, and how."""
    return f"{FORMAT} {values.checksum} {PIECE_TOKENS} {DEPTH}".encode().ljust(HEADER_BYTES)


def _num_pieces(num_tokens: int) -> int:
    return -(-num_tokens // PIECE_TOKENS)
