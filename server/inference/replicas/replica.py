"""A replica: an inference engine in a process that Ray Serve starts, on whatever node of the cluster has room.

The engine's loop runs in a thread, as it does in an inference worker. The methods here run on the event loop of Ray
Serve. They carry requests to the engine, and its answers back: one call for each request, so that Ray Serve counts the
requests that are open and can cancel one.
"""

from __future__ import annotations

import asyncio
import logging
import os
import threading
import time
from collections import deque
from collections.abc import AsyncIterator, Mapping
from dataclasses import replace
from itertools import count, groupby
from pathlib import Path
from typing import Any

from ray import serve
from ray.util import get_node_ip_address

from memlm.api.request import Request
from memlm.errors import Unavailable
from memlm.generation.sessions.fence import SessionFence, check_of
from memlm.generation.sessions.names import SessionNames, suffix_of
from memlm.server.config import ServerConfig
from memlm.server.inference.messages import (
    Answer,
    Cancel,
    DocumentsDeleted,
    Events,
    Failed,
    FromWorker,
    Heartbeat,
    Loaded,
    LoadFailed,
    Result,
    Stop,
    Submission,
)
from memlm.server.inference.pipe import Inbox, Outbox
from memlm.server.inference.replicas import applications
from memlm.server.inference.requests import is_last

JOIN_S = 15.0  # longer than the engine waits for its writes
IDS_KEPT = 1024  # of requests that have ended

log = logging.getLogger("memlm.server")


class Replica:
    """The deployment's class. Every method names the replica that is meant, since another may get the call where that
    one is gone.
    """

    def __init__(self, config: ServerConfig, most_together: int, fence: SessionFence | None = None) -> None:
        """By default `most_together` replicas share half of the RAM of this machine. `fence` is that of the server's
        session folder.
        """
        context = serve.get_replica_context()
        self._config = replace(config, max_cache_bytes=config.max_cache_bytes or config.cache_bytes // most_together)
        self._id, self._fence = context.replica_id.unique_id, fence
        self._inbox, self._engine = Inbox(), threading.Thread()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._loaded: asyncio.Future[Loaded | LoadFailed] | None = None
        self._start_stores: dict[str, Path] = {}
        self._calls: dict[str, asyncio.Queue[list[Answer]]] = {}
        self._ended = deque[str](maxlen=IDS_KEPT)
        self._unsolicited: list[tuple[int, FromWorker]] = []  # numbered, until they have arrived
        self._numbers = count(1)
        threading.Thread(
            target=applications.end_with_server, args=(context.app_name,), name="server's end", daemon=True
        ).start()

    async def load(
        self, replica: str, stores: Mapping[str, Path], restarted: bool
    ) -> tuple[Loaded | LoadFailed, str] | None:
        """Starts the engine and waits until it is loaded. Returns the process and its node with the outcome, and None
        where another replica is meant. While an engine lives, another call waits for that one: Ray Serve sends again
        what it takes for lost.
        """
        if replica != self._id:
            return None
        if self._loaded is None or (self._loaded.done() and not self._engine.is_alive()):
            self._loop, self._start_stores = asyncio.get_running_loop(), dict(stores)
            self._loaded, work = self._loop.create_future(), (self._start_stores, restarted)
            self._engine = threading.Thread(target=self._run, args=work, name="engine", daemon=True)
            self._engine.start()
        elif self._start_stores != stores:
            log.error("the datastores in service changed while the replica loaded, and so it ends")
            os._exit(1)  # Ray Serve replaces it
        loaded = await asyncio.shield(self._loaded)  # one caller that leaves must not cancel it for the others
        return loaded, f"process {os.getpid()} on {get_node_ip_address()}"

    async def answer(
        self, replica: str, id_: str, request: Request[Any], left_s: float | None, caller: str, owner: str
    ) -> AsyncIterator[list[Answer]]:
        """Yields the answers to a request, which has `left_s` seconds. Cancels it if the caller leaves. One that comes
        again while it runs ends both: Ray Serve sends again where the caller has lost the answers to the first one.
        """
        if replica != self._id or not self._engine.is_alive():
            yield [Failed(id_, Unavailable("the replica of this request is gone; ask again"))]
            return
        if id_ in self._calls or id_ in self._ended:
            twice = Failed(id_, Unavailable("the request arrived twice, and its answers may be lost; ask again"))
            if (first := self._calls.get(id_)) is not None:
                self._inbox.put(Cancel(id_))
                first.put_nowait([twice])
            yield [twice]
            return
        calls = self._calls[id_] = asyncio.Queue()
        now_s, is_over = time.monotonic(), False
        self._inbox.put(Submission(id_, request, now_s, None if left_s is None else now_s + left_s, caller, owner))
        try:
            while not is_over:
                answers = await calls.get()
                is_over = is_last(answers[-1])
                yield answers
        finally:
            del self._calls[id_]
            self._ended.append(id_)
            if not is_over:
                self._inbox.put(Cancel(id_))

    async def heartbeat(self, replica: str, arrived: int) -> list[tuple[int, FromWorker]] | None:
        """Returns what the engine has said beside answers, numbered: its latest heartbeat, deleted documents. What has
        a number up to `arrived` is not returned again. An answer that is lost comes with the next one.
        """
        if replica != self._id:
            return None
        self._unsolicited = [each for each in self._unsolicited if each[0] > arrived]
        return list(self._unsolicited)

    async def stop(self, replica: str) -> None:
        """Ends the engine, after the writes that have begun."""
        if replica == self._id:
            await self._stop()

    async def __del__(self) -> None:
        """As `stop`. Ray Serve calls this before it ends a replica that it does not need any more."""
        await self._stop()

    async def _stop(self) -> None:
        if self._engine.is_alive():
            self._inbox.put(Stop())
            await asyncio.to_thread(self._engine.join, JOIN_S)

    def _run(self, stores: Mapping[str, Path], restarted: bool) -> None:
        """Thread: the engine, from loading on. The process ends with an engine that fails."""
        from memlm.server.inference.startup import run_engine

        suffix = suffix_of(self._id)
        names = SessionNames(lambda name: name.endswith(suffix), suffix, check_of(self._fence))
        try:
            run_engine(self._config, stores, self._inbox, Outbox(self._write), names=names, restarted=restarted)
        except BaseException:
            log.exception("the engine failed")
            os._exit(1)

    def _write(self, messages: list[FromWorker]) -> None:
        assert self._loop is not None  # `load` was called on it
        self._loop.call_soon_threadsafe(self._take, messages)

    def _take(self, messages: list[FromWorker]) -> None:
        """Passes the engine's messages to the calls that wait for them."""
        for id_, group in groupby(messages, lambda message: message.id if isinstance(message, _ANSWERS) else None):
            if id_ is None:
                self._take_unsolicited(list(group))
            elif (calls := self._calls.get(id_)) is not None:
                calls.put_nowait([message for message in group if isinstance(message, _ANSWERS)])

    def _take_unsolicited(self, messages: list[FromWorker]) -> None:
        for message in messages:
            if isinstance(message, Loaded | LoadFailed):
                assert self._loaded is not None
                self._loaded.set_result(message)
            elif isinstance(message, Heartbeat | DocumentsDeleted):
                if isinstance(message, Heartbeat):  # in place of an earlier one
                    self._unsolicited = [each for each in self._unsolicited if not isinstance(each[1], Heartbeat)]
                self._unsolicited.append((next(self._numbers), message))


_ANSWERS = (Events, Result, Failed)
