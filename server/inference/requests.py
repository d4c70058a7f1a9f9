"""An inference engine in another process and its requests in flight, whatever carries the messages.

`WorkerHandle` reaches it over a pipe, `ReplicaHandle` through Ray Serve. Everything here runs on the event loop.
"""

from __future__ import annotations

import asyncio
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import AsyncGenerator, Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from secrets import token_hex
from typing import Any, TypeVar, cast

from memlm.api.generation import Finished
from memlm.api.params import StreamRequest
from memlm.api.request import Request
from memlm.errors import Incompatible, InvalidInput, MemlmError, Overloaded, Unavailable
from memlm.server.config import ServerConfig
from memlm.server.inference.messages import (
    Answer,
    DocumentsDeleted,
    Events,
    Failed,
    FromWorker,
    Heartbeat,
    Loaded,
    LoadFailed,
    Refresh,
    Result,
    Submission,
    merge_tokens,
)
from memlm.server.quota import Holding, Quota, share_of
from memlm.server.telemetry.datastores import StoreStats
from memlm.server.telemetry.metrics import Stats
from memlm.wire.codec import WireEvent

RETRY_AFTER_S, MIN_RETRY_S, MAX_RETRY_S = 1.0, 0.05, 60.0
NUM_END_TIMES = 16
STALE_HEARTBEAT_S = 10.0  # after that, a worker does not count as serving
WATCH_INTERVAL_S = 0.25  # between looks at a heartbeat

R = TypeVar("R")


class PendingRequest:
    """A request in flight, and its answers that have not been taken yet.

    `holding` counts the bytes of unread events, at most `max_bytes`. A client that reads too slowly exceeds them, and
    then its generation ends.
    """

    def __init__(self, holding: Holding, max_bytes: int) -> None:
        self._holding, self._max_bytes = holding, max_bytes
        self._answers: list[Answer] = []
        self._arrived: asyncio.Future[None] | None = None  # what `take` waits for

    def put(self, answer: Answer) -> None:
        """Adds an answer. Raises Overloaded where too many bytes wait to be taken, and InvalidInput where one answer
        has too many.
        """
        size = answer.size if isinstance(answer, Events) else 0  # others are small, or come alone
        if size > self._max_bytes:  # asked again, it would have as many
            raise InvalidInput(
                f"one event of this generation has {size:,} bytes, and {self._max_bytes:,} may wait for a client; ask"
                " for fewer passages or neighbors, or start the server with more stream_bytes"
            )
        if self._holding.amount + size > self._max_bytes:
            raise Overloaded(
                f"more than {self._max_bytes:,} bytes of this generation waited; read it as fast as it comes"
            )
        self._holding.take(size)
        self._answers.append(answer)
        if self._arrived is not None and not self._arrived.done():
            self._arrived.set_result(None)

    async def take(self) -> list[Answer]:
        """Returns the answers since the last call. Waits for at least one."""
        if not self._answers:
            self._arrived = asyncio.get_running_loop().create_future()
            await self._arrived
        taken, self._answers = self._answers, []
        self._holding.give(self._holding.amount)
        return taken


def event_quota(config: ServerConfig) -> Quota:
    """The quota of event bytes that wait for clients or are kept for resuming."""
    total = max(config.max_event_bytes, config.max_stream_bytes)
    return Quota("bytes of events that wait for clients", total, max(share_of(total), config.max_stream_bytes))


class ServedFiles:
    """The files that the first engine of a server has loaded, which every other one must have loaded too."""

    def __init__(self) -> None:
        self._fingerprints: Mapping[str, str] = {}

    def check(self, loaded: Loaded) -> None:
        """Raises Incompatible, naming the files, for an engine that loaded others than the first."""
        self._fingerprints = first = self._fingerprints or loaded.fingerprints
        changed = [name for name in first if first[name] != loaded.fingerprints.get(name)]
        if changed:
            raise Incompatible(
                f"the files of the {' and the '.join(changed)} changed since the server started, and one service has"
                " one model; restart the server, or put the files back"
            )


class EngineHandle(ABC):
    """An engine in another process, and its requests in flight."""

    kind = "inference worker"

    def __init__(
        self,
        config: ServerConfig,
        name: str,
        stores: Callable[[], Mapping[str, Path]],
        event_bytes: Quota | None = None,
        on_documents_deleted: Callable[[str, Collection[str] | None], None] = lambda store, document_ids: None,
        on_store_stats: Callable[[Sequence[StoreStats]], None] = lambda stores: None,
    ) -> None:
        """`name` is that of logs and errors. `stores` returns the datastores that a starting engine loads.
        `on_documents_deleted` is called with a datastore and the documents that another process deleted from it,
        `on_store_stats` with the figures of each heartbeat.
        """
        self.files = ServedFiles()  # of this engine and its successors, unless a pool gives it those of all
        self._on_documents_deleted, self._on_store_stats = on_documents_deleted, on_store_stats
        self._event_bytes = event_quota(config) if event_bytes is None else event_bytes
        self._config, self.name, self._stores = config, name, stores
        self.stats = Stats()
        self._pending: dict[str, PendingRequest] = {}
        self._ended_s: deque[float] = deque(maxlen=NUM_END_TIMES)
        self._loaded: asyncio.Future[None] | None = None
        self._start_stores: Mapping[str, Path] = {}
        self._refresh_task: asyncio.Task[None] | None = None
        self.is_loaded = self.is_ready = False
        self._heartbeat_s, self._silent_checks = 0.0, 0
        self._exited = asyncio.Event()

    @abstractmethod
    def restart(self, why: str) -> None:
        """Kills the process. Its replacement loads the datastores that are in service now."""

    @abstractmethod
    def _send(self, submission: Submission) -> None:
        """Sends a request."""

    @abstractmethod
    def _send_cancel(self, id_: str) -> None:
        """Cancels a request that was sent."""

    @property
    def is_serving(self) -> bool:
        """Whether the worker is ready and sent a heartbeat recently."""
        return self.is_ready and self.heartbeat_age_s < min(STALE_HEARTBEAT_S, self._config.worker_timeout_s)

    @property
    def heartbeat_age_s(self) -> float:
        """Seconds since the worker's last message."""
        return time.monotonic() - self._heartbeat_s

    @property
    def has_place(self) -> bool:
        """Whether one request more would run at once."""
        return self.num_open < self._config.max_running

    @property
    def num_open(self) -> int:
        """Requests in flight."""
        return len(self._pending)

    @contextmanager
    def submit(
        self,
        request: Request[Any],
        time_left_s: float | None,
        *,
        id_: str = "",
        caller: str = "",
        owner: str = "",
        internal: bool = False,
    ) -> Iterator[PendingRequest]:
        """Sends a request. Leaving the block before the last answer has come cancels the request.

        Raises Overloaded at once if too many requests are in flight, unless this one is `internal`, and Unavailable
        while there is no worker.
        """
        self.check_room(internal=internal)
        id_, now_s = id_ or token_hex(8), time.monotonic()
        deadline_s = None if time_left_s is None else now_s + time_left_s
        with self._event_bytes.hold(caller) as holding:
            self._pending[id_] = pending = PendingRequest(holding, self._config.max_stream_bytes)
            self._send(Submission(id_, request, now_s, deadline_s, caller, owner))
            try:
                yield pending
            finally:
                self._cancel(id_)

    def _cancel(self, id_: str) -> None:
        """Cancels a request, unless its last answer has come."""
        if self._pending.pop(id_, None) is not None:
            self._send_cancel(id_)

    async def stream(
        self, request: StreamRequest, time_left_s: float | None, **origin: Any
    ) -> AsyncGenerator[WireEvent, None]:
        """Yields the events of a generation, submitted as by `submit`. Those that come while one is being taken are
        merged into the next one. Closing this generator cancels the generation. Raises the generation's error.
        """
        event: WireEvent = ()
        with self.submit(request, time_left_s, **origin) as pending:
            while not isinstance(event, Finished):
                for event in merge_tokens(await pending.take()):
                    yield event

    async def ask(self, request: Request[R], time_left_s: float | None = None, **origin: Any) -> R:
        """Returns the only answer to a request, submitted as by `submit`. Raises the request's error."""
        with self.submit(request, time_left_s, **origin) as pending:
            (answer,) = await pending.take()
        if isinstance(answer, Result):
            return cast(R, answer.value)
        raise answer.error if isinstance(answer, Failed) else TypeError(f"{type(answer).__name__} is no answer")

    def check_room(self, *, internal: bool = False) -> None:
        """Raises Overloaded if too many requests are in flight, and Unavailable while there is no worker."""
        if not (self.is_ready or (internal and self.is_loaded)):
            raise Unavailable(f"the {self.kind} is being started again; try again in a moment")
        if not internal and self.num_open >= self._config.max_running + self._config.max_queued:
            retry_after_s = self._retry_after_s()
            raise Overloaded(
                f"{self.num_open} requests are running or waiting, which is all that this server takes; try again in"
                f" {retry_after_s:.2g} s",
                retry_after_s=retry_after_s,
            )

    def _retry_after_s(self) -> float:
        """The mean time between the ends of the latest requests."""
        if len(self._ended_s) < 2:
            return RETRY_AFTER_S
        interval_s = (self._ended_s[-1] - self._ended_s[0]) / (len(self._ended_s) - 1)
        return min(max(interval_s, MIN_RETRY_S), MAX_RETRY_S)

    async def _kill_if_silent(self) -> None:
        """Kills a loaded engine that sends nothing for `worker_timeout_s`."""
        while True:
            await asyncio.sleep(WATCH_INTERVAL_S)
            self._silent_checks += 1
            if self.is_loaded and self._silent_checks * WATCH_INTERVAL_S >= self._config.worker_timeout_s:
                self.is_ready = False
                self.restart(f"it sent no heartbeat for {self._config.worker_timeout_s:g} s")
                await self._exited.wait()

    def _on_messages(self, messages: Sequence[FromWorker]) -> None:
        self._heartbeat_s, self._silent_checks = time.monotonic(), 0
        for message in messages:
            self._on_message(message)

    def _on_message(self, message: FromWorker) -> None:
        if isinstance(message, Events):
            self._on_answer(message)
        elif isinstance(message, Heartbeat):
            self.stats = message.stats
            self._on_store_stats(message.stores)
        elif isinstance(message, Loaded):
            self._on_loaded(message)
        elif isinstance(message, LoadFailed):
            self._resolve_start(message.error)
        elif isinstance(message, DocumentsDeleted):
            self._on_documents_deleted(message.store, message.document_ids)
        else:
            self._on_answer(message)

    def _on_answer(self, answer: Answer) -> None:
        pending = self._pending.get(answer.id)
        if pending is None:
            return
        if is_last(answer):
            del self._pending[answer.id]
            self._ended_s.append(self._heartbeat_s)
        try:
            pending.put(answer)
        except (InvalidInput, Overloaded) as error:
            pending.put(Failed(answer.id, error))
            self._cancel(answer.id)

    def _on_loaded(self, loaded: Loaded) -> None:
        try:
            self.files.check(loaded)
        except Incompatible as error:
            self._resolve_start(error)
            return
        if self._start_stores != self._stores():
            self.restart("the datastores in service changed while it loaded")
            return
        self.is_loaded = True
        self._refresh_task = asyncio.create_task(self._refresh())

    async def _refresh(self) -> None:
        try:
            await self.ask(Refresh(), internal=True)
        except MemlmError as error:
            self.restart(str(error))
        else:
            self.is_ready = True
            self._resolve_start(None)

    def _fail_all(self) -> None:
        """Fails every request in flight, after the end of the process."""
        self.is_loaded = self.is_ready = False
        self.stats = Stats()
        self._resolve_start(Unavailable(f"the {self.kind} died while it was loading; the server's log may say why"))
        for id_, pending in self._pending.items():
            pending.put(Failed(id_, Unavailable(f"the {self.kind} died at this request or another; ask again")))
        self._pending.clear()

    def _resolve_start(self, error: MemlmError | None) -> None:
        if self._loaded is None or self._loaded.done():
            return
        if error is None:
            self._loaded.set_result(None)
        else:
            self._loaded.set_exception(error)


def is_last(answer: Answer) -> bool:
    """Whether an answer is the last one to its request."""
    return not isinstance(answer, Events) or isinstance(answer.events[-1], Finished)
