"""All inference workers, as the front sees them: whom a question goes to, and what has to happen on every one.

A session lives where its name says; what has none goes to whoever has least to do. Datastores come and go, and
documents are deleted, on all workers before the caller hears of it; a worker that could not follow is started again,
and loads what is in service then.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import astuple
from itertools import chain
from pathlib import Path
from random import random
from typing import Any, TypeVar, cast

from memlm.api.datastores import DeleteDocumentsRequest, DeleteReport, LoadDatastoreRequest
from memlm.api.request import Request
from memlm.api.sessions import ListSessionsRequest
from memlm.base.cpu import num_cores
from memlm.errors import InternalError, MemlmError, Unavailable
from memlm.server.config import ServerConfig, worker_for_session
from memlm.server.inference.deletions import Deletions
from memlm.server.inference.handle import JOIN_S, PendingRequest, WorkerHandle, event_quota
from memlm.server.inference.messages import Refresh
from memlm.server.telemetry.metrics import Stats

FRESH_HEARTBEAT_S = 2.0  # four heartbeats: a worker that is silent for longer may stand still

R = TypeVar("R")


class WorkerPool:
    """The workers of a server."""

    def __init__(self, config: ServerConfig, stores: Callable[[], Mapping[str, Path]]) -> None:
        """Starts nothing yet. `stores` tells what a worker that starts is to load."""
        self.deletions, self._stores = Deletions(), stores
        per_worker = config.per_worker(num_cores())
        self.event_bytes = event_quota(config)
        self._workers = tuple(
            WorkerHandle(per_worker, number, stores, self.event_bytes, self.mark_deleted)
            for number in range(config.num_workers)
        )
        self._limit_s = config.worker_timeout_s + JOIN_S  # a worker that stands still is killed before

    async def start(self) -> None:
        """Starts all and waits until they are loaded. Raises what kept one from loading."""
        await asyncio.gather(*(worker.start() for worker in self._workers))

    async def stop(self, timeout_s: float) -> None:
        """Tells all to stop, and waits for them; those that do not stop are killed."""
        await asyncio.gather(*(worker.stop(timeout_s) for worker in self._workers))

    @property
    def is_serving(self) -> bool:
        """Whether there is one that has loaded and whose loop has moved of late."""
        return any(worker.is_serving for worker in self._workers)

    @property
    def heartbeat_age_s(self) -> float:
        """Seconds since the stillest loop last told that it moves."""
        return max(worker.heartbeat_age_s for worker in self._workers)

    @property
    def stats(self) -> Stats:
        """How much all of them have to do, and hold."""
        return Stats(*map(sum, zip(*(astuple(worker.stats) for worker in self._workers), strict=True)))

    @property
    def num_open(self) -> int:
        """Questions that somebody waits for the answers of."""
        return sum(worker.num_open for worker in self._workers)

    def check_room(self) -> None:
        """Raises Overloaded where there is too much to do already, Unavailable while there is no worker."""
        self._least_loaded().check_room()

    @contextmanager
    def submit(self, request: Request[Any], time_left_s: float | None, **origin: Any) -> Iterator[PendingRequest]:
        """Asks one, as `WorkerHandle.submit` does."""
        with self._worker_for(request).submit(request, time_left_s, **origin) as pending:
            yield pending

    async def answer(self, request: Request[R], time_left_s: float | None = None, **origin: Any) -> R:
        """The one answer to a question, from whom it takes. Raises its error."""
        if isinstance(request, ListSessionsRequest):
            lists = await self._gather_answers(request, time_left_s, **origin)
            sessions = sorted(chain(*lists), key=lambda session: session.used_s, reverse=True)
            return cast(R, tuple(sessions))
        if isinstance(request, DeleteDocumentsRequest):
            return cast(R, await asyncio.shield(self._delete(request, time_left_s, **origin)))
        return await self._worker_for(request).answer(request, time_left_s, **origin)

    async def broadcast(
        self, request: Request[R], on_done: Callable[[R], None], *, internal: bool = False, **origin: Any
    ) -> R:
        """One answer of all workers, to what each has to do; `on_done` is told of it before anybody is asked anything
        else. It is done to its end, whoever waits for it. Raises Overloaded as `check_room` does, unless it is the
        server's own doing, and the error where none could do it.
        """
        if not internal:
            self.check_room()
        return await asyncio.shield(self._broadcast(request, on_done, **origin))

    async def refresh(self, store: str) -> None:
        """Has every worker move to what is in a datastore's folder now. Raises Unavailable while one does not serve,
        and the error of one that cannot read the folder.
        """
        await self._gather_answers(Refresh(store), internal=True)

    async def _broadcast(self, request: Request[R], on_done: Callable[[R], None], **origin: Any) -> R:
        workers = [worker for worker in self._workers if worker.is_loaded]
        if not workers:
            raise Unavailable("the inference worker is being started again; try again in a moment")
        results = dict(zip(workers, await self._gather_results(workers, request, internal=True, **origin), strict=True))
        done = {worker: value for worker, value in results.items() if not isinstance(value, BaseException)}
        if not done:
            raise next(iter(results.values()))
        value = next(iter(done.values()))
        on_done(value)
        if isinstance(request, LoadDatastoreRequest) and request.replace:
            self.mark_deleted(value.name)
        for worker in self._workers:
            if worker.is_loaded and worker not in done:
                worker.restart(f"it could not do what the others did ({results.get(worker, 'it came up meanwhile')})")
        return value

    async def _delete(self, request: DeleteDocumentsRequest, time_left_s: float | None, **origin: Any) -> DeleteReport:
        """One writes, always the same; the others move on to what it wrote, and then it is done."""
        leader = self._leader()
        try:
            report = await leader.answer(request, time_left_s, **origin)
        except (Unavailable, InternalError):  # it may have been committed
            self.mark_deleted(request.store, request.document_ids)
            raise
        self.mark_deleted(report.store, request.document_ids)
        followers = [worker for worker in self._workers if worker.is_loaded and worker is not leader]
        outcomes = await self._gather_results(followers, Refresh(report.store), internal=True)
        for worker, value in zip(followers, outcomes, strict=True):
            if isinstance(value, BaseException):
                worker.restart(f"it could not follow a deletion ({value})")
        return report

    def mark_deleted(self, store: str | None, document_ids: Collection[str] | None = None) -> None:
        """Takes documents of a datastore (of no ids, all) out of all that is still delivered of running and resumable
        generations, under each name that the datastore has.
        """
        paths = {name: path.resolve() for name, path in self._stores().items()}
        names = [name for name, path in paths.items() if store is None or path == paths.get(store)]
        self.deletions.add({*names, *([] if store is None else [store])}, document_ids)

    async def _gather_answers(self, request: Request[R], time_left_s: float | None = None, **origin: Any) -> list[R]:
        """Of each its answer. Raises an error of one, and Unavailable at once where one does not serve."""
        if not all(worker.is_serving for worker in self._workers):
            raise Unavailable("not all inference workers serve at the moment; try again in a moment")
        return await asyncio.gather(*(self._answer(worker, request, time_left_s, **origin) for worker in self._workers))

    async def _gather_results(self, workers: list[WorkerHandle], request: Request[Any], **origin: Any) -> list[Any]:
        """Of each its answer, or its error."""
        answers: list[Awaitable[Any]] = [self._answer(worker, request, **origin) for worker in workers]
        return [_reraise_unexpected(value) for value in await asyncio.gather(*answers, return_exceptions=True)]

    async def _answer(
        self, worker: WorkerHandle, request: Request[R], time_left_s: float | None = None, **origin: Any
    ) -> R:
        """One worker's answer to a question for all of them. Raises Unavailable where it takes too long; only opening a
        datastore may take any time, as long as the worker's heart beats.
        """
        try:
            async with asyncio.timeout(None if isinstance(request, LoadDatastoreRequest) else self._limit_s):
                return await worker.answer(request, time_left_s, **origin)
        except TimeoutError:
            raise Unavailable(f"inference worker {worker.number} did not answer within {self._limit_s:g} s") from None

    def _worker_for(self, request: Request[Any]) -> WorkerHandle:
        session = getattr(request, "session", None)
        return self._workers[worker_for_session(session, len(self._workers))] if session else self._least_loaded()

    def _least_loaded(self) -> WorkerHandle:
        """Who has least to do, of those that move; any one of several."""
        return min(
            self._workers, key=lambda worker: (not worker.is_serving, not worker.is_ready, worker.num_open, random())
        )

    def _leader(self) -> WorkerHandle:
        """The first that serves: one that stands still could not answer before it is replaced."""
        return min(self._workers, key=lambda worker: (not worker.is_ready, worker.heartbeat_age_s > FRESH_HEARTBEAT_S))


def _reraise_unexpected(value: Any) -> Any:
    if isinstance(value, BaseException) and not isinstance(value, MemlmError):
        raise value
    return value
