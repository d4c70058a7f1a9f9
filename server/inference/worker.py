"""An inference worker: a process that owns a model and its datastores.

One loop accepts requests, drops those that are cancelled or late before they cost anything, and advances the others: in
each iteration every generation draws one token in the batch, and one other request takes a step. Waiting requests are
admitted by turns among the callers, so that a caller with a hundred requests does not delay a caller with one.
"""

from __future__ import annotations

import logging
import signal
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import wait
from contextlib import closing, contextmanager, nullcontext
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch

from memlm.api.datastores import DeleteDocumentsRequest, LoadDatastoreRequest
from memlm.api.params import StreamRequest
from memlm.base.cpu import use_cores
from memlm.distributed.shards import Shards
from memlm.errors import DeadlineExceeded, Incompatible, InternalError, MemlmError, Overloaded
from memlm.generation.batch import Batch
from memlm.generation.engine import Engine
from memlm.generation.sessions import Sessions
from memlm.index.store.exclusion import search_views
from memlm.model.adapter_files import attach_adapters
from memlm.model.checkpoint import load_checkpoint
from memlm.model.encoder_files import load_encoder
from memlm.retrieval.store import OnLost, ViewSearch
from memlm.server.config import ServerConfig, worker_for_session
from memlm.server.inference.active_request import ActiveRequest
from memlm.server.inference.background import BackgroundTasks
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
)
from memlm.server.inference.offloads import Offloads
from memlm.server.inference.pipe import Inbox, Outbox
from memlm.server.inference.store_stats import store_stats
from memlm.server.processes import trim_heap
from memlm.server.telemetry.logs import start_logging
from memlm.server.telemetry.metrics import Stats

log = logging.getLogger("memlm.server.worker")

HEARTBEAT_S = 0.5
BACKGROUND_POLL_S = 0.01
OFFLOAD_POLL_S = 0.002
FINISH_WRITES_S = 10.0
IDLE_RELEASE_S = 5.0  # without work, until unused RAM is released
RETRY_AFTER_S = 1.0


def run_worker(
    pipe: Connection, config: ServerConfig, stores: Mapping[str, Path], number: int = 0, restarted: bool = False
) -> None:
    """Runs a worker process: loads, then serves until `Stop` or until the front end is gone.

    The worker owns the sessions whose names map to its `number`. At the server's start a datastore given by --store
    that cannot be opened is an error. In a `restarted` worker it is not, since the server is already in use.
    """
    # A terminal and a service manager signal the whole process group; only the front end acts on it.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    start_logging(config.log_level, config.log_format)
    inbox, outbox = Inbox(pipe), Outbox(pipe)
    # Set even where nothing changes: torch keeps a number that was set, while Faiss would change the default.
    torch.set_num_threads(config.num_threads or torch.get_num_threads())
    if config.num_workers > 1:
        use_cores(config.num_threads)
    try:
        required = set() if restarted else {path.resolve().name for path in config.stores}

        def on_lost(store: str, document_ids: Sequence[str] | None) -> None:
            outbox.send(DocumentsDeleted(store, None if document_ids is None else tuple(document_ids)))

        shards = Shards(config.shards, partial=config.partial) if config.shards else None
        search: ViewSearch = search_views if shards is None else shards.search
        engine = _load_model(config, stores, number, may_fail=set(stores) - required, on_lost=on_lost, search=search)
    except MemlmError as error:
        outbox.send(LoadFailed(error))
        outbox.flush()
        return
    with closing(engine.stores), shards or nullcontext():
        outbox.send(Loaded())
        outbox.flush()
        Worker(
            engine, inbox, outbox.send, config.max_running, config.max_queued_tokens, outbox.flush, config.cache_bytes
        ).run()


def _load_model(
    config: ServerConfig,
    stores: Mapping[str, Path],
    number: int,
    *,
    may_fail: Collection[str],
    on_lost: OnLost,
    search: ViewSearch,
) -> Engine:
    checkpoint = load_checkpoint(
        config.model, dtype=config.dtype, device=config.device, attention_window=config.attention_window,
        extended_attention=config.extended_attention,
    )  # fmt: skip
    if any(part.kind == "domain" for part in checkpoint.decoder.config.parts):
        raise Incompatible(
            f"{config.model} has experts of domains, and a server chooses none; use it in process (`memlm generate"
            " --domain`), or serve a model without"
        )
    if checkpoint.decoder.cross is not None:
        raise Incompatible(
            f"{config.model} reads a chunk store by its cross {checkpoint.decoder.cross.part.kind}, and a server gives"
            " it none; use it in process (`memlm generate --chunk-store`), or serve the model that it was made of"
        )
    attach_adapters(checkpoint, {adapter.name: adapter.path for adapter in config.adapters})
    sessions = Sessions(
        checkpoint,
        folder=config.session_dir,
        ttl_s=config.session_ttl_s,
        max_bytes=config.max_session_bytes,
        max_sessions=config.max_sessions,
        max_per_owner=config.max_sessions_per_caller,
        is_ours=lambda name: worker_for_session(name, config.num_workers) == number,
    )
    encoder = None if config.encoder is None else load_encoder(config.encoder, device=config.device)
    return Engine(
        checkpoint, stores, sessions, may_fail=may_fail, on_lost=on_lost, passage_encoder=encoder, search=search
    )


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
        self._batch = Batch(engine.checkpoint, max_sequences=max_running)
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
        return OFFLOAD_POLL_S if self._offloaded else BACKGROUND_POLL_S if self._background else HEARTBEAT_S

    def _accept(self, active: ActiveRequest) -> None:
        """Takes the first step of a request. A request with more steps waits to be admitted."""
        if self._has_expired(active):
            return
        self._last_work_s = time.monotonic()
        request, send = active.submission.request, partial(self._reply, active)
        with self._reporting_errors(active):
            if isinstance(request, LoadDatastoreRequest | DeleteDocumentsRequest | Refresh):
                self._background.start(active, request)
            elif isinstance(request, StreamRequest):
                self._check_queue(active, request)
                active.steps = generate_steps(
                    active, self._engine, self._batch, send, self._flush_timer, self._cache_budget
                )
            else:
                active.steps = answer_and_send(active.submission, self._engine, send)
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
        with self._reporting_errors(active):
            offload = active.steps.send(result) if error is None else active.steps.throw(error)
            if active.generation is not None:
                active.num_tokens = active.generation.num_pending
            if offload is not None:
                active.offloaded, active.must_end = self._offloads.submit(active.caller, offload), offload.must_end
                self._offloaded.append(active)
            elif active.must_wait or active not in self._running:
                self._wait(active)
            has_ended = False
        if has_ended and active in self._running:
            self._running.remove(active)

    def _wait(self, active: ActiveRequest) -> None:
        """Lets a request wait to be admitted. An answer has been admitted once before, to find its passages."""
        if active in self._running:
            self._running.remove(active)
        active.must_wait = False
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
            if active.generation is not None:
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
        by_sequence = {active.sequence: active for active in self._running if active.sequence}
        try:
            sequences = self._batch.step()
        except Exception:
            log.exception("a step of %d generations failed", len(by_sequence))
            for active in by_sequence.values():
                self._send(Failed(active.id, internal_error(active.id)))
                self._drop(active)
            return
        for sequence in sequences:
            self._advance(by_sequence[sequence])

    def _step_next(self) -> None:
        """Takes one step of one request outside the batch, by turns."""
        active = next((active for active in self._running if active.is_ready and active.sequence is None), None)
        if active is None:
            return
        self._running.remove(active)
        self._running.append(active)
        self._advance(active)

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
        return [*self._waiting, *self._running, *(active for active in self._offloaded if active not in self._running)]

    @property
    def _num_queued_tokens(self) -> int:
        """Tokens of the prompts that wait, or are being encoded."""
        return sum(active.num_tokens for active in self._active if active not in self._running)

    @property
    def _cache_bytes(self) -> int:
        return sum(active.cache_bytes for active in self._running)

    def _stats(self) -> Stats:
        sessions = self._engine.sessions
        waiting = len(self._active) - len(self._running)
        return Stats(
            len(self._running), waiting, self._num_queued_tokens, len(sessions), sessions.num_bytes, self._cache_bytes
        )


def internal_error(request_id: str) -> InternalError:
    """The error that a caller gets for a bug: only where to look for it."""
    return InternalError(f"a bug in the server; its log has the details under request {request_id}")
