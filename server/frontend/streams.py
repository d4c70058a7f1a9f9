"""Streams of generated tokens: pending tokens are merged, and resumable generations outlive their connection."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import replace
from functools import partial
from typing import Any

from memlm.api.generation import Accepted, Finished, ResumeGenerationRequest
from memlm.errors import Cancelled, Incompatible, InternalError, InvalidInput, MemlmError, NotFound, Overloaded
from memlm.server.inference.deletions import Deletion, DeletionFilter
from memlm.server.inference.messages import MAX_EVENT_BYTES, event_size
from memlm.server.inference.pool import EnginePool
from memlm.server.quota import Holding, Quota
from memlm.wire.codec import WireEvent

POLL_S = 0.5  # between looks for whether anybody still follows a generation

log = logging.getLogger("memlm.server")

MAX_REGISTERED = 8192  # more than may run at once; the oldest goes first
DROPPED_FRACTION = 8  # the part of a generation's bytes that is dropped at a time


class GenerationStreams:
    def __init__(self, workers: EnginePool, max_stream_bytes: int) -> None:
        """At most `max_stream_bytes` of one resumable generation are kept."""
        self._workers, self._registry = workers, ResumableGenerationRegistry(workers.event_bytes, max_stream_bytes)

    def cancel(self, request_id: str, owner: str) -> None:
        """Cancels a resumable generation. Raises NotFound where it is not the owner's."""
        self._registry.stop(request_id, self._registry.find(request_id, owner))

    async def stream(
        self, request: Any, left_s: float | None, *, id_: str, caller: str, owner: str
    ) -> AsyncGenerator[WireEvent, None]:
        """Yields a generation's events without neighbors that were deleted since it began, and without such passages
        that were left out of a prompt. Raises NotFound once a document is deleted that has a passage in the prompt of
        an answer.

        Closing this generator ends a generation that cannot be resumed.
        """
        from_worker = partial(self._workers.stream, request, left_s, id_=id_, caller=caller, owner=owner)
        since = self._workers.deletions.latest
        if isinstance(request, ResumeGenerationRequest):
            run = self._registry.find(request.request_id, owner)
            stream, since = run.follow(request.offset), run.since
        elif request.resume_s is not None:
            run = self._registry.new(owner, caller, request.resume_s, since)
            run.work = asyncio.create_task(self._record(run, from_worker()))
            stream = run.follow(0)
        else:
            stream = from_worker()
        forgetting, prompt = DeletionFilter(since), None
        async with aclosing(stream) as events:
            async for event in events:
                if isinstance(event, Accepted):
                    prompt = event.prompt
                if prompt is not None and forgetting.is_needed:
                    forgetting.check_passages(prompt.passages)
                    if isinstance(event, Accepted):
                        event = replace(event, prompt=replace(prompt, left_out=forgetting.kept(prompt.left_out)))
                if isinstance(event, tuple) and forgetting.is_needed:
                    event = await asyncio.to_thread(forgetting.apply, event)
                yield event

    async def _record(self, run: ResumableGeneration, events: AsyncGenerator[WireEvent, None]) -> None:
        """Task: records a resumable generation's events, whether or not a client follows."""
        run.expiring = asyncio.create_task(self._expire(run))
        try:
            async with aclosing(events):
                async for event in events:
                    self._registry.add(run, event)
        except MemlmError as error:
            run.fail(error)
        except asyncio.CancelledError:
            run.fail(Cancelled("the generation was cancelled"))
        except Exception:
            log.exception("a generation failed")
            run.fail(InternalError("a bug in the server; its log has the details"))
        finally:
            if run.failure is not None:
                self._registry.drop(run, str(run.failure))

    async def _expire(self, run: ResumableGeneration) -> None:
        """Task: drops a resumable generation that no client has followed for `keep_s`."""
        while not run.is_expired:
            await asyncio.sleep(min(POLL_S, run.keep_s))
        if run.accepted is not None:
            self._registry.stop(run.accepted.request_id, run)
        elif run.work is not None:
            run.work.cancel()


class ResumableGeneration:
    """A generation's latest events, and the clients that follow it."""

    def __init__(self, owner: str, keep_s: float, since: Deletion, holding: Holding) -> None:
        """`since` is the latest deletion before the generation began. `holding` counts the bytes that are kept."""
        self.owner, self.keep_s, self.since = owner, keep_s, since
        self.accepted: Accepted | None = None
        self.finished: Finished | None = None
        self.failure: MemlmError | None = None
        self.left_s = time.monotonic()
        self.work: asyncio.Task[None] | None = None
        self.expiring: asyncio.Task[None] | None = None
        self._tokens, self._num_dropped, self._prompt_size = list[bytes](), 0, 0
        self._holding, self._is_forgotten = holding, False
        self.caller = holding.caller
        self._offsets: dict[object, int] = {}  # of each follower, the token that it gets next
        self._changed = asyncio.Event()

    @property
    def num_bytes(self) -> int:
        """Bytes of the tokens that are kept, and of the prompt of an answer."""
        return self._holding.amount

    @property
    def num_generated(self) -> int:
        """Tokens that have been drawn, dropped ones included."""
        return self._num_dropped + len(self._tokens)

    @property
    def is_followed(self) -> bool:
        """Whether a client receives the events."""
        return bool(self._offsets)

    @property
    def has_ended(self) -> bool:
        """Whether all events have come."""
        return self.finished is not None or self.failure is not None

    @property
    def is_expired(self) -> bool:
        """Whether no client has followed it for `keep_s`."""
        return not self.is_followed and time.monotonic() - self.left_s > self.keep_s

    def add(self, event: WireEvent) -> None:
        """Adds an event. Raises Overloaded where there is no room for it."""
        self._holding.take(event_size(event))
        if isinstance(event, Accepted):
            self.accepted, self._prompt_size = event, event_size(event)
        elif isinstance(event, Finished):
            self.finished = event
        else:
            self._tokens += event
        self._notify()

    def drop_delivered(self) -> bool:
        """Drops the oldest of the tokens that all followers have received. Returns False if there are none."""
        least = max(1, (self.num_bytes - self._prompt_size) // DROPPED_FRACTION)
        delivered, count, freed = min(self._offsets.values(), default=0) - self._num_dropped, 0, 0
        while count < delivered and freed < least:
            freed += len(self._tokens[count])
            count += 1
        del self._tokens[:count]
        self._num_dropped += count
        self._holding.give(freed)
        return count > 0

    def fail(self, error: MemlmError) -> None:
        """Ends the generation with an error, which followers raise."""
        self.failure = error
        self._notify()

    def forget(self) -> None:
        """Frees the tokens, once the last follower has received them."""
        self._is_forgotten = True
        if not self.is_followed:
            self._tokens.clear()
            self._holding.give(self._holding.amount)

    async def follow(self, offset: int) -> AsyncGenerator[WireEvent, None]:
        """Yields events from the token at `offset` on, recorded ones first.

        Raises the generation's failure, InvalidInput for a token that has not been drawn yet, and Incompatible for a
        token that was dropped.
        """
        if offset > self.num_generated:
            raise InvalidInput(
                f"offset is {offset}, and {self.num_generated} tokens have been drawn; expected at most that",
                field="offset",
            )
        if offset < self._num_dropped:
            raise Incompatible(
                f"tokens are kept from {self._num_dropped} on, and offset is {offset}; the earlier ones took more"
                " memory than the server keeps of a generation: ask anew"
            )
        follower = object()
        self._offsets[follower] = offset
        try:
            while self.accepted is None and not self.has_ended:
                await self._changed.wait()
            if self.accepted is not None:
                yield self.accepted
            while True:
                changed = self._changed
                if offset < self.num_generated:
                    yield (stream := self._event_from(offset))
                    self._offsets[follower] = offset = offset + len(stream)
                    continue
                if self.finished is not None:
                    yield self.finished
                    return
                if self.failure is not None:
                    raise self.failure
                await changed.wait()
        finally:
            del self._offsets[follower]
            self.left_s = time.monotonic()
            if self._is_forgotten:
                self.forget()

    def _event_from(self, offset: int) -> tuple[bytes, ...]:
        """The tokens from `offset` on, up to the size of an event."""
        begin, size = offset - self._num_dropped, 0
        end = begin
        while end < len(self._tokens) and size < MAX_EVENT_BYTES:
            size += len(self._tokens[end])
            end += 1
        return tuple(self._tokens[begin:end])

    def _notify(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()


class ResumableGenerationRegistry:
    """All resumable generations, by request id.

    At most `max_bytes` of each are kept, and of all together the quota `event_bytes`. When that is full, the generation
    that ended first and that no client follows is dropped, one of the same caller where that caller exceeds its share.
    """

    def __init__(self, event_bytes: Quota, max_bytes: int) -> None:
        self._event_bytes, self._max_bytes = event_bytes, max_bytes
        self._registry: dict[str, ResumableGeneration] = {}
        self._dropped: dict[str, tuple[str, str]] = {}  # by request id: the owner, and why
        event_bytes.reclaim = self._drop_oldest

    def new(self, owner: str, caller: str, keep_s: float, since: Deletion) -> ResumableGeneration:
        """Starts the record of a generation that has not been accepted yet."""
        return ResumableGeneration(owner, keep_s, since, Holding(self._event_bytes, caller))

    def add(self, run: ResumableGeneration, event: WireEvent) -> None:
        """Adds an event. `Accepted` registers the generation. Raises Overloaded without room for it."""
        size = event_size(event)
        while run.num_bytes + size > self._max_bytes:
            if not run.drop_delivered():
                raise Overloaded(
                    f"the generation has ended: {self._max_bytes:,} bytes of it were kept, and no client had read them"
                )
        while True:
            try:
                run.add(event)
                break
            except Overloaded:
                if not run.drop_delivered():
                    raise
        if isinstance(event, Accepted):
            self._registry[event.request_id] = run
            if len(self._registry) > MAX_REGISTERED:
                self.stop(*next(iter(self._registry.items())))

    def find(self, request_id: str, owner: str) -> ResumableGeneration:
        """Raises NotFound for a generation that is unknown, failed, expired or another owner's."""
        run = self._registry.get(request_id)
        if run is None or run.owner != owner or run.failure is not None or run.is_expired:
            dropped_owner, why = self._dropped.get(request_id, ("", ""))
            why = f" ({why})" if why and dropped_owner == owner else ""
            raise NotFound(
                f"no generation {request_id!r} that could be resumed{why}; ask anew", kind="generation", name=request_id
            )
        return run

    def stop(self, request_id: str, run: ResumableGeneration) -> None:
        """Cancels a generation and drops its events."""
        self._registry.pop(request_id, None)
        if run.work is not None:
            run.work.cancel()
        run.forget()

    def drop(self, run: ResumableGeneration, why: str) -> None:
        """Drops the events of a generation that has ended, and keeps the reason for its owner."""
        request_id = "" if run.accepted is None else run.accepted.request_id
        if self._registry.get(request_id) is run:
            del self._registry[request_id]
            self._dropped[request_id] = run.owner, why
            if len(self._dropped) > MAX_REGISTERED:
                del self._dropped[next(iter(self._dropped))]
        run.forget()

    def _drop_oldest(self, caller: str, own_only: bool) -> bool:
        """Drops the generation that ended first, `own_only` of this caller. Returns False if none can be dropped."""
        ended = (run for run in self._registry.values() if run.finished is not None and not run.is_followed)
        oldest = next((run for run in ended if not own_only or run.caller == caller), None)
        if oldest is None:
            return False
        self.drop(oldest, "it had ended, and its memory was needed for others")
        return True
