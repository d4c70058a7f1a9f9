"""An inference worker: a process that owns a model and its datastores.

One loop accepts requests, drops those that are cancelled or late before they cost anything, and advances the others: in
each iteration every generation draws one token in the batch, and one other request takes a step. Waiting requests are
admitted by turns among the callers, so that a caller with a hundred requests does not delay a caller with one.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import wait
from contextlib import contextmanager
from functools import partial
from typing import Any

from memlm.api.params import StreamRequest
from memlm.base.steps import Offload
from memlm.errors import DeadlineExceeded, InternalError, MemlmError, Overloaded
from memlm.generation.batch import Batch
from memlm.generation.engine import Engine
from memlm.server.inference.active_request import ActiveRequest, Life
from memlm.server.inference.background import BackgroundRequest, BackgroundTasks
from memlm.server.inference.cache_budget import CacheBudget
from memlm.server.inference.handlers import FlushTimer, ask_and_send, stream_and_send
from memlm.server.inference.messages import (
    Cancel,
    Failed,
    FromWorker,
    Heartbeat,
    Result,
    Stop,
)
from memlm.server.inference.offloads import Offloads
from memlm.server.inference.pipe import Inbox
from memlm.server.inference.store_stats import store_stats
from memlm.server.processes import trim_heap
from memlm.server.telemetry.metrics import Stats

log = logging.getLogger("memlm.server.worker")

HEARTBEAT_S = 0.5
BACKGROUND_POLL_S = 0.01
OFFLOAD_POLL_S = 0.002
FINISH_WRITES_S = 10.0
IDLE_RELEASE_S = 5.0  # without work, until unused RAM is released
RETRY_AFTER_S = 1.0


class Worker:
    """The loop. `send` queues a message to the front end, `flush` writes the queued messages."""

    def __init__(
        self,
        engine: Engine,
        inbox: Inbox,
        send: Callable[[FromWorker], None],
        max_running: int,
        max_queued_tokens: int = 1 << 20,
        flush: Callable[[], None] = lambda: None,
        max_cache_bytes: int = 1 << 50,
    ) -> None:
        self._engine, self._inbox, self._send, self._flush = engine, inbox, send, flush
        self._max_running, self._max_queued_tokens = max_running, max_queued_tokens
        self._batch = Batch(engine.checkpoint, max_sequences=max_running, prefixes=engine.prefixes)
        self._cache_budget = CacheBudget(max_cache_bytes, engine.checkpoint)
        self._waiting: list[ActiveRequest] = []
        self._running: list[ActiveRequest] = []
        self._offloaded: list[ActiveRequest] = []  # a thread works for them; some of them run, none of them wait
        self._offloads, self._background = Offloads(), BackgroundTasks(engine)
        self._flush_timer = FlushTimer(lambda: len(self._running))
        self._heartbeat_s = 0.0
        self._last_work_s: float | None = None

    def run(self) -> None:
        """Iterates until `Stop`."""
        try:
            while True:
                for message in self._inbox.take(wait_s=self._idle_wait_s()):
                    if isinstance(message, Stop):
                        return
                    if isinstance(message, Cancel):
                        self._cancel(message.id)
                    else:
                        self._accept(ActiveRequest(message))
                self._finish_background_tasks()
                self._use_idle_moment()
                self._resume_offloaded()
                self._expire()
                self._admit()
                self._flush()  # answers do not wait for the step of the batch
                self._flush_timer.tick()
                self._step_batch()
                self._step_next()
                self._send_heartbeat()
                self._flush()
        finally:
            self._finish_writes()

    def _idle_wait_s(self) -> float:
        """How long the loop may sleep until a message comes."""
        if any(active.is_ready for active in self._running):
            return 0.0
        if self._offloaded:
            return OFFLOAD_POLL_S
        return BACKGROUND_POLL_S if self._background or self._background.misses_vectors else HEARTBEAT_S

    def _accept(self, active: ActiveRequest) -> None:
        """Takes the first step of a request. A request with more steps waits to be admitted."""
        if self._has_expired(active):
            return
        self._last_work_s = time.monotonic()
        request, send = active.submission.request, partial(self._reply, active)
        with self._reporting_errors(active):
            if isinstance(request, BackgroundRequest):
                self._background.start(active, request)
            elif isinstance(request, StreamRequest):
                self._check_queue(active, request)
                active.steps = stream_and_send(
                    active, self._engine, self._batch, send, self._flush_timer, self._cache_budget
                )
            else:
                active.steps = ask_and_send(active.submission, self._engine, send)
        if active.steps is not None:
            self._advance(active)

    def _check_queue(self, active: ActiveRequest, request: StreamRequest) -> None:
        """Raises Overloaded where too many prompt tokens wait."""
        queued = self._num_queued_tokens
        active.num_tokens = request.approximate_tokens
        if queued and queued + active.num_tokens > self._max_queued_tokens:
            raise Overloaded(
                f"{queued:,} tokens of prompts are waiting, and {self._max_queued_tokens:,} are all that this server"
                f" takes; try again in {RETRY_AFTER_S:g} s",
                retry_after_s=RETRY_AFTER_S,
            )

    def _advance(self, active: ActiveRequest, result: Any = None, error: BaseException | None = None) -> None:
        """Takes the next step of a request: it ends, offloads work to a thread, or is ready for another step."""
        assert active.steps is not None
        has_ended = True
        if active.life is Life.DRAWING:
            active.life = Life.RUNNING
        with self._reporting_errors(active):
            step = active.steps.send(result) if error is None else active.steps.throw(error)
            if active.generations:
                active.num_tokens = sum(generation.num_pending for generation in active.generations)
            if isinstance(step, Offload):
                active.offloaded, active.must_end = self._offloads.submit(active.caller, step), step.must_end
                self._offloaded.append(active)
            elif step is Life.DRAWING:
                active.life = step
            elif step is Life.WAITING or not active.is_admitted:
                self._wait(active)
            has_ended = False
        if has_ended and active.is_admitted:
            self._running.remove(active)

    def _wait(self, active: ActiveRequest) -> None:
        """Lets a request wait to be admitted. One with many token ids has been admitted once before, to check them."""
        if active.is_admitted:
            self._running.remove(active)
        active.life = Life.WAITING
        self._waiting.append(active)

    def _finish_background_tasks(self) -> None:
        for active, finish in self._background.take_finished():
            with self._reporting_errors(active):
                self._send(Result(active.id, finish()))
        self._background.finish_refresh()

    def _resume_offloaded(self) -> None:
        """Advances the requests whose offloaded work has ended."""
        for active in [each for each in self._offloaded if each.offloaded is not None and each.offloaded.done()]:
            outcome, active.offloaded = active.offloaded, None
            self._offloaded.remove(active)
            assert outcome is not None
            if error := outcome.exception():
                self._advance(active, error=error)
            else:
                self._advance(active, outcome.result())

    def _cancel(self, id_: str) -> None:
        for active in self._active:
            if active.id == id_:
                self._drop(active)

    def _expire(self) -> None:
        for active in self._active:
            if not active.is_abandoned and self._has_expired(active):
                self._drop(active)

    def _has_expired(self, active: ActiveRequest) -> bool:
        """Whether the deadline of a request has passed. If so, DeadlineExceeded is its answer."""
        deadline_s = active.submission.deadline_s
        if deadline_s is None or time.monotonic() < deadline_s:
            return False
        allowed_s = deadline_s - active.submission.submitted_s
        expired = DeadlineExceeded(f"the {allowed_s:.3g} s allowed for the call ran out; allow more, or ask for less")
        self._reply(active, Failed(active.id, expired))
        return True

    def _drop(self, active: ActiveRequest) -> None:
        """Ends a request without an answer. A write that has begun ends first, so that disk and RAM agree."""
        if active.offloaded is not None and active.must_end and not active.offloaded.cancel():
            active.is_abandoned = True
            return
        for requests in (self._waiting, self._running, self._offloaded):
            if active in requests:
                requests.remove(active)
        if active.offloaded is not None:
            active.offloaded.cancel()
        if active.steps is not None:
            active.steps.close()

    def _admit(self) -> None:
        """Moves waiting requests into the free places."""
        while len(self._running) < self._max_running and (active := self._next_admissible()) is not None:
            self._waiting.remove(active)
            self._running.append(active)
            active.life = Life.RUNNING
            if active.generations:
                self._advance(active)  # into the batch, before its next step

    def _next_admissible(self) -> ActiveRequest | None:
        """The oldest request of the caller with the fewest running ones.

        A generation whose cache does not fit holds back later generations, so that its turn comes. Requests without a
        cache pass it.
        """
        running = Counter(active.caller for active in self._running)
        waiting = sorted(self._waiting, key=lambda active: running[active.caller])
        if waiting and waiting[0].cache_bytes > self._cache_budget.max_bytes - self._cache_bytes:
            waiting = [active for active in waiting if not active.cache_bytes]
        return waiting[0] if waiting else None

    def _step_batch(self) -> None:
        """Draws one token for every generation in the batch."""
        if not len(self._batch):
            return
        by_sequence = {active.sequence: active for active in self._running if active.life is Life.DRAWING}
        try:
            sequences = self._batch.step()
        except Exception:
            log.exception("a step of %d generations failed", len(by_sequence))
            for active in by_sequence.values():
                self._send(Failed(active.id, internal_error(active.id)))
                self._drop(active)
            return
        for sequence in sequences:
            if sequence in by_sequence:  # not one that failed in an earlier step
                self._advance(by_sequence[sequence])

    def _step_next(self) -> None:
        """Takes one step of one request outside the batch, by turns."""
        active = next((active for active in self._running if active.is_ready and active.life is Life.RUNNING), None)
        if active is None:
            return
        self._running.remove(active)
        self._running.append(active)
        self._advance(active)

    def _use_idle_moment(self) -> None:
        """Makes vectors of passages while no request is there."""
        if not self._active:
            self._background.make_vectors()

    def _send_heartbeat(self) -> None:
        """Every HEARTBEAT_S, proves that the loop iterates, and does the housekeeping of an idle moment."""
        now_s = time.monotonic()
        if now_s - self._heartbeat_s < HEARTBEAT_S:
            return
        self._heartbeat_s = now_s
        self._background.start_refresh()
        self._background.start_merge()
        self._engine.sessions.expire()
        self._send(Heartbeat(self._stats(), store_stats(self._engine.stores)))
        self._release_idle_ram(now_s)

    def _release_idle_ram(self, now_s: float) -> None:
        """Returns unused RAM to the system after IDLE_RELEASE_S without work."""
        if self._running or self._waiting or self._offloaded:
            self._last_work_s = now_s
        elif self._last_work_s is not None and now_s - self._last_work_s >= IDLE_RELEASE_S:
            self._last_work_s = None
            self._batch.shrink()
            trim_heap()

    def _finish_writes(self) -> None:
        """Waits for writes that have begun: their requests may have been acknowledged by the time they end."""
        writes = [active.offloaded for active in self._offloaded if active.offloaded is not None and active.must_end]
        wait(writes, timeout=FINISH_WRITES_S)
        self._resume_offloaded()
        self._offloads.close()

    def _reply(self, active: ActiveRequest, message: FromWorker) -> None:
        """Sends an answer, unless the request was cancelled."""
        if not active.is_abandoned:
            self._send(message)

    @contextmanager
    def _reporting_errors(self, active: ActiveRequest) -> Iterator[None]:
        """Turns any error into the answer of the request that raised it."""
        try:
            yield
        except StopIteration:
            pass
        except MemlmError as error:
            self._reply(active, Failed(active.id, error))
        except Exception:
            log.exception("request %s failed", active.id)
            self._reply(active, Failed(active.id, internal_error(active.id)))

    @property
    def _active(self) -> list[ActiveRequest]:
        """All requests of the loop, each once."""
        return [*self._waiting, *self._running, *(active for active in self._offloaded if not active.is_admitted)]

    @property
    def _num_queued_tokens(self) -> int:
        """Tokens of the prompts that wait, or are being encoded."""
        return sum(active.num_tokens for active in self._active if not active.is_admitted)

    @property
    def _cache_bytes(self) -> int:
        return sum(active.cache_bytes for active in self._running)

    def _stats(self) -> Stats:
        sessions = self._engine.sessions
        waiting = len(self._active) - len(self._running)
        return Stats(
            len(self._running), waiting, self._num_queued_tokens, len(sessions), sessions.num_bytes, self._cache_bytes,
            self._engine.prefixes.num_bytes,
        )  # fmt: skip


def internal_error(request_id: str) -> InternalError:
    """The error that a caller gets for a bug: only where to look for it."""
    return InternalError(f"a bug in the server; its log has the details under request {request_id}")
