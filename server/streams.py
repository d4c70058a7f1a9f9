"""Generations on their way to who asked: what piled up goes out together, and what can be resumed outlives a connection
that breaks.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Iterator, Sequence
from contextlib import aclosing
from functools import partial
from typing import Any

from memlm.errors import Cancelled, InternalError, MemlmError
from memlm.events import Finished
from memlm.questions import ResumeGenerationRequest
from memlm.server.deletions import Forgetting
from memlm.server.messages import Answer, Events, Failed
from memlm.server.runs import MAX_EVENT_BYTES, Run, Runs
from memlm.server.workers import Workers
from memlm.wire import WireEvent

LOOK_S = 0.5  # between looks for whether anybody still follows a generation

log = logging.getLogger("memlm.server")


class Streams:
    """The generations of a server."""

    def __init__(self, workers: Workers, max_stream_bytes: int) -> None:
        """Takes who draws them, and the most that is kept of one."""
        self._workers, self._runs = workers, Runs(workers.event_bytes, max_stream_bytes)

    def cancel(self, request_id: str, owner: str) -> None:
        """Stops one that goes on without a connection. Raises NotFound where it is not the owner's."""
        self._runs.stop(request_id, self._runs.find(request_id, owner))

    async def events(
        self, question: Any, left_s: float | None, *, id_: str, caller: str, owner: str
    ) -> AsyncGenerator[WireEvent, None]:
        """Yields a generation's events, of a resumable one from its run, without the neighbors that were deleted since
        it began. Closing this ends a generation that cannot be resumed.
        """
        drawn = partial(self._drawn, question, left_s, id_=id_, caller=caller, owner=owner)
        since = self._workers.deletions.latest
        if isinstance(question, ResumeGenerationRequest):
            run = self._runs.find(question.request_id, owner)
            coming, since = run.follow(question.offset), run.since
        elif question.resume_s is not None:
            run = self._runs.new(owner, caller, question.resume_s, since)
            run.work = asyncio.create_task(self._go_on(run, drawn()))
            coming = run.follow(0)
        else:
            coming = drawn()
        forgetting = Forgetting(since)
        async with aclosing(coming) as events:
            async for event in events:
                if isinstance(event, tuple) and forgetting.is_needed:
                    event = await asyncio.to_thread(forgetting.without_deleted, event)
                yield event

    async def _drawn(self, question: Any, left_s: float | None, **about: str) -> AsyncGenerator[WireEvent, None]:
        """A generation's events, as they come. Who closes this tells the worker that nobody waits any more."""
        event: WireEvent = ()
        with self._workers.ask(question, left_s, **about) as asked:
            while not isinstance(event, Finished):
                for event in merged(await asked.take()):
                    yield event

    async def _go_on(self, run: Run, events: AsyncGenerator[WireEvent, None]) -> None:
        """Task: a generation goes on, whoever follows it, until nobody has come back for too long."""
        run.keeper = asyncio.create_task(self._look_after(run))
        try:
            async with aclosing(events):
                async for event in events:
                    self._runs.add(run, event)
        except MemlmError as error:
            run.fail(error)
        except asyncio.CancelledError:
            run.fail(Cancelled("the generation was cancelled"))
        except Exception:
            log.exception("a generation failed")
            run.fail(InternalError("a bug in the server; its log tells more"))
        finally:
            if run.failure is not None:
                self._runs.drop(run, str(run.failure))

    async def _look_after(self, run: Run) -> None:
        """Task: forgets a generation that nobody came back to, ended or not."""
        while not run.is_given_up:
            await asyncio.sleep(min(LOOK_S, run.keep_s))
        if run.accepted is not None:
            self._runs.stop(run.accepted.request_id, run)
        elif run.work is not None:
            run.work.cancel()


def merged(answers: Sequence[Answer]) -> Iterator[WireEvent]:
    """The events in some answers, with tokens that follow each other in one. Raises the failure that ends them."""
    tokens, size = list[bytes](), 0
    for answer in answers:
        for event in answer.events if isinstance(answer, Events) else ():
            if tokens and (size >= MAX_EVENT_BYTES or not isinstance(event, tuple)):
                yield tuple(tokens)
                tokens, size = [], 0
            if isinstance(event, tuple):
                tokens += event
                size += sum(map(len, event))
            else:
                yield event
    if tokens:
        yield tuple(tokens)
    if not isinstance(answers[-1], Events):
        raise _failure(answers[-1])


def _failure(answer: Answer) -> MemlmError:
    return answer.error if isinstance(answer, Failed) else InternalError(f"the worker answered {type(answer).__name__}")
