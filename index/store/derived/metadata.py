"""The metadata of the documents of a segment, as requests ask for it: read once, and kept in RAM within a limit.

A field is kept as a digest of each of its values, so that a filter compares numbers where it would parse JSON.
"""

from __future__ import annotations

import json
import threading
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import TYPE_CHECKING

import numpy as np
from jaxtyping import Bool, Int64, UInt64

from memlm.base.storable import REPLACEMENT, is_utf8
from memlm.index.store.derived.versions import SegmentVersions, Versions
from memlm.index.store.filters import TITLE, items_of_field

if TYPE_CHECKING:
    from memlm.index.store.documents import DocumentRow, DocumentTable
    from memlm.index.store.segment import Segment

DOCUMENT_BYTES, LEAST_BYTES = 128, 1 << 12  # of all fields that are kept: for each document, and of few documents
ENTRY_BYTES = 512  # of a field that no document has
MOST_TOGETHER = 2  # of all segments, and of those with keys


@dataclass(frozen=True, slots=True)
class FieldValues:
    """The values of one field in a segment, in the order of the first half of their digests. A document has one for
    each item of a list.
    """

    firsts_V: UInt64[np.ndarray, " V"]
    seconds_V: UInt64[np.ndarray, " V"]
    rows_V: Int64[np.ndarray, " V"]

    @classmethod
    def read(cls, documents: DocumentTable, name: str) -> FieldValues:
        """Reads the documents that have the field."""
        digests, rows = list[bytes](), list[int]()
        for document in _documents_with(documents, name):
            for item in items_of_field(document, name):
                digests.append(_digest(json.dumps(item)))
                rows.append(document.row)
        firsts_V, seconds_V = np.frombuffer(b"".join(digests), np.uint64).reshape(-1, 2).T
        order_V = np.argsort(firsts_V)
        return cls(firsts_V[order_V], seconds_V[order_V], np.array(rows, np.int64)[order_V])

    @property
    def num_bytes(self) -> int:
        """Size in RAM."""
        return ENTRY_BYTES + self.firsts_V.nbytes + self.seconds_V.nbytes + self.rows_V.nbytes

    def rows_with(self, value: str) -> Int64[np.ndarray, " n"]:
        """The rows of the documents with an item that is this text, or whose JSON this text is."""
        found = [self.rows_V[:0]]
        for text in (json.dumps(value), value) if is_utf8(value) else ():
            first, second = np.frombuffer(_digest(text), np.uint64)
            begin, end = (np.searchsorted(self.firsts_V, first, side) for side in ("left", "right"))
            found.append(self.rows_V[begin:end][self.seconds_V[begin:end] == second])
        return np.concatenate(found)


class SegmentMetadata:
    """The versions and the fields of a segment's documents, deleted ones too, for all that share the segment. Methods
    take its table of documents, which an earlier user may have closed. Any thread may call them.

    Fields take DOCUMENT_BYTES a document at most, `num_bytes` in all: those that were used last.
    """

    def __init__(self) -> None:
        self._versions: SegmentVersions | None = None
        self._together = dict[tuple[object, ...], Versions]()
        self._fields, self.num_bytes = OrderedDict[str, FieldValues](), 0
        self._lock = threading.Lock()

    def versions(self, documents: DocumentTable) -> SegmentVersions:
        """The versions of its documents."""
        if self._versions is None:
            self._versions = SegmentVersions.read(documents)  # another thread may have been sooner
        return self._versions

    def versions_with(self, segments: Sequence[Segment]) -> Versions:
        """Which documents of some segments, the first of which has this, supersede which. Later snapshots have the same
        segments, mostly, with more documents deleted.
        """
        cores = tuple(segment.core for segment in segments)
        if (versions := self._together.get(cores)) is None:
            versions = Versions(segments)
            self._together = dict(
                [*self._together.items(), (cores, versions)][-MOST_TOGETHER:]
            )  # other threads read it
        return versions

    def having(self, documents: DocumentTable, num_documents: int, name: str, value: str) -> Bool[np.ndarray, " docs"]:
        """Whether each document has a field with a value, as `DocumentFilter.accepts` says."""
        with self._lock:
            if values := self._fields.get(name):
                self._fields.move_to_end(name)
        if values is None:
            self._keep(name, values := FieldValues.read(documents, name), num_documents)
        mask = np.zeros(num_documents, bool)
        mask[values.rows_with(value)] = True
        return mask

    def _keep(self, name: str, values: FieldValues, num_documents: int) -> None:
        most = max(LEAST_BYTES, DOCUMENT_BYTES * num_documents)
        if _bytes_of(name, values) > most:
            return
        with self._lock:
            if name in self._fields:  # another thread was sooner
                return
            self._fields[name], self.num_bytes = values, self.num_bytes + _bytes_of(name, values)
            while self.num_bytes > most:
                self.num_bytes -= _bytes_of(*self._fields.popitem(last=False))


def _bytes_of(name: str, values: FieldValues) -> int:
    return 4 * len(name) + values.num_bytes


def _documents_with(documents: DocumentTable, name: str) -> Iterator[DocumentRow]:
    """The documents that have a field, and maybe others."""
    if name == TITLE or REPLACEMENT in name:  # which stands for what is written otherwise in an older table
        return iter(documents)
    return documents.with_fields(name)


def _digest(text: str) -> bytes:
    """Equal for equal texts, and for others only by an accident that cannot be brought about."""
    return blake2b(text.encode(), digest_size=16).digest()
