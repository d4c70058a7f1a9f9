"""All inference workers: which one gets a request, and changes that every one has to make.

A request with a session goes to the worker that the session's name maps to, any other request to the least busy worker,
or to a slightly busier one that has just read a text of the caller which begins alike.
Datastores are loaded and unloaded, and documents are deleted, on all workers before the caller gets an answer. A worker
that cannot follow is restarted, and then loads the datastores that are in service.
"""

from __future__ import annotations

import asyncio
import math
from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import AsyncGenerator, Awaitable, Callable, Collection, Coroutine, Mapping, Sequence
from dataclasses import astuple
from hashlib import blake2b
from itertools import chain
from pathlib import Path
from random import random
from typing import Any, TypeVar, cast

from memlm.api.datastores import (
    DeleteDocumentsRequest,
    DeleteReport,
    LoadDatastoreRequest,
    RememberReport,
    RememberRequest,
)
from memlm.api.params import StreamRequest
from memlm.api.request import Request
from memlm.api.sessions import ListSessionsRequest
from memlm.base.cpu import num_cores
from memlm.errors import InternalError, MemlmError, NotFound, Unavailable
from memlm.generation.sessions.fence import SessionFence
from memlm.server.config import ServerConfig, worker_for_session
from memlm.server.inference.deletions import Deletions
from memlm.server.inference.handle import JOIN_S, WorkerHandle
from memlm.server.inference.messages import Refresh, party_of
from memlm.server.inference.requests import EngineHandle, ServedFiles, event_quota
from memlm.server.telemetry.datastores import StoreStats
from memlm.server.telemetry.metrics import Stats
from memlm.wire.codec import WireEvent

# Texts of at least so many tokens are kept by the worker that reads them. Beginnings of so many are remembered.
READ_TOKENS, MAX_READERS = 32, 4096
FRESH_HEARTBEAT_S = 2.0  # four heartbeats: a worker that is silent for longer may stand still

R = TypeVar("R")


class EnginePool(ABC):
    """All engines, which are called workers here: those of `WorkerPool`, or the replicas of `ReplicaPool`."""

    kind = "inference worker"

    def __init__(self, config: ServerConfig, stores: Callable[[], Mapping[str, Path]]) -> None:
        """`stores` returns the datastores that a starting worker loads."""
        self.deletions, self._config, self._stores = Deletions(), config, stores
        self.event_bytes, self._files = event_quota(config), ServedFiles()
        self._limit_s = config.worker_timeout_s + JOIN_S  # a worker that hangs is killed before
        self._readers = OrderedDict[bytes, str]()  # by the beginnings of the latest texts

    @abstractmethod
    async def start(self) -> None:
        """Starts all workers and waits until they are loaded. Raises the error that kept one from loading."""

    @abstractmethod
    async def stop(self, timeout_s: float) -> None:
        """Stops all workers and waits up to `timeout_s`. Workers that do not stop are killed."""

    @property
    @abstractmethod
    def _workers(self) -> Sequence[EngineHandle]:
        """The workers that may get requests."""

    @abstractmethod
    def _owner_of(self, session: str) -> EngineHandle:
        """The worker of a session. Raises Unavailable where there is none at the moment."""

    @property
    def is_serving(self) -> bool:
        """Whether at least one worker is ready and sent a heartbeat recently."""
        return any(worker.is_serving for worker in self._workers)

    @property
    def heartbeat_age_s(self) -> float:
        """The age of the oldest last heartbeat."""
        return max((worker.heartbeat_age_s for worker in self._workers), default=math.inf)

    @property
    def stats(self) -> Stats:
        """The sums of all workers' figures."""
        return Stats(*map(sum, zip(*(astuple(worker.stats) for worker in self._workers), strict=True)))

    @property
    def num_open(self) -> int:
        """Requests in flight."""
        return sum(worker.num_open for worker in self._workers)

    def check_room(self) -> None:
        """Raises Overloaded if the least busy worker is full, and Unavailable while there is no worker."""
        self._least_loaded().check_room()

    def stream(
        self, request: StreamRequest, time_left_s: float | None, **origin: Any
    ) -> AsyncGenerator[WireEvent, None]:
        """The events of a generation by one worker, as `EngineHandle.stream`."""
        return self._worker_for(request, **origin).stream(request, time_left_s, **origin)

    async def ask(self, request: Request[R], time_left_s: float | None = None, **origin: Any) -> R:
        """Returns the only answer to a request, from the worker or workers that it concerns. Raises the request's
        error.
        """
        if isinstance(request, ListSessionsRequest):
            return cast(
                R, tuple(chain(*await self._gather_answers(cast(Request[Any], request), time_left_s, **origin)))
            )
        if isinstance(request, DeleteDocumentsRequest):
            return cast(R, await run_to_end(self._delete(request, time_left_s, **origin)))
        if isinstance(request, RememberRequest):
            return cast(R, await self._remember(request, time_left_s, **origin))
        return await self._worker_for(request).ask(request, time_left_s, **origin)

    async def broadcast(
        self, request: Request[R], on_done: Callable[[R], None], *, internal: bool = False, **origin: Any
    ) -> R:
        """Makes a change on all workers and returns the answer of one. `on_done` gets the answer before any later
        request.

        The change runs to its end even if the caller leaves. A worker that fails where another succeeded is restarted.
        Raises Overloaded as `check_room` does, unless the change is `internal`, and the error if every worker failed.
        """
        if not internal:
            self.check_room()
        return await run_to_end(self._broadcast(request, on_done, **origin))

    async def refresh(self, store: str) -> None:
        """Switches every worker to the latest version of a datastore.

        Raises Unavailable while a worker does not serve, and the error of a worker that cannot read the datastore.
        """
        await self._gather_answers(Refresh(store), internal=True)

    async def _broadcast(self, request: Request[R], on_done: Callable[[R], None], **origin: Any) -> R:
        workers = [worker for worker in self._workers if worker.is_loaded]
        if not workers:
            raise self._none_is_there()
        results = dict(zip(workers, await self._gather_results(workers, request, internal=True, **origin), strict=True))
        done = {worker: value for worker, value in results.items() if not isinstance(value, BaseException)}
        if not done:
            raise next(iter(results.values()))
        value = next(iter(done.values()))
        on_done(value)
        if isinstance(request, LoadDatastoreRequest) and request.replace:
            self.mark_deleted(value.name)
        self._end_leaving()
        for worker in self._workers:
            if worker.is_loaded and worker not in done:
                worker.restart(f"it could not do what the others did ({results.get(worker, 'it came up meanwhile')})")
        return value

    async def _delete(self, request: DeleteDocumentsRequest, time_left_s: float | None, **origin: Any) -> DeleteReport:
        """One worker commits the deletion, and the others refresh."""
        leader = self._leader()
        try:
            report = await leader.ask(request, time_left_s, **origin)
        except (Unavailable, InternalError):  # it may have been committed
            self.mark_deleted(request.store, request.document_ids)
            raise
        self.mark_deleted(report.store, request.document_ids)
        await self._follow(leader, report.store, "a deletion")
        self._end_leaving()
        return report

    async def _remember(self, request: RememberRequest, time_left_s: float | None, **origin: Any) -> RememberReport:
        """One worker reads and commits the documents, and the others refresh before the caller gets an answer."""
        leader = self._least_loaded()
        report = await leader.ask(request, time_left_s, **origin)
        await run_to_end(self._follow(leader, report.store, "a text that is to be remembered"))
        return report

    async def _follow(self, leader: EngineHandle, store: str, change: str) -> None:
        """Switches all workers but one to its commit. A worker that cannot follow is restarted."""
        followers = [worker for worker in self._workers if worker.is_loaded and worker is not leader]
        outcomes = await self._gather_results(followers, Refresh(store), internal=True)
        for worker, value in zip(followers, outcomes, strict=True):
            if isinstance(value, BaseException) and not isinstance(value, NotFound):  # it was unloaded meanwhile
                worker.restart(f"it could not follow {change} ({value})")

    def _end_leaving(self) -> None:  # noqa: B027 - nothing to do, unless a pool has such processes
        """Fails the requests of processes that serve on without being told of changes."""

    def mark_deleted(self, store: str | None, document_ids: Collection[str] | None = None) -> None:
        """Removes documents of a datastore (None: all of them) from events that wait for delivery.

        A datastore in service under several names is marked under each of them.
        """
        paths = {name: path.resolve() for name, path in self._stores().items()}
        names = [name for name, path in paths.items() if store is None or path == paths.get(store)]
        self.deletions.add({*names, *([] if store is None else [store])}, document_ids)

    async def _gather_answers(self, request: Request[R], time_left_s: float | None = None, **origin: Any) -> list[R]:
        """Returns every worker's answer. Raises the error of one, and Unavailable at once where one does not serve."""
        if not self._workers:
            raise self._none_is_there()
        if not all(worker.is_serving for worker in self._workers):
            raise Unavailable(f"not all {self.kind}s serve at the moment; try again in a moment")
        return await asyncio.gather(*(self._answer(worker, request, time_left_s, **origin) for worker in self._workers))

    async def _gather_results(self, workers: list[EngineHandle], request: Request[Any], **origin: Any) -> list[Any]:
        """Returns the answer or the error of each of these workers."""
        answers: list[Awaitable[Any]] = [self._answer(worker, request, **origin) for worker in workers]
        return [_reraise_unexpected(value) for value in await asyncio.gather(*answers, return_exceptions=True)]

    async def _answer(
        self, worker: EngineHandle, request: Request[R], time_left_s: float | None = None, **origin: Any
    ) -> R:
        """Returns one worker's answer. Raises Unavailable after `_limit_s`, unless a datastore is opened."""
        try:
            async with asyncio.timeout(None if isinstance(request, LoadDatastoreRequest) else self._limit_s):
                return await worker.ask(request, time_left_s, **origin)
        except TimeoutError:
            raise Unavailable(f"{worker.name} did not answer within {self._limit_s:g} s") from None

    def _worker_for(self, request: Request[Any], *, owner: str = "", caller: str = "", **_: Any) -> EngineHandle:
        if session := getattr(request, "session", None):
            return self._owner_of(session)
        least = self._least_loaded()
        if isinstance(request, StreamRequest) and request.approximate_tokens >= READ_TOKENS:
            return self._reader_of(request, least, party_of(owner, caller))
        return least

    def _reader_of(self, request: StreamRequest, least: EngineHandle, party: str) -> EngineHandle:
        """The worker that has just read a text of the caller which begins alike, if it has a free place and at most one
        request more than the `least` busy one. From now on that is the one that is returned.
        """
        key = blake2b(f"{party}\n{request.beginning}".encode(errors="replace"), digest_size=16).digest()
        name = self._readers.pop(key, least.name)
        reader = next((each for each in self._workers if each.name == name), least)
        is_near = reader.is_ready and reader.has_place and reader.num_open <= least.num_open + 1
        found = reader if is_near else least
        self._readers[key] = found.name
        if len(self._readers) > MAX_READERS:
            self._readers.popitem(last=False)
        return found

    def _least_loaded(self) -> EngineHandle:
        """The serving worker with the fewest requests in flight, at random among equals."""
        if not (workers := self._workers):
            raise self._none_is_there()
        return min(workers, key=lambda worker: (not worker.is_serving, not worker.is_ready, worker.num_open, random()))

    def _leader(self) -> EngineHandle:
        """The first worker with a fresh heartbeat. A worker that hangs could not answer before it is replaced."""
        if not (workers := self._workers):
            raise self._none_is_there()
        return min(workers, key=lambda worker: (not worker.is_ready, worker.heartbeat_age_s > FRESH_HEARTBEAT_S))

    def _none_is_there(self) -> Unavailable:
        return Unavailable(f"the {self.kind} is being started again; try again in a moment")


class WorkerPool(EnginePool):
    """Worker processes of this server. The name of a session maps to the number of its worker."""

    def __init__(
        self,
        config: ServerConfig,
        stores: Callable[[], Mapping[str, Path]],
        on_store_stats: Callable[[Sequence[StoreStats]], None] = lambda stores: None,
        fence: SessionFence | None = None,
    ) -> None:
        """As `EnginePool`. `on_store_stats` is called with the figures of each heartbeat. `fence` is that of the
        session folder.
        """
        super().__init__(config, stores)
        per_worker = config.per_worker(num_cores())
        self._handles = tuple(
            WorkerHandle(per_worker, number, stores, self.event_bytes, self.mark_deleted, on_store_stats, fence)
            for number in range(config.num_workers)
        )
        for handle in self._handles:
            handle.files = self._files

    async def start(self) -> None:
        """As `EnginePool.start`."""
        await asyncio.gather(*(worker.start() for worker in self._handles))

    async def stop(self, timeout_s: float) -> None:
        """As `EnginePool.stop`."""
        await asyncio.gather(*(worker.stop(timeout_s) for worker in self._handles))

    @property
    def _workers(self) -> Sequence[EngineHandle]:
        return self._handles

    def _owner_of(self, session: str) -> EngineHandle:
        return self._handles[worker_for_session(session, len(self._handles))]


async def run_to_end(change: Coroutine[Any, Any, R]) -> R:
    """Awaits a change that goes on without the caller. If the caller has left, an error of the change has no reader."""
    task = asyncio.ensure_future(change)
    task.add_done_callback(lambda ended: ended.cancelled() or ended.exception())
    return await asyncio.shield(task)


def _reraise_unexpected(value: Any) -> Any:
    if isinstance(value, BaseException) and not isinstance(value, MemlmError):
        raise value
    return value
