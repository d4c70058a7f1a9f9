"""Which passages hold a term, and how often: an inverted file in blocks, each of at most 65,536 passages.

A block stands for itself, so that a file is written in one pass in bounded RAM, and small files are searched together
like the blocks of one. A term is known by a hash of 64 bits. A block has a table of its terms by hash, and for each
term either the sorted places of the passages with it (2 bytes each) and how often it stands in each (1 byte), or, where
that is shorter, how often it stands in every passage of the block. For each term, a bound says how much it can add to
the score of a passage, so that most passages need not be scored (MaxScore, Turtle and Flood 1995).

    blocks, each: hashes, frequencies, begins, bounds, lengths, places, counts, dense counts, at multiples of 8 bytes
    directory: JSON with the identity of the content, and the sizes of each block
    end: 8 bytes of magic, and the directory's offset, length and checksum
"""

from __future__ import annotations

import json
import mmap
import struct
import zlib
from array import array
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from hashlib import blake2b
from typing import BinaryIO, NamedTuple

import numpy as np
from jaxtyping import Bool, Float32, Float64, Int64, UInt, UInt16, UInt32, UInt64

from memlm.errors import Corrupt

K1, B = 1.2, 0.75  # of BM25: how soon a repeated term counts no more, and how much a long passage counts less
MAGIC = b"memlmPL1"
BLOCK_PASSAGES = 1 << 16
BLOCK_TERMS = 1 << 23  # of a block, after which it ends: so much RAM is needed
_END = struct.Struct("<8sQII")


def hash_of(term: str) -> int:
    """The 64 bits by which a term is known."""
    return int.from_bytes(blake2b(term.encode(errors="surrogatepass"), digest_size=8).digest(), "little")


class PostingsWriter:
    """Writes the postings of passages, which come in their order. `finish` completes the file."""

    def __init__(self, file: BinaryIO) -> None:
        self._file, self._offset, self._sizes = file, file.tell(), list[_Sizes]()
        self._first = 0
        self._numbers, self._terms, self._lengths = _Numbers(), array("I"), array("I")

    def add(self, terms: Sequence[str]) -> None:
        """Adds the next passage, by its terms, each as often as it stands there."""
        if len(self._lengths) == BLOCK_PASSAGES or len(self._terms) + len(terms) > BLOCK_TERMS:
            self._write_block()
        self._terms.extend(map(self._numbers.__getitem__, terms))
        self._lengths.append(len(terms))

    def finish(self, identity: str) -> None:
        """Writes the last block and the directory. `identity` names the content."""
        self._write_block()
        body = {"identity": identity, "passages": self._first, "blocks": [asdict(each) for each in self._sizes]}
        directory = json.dumps(body).encode()
        self._file.write(directory)
        self._file.write(_END.pack(MAGIC, self._offset, len(directory), zlib.crc32(directory)))
        self._file.flush()

    def _write_block(self) -> None:
        if not self._lengths:
            return
        lengths_P, arrays = _inverted(self._numbers, self._terms, self._lengths)
        sizes = _Sizes(
            offset=self._offset,
            first=self._first,
            passages=len(lengths_P),
            num_terms=int(lengths_P.sum()),
            terms=len(arrays[0]),
            entries=len(arrays[5]),
            dense=len(arrays[7]) // len(lengths_P),
            count_bytes=arrays[6].itemsize,
        )
        for section in arrays:
            content = section.tobytes()
            self._file.write(content.ljust(_padded(len(content)), b"\0"))
            self._offset += _padded(len(content))
        self._sizes.append(sizes)
        self._first += len(lengths_P)
        self._numbers, self._terms, self._lengths = _Numbers(), array("I"), array("I")


class Postings:
    """The postings of a file, mapped, or of bytes in RAM. Raises ValueError for a file that is damaged or not whole.

    Opening reads the directory only. Damage within a block raises Corrupt when it is searched, with the file's `path`.
    """

    def __init__(self, content: bytes | mmap.mmap, path: str = "") -> None:
        if len(content) < _END.size:
            raise ValueError("it is cut off")
        magic, offset, length, checksum = _END.unpack(content[len(content) - _END.size :])
        if magic != MAGIC or offset + length + _END.size != len(content):
            raise ValueError("it is of another kind, or cut off")
        directory = content[offset : offset + length]
        if zlib.crc32(directory) != checksum:
            raise ValueError("its directory was changed")
        body = json.loads(directory)
        self.identity, self._num_passages = str(body["identity"]), int(body["passages"])
        self.blocks = [Block(content, _Sizes(**each), path) for each in body["blocks"]]
        self._size = np.zeros(0, bool), (0, 0)
        self._norms = 0.0, np.zeros(0, np.float32)

    @classmethod
    def mapped(cls, file: BinaryIO, path: str) -> Postings:
        """Maps an open file."""
        return cls(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ), path)

    def __len__(self) -> int:
        return self._num_passages

    @cached_property
    def lengths_P(self) -> UInt32[np.ndarray, " P"]:
        """How many terms each passage has."""
        return np.concatenate([np.zeros(0, "<u4"), *(block.lengths_P for block in self.blocks)])

    def size(self, live_P: Bool[np.ndarray, " P"] | None) -> tuple[int, int]:
        """How many passages are live, and how many terms these have. The last mask is remembered."""
        if live_P is None:
            return len(self), sum(block.num_terms for block in self.blocks)
        known, size = self._size
        if known is not live_P:
            size = int(np.count_nonzero(live_P)), int(self.lengths_P[live_P].sum(dtype=np.int64))
            self._size = live_P, size
        return size

    def norms_P(self, mean: float) -> Float32[np.ndarray, " P"]:
        """The norm of each passage, which BM25 adds to a count, where passages have `mean` terms on average. The last
        mean is remembered.
        """
        known, norms_P = self._norms
        if known != mean:
            norms_P = norms_of(self.lengths_P, mean).astype(np.float32)
            self._norms = mean, norms_P
        return norms_P


class TermRow(NamedTuple):
    """A term in the table of a block."""

    term: int  # its number among those that were looked up
    frequency: int  # passages with the term
    begin: int
    bound: float  # of a count over a count and a norm, where the mean length is that of the block


class Block:
    """Some passages of a file, in order. Its arrays are read when they are used."""

    def __init__(self, content: bytes | mmap.mmap, sizes: _Sizes, path: str) -> None:
        self._content, self._sizes, self._path = content, sizes, path
        self.first, self.num_passages, self.num_terms = sizes.first, sizes.passages, sizes.num_terms

    @property
    def mean(self) -> float:
        """The mean length of its passages, which the bounds are for."""
        return max(self.num_terms / self.num_passages, 1e-9)

    @property
    def lengths_P(self) -> UInt32[np.ndarray, " P"]:
        """How many terms each passage has."""
        return self._arrays[4]

    def look_up(self, hashes_T: UInt64[np.ndarray, " T"]) -> list[TermRow]:
        """The rows of those of some terms that the block has. Raises Corrupt for damaged ones."""
        hashes, *columns = self._arrays[:4]
        if not len(hashes):
            return []
        rows_T = np.minimum(np.searchsorted(hashes, hashes_T), len(hashes) - 1)
        found_F = np.flatnonzero(hashes[rows_T] == hashes_T)
        rows_F = rows_T[found_F]
        rows = list(map(TermRow, found_F.tolist(), *(column[rows_F].tolist() for column in columns)))
        if any(row.frequency > self.num_passages for row in rows):
            raise self._damaged(f"a term has more passages than the block of passage {self.first}")
        return rows

    def postings(self, row: TermRow) -> tuple[UInt16[np.ndarray, " F"] | None, UInt[np.ndarray, " F"]]:
        """The places of the passages with a term, and how often it stands in each. Without places, there is a count for
        each passage of the block. Raises Corrupt for damaged ones.
        """
        _, _, _, _, _, places, counts, dense = self._arrays
        if row.frequency >= _dense_from(self.num_passages, self._sizes.count_bytes):
            counts_P = dense[row.begin * self.num_passages : (row.begin + 1) * self.num_passages]
            if len(counts_P) == self.num_passages:
                return None, counts_P
        else:
            rows = slice(row.begin, row.begin + row.frequency)
            places_F, counts_F = places[rows], counts[rows]
            are_within = self.num_passages > 0xFFFF or int(places_F.max(initial=0)) < self.num_passages
            if len(places_F) == row.frequency and are_within:
                return places_F, counts_F
        raise self._damaged(f"a term's postings are not as many as it has, in the block of passage {self.first}")

    def counts_at(self, row: TermRow, places_C: Int64[np.ndarray, " C"]) -> UInt[np.ndarray, " C"]:
        """How often a term stands in each of some passages, by their places in the block."""
        places, counts = self.postings(row)
        if places is None:
            return counts[places_C]
        near_C = np.searchsorted(places, places_C.astype(np.uint16))
        near_C[near_C == len(places)] = 0
        return np.where(places[near_C] == places_C, counts[near_C], 0)

    @cached_property
    def _arrays(self) -> list[np.ndarray]:
        arrays, offset = list[np.ndarray](), self._sizes.offset
        try:
            for dtype, size in self._sizes.sections():
                arrays.append(np.frombuffer(self._content, dtype, size, offset))
                offset += _padded(arrays[-1].nbytes)
        except ValueError as error:
            raise self._damaged(error) from error
        return arrays

    def _damaged(self, reason: object) -> Corrupt:
        return Corrupt(f"{self._path} is damaged ({reason}); remove it, and the next search makes it anew")


def norms_of(lengths_P: UInt32[np.ndarray, " P"], mean: float) -> Float64[np.ndarray, " P"]:
    """The terms that BM25 adds to the counts of passages, by their lengths in terms."""
    norms_P: np.ndarray = K1 * (1 - B + B * lengths_P.astype(np.int64) / mean)
    return norms_P


@dataclass(frozen=True, slots=True)
class _Sizes:
    offset: int
    first: int
    passages: int
    num_terms: int
    terms: int
    entries: int
    dense: int
    count_bytes: int

    def sections(self) -> tuple[tuple[str, int], ...]:
        """The type and the length of each array of a block, in their order."""
        count = f"<u{self.count_bytes}"
        return (
            ("<u8", self.terms),
            ("<u4", self.terms),
            ("<u4", self.terms),
            ("<f4", self.terms),
            ("<u4", self.passages),
            ("<u2", self.entries),
            (count, self.entries),
            (count, self.dense * self.passages),
        )


class _Numbers(dict[str, int]):
    """Gives each new term the next number."""

    def __missing__(self, term: str) -> int:
        number = self[term] = len(self)
        return number


def _inverted(
    terms: _Numbers, numbers: array[int], lengths: array[int]
) -> tuple[Int64[np.ndarray, " P"], list[np.ndarray]]:
    """The lengths of passages, and the arrays of their block."""
    lengths_P = np.array(lengths, np.int64)
    num_passages = len(lengths_P)
    hashes_T, ranks_T = np.unique(np.array([hash_of(term) for term in terms], np.uint64), return_inverse=True)
    keys_N = ranks_T[np.array(numbers, np.int64)].astype(np.uint64) << np.uint64(16)
    keys_N |= np.repeat(np.arange(num_passages, dtype=np.uint64), lengths_P)
    keys_N.sort()
    firsts_E = np.flatnonzero(np.concatenate([[True][: len(keys_N)], keys_N[1:] != keys_N[:-1]]))
    counts_E = np.diff(firsts_E, append=len(keys_N))
    keys_E = keys_N[firsts_E]
    terms_E, places_E = (keys_E >> np.uint64(16)).astype(np.int64), (keys_E & np.uint64(0xFFFF)).astype(np.uint16)
    frequencies_T = np.bincount(terms_E, minlength=len(hashes_T))
    counts_E = counts_E.astype("<u1" if counts_E.max(initial=0) < 256 else "<u4")
    is_dense_T = frequencies_T >= _dense_from(num_passages, counts_E.itemsize)
    dense = np.zeros((int(is_dense_T.sum()), num_passages), counts_E.dtype)
    rows_T, is_dense_E = np.cumsum(is_dense_T) - 1, is_dense_T[terms_E]
    dense[rows_T[terms_E[is_dense_E]], places_E[is_dense_E]] = counts_E[is_dense_E]
    kept_T = np.where(is_dense_T, 0, frequencies_T)
    begins_T = np.where(is_dense_T, rows_T, np.cumsum(kept_T) - kept_T)
    return lengths_P, [
        hashes_T.astype("<u8"),
        frequencies_T.astype("<u4"),
        begins_T.astype("<u4"),
        _bounds(frequencies_T, counts_E, lengths_P, places_E),
        lengths_P.astype("<u4"),
        places_E[~is_dense_E].astype("<u2"),
        counts_E[~is_dense_E],
        dense.ravel(),
    ]


def _bounds(
    frequencies_T: Int64[np.ndarray, " T"],
    counts_E: np.ndarray,
    lengths_P: Int64[np.ndarray, " P"],
    places_E: np.ndarray,
) -> Float32[np.ndarray, " T"]:
    """The largest count / (count + norm) of each term, rounded up."""
    if not len(frequencies_T):
        return np.zeros(0, "<f4")
    norms_P = K1 * (1 - B + B * lengths_P / max(lengths_P.mean(), 1e-9))
    parts_E = counts_E / (counts_E + norms_P[places_E])
    largest_T = np.maximum.reduceat(parts_E, np.cumsum(frequencies_T) - frequencies_T)
    rounded_T: np.ndarray = np.nextafter(largest_T.astype("<f4"), np.float32(2))
    return rounded_T


def _dense_from(num_passages: int, count_bytes: int) -> int:
    """The number of passages with a term from which a count for each passage of the block is shorter."""
    return num_passages * count_bytes // (2 + count_bytes) + 1


def _padded(num_bytes: int) -> int:
    return -(-num_bytes // 8) * 8
