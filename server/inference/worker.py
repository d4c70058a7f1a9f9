"""An inference worker: a process that owns a model and its stores.

One loop takes what the front asks, drops what is cancelled or too late before it costs anything, and goes on with all
that runs: every generation by one token, side by side, and one of the texts that are scored by a few windows. What
waits is admitted by turns among the callers, so that nobody's hundred requests stand before another's one.
"""

from __future__ import annotations

import logging
import signal
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import closing, contextmanager
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch

from memlm.api.datastores import DeleteDocumentsRequest, LoadDatastoreRequest
from memlm.api.params import GenerateRequest
from memlm.base.allocator import trim_heap
from memlm.base.cpu import use_cores
from memlm.base.steps import Steps
from memlm.errors import DeadlineExceeded, InternalError, MemlmError, Overloaded
from memlm.generation.batch import Batch, RunningSequence
from memlm.generation.engine import Engine
from memlm.generation.generation import Generation
from memlm.generation.loaded_stores import PendingDelete, PendingRefresh
from memlm.generation.sessions import Sessions
from memlm.model.checkpoint import load_checkpoint
from memlm.retrieval.store import ModelStore, OnLost
from memlm.server.config import ServerConfig, worker_for_session
from memlm.server.inference.cache_budget import CacheBudget
from memlm.server.inference.handlers import FlushTimer, answer_and_send, generate_steps
from memlm.server.inference.messages import (
    Cancel,
    DocumentsDeleted,
    Failed,
    FromWorker,
    Heartbeat,
    Loaded,
    LoadFailed,
    Refresh,
    Result,
    Stop,
    Submission,
)
from memlm.server.inference.offloads import Offloads
from memlm.server.inference.pipe import Inbox, Outbox
from memlm.server.telemetry.logs import start_logging
from memlm.server.telemetry.metrics import Stats

log = logging.getLogger("memlm.server.worker")

HEARTBEAT_S = 0.5
BACKGROUND_POLL_S = 0.01
OFFLOAD_POLL_S = 0.002  # between looks for whether a thread has done its work
FINISH_WRITES_S = 10.0
IDLE_RELEASE_S = 5.0  # without work, until the memory of what was done is given back
RETRY_AFTER_S = 1.0


def run_worker(
    pipe: Connection, config: ServerConfig, stores: Mapping[str, Path], number: int = 0, restarted: bool = False
) -> None:
    """A worker process, from loading to its end, which comes with `Stop` or with the front's own end. Of the sessions,
    those are its own that have their `number` here. Once the server runs, a datastore that cannot be opened keeps no
    worker from starting; before, it does if it was given by --store.
    """
    # A terminal and a service manager signal the whole group; it is for the front to say what that means.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    start_logging(config.log_level, config.log_format)
    inbox, outbox = Inbox(pipe), Outbox(pipe)
    # Said even where nothing changes: what torch was never told, Faiss's own setting would change under it.
    torch.set_num_threads(config.num_threads or torch.get_num_threads())
    if config.num_workers > 1:
        use_cores(config.num_threads)
    try:
        required = set() if restarted else {path.resolve().name for path in config.stores}

        def on_lost(store: str, document_ids: Sequence[str] | None) -> None:
            outbox.send(DocumentsDeleted(store, None if document_ids is None else tuple(document_ids)))

        engine = _load_model(config, stores, number, may_fail=set(stores) - required, on_lost=on_lost)
    except MemlmError as error:
        outbox.send(LoadFailed(error))
        outbox.flush()
        return
    with closing(engine.stores):
        outbox.send(Loaded())
        outbox.flush()
        Worker(
            engine, inbox, outbox.send, config.max_running, config.max_queued_tokens, outbox.flush, config.cache_bytes
        ).run()


def _load_model(
    config: ServerConfig, stores: Mapping[str, Path], number: int, *, may_fail: Collection[str], on_lost: OnLost
) -> Engine:
    checkpoint = load_checkpoint(config.model, dtype=config.dtype)
    sessions = Sessions(
        checkpoint,
        folder=config.session_dir,
        ttl_s=config.session_ttl_s,
        max_bytes=config.max_session_bytes,
        max_sessions=config.max_sessions,
        max_per_owner=config.max_sessions_per_caller,
        is_ours=lambda name: worker_for_session(name, config.num_workers) == number,
    )
    return Engine(checkpoint, stores, sessions, may_fail=may_fail, on_lost=on_lost)


@dataclass(eq=False, slots=True)
class ActiveRequest:
    """A submitted request. The loop advances `steps`; `offloaded` is the work that a thread does for them meanwhile.

    `sequence` is a generation's row in the batch.
    """

    submission: Submission
    num_tokens: int = 0  # of its prompt; estimated until it is encoded
    steps: Steps[None] | None = None
    generation: Generation | None = None
    sequence: RunningSequence | None = None
    cache_bytes: int = 0  # what its keys and values may come to
    offloaded: Future[Any] | None = None
    must_end: bool = False  # what is away cannot be taken back
    is_abandoned: bool = False  # nobody waits for it; it only ends what is away

    @property
    def is_ready(self) -> bool:
        """Whether the loop can take a step of it."""
        return self.offloaded is None


class Worker:
    """The loop, and what it has to do."""

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
        """Takes a loaded model, and where to hear and to answer; `flush` follows whatever should not wait."""
        self._engine, self._inbox, self._send, self._flush = engine, inbox, send, flush
        self._max_running, self._max_queued_tokens = max_running, max_queued_tokens
        self._batch, self._cache_budget = (
            Batch(engine.checkpoint, max_sequences=max_running),
            CacheBudget(max_cache_bytes, engine.checkpoint),
        )
        self._waiting: list[ActiveRequest] = []
        self._running: list[ActiveRequest] = []
        self._offloaded: list[ActiveRequest] = []  # those that a thread works for; some of them run, none of them wait
        self._offloads = Offloads()
        self._heartbeat_s = 0.0
        self._last_work_s: float | None = None
        self._flush_timer = FlushTimer(lambda: len(self._running))
        # Opening a large datastore takes a while, and so may a deletion: nobody else's tokens need wait for either, nor
        # they for each other.
        self._opener, self._deleter = ThreadPoolExecutor(1, "opener"), ThreadPoolExecutor(1, "deleter")
        self._opening: list[tuple[ActiveRequest, Future[Any], Callable[[Any], Any]]] = []
        self._refreshing: Future[PendingRefresh] | None = None

    def run(self) -> None:
        """Goes round until `Stop`."""
        try:
            while self._poll_inbox():
                self._iterate()
        finally:
            self._finish_writes()

    def _iterate(self) -> None:
        self._finish_background_tasks()
        self._resume_offloaded()
        self._expire()
        self._admit()
        self._flush()  # nobody's answer waits for the others' step
        self._flush_timer.tick()
        self._step_batch()
        self._step_next()
        self._send_heartbeat()
        self._flush()

    def _poll_inbox(self) -> bool:
        """Takes what the front says; False for `Stop`. Sleeps where there is nothing to do."""
        if any(active.is_ready for active in self._running):
            wait_s = 0.0
        else:
            wait_s = OFFLOAD_POLL_S if self._offloaded else BACKGROUND_POLL_S if self._opening else HEARTBEAT_S
        for message in self._inbox.take(wait_s=wait_s):
            if isinstance(message, Stop):
                return False
            if isinstance(message, Cancel):
                self._cancel(message.id)
            else:
                self._accept(ActiveRequest(message))
        return True

    def _accept(self, active: ActiveRequest) -> None:
        """Takes the first step of a request; what needs more waits for its turn."""
        if self._has_expired(active):
            return
        self._last_work_s = time.monotonic()
        request, send = active.submission.request, partial(self._reply, active)
        with self._reporting_errors(active):
            if isinstance(request, LoadDatastoreRequest):
                opening = self._opener.submit(
                    ModelStore.open, request.path, self._engine.checkpoint, request.store or ""
                )
                self._opening.append(
                    (active, opening, partial(self._engine.stores.register_store, replace=request.replace))
                )
            elif isinstance(request, DeleteDocumentsRequest):
                deleting = self._deleter.submit(self._engine.stores.prepare_delete, request.document_ids, request.store)
                self._opening.append((active, deleting, PendingDelete.apply))
            elif isinstance(request, Refresh):
                refreshing = self._deleter.submit(self._engine.stores.prepare_refresh, request.store)
                self._opening.append((active, refreshing, PendingRefresh.apply))
            elif isinstance(request, GenerateRequest):
                self._check_queue(active, request)
                active.steps = generate_steps(
                    active.submission, self._engine, self._batch, send, self._flush_timer, active, self._cache_budget
                )
            else:
                active.steps = answer_and_send(active.submission, self._engine, send)
        if active.steps is not None:
            self._advance(active)

    def _advance(self, active: ActiveRequest, result: Any = None, error: BaseException | None = None) -> None:
        """Goes on with a job until it wants a turn, work for a thread, or has ended."""
        assert active.steps is not None
        continues = False
        with self._reporting_errors(active):
            offload = active.steps.send(result) if error is None else active.steps.throw(error)
            if active.generation is not None:
                active.num_tokens = len(active.generation.pending_ids)
            if offload is not None:
                active.offloaded, active.must_end = (
                    self._offloads.submit(active.submission.caller, offload),
                    offload.must_end,
                )
                self._offloaded.append(active)
            elif active not in self._running:
                self._waiting.append(active)
            continues = True
        if not continues and active in self._running:
            self._running.remove(active)

    def _resume_offloaded(self) -> None:
        """Goes on with the jobs whose work in a thread has ended."""
        for active in [each for each in self._offloaded if each.offloaded is not None and each.offloaded.done()]:
            outcome, active.offloaded = active.offloaded, None
            self._offloaded.remove(active)
            assert outcome is not None
            if error := outcome.exception():
                self._advance(active, error=error)
            else:
                self._advance(active, outcome.result())

    def _finish_background_tasks(self) -> None:
        """Takes into service what has been opened, in one step."""
        for ready_task in [each for each in self._opening if each[1].done()]:
            self._opening.remove(ready_task)
            active, opening, apply = ready_task
            with self._reporting_errors(active):
                self._send(Result(active.submission.id, apply(opening.result())))
        if self._refreshing is not None and self._refreshing.done():
            refreshing, self._refreshing = self._refreshing, None
            try:
                refreshing.result().apply()
            except Exception:
                log.exception("looking for changes of the datastores failed")

    def _check_queue(self, active: ActiveRequest, request: GenerateRequest) -> None:
        """A prompt has at most as many tokens as bytes, and mostly a third: that is near enough for a bound."""
        queued = self._num_queued_tokens
        active.num_tokens = len(request.prompt.encode(errors="replace")) // 3
        if queued and queued + active.num_tokens > self._max_queued_tokens:
            raise Overloaded(
                f"{queued:,} tokens of prompts are waiting, and {self._max_queued_tokens:,} are all that this server"
                f" takes; try again in {RETRY_AFTER_S:g} s",
                retry_after_s=RETRY_AFTER_S,
            )

    @property
    def _num_queued_tokens(self) -> int:
        """Tokens of the prompts that wait, or are being encoded."""
        return sum(active.num_tokens for active in self._active if active not in self._running)

    @property
    def _active(self) -> list[ActiveRequest]:
        """All jobs in work, each once."""
        return [*self._waiting, *self._running, *(active for active in self._offloaded if active not in self._running)]

    def _cancel(self, id_: str) -> None:
        """Drops a job without an answer. One that has ended meanwhile is not there any more, which is as good."""
        for active in self._active:
            if active.submission.id == id_:
                self._drop(active)

    def _expire(self) -> None:
        for active in self._active:
            if not active.is_abandoned and self._has_expired(active):
                self._drop(active)

    def _has_expired(self, active: ActiveRequest) -> bool:
        """Whether a job's time ran out; if so, that is its answer."""
        deadline_s = active.submission.deadline_s
        if deadline_s is None or time.monotonic() < deadline_s:
            return False
        allowed_s = deadline_s - active.submission.submitted_s
        expired = DeadlineExceeded(f"the {allowed_s:.3g} s allowed for the call ran out; allow more, or ask for less")
        self._reply(active, Failed(active.submission.id, expired))
        return True

    def _drop(self, active: ActiveRequest) -> None:
        """Ends a job at once. A write that has begun is waited for first, so that disk and memory agree."""
        if active.offloaded is not None and active.must_end and not active.offloaded.cancel():
            active.is_abandoned = True
            return
        for actives in (self._waiting, self._running, self._offloaded):
            if active in actives:
                actives.remove(active)
        if active.offloaded is not None:
            active.offloaded.cancel()
        if active.steps is not None:
            active.steps.close()

    def _reply(self, active: ActiveRequest, message: FromWorker) -> None:
        """Sends an answer, unless nobody waits for it any more."""
        if not active.is_abandoned:
            self._send(message)

    def _admit(self) -> None:
        """Fills the places that are free."""
        while len(self._running) < self._max_running and (active := self._next_admissible()) is not None:
            self._waiting.remove(active)
            self._running.append(active)
            if active.generation is not None:
                self._advance(active)  # it joins the batch before the next step

    def _next_admissible(self) -> ActiveRequest | None:
        """The job whose caller has the fewest running, and of these the one that waits longest. Where its cache does
        not fit yet, no other generation passes it, so that its turn comes; jobs without a cache do.
        """
        running = Counter(active.submission.caller for active in self._running)
        free = self._cache_budget.max_bytes - self._cache_bytes
        waiting = sorted(self._waiting, key=lambda active: running[active.submission.caller])
        if waiting and waiting[0].cache_bytes > free:
            waiting = [active for active in waiting if not active.cache_bytes]
        return waiting[0] if waiting else None

    @property
    def _cache_bytes(self) -> int:
        return sum(active.cache_bytes for active in self._running)

    def _step_batch(self) -> None:
        """Draws one more token for every generation in the batch."""
        if not len(self._batch):
            return
        actives = {active.sequence: active for active in self._running if active.sequence}
        try:
            sequences = self._batch.step()
        except Exception:
            log.exception("a step of %d generations failed", len(actives))
            for active in actives.values():
                self._send(Failed(active.submission.id, internal_error(active.submission.id)))
                self._drop(active)
            return
        for sequence in sequences:
            self._advance(actives[sequence])

    def _step_next(self) -> None:
        """Takes one step of one job that is not in the batch, in turn."""
        active = next((active for active in self._running if active.is_ready and active.sequence is None), None)
        if active is None:
            return
        self._running.remove(active)
        self._running.append(active)
        self._advance(active)

    def _finish_writes(self) -> None:
        """Waits for writes that have begun: their requests may have been acknowledged by the time they end."""
        wait(
            [active.offloaded for active in self._offloaded if active.offloaded is not None and active.must_end],
            timeout=FINISH_WRITES_S,
        )
        self._resume_offloaded()
        self._offloads.close()

    @contextmanager
    def _reporting_errors(self, active: ActiveRequest) -> Iterator[None]:
        """Whatever goes wrong with a job is its own answer, and no other job's trouble."""
        try:
            yield
        except StopIteration:
            pass
        except MemlmError as error:
            self._reply(active, Failed(active.submission.id, error))
        except Exception:
            log.exception("request %s failed", active.submission.id)
            self._reply(active, Failed(active.submission.id, internal_error(active.submission.id)))

    def _send_heartbeat(self) -> None:
        """Tells now and then that the loop goes round: a process that merely exists proves nothing."""
        now_s = time.monotonic()
        if now_s - self._heartbeat_s >= HEARTBEAT_S:
            self._heartbeat_s = now_s
            if self._refreshing is None:
                self._refreshing = self._opener.submit(self._engine.stores.prepare_refresh)
            self._engine.sessions.expire()
            self._send(Heartbeat(self._stats()))
            self._release_idle_memory(now_s)

    def _release_idle_memory(self, now_s: float) -> None:
        """Once nothing has been done for a while, gives the system the memory that it took."""
        if self._running or self._waiting or self._offloaded:
            self._last_work_s = now_s
        elif self._last_work_s is not None and now_s - self._last_work_s >= IDLE_RELEASE_S:
            self._last_work_s = None
            self._batch.shrink()
            trim_heap()

    def _stats(self) -> Stats:
        sessions = self._engine.sessions
        waiting = len(self._active) - len(self._running)
        return Stats(
            len(self._running), waiting, self._num_queued_tokens, len(sessions), sessions.num_bytes, self._cache_bytes
        )


def internal_error(request_id: str) -> InternalError:
    """What a caller is told of a bug of ours: no more than where to look for it."""
    return InternalError(f"a bug in the server; its log tells more under request {request_id}")
