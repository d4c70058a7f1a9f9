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
from typing import Any

from memlm.api.datastores import DeleteDocumentsRequest, LoadDatastoreRequest
from memlm.api.sessions import ListSessionsRequest
from memlm.base.cpu import num_cores
from memlm.errors import InternalError, MemlmError, Unavailable
from memlm.server.config import ServerConfig, place_of
from memlm.server.inference.deletions import Deletions
from memlm.server.inference.handle import JOIN_S, Call, WorkerLink, event_quota
from memlm.server.inference.messages import CatchUp, Question
from memlm.server.telemetry.metrics import Stats

FRESH_BEAT_S = 2.0  # four heartbeats: a worker that is silent for longer may stand still


class Workers:
    """The workers of a server."""

    def __init__(self, config: ServerConfig, stores: Callable[[], Mapping[str, Path]]) -> None:
        """Starts nothing yet. `stores` tells what a worker that starts is to load."""
        self.deletions, self._stores = Deletions(), stores
        share = config.share(num_cores())
        self.event_bytes = event_quota(config)
        self._links = tuple(
            WorkerLink(share, place, stores, self.event_bytes, self.forget) for place in range(config.num_workers)
        )
        self._limit_s = config.worker_timeout_s + JOIN_S  # a worker that stands still is killed before

    async def start(self) -> None:
        """Starts all and waits until they are loaded. Raises what kept one from loading."""
        await asyncio.gather(*(link.start() for link in self._links))

    async def stop(self, patience_s: float) -> None:
        """Tells all to stop, and waits for them; those that do not stop are killed."""
        await asyncio.gather(*(link.stop(patience_s) for link in self._links))

    @property
    def is_serving(self) -> bool:
        """Whether there is one that has loaded and whose loop has moved of late."""
        return any(link.is_serving for link in self._links)

    @property
    def beat_age_s(self) -> float:
        """Seconds since the stillest loop last told that it moves."""
        return max(link.beat_age_s for link in self._links)

    @property
    def stats(self) -> Stats:
        """How much all of them have to do, and hold."""
        return Stats(*map(sum, zip(*(astuple(link.stats) for link in self._links), strict=True)))

    @property
    def num_open(self) -> int:
        """Questions that somebody waits for the answers of."""
        return sum(link.num_open for link in self._links)

    def check_room(self) -> None:
        """Raises Overloaded where there is too much to do already, Unavailable while there is no worker."""
        self._freest().check_room()

    @contextmanager
    def ask(self, question: Question, time_left_s: float | None, **about: Any) -> Iterator[Call]:
        """Asks one, as `WorkerLink.ask` does."""
        with self._link_for(question).ask(question, time_left_s, **about) as call:
            yield call

    async def answer(self, question: Question, time_left_s: float | None = None, **about: Any) -> Any:
        """The one answer to a question, from whom it takes. Raises its error."""
        if isinstance(question, ListSessionsRequest):
            found = await self._answers(question, time_left_s, **about)
            return tuple(sorted(chain(*found), key=lambda session: session.used_s, reverse=True))
        if isinstance(question, DeleteDocumentsRequest):
            return await asyncio.shield(self._delete(question, time_left_s, **about))
        return await self._link_for(question).answer(question, time_left_s, **about)

    async def everywhere(
        self, question: Question, then: Callable[[Any], None], *, ours: bool = False, **about: Any
    ) -> Any:
        """One answer of all workers, to what each has to do; `then` is told of it before anybody is asked anything
        else. It is done to its end, whoever waits for it. Raises Overloaded as `check_room` does, unless it is the
        server's own doing, and the error where none could do it.
        """
        if not ours:
            self.check_room()
        return await asyncio.shield(self._everywhere(question, then, **about))

    async def catch_up(self, store: str) -> None:
        """Has every worker move to what is in a datastore's folder now. Raises Unavailable while one does not serve,
        and the error of one that cannot read the folder.
        """
        await self._answers(CatchUp(store), ours=True)

    async def _everywhere(self, question: Question, then: Callable[[Any], None], **about: Any) -> Any:
        links = [link for link in self._links if link.is_loaded]
        if not links:
            raise Unavailable("the inference worker is being started again; try again in a moment")
        told = dict(zip(links, await self._tried(links, question, ours=True, **about), strict=True))
        done = {link: value for link, value in told.items() if not isinstance(value, BaseException)}
        if not done:
            raise next(iter(told.values()))
        value = next(iter(done.values()))
        then(value)
        if isinstance(question, LoadDatastoreRequest) and question.replace:
            self.forget(value.name)
        for link in self._links:
            if link.is_loaded and link not in done:
                link.restart(f"it could not do what the others did ({told.get(link, 'it came up meanwhile')})")
        return value

    async def _delete(self, question: DeleteDocumentsRequest, time_left_s: float | None, **about: Any) -> Any:
        """One writes, always the same; the others move on to what it wrote, and then it is done."""
        leader = self._leader()
        try:
            report = await leader.answer(question, time_left_s, **about)
        except (Unavailable, InternalError):  # it may have been committed
            self.forget(question.store, question.document_ids)
            raise
        self.forget(report.store, question.document_ids)
        others = [link for link in self._links if link.is_loaded and link is not leader]
        moved = await self._tried(others, CatchUp(report.store), ours=True)
        for link, value in zip(others, moved, strict=True):
            if isinstance(value, BaseException):
                link.restart(f"it could not follow a deletion ({value})")
        return report

    def forget(self, store: str | None, document_ids: Collection[str] | None = None) -> None:
        """Takes documents of a datastore (of no ids, all) out of all that is still delivered of running and resumable
        generations, under each name that the datastore has.
        """
        paths = {name: path.resolve() for name, path in self._stores().items()}
        same = [name for name, path in paths.items() if store is None or path == paths.get(store)]
        self.deletions.add({*same, *([] if store is None else [store])}, document_ids)

    async def _answers(self, question: Question | CatchUp, time_left_s: float | None = None, **about: Any) -> list[Any]:
        """Of each its answer. Raises an error of one, and Unavailable at once where one does not serve."""
        if not all(link.is_serving for link in self._links):
            raise Unavailable("not all inference workers serve at the moment; try again in a moment")
        return await asyncio.gather(*(self._answer(link, question, time_left_s, **about) for link in self._links))

    async def _tried(self, links: list[WorkerLink], question: Question | CatchUp, **about: Any) -> list[Any]:
        """Of each its answer, or its error."""
        asking: list[Awaitable[Any]] = [self._answer(link, question, **about) for link in links]
        return [_expected(value) for value in await asyncio.gather(*asking, return_exceptions=True)]

    async def _answer(
        self, link: WorkerLink, question: Question | CatchUp, time_left_s: float | None = None, **about: Any
    ) -> Any:
        """One worker's answer to a question for all of them. Raises Unavailable where it takes too long; only opening a
        datastore may take any time, as long as the worker's heart beats.
        """
        try:
            async with asyncio.timeout(None if isinstance(question, LoadDatastoreRequest) else self._limit_s):
                return await link.answer(question, time_left_s, **about)
        except TimeoutError:
            raise Unavailable(f"inference worker {link.place} did not answer within {self._limit_s:g} s") from None

    def _link_for(self, question: Question) -> WorkerLink:
        session = getattr(question, "session", None)
        return self._links[place_of(session, len(self._links))] if session else self._freest()

    def _freest(self) -> WorkerLink:
        """Who has least to do, of those that move; any one of several."""
        return min(self._links, key=lambda link: (not link.is_serving, not link.is_up, link.num_open, random()))

    def _leader(self) -> WorkerLink:
        """The first that serves: one that stands still could not answer before it is replaced."""
        return min(self._links, key=lambda link: (not link.is_up, link.beat_age_s > FRESH_BEAT_S))


def _expected(value: Any) -> Any:
    if isinstance(value, BaseException) and not isinstance(value, MemlmError):
        raise value
    return value
