"""A search of a shard and its answer as bytes: a header in JSON, and behind it the arrays, little-endian.

A search names each segment by its content, and which of its documents count as deleted by a digest of their mask. A
shard that does not know the mask yet asks for it. So the caller alone decides what is deleted, and a deletion counts in
all shards at once.
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Mapping
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Any, TypeAlias

import numpy as np
from jaxtyping import Bool, Float32, Int64

from memlm.index.neighbors import Neighbors
from memlm.index.store.filters import DocumentFilter
from memlm.index.store.manifest import SegmentRecord

SERVICE = "memlm.Shard"  # of unary calls: bytes in, bytes out
DESCRIBE, SEARCH = f"/{SERVICE}/Describe", f"/{SERVICE}/Search"
ALL_LIVE = ""  # the digest of a mask without a deleted document
_LENGTH = struct.Struct("<I")

Core: TypeAlias = tuple[int, str]  # a segment's number, and a digest of its files and the settings of its index


@dataclass(frozen=True, slots=True)
class SegmentView:
    """A segment and the digest of the mask of its deleted documents."""

    core: Core
    deleted: str = ALL_LIVE


@dataclass(frozen=True, slots=True)
class ShardSearch:
    """A search for Q queries in a store, the q-th in the segments of `views[view_Q[q]]`. `masks` come where the shard
    asked for them, by digest, each a bit a document. `only` chooses documents, and goes with one view.
    """

    store_id: str
    queries_QD: Float32[np.ndarray, "Q D"]  # rounded to float16
    k: int
    nprobe: int | None
    views: tuple[tuple[SegmentView, ...], ...]
    view_Q: Int64[np.ndarray, " Q"]
    only: DocumentFilter | None = None
    masks: Mapping[str, bytes] = field(default_factory=dict)

    def encode(self) -> bytes:
        """As bytes: 2 for each dimension of a query, some hundred for each segment."""
        queries_QD, view_Q = self.queries_QD.astype("<f2"), self.view_Q.astype("<u2")
        header = {
            "store": self.store_id,
            "shape": queries_QD.shape,
            "k": self.k,
            "nprobe": self.nprobe,
            "views": [[[*each.core, each.deleted] for each in view] for view in self.views],
            "only": None if self.only is None else [self.only.documents, self.only.where],
            "masks": [[digest, len(mask)] for digest, mask in self.masks.items()],
        }
        return _packed(header, queries_QD.tobytes(), view_Q.tobytes(), *self.masks.values())

    @classmethod
    def decode(cls, message: bytes) -> ShardSearch:
        """Raises ValueError for bytes that are no search."""
        header, body = _unpacked(message)
        num_queries, dim = header["shape"]
        queries_QD, body = _array(body, "<f2", num_queries, dim)
        view_Q, body = _array(body, "<u2", num_queries)
        masks = dict[str, bytes]()
        for digest, size in header["masks"]:
            masks[digest], body = bytes(body[:size]), body[size:]
        views = tuple(
            tuple(SegmentView((number, content), deleted) for number, content, deleted in view)
            for view in header["views"]
        )
        if num_queries and not 0 <= view_Q.max() < len(views):
            raise ValueError(f"a query names view {view_Q.max()} of {len(views)}")
        only = header["only"]
        return cls(
            header["store"], queries_QD.astype(np.float32), header["k"], header["nprobe"], views,
            view_Q.astype(np.int64),
            None if only is None else DocumentFilter(tuple(only[0]), tuple(map(tuple, only[1]))), masks,
        )  # fmt: skip


@dataclass(frozen=True, slots=True)
class ShardAnswer:
    """What a shard found, or the digests of the masks that it needs for a search."""

    found: Neighbors | None
    missing: tuple[str, ...] = ()

    def is_of(self, search: ShardSearch) -> bool:
        """Whether it has neighbors, of the size that was asked for."""
        return self.found is not None and self.found.ids_QK.shape == (len(search.queries_QD), search.k)

    def encode(self) -> bytes:
        """As bytes: 16 for each neighbor."""
        if self.found is None:
            return _packed({"missing": self.missing})
        distances_QK, ids_QK, values_QK = self.found.distances_QK, self.found.ids_QK, self.found.values_QK
        return _packed(
            {"shape": distances_QK.shape},
            distances_QK.astype("<f4").tobytes(), ids_QK.astype("<i8").tobytes(), values_QK.astype("<i4").tobytes(),
        )  # fmt: skip

    @classmethod
    def decode(cls, message: bytes) -> ShardAnswer:
        """Raises ValueError for bytes that are no answer."""
        header, body = _unpacked(message)
        if "missing" in header:
            return cls(None, tuple(header["missing"]))
        distances_QK, body = _array(body, "<f4", *header["shape"])
        ids_QK, body = _array(body, "<i8", *header["shape"])
        values_QK, body = _array(body, "<i4", *header["shape"])
        return cls(Neighbors(distances_QK.astype(np.float32), ids_QK.astype(np.int64), values_QK.astype(np.int64)))


@dataclass(frozen=True, slots=True)
class Description:
    """What a shard says of itself: the store, its number of how many, its process, and the entries that it holds."""

    store_id: str
    shard: int
    num_shards: int
    process: str
    entries: int

    def encode(self) -> bytes:
        """As JSON."""
        return json.dumps([self.store_id, self.shard, self.num_shards, self.process, self.entries]).encode()

    @classmethod
    def decode(cls, message: bytes) -> Description:
        """Raises ValueError for bytes that are no description."""
        try:
            return cls(*json.loads(message))
        except TypeError as error:
            raise ValueError(f"no description of a shard: {message[:80]!r}") from error


def core_of(record: SegmentRecord) -> Core:
    """The identity of all that a search of a segment depends on, but for its deletions."""
    files = {name: file.checksum for name, file in record.files.items() if name != record.deleted}
    content = json.dumps([sorted(files.items()), record.index, record.nprobe, record.rerank])
    return record.number, blake2b(content.encode(), digest_size=12).hexdigest()


def packed_mask(deleted: Bool[np.ndarray, " docs"]) -> bytes:
    """A bit a document."""
    return np.packbits(deleted).tobytes()


def digest_of(mask: bytes) -> str:
    """The digest of a packed mask."""
    return blake2b(mask, digest_size=12).hexdigest()


def _packed(header: Mapping[str, Any], *parts: bytes) -> bytes:
    encoded = json.dumps(header, separators=(",", ":")).encode()
    return b"".join((_LENGTH.pack(len(encoded)), encoded, *parts))


def _unpacked(message: bytes) -> tuple[dict[str, Any], memoryview]:
    if len(message) < _LENGTH.size:
        raise ValueError(f"a message of {len(message)} bytes")
    end = _LENGTH.size + _LENGTH.unpack_from(message)[0]
    header = json.loads(message[_LENGTH.size : end])
    if not isinstance(header, dict):
        raise ValueError("a message without a header")
    return header, memoryview(message)[end:]


def _array(body: memoryview, kind: str, *shape: int) -> tuple[np.ndarray, memoryview]:
    """Returns an array of a shape, and the bytes behind it."""
    size = math.prod(shape) * np.dtype(kind).itemsize
    if min(shape) < 0 or size > len(body):
        raise ValueError(f"an array of shape {tuple(shape)} in {len(body)} bytes")
    return np.frombuffer(body[:size], kind).reshape(shape), body[size:]
