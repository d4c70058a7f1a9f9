"""A shard: a process that searches some segments of a datastore for others, over gRPC.

It opens its own segments at start and any other that it is asked for, reads no tombstones, and answers for the deleted
documents that the caller names (`shard_messages`). It has no authentication: run shards in a network of their own.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections import OrderedDict
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from shlex import quote
from typing import Any

import grpc
import numpy as np

from memlm.base.cpu import num_cores
from memlm.distributed.shard_messages import (
    ALL_LIVE,
    SERVICE,
    Core,
    Description,
    SegmentView,
    ShardAnswer,
    ShardSearch,
    core_of,
    digest_of,
)
from memlm.errors import Corrupt, Incompatible, MemlmError, Unavailable, check_range
from memlm.index.store.manifest import SegmentRecord, read_manifest, read_pointer
from memlm.index.store.segment import Segment, search_segments
from memlm.index.store.shards import ShardNumber, shards_of

KEPT_VIEWS = 512  # segments with masks of deleted documents
KEPT_S = 60.0  # that a segment stays open after it left the store
MAX_MESSAGE_BYTES = 256 << 20
OPTIONS = (
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    ("grpc.http2.min_ping_interval_without_data_ms", 2000),  # servers ping, to notice a machine that is gone
    ("grpc.so_reuseport", 0),  # or two shards would share a port, and a caller would reach either
)
DRAIN_S = 5.0  # that running searches may take at the end

log = logging.getLogger("memlm.shard")


class ShardSegments:
    """The segments of one shard of a datastore. Any thread may search them."""

    def __init__(self, path: str | Path, shard: ShardNumber) -> None:
        """Opens the shard's segments. Raises as `Datastore.open` does, and Incompatible for a store without keys."""
        self.path, self.shard = Path(path), shard
        self._process = os.urandom(8).hex()
        self._lock = threading.Lock()
        self._opened = dict[Core, Segment]()
        self._left_s = dict[Core, float]()  # since when a segment has been in no manifest
        self._views = OrderedDict[SegmentView, Segment]()
        self._manifest = read_manifest(self.path)
        if not self._manifest.is_keyed:
            raise Incompatible(
                f"{self.path} has no keys, and a shard searches keys; serve it without shards, or make them:"
                f" `memlm index keys {quote(str(self.path))} --model MODEL`"
            )
        if not self._manifest.store_id:
            raise Incompatible(
                f"{self.path} is of an early version of memlm; `memlm index compact {quote(str(self.path))}` renews it"
            )
        self._refresh()

    @property
    def description(self) -> Description:
        """The present content of the shard. Opens later commits."""
        with self._lock:
            with suppress(MemlmError, OSError):  # a folder that is away for a moment changes nothing
                if read_pointer(self.path) != self._manifest.pointer:
                    self._refresh()
            self._forget()
            entries = sum(record.entries for record in self._own())
        return Description(self._manifest.store_id, self.shard.number, self.shard.of, self._process, entries)

    def search(self, search: ShardSearch) -> ShardAnswer:
        """Searches the segments that are named. Raises Unavailable for a segment that the folder does not have."""
        check_range("k", search.k, least=1, whole=True)
        with self._lock:
            if search.store_id != self._manifest.store_id:
                self._refresh()
            if search.store_id != self._manifest.store_id:
                raise Unavailable(f"the folder {self.path} has come to hold another datastore")
            wanted = dict.fromkeys(each for view in search.views for each in view)
            missing = tuple({each.deleted for each in wanted if not self._has(each, search.masks)})
            if missing:
                return ShardAnswer(None, missing)
            segments = {each: self._view(each, search.masks) for each in wanted}
            while len(self._views) > KEPT_VIEWS:
                self._views.popitem(last=False)
        views = [tuple(segments[each] for each in view) for view in search.views]
        views_Q = [views[number] for number in search.view_Q.tolist()]
        return ShardAnswer(search_segments(views_Q, search.queries_QD, search.k, search.nprobe, search.only))

    def _own(self) -> list[SegmentRecord]:
        records = self._manifest.segments
        shards = shards_of(records, self.shard.of)
        return [record for record, shard in zip(records, shards, strict=True) if shard == self.shard.number]

    def _has(self, view: SegmentView, masks: Mapping[str, bytes]) -> bool:
        return view.deleted == ALL_LIVE or view in self._views or view.deleted in masks

    def _view(self, view: SegmentView, masks: Mapping[str, bytes]) -> Segment:
        """The segment with a mask. The caller holds the lock."""
        whole = self._opened.get(view.core) or self._open(view.core)
        if view.deleted == ALL_LIVE:
            return whole
        if (known := self._views.get(view)) is None:
            mask = masks[view.deleted]
            count = whole.record.documents
            if digest_of(mask) != view.deleted or len(mask) != -(-count // 8):
                raise Corrupt(f"the mask of segment {view.core[0]} has {len(mask)} bytes for {count} documents")
            known = whole.without(np.unpackbits(np.frombuffer(mask, np.uint8), count=count).astype(bool))
            self._views[view] = known
        self._views.move_to_end(view)
        return known

    def _open(self, core: Core) -> Segment:
        """Opens a segment that is not the shard's own, or that was committed since. The caller holds the lock."""
        self._refresh()
        for record in self._manifest.segments:
            if core_of(record) == core:
                return self._opened.get(core) or self._whole(record)
        raise Unavailable(
            f"shard {self.shard} has no segment {core[0]} as it is searched; its folder {self.path} is at manifest"
            f" {self._manifest.number}"
        )

    def _refresh(self) -> None:
        """Opens the newest manifest's segments of this shard, unless they are open."""
        while True:
            before, self._manifest = self._manifest, read_manifest(self.path)
            try:
                if before.store_id != self._manifest.store_id:
                    self._opened, self._left_s = {}, {}
                    self._views.clear()
                for record in self._own():
                    if core_of(record) not in self._opened:
                        self._whole(record)
            except (Corrupt, OSError):
                if read_pointer(self.path) == self._manifest.pointer:
                    raise
            else:
                break
        self._forget()

    def _forget(self) -> None:
        """Closes segments a while after they left the store. Until then servers may ask for them."""
        now_s, current = time.monotonic(), {core_of(record) for record in self._manifest.segments}
        self._left_s = {core: self._left_s.get(core, now_s) for core in self._opened if core not in current}
        gone = {core for core, left_s in self._left_s.items() if now_s - left_s > KEPT_S}
        for core in gone:
            del self._opened[core]
        for view in [view for view in self._views if view.core in gone]:
            del self._views[view]

    def _whole(self, record: SegmentRecord) -> Segment:
        """Opens a segment with all of its documents. The caller holds the lock."""
        files = {name: file for name, file in record.files.items() if name != record.deleted}
        segment = Segment(self.path, replace(record, files=files, deleted=None), self._manifest.spec.dim)
        self._opened[core_of(record)] = segment
        return segment


class ShardServer:
    """Answers searches for a shard at an address: HOST:PORT, with port 0 for any, or unix:PATH. A context manager."""

    def __init__(self, segments: ShardSegments, address: str) -> None:
        """Starts to listen. Raises Unavailable if the address cannot be listened on."""
        self._segments = segments
        self._server = grpc.server(ThreadPoolExecutor(2 * num_cores() + 2, "shard"), options=OPTIONS)
        calls = {"Describe": self._describe, "Search": self._search}
        handlers = {name: grpc.unary_unary_rpc_method_handler(call) for name, call in calls.items()}
        self._server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, handlers),))
        try:
            port = self._server.add_insecure_port(address)
        except RuntimeError as error:
            raise Unavailable(f"{address} cannot be listened on ({error}); choose another address") from error
        self.address = address if address.startswith("unix:") else f"{address.rpartition(':')[0]}:{port}"
        self._server.start()

    def wait(self) -> None:
        """Waits until the server was stopped."""
        self._server.wait_for_termination()

    def stop(self, *, wait: bool = True) -> None:
        """Refuses further searches, and ends once those that run are done, after DRAIN_S at most."""
        stopped = self._server.stop(DRAIN_S)
        if wait:
            stopped.wait()

    def __enter__(self) -> ShardServer:
        return self

    def __exit__(self, *error: object) -> None:
        self.stop()

    def _describe(self, message: bytes, context: Any) -> bytes:
        return self._segments.description.encode()

    def _search(self, message: bytes, context: Any) -> bytes:
        try:
            return self._segments.search(ShardSearch.decode(message)).encode()
        except MemlmError as error:
            log.warning("a search was refused: %s", error)
            context.abort(grpc.StatusCode.FAILED_PRECONDITION, str(error))
        except (ValueError, KeyError, TypeError) as error:
            context.abort(grpc.StatusCode.INVALID_ARGUMENT, f"no search of a shard: {error}")
        except Exception:
            log.exception("a search failed")
            context.abort(grpc.StatusCode.INTERNAL, "the shard failed; its log has the details")
        raise AssertionError("abort returns")
