"""A shard: a process that searches some segments of a datastore for others, over gRPC.

It opens its own segments at start and any other that it is asked for, reads no tombstones, and answers for the deleted
documents that the caller names (`shard_messages`). It authenticates nobody: run shards in a network of their own.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections import OrderedDict
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
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
from memlm.index.store.manifest import Manifest, SegmentRecord, read_manifest
from memlm.index.store.segment import Segment, search_segments
from memlm.index.store.shards import ShardNumber, shards_of

KEPT_VIEWS = 512  # segments with masks of deleted documents
KEPT_S = 60.0  # that a segment stays open after it left the store
MAX_MESSAGE_BYTES = 256 << 20
OPTIONS = (
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
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
        if self._manifest.spec.drafts_only:
            raise Incompatible(f"{self.path} gives drafts only, and a shard searches keys; serve it without shards")
        if not self._manifest.store_id:
            raise Incompatible(
                f"{self.path} is of an early version of memlm; `memlm index compact {self.path}` renews it"
            )
        self._refresh()

    @property
    def description(self) -> Description:
        """What the shard holds now, by the newest manifest."""
        with self._lock:
            entries = sum(record.entries for record in self._own(self._manifest))
        return Description(self._manifest.store_id, self.shard.number, self.shard.of, self._process, entries)

    def search(self, search: ShardSearch) -> ShardAnswer:
        """Searches the segments that are named. Raises Unavailable for a segment that the folder does not have."""
        with self._lock:
            wanted = dict.fromkeys(each for view in search.views for each in view)
            missing = tuple({each.deleted for each in wanted if not self._has(each, search.masks)})
            if missing:
                return ShardAnswer(None, missing)
            segments = {each: self._view(each, search.masks) for each in wanted}
        check_range("k", search.k, least=1, whole=True)
        views = [tuple(segments[each] for each in view) for view in search.views]
        views_Q = [views[number] for number in search.view_Q.tolist()]
        return ShardAnswer(search_segments(views_Q, search.queries_QD, search.k, search.nprobe, search.only))

    def _own(self, manifest: Manifest) -> list[SegmentRecord]:
        shards = shards_of(manifest.segments, self.shard.of)
        return [record for record, shard in zip(manifest.segments, shards, strict=True) if shard == self.shard.number]

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
            while len(self._views) > KEPT_VIEWS:
                self._views.popitem(last=False)
        self._views.move_to_end(view)
        return known

    def _open(self, core: Core) -> Segment:
        """Opens a segment that is not the shard's own, or that was committed since. The caller holds the lock."""
        self._refresh()
        if (found := self._opened.get(core)) is not None:
            return found
        for record in self._manifest.segments:
            if record.number == core[0]:
                segment = self._whole(record)
                if core_of(segment) == core:
                    self._opened[core] = segment
                    return segment
        raise Unavailable(
            f"shard {self.shard} has no segment {core[0]} as it is searched; its folder {self.path} is at manifest"
            f" {self._manifest.number}"
        )

    def _refresh(self) -> None:
        """Opens the newest manifest's segments of this shard. Those that left stay for a while, since servers ask for
        them until they switch.
        """
        while True:
            manifest = read_manifest(self.path)
            try:
                for record in self._own(manifest):
                    segment = self._whole(record)
                    self._opened.setdefault(core_of(segment), segment)
            except (Corrupt, OSError):
                if read_manifest(self.path).pointer == manifest.pointer:
                    raise
            else:
                break
        self._manifest, now_s = manifest, time.monotonic()
        current = {record.number for record in manifest.segments}
        self._left_s = {core: self._left_s.get(core, now_s) for core in self._opened if core[0] not in current}
        for core, left_s in self._left_s.items():
            if now_s - left_s > KEPT_S:
                del self._opened[core]

    def _whole(self, record: SegmentRecord) -> Segment:
        """Opens a segment with all of its documents."""
        files = {name: file for name, file in record.files.items() if name != record.deleted}
        return Segment(self.path, replace(record, files=files, deleted=None), self._manifest.spec.dim)


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
            context.abort(grpc.StatusCode.FAILED_PRECONDITION, str(error))
        except (ValueError, KeyError, TypeError) as error:
            context.abort(grpc.StatusCode.INVALID_ARGUMENT, f"no search of a shard: {error}")
        except Exception:
            log.exception("a search failed")
            context.abort(grpc.StatusCode.INTERNAL, "the shard failed; its log has the details")
        raise AssertionError("abort returns")
