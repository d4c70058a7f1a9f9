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
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch

from memlm.api.datastores import DeleteDocumentsRequest, LoadDatastoreRequest
from memlm.api.params import GenerateRequest
from memlm.base.allocator import give_back
from memlm.base.cpu import use_cores
from memlm.base.steps import Steps
from memlm.errors import DeadlineExceeded, InternalError, MemlmError, Overloaded
from memlm.generation.batch import Batch, RunningSequence
from memlm.generation.generation import Generation
from memlm.generation.sessions import Sessions
from memlm.language_model import LanguageModel
from memlm.model.checkpoint import load_checkpoint
from memlm.retrieval.store import ModelStore, OnLost
from memlm.server.config import ServerConfig, place_of
from memlm.server.inference.cache_room import CacheRoom
from memlm.server.inference.handlers import Pace, answered, generated
from memlm.server.inference.messages import (
    Ask,
    Cancel,
    CatchUp,
    Failed,
    FromWorker,
    Heartbeat,
    Loaded,
    Lost,
    NotLoaded,
    Result,
    Stop,
)
from memlm.server.inference.offloads import Offloads
from memlm.server.inference.pipe import Inbox, Outbox
from memlm.server.telemetry.logs import start_logging
from memlm.server.telemetry.metrics import Stats

log = logging.getLogger("memlm.server.worker")

HEARTBEAT_S = 0.5
OPENING_S = 0.01
AWAY_S = 0.002  # between looks for whether a thread has done its work
LAST_WRITES_S = 10.0
REST_S = 5.0  # without work, until the memory of what was done is given back
RETRY_AFTER_S = 1.0


def run_worker(
    pipe: Connection, config: ServerConfig, stores: Mapping[str, Path], place: int = 0, restarted: bool = False
) -> None:
    """A worker process, from loading to its end, which comes with `Stop` or with the front's own end. Of the sessions,
    those are its own that have their `place` here. Once the server runs, a datastore that cannot be opened keeps no
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
        given = set() if restarted else {path.resolve().name for path in config.stores}

        def on_lost(store: str, document_ids: Sequence[str] | None) -> None:
            outbox.send(Lost(store, None if document_ids is None else tuple(document_ids)))

        lm = _loaded(config, stores, place, may_fail=set(stores) - given, on_lost=on_lost)
    except MemlmError as error:
        outbox.send(NotLoaded(error))
        outbox.flush()
        return
    with lm:
        outbox.send(Loaded())
        outbox.flush()
        Worker(
            lm, inbox, outbox.send, config.max_running, config.max_queued_tokens, outbox.flush, config.cache_bytes
        ).run()


def _loaded(
    config: ServerConfig, stores: Mapping[str, Path], place: int, *, may_fail: Collection[str], on_lost: OnLost
) -> LanguageModel:
    checkpoint = load_checkpoint(config.model, dtype=config.dtype)
    sessions = Sessions(
        checkpoint,
        folder=config.session_dir,
        ttl_s=config.session_ttl_s,
        max_bytes=config.max_session_bytes,
        max_sessions=config.max_sessions,
        max_per_owner=config.max_sessions_per_caller,
        is_ours=lambda name: place_of(name, config.num_workers) == place,
    )
    return LanguageModel(checkpoint, stores, sessions, may_fail=may_fail, on_lost=on_lost)


@dataclass(eq=False, slots=True)
class Job:
    """A request in work. Its `steps` run until they want a turn; `away` is what a thread does for them meanwhile. A
    generation's `sequence` is its place in the batch.
    """

    ask: Ask
    num_tokens: int = 0  # of its prompt; estimated until it is encoded
    steps: Steps[None] | None = None
    generation: Generation | None = None
    sequence: RunningSequence | None = None
    cache_bytes: int = 0  # what its keys and values may come to
    away: Future[Any] | None = None
    must_end: bool = False  # what is away cannot be taken back
    is_abandoned: bool = False  # nobody waits for it; it only ends what is away

    @property
    def is_ready(self) -> bool:
        """Whether the loop can take a step of it."""
        return self.away is None


class Worker:
    """The loop, and what it has to do."""

    def __init__(
        self,
        lm: LanguageModel,
        inbox: Inbox,
        send: Callable[[FromWorker], None],
        max_running: int,
        max_queued_tokens: int = 1 << 20,
        flush: Callable[[], None] = lambda: None,
        max_cache_bytes: int = 1 << 50,
    ) -> None:
        """Takes a loaded model, and where to hear and to answer; `flush` follows whatever should not wait."""
        self._lm, self._inbox, self._send, self._flush = lm, inbox, send, flush
        self._max_running, self._max_queued_tokens = max_running, max_queued_tokens
        self._batch, self._room = (
            Batch(lm.checkpoint, max_sequences=max_running),
            CacheRoom(max_cache_bytes, lm.checkpoint),
        )
        self._waiting: list[Job] = []
        self._running: list[Job] = []
        self._away: list[Job] = []  # those that a thread works for; some of them run, none of them wait
        self._offloads = Offloads()
        self._beat_s = 0.0
        self._worked_s: float | None = None
        self._pace = Pace(lambda: len(self._running))
        # Opening a large datastore takes a while, and so may a deletion: nobody else's tokens need wait for either, nor
        # they for each other.
        self._opener, self._deleter = ThreadPoolExecutor(1, "opener"), ThreadPoolExecutor(1, "deleter")
        self._opening: list[tuple[Job, Future[Any], Callable[[Any], Any]]] = []
        self._newer: Future[list[Callable[[], bool]]] | None = None

    def run(self) -> None:
        """Goes round until `Stop`."""
        try:
            while self._listen():
                self._turn()
        finally:
            self._end_writing()

    def _turn(self) -> None:
        self._take_in()
        self._take_back()
        self._expire()
        self._admit()
        self._flush()  # nobody's answer waits for the others' step
        self._pace.turn()
        self._step_batch()
        self._step_next()
        self._beat()
        self._flush()

    def _listen(self) -> bool:
        """Takes what the front says; False for `Stop`. Sleeps where there is nothing to do."""
        if any(job.is_ready for job in self._running):
            wait_s = 0.0
        else:
            wait_s = AWAY_S if self._away else OPENING_S if self._opening else HEARTBEAT_S
        for message in self._inbox.take(wait_s=wait_s):
            if isinstance(message, Stop):
                return False
            if isinstance(message, Cancel):
                self._cancel(message.id)
            else:
                self._take_up(Job(message))
        return True

    def _take_up(self, job: Job) -> None:
        """Takes the first step of a request; what needs more waits for its turn."""
        if self._is_late(job):
            return
        self._worked_s = time.monotonic()
        question, send = job.ask.question, partial(self._tell, job)
        with self._answering(job):
            if isinstance(question, LoadDatastoreRequest):
                opening = self._opener.submit(ModelStore.open, question.path, self._lm.checkpoint, question.store or "")
                self._opening.append((job, opening, partial(self._lm.register_store, replace=question.replace)))
            elif isinstance(question, DeleteDocumentsRequest):
                deleting = self._deleter.submit(self._lm.prepare_delete, question.document_ids, store=question.store)
                self._opening.append((job, deleting, lambda move: move()))
            elif isinstance(question, CatchUp):
                look = (
                    self._lm.prepare_refresh
                    if question.store is None
                    else partial(self._lm.prepare_refresh_of, question.store)
                )
                self._opening.append((job, self._deleter.submit(look), _move_all))
            elif isinstance(question, GenerateRequest):
                self._check_queue(job, question)
                job.steps = generated(job.ask, self._lm, self._batch, send, self._pace, job, self._room)
            else:
                job.steps = answered(job.ask, self._lm, send)
        if job.steps is not None:
            self._advance(job)

    def _advance(self, job: Job, result: Any = None, error: BaseException | None = None) -> None:
        """Goes on with a job until it wants a turn, work for a thread, or has ended."""
        assert job.steps is not None
        goes_on = False
        with self._answering(job):
            wanted = job.steps.send(result) if error is None else job.steps.throw(error)
            if job.generation is not None:
                job.num_tokens = len(job.generation.pending_ids)
            if wanted is not None:
                job.away, job.must_end = self._offloads.submit(job.ask.caller, wanted), wanted.must_end
                self._away.append(job)
            elif job not in self._running:
                self._waiting.append(job)
            goes_on = True
        if not goes_on and job in self._running:
            self._running.remove(job)

    def _take_back(self) -> None:
        """Goes on with the jobs whose work in a thread has ended."""
        for job in [each for each in self._away if each.away is not None and each.away.done()]:
            outcome, job.away = job.away, None
            self._away.remove(job)
            assert outcome is not None
            if error := outcome.exception():
                self._advance(job, error=error)
            else:
                self._advance(job, outcome.result())

    def _take_in(self) -> None:
        """Takes into service what has been opened, in one step."""
        for opened in [each for each in self._opening if each[1].done()]:
            self._opening.remove(opened)
            job, opening, use = opened
            with self._answering(job):
                self._send(Result(job.ask.id, use(opening.result())))
        if self._newer is not None and self._newer.done():
            looked, self._newer = self._newer, None
            try:
                _move_all(looked.result())
            except Exception:
                log.exception("looking for changes of the datastores failed")

    def _check_queue(self, job: Job, question: GenerateRequest) -> None:
        """A prompt has at most as many tokens as bytes, and mostly a third: that is near enough for a bound."""
        queued = self._num_queued_tokens
        job.num_tokens = len(question.prompt.encode(errors="replace")) // 3
        if queued and queued + job.num_tokens > self._max_queued_tokens:
            raise Overloaded(
                f"{queued:,} tokens of prompts are waiting, and {self._max_queued_tokens:,} are all that this server"
                f" takes; try again in {RETRY_AFTER_S:g} s",
                retry_after_s=RETRY_AFTER_S,
            )

    @property
    def _num_queued_tokens(self) -> int:
        """Tokens of the prompts that wait, or are being encoded."""
        return sum(job.num_tokens for job in self._jobs if job not in self._running)

    @property
    def _jobs(self) -> list[Job]:
        """All jobs in work, each once."""
        return [*self._waiting, *self._running, *(job for job in self._away if job not in self._running)]

    def _cancel(self, id_: str) -> None:
        """Drops a job without an answer. One that has ended meanwhile is not there any more, which is as good."""
        for job in self._jobs:
            if job.ask.id == id_:
                self._drop(job)

    def _expire(self) -> None:
        for job in self._jobs:
            if not job.is_abandoned and self._is_late(job):
                self._drop(job)

    def _is_late(self, job: Job) -> bool:
        """Whether a job's time ran out; if so, that is its answer."""
        deadline_s = job.ask.deadline_s
        if deadline_s is None or time.monotonic() < deadline_s:
            return False
        allowed_s = deadline_s - job.ask.asked_s
        late = DeadlineExceeded(f"the {allowed_s:.3g} s allowed for the call ran out; allow more, or ask for less")
        self._tell(job, Failed(job.ask.id, late))
        return True

    def _drop(self, job: Job) -> None:
        """Ends a job at once. A write that has begun is waited for first, so that disk and memory agree."""
        if job.away is not None and job.must_end and not job.away.cancel():
            job.is_abandoned = True
            return
        for jobs in (self._waiting, self._running, self._away):
            if job in jobs:
                jobs.remove(job)
        if job.away is not None:
            job.away.cancel()
        if job.steps is not None:
            job.steps.close()

    def _tell(self, job: Job, message: FromWorker) -> None:
        """Sends an answer, unless nobody waits for it any more."""
        if not job.is_abandoned:
            self._send(message)

    def _admit(self) -> None:
        """Fills the places that are free."""
        while len(self._running) < self._max_running and (job := self._next()) is not None:
            self._waiting.remove(job)
            self._running.append(job)
            if job.generation is not None:
                self._advance(job)  # it joins the batch before the next step

    def _next(self) -> Job | None:
        """The job whose caller has the fewest running, and of these the one that waits longest. Where its cache does
        not fit yet, no other generation passes it, so that its turn comes; jobs without a cache do.
        """
        running = Counter(job.ask.caller for job in self._running)
        free = self._room.max_bytes - self._cache_bytes
        waiting = sorted(self._waiting, key=lambda job: running[job.ask.caller])
        if waiting and waiting[0].cache_bytes > free:
            waiting = [job for job in waiting if not job.cache_bytes]
        return waiting[0] if waiting else None

    @property
    def _cache_bytes(self) -> int:
        return sum(job.cache_bytes for job in self._running)

    def _step_batch(self) -> None:
        """Draws one more token for every generation in the batch."""
        if not len(self._batch):
            return
        jobs = {job.sequence: job for job in self._running if job.sequence}
        try:
            sequences = self._batch.step()
        except Exception:
            log.exception("a step of %d generations failed", len(jobs))
            for job in jobs.values():
                self._send(Failed(job.ask.id, internal_error(job.ask.id)))
                self._drop(job)
            return
        for sequence in sequences:
            self._advance(jobs[sequence])

    def _step_next(self) -> None:
        """Takes one step of one job that is not in the batch, in turn."""
        job = next((job for job in self._running if job.is_ready and job.sequence is None), None)
        if job is None:
            return
        self._running.remove(job)
        self._running.append(job)
        self._advance(job)

    def _end_writing(self) -> None:
        """Waits for writes that have begun: their requests may have been acknowledged by the time they end."""
        wait([job.away for job in self._away if job.away is not None and job.must_end], timeout=LAST_WRITES_S)
        self._take_back()
        self._offloads.close()

    @contextmanager
    def _answering(self, job: Job) -> Iterator[None]:
        """Whatever goes wrong with a job is its own answer, and no other job's trouble."""
        try:
            yield
        except StopIteration:
            pass
        except MemlmError as error:
            self._tell(job, Failed(job.ask.id, error))
        except Exception:
            log.exception("request %s failed", job.ask.id)
            self._tell(job, Failed(job.ask.id, internal_error(job.ask.id)))

    def _beat(self) -> None:
        """Tells now and then that the loop goes round: a process that merely exists proves nothing."""
        now_s = time.monotonic()
        if now_s - self._beat_s >= HEARTBEAT_S:
            self._beat_s = now_s
            if self._newer is None:
                self._newer = self._opener.submit(self._lm.prepare_refresh)
            self._lm.sessions.expire()
            self._send(Heartbeat(self._stats()))
            self._rest(now_s)

    def _rest(self, now_s: float) -> None:
        """Once nothing has been done for a while, gives the system the memory that it took."""
        if self._running or self._waiting or self._away:
            self._worked_s = now_s
        elif self._worked_s is not None and now_s - self._worked_s >= REST_S:
            self._worked_s = None
            self._batch.shrink()
            give_back()

    def _stats(self) -> Stats:
        sessions = self._lm.sessions
        waiting = len(self._jobs) - len(self._running)
        return Stats(
            len(self._running), waiting, self._num_queued_tokens, len(sessions), sessions.num_bytes, self._cache_bytes
        )


def _move_all(moves: Sequence[Callable[[], bool]]) -> None:
    """Moves to the snapshots that were found in the datastores' folders."""
    for move in moves:
        move()


def internal_error(request_id: str) -> InternalError:
    """What a caller is told of a bug of ours: no more than where to look for it."""
    return InternalError(f"a bug in the server; its log tells more under request {request_id}")
