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
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch

from memlm.batch import Batch, Member
from memlm.checkpoint import load_checkpoint
from memlm.errors import DeadlineExceeded, InternalError, MemlmError, Overloaded, Unavailable
from memlm.generate import Generation
from memlm.index.cores import use_cores
from memlm.language_model import LanguageModel
from memlm.memory import Memory
from memlm.params import GenerateRequest
from memlm.questions import (
    AppendToSessionRequest,
    DeleteDocumentsRequest,
    LoadDatastoreRequest,
    ScoreRequest,
    SearchRequest,
)
from memlm.server.allocator import give_back
from memlm.server.answers import Pace, Steps, Telling, alone, answer_to, appended, scored, searched
from memlm.server.config import ServerConfig, place_of
from memlm.server.logs import start_logging
from memlm.server.messages import (
    Ask,
    Cancel,
    CatchUp,
    Failed,
    FromWorker,
    Heartbeat,
    Loaded,
    NotLoaded,
    Result,
    Stats,
    Stop,
)
from memlm.server.worker_pipe import Inbox, Outbox
from memlm.sessions import Sessions

log = logging.getLogger("memlm.server.worker")

HEARTBEAT_S = 0.5
OPENING_S = 0.01
REST_S = 5.0  # without work, until the memory of what was done is given back
RETRY_AFTER_S = 1.0


def run_worker(pipe: Connection, config: ServerConfig, stores: Mapping[str, Path], place: int = 0) -> None:
    """A worker process, from loading to its end, which comes with `Stop` or with the front's own end. Of the sessions,
    those are its own that have their `place` here.
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
        lm = _loaded(config, stores, place)
    except MemlmError as error:
        outbox.send(NotLoaded(error))
        outbox.flush()
        return
    with lm:
        outbox.send(Loaded())
        outbox.flush()
        Worker(lm, inbox, outbox.send, config.max_running, config.max_queued_tokens, outbox.flush).run()


def _loaded(config: ServerConfig, stores: Mapping[str, Path], place: int) -> LanguageModel:
    checkpoint = load_checkpoint(config.model, dtype=config.dtype)
    sessions = Sessions(
        checkpoint,
        folder=config.session_dir,
        ttl_s=config.session_ttl_s,
        max_bytes=config.max_session_bytes,
        is_ours=lambda name: place_of(name, config.num_workers) == place,
    )
    return LanguageModel(checkpoint, stores, sessions)


@dataclass(eq=False, slots=True)
class Job:
    """A question that was taken up. Of a generation, what draws its tokens; once it runs, its place in the batch, or
    the steps in which it goes by itself.
    """

    ask: Ask
    generation: Generation | None = None
    telling: Telling | None = None
    member: Member | None = None
    steps: Steps | None = None

    @property
    def num_tokens(self) -> int:
        """Tokens of its prompt."""
        return 0 if self.generation is None else len(self.generation.unread)


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
    ) -> None:
        """Takes a loaded model, and where to hear and to answer; `flush` follows whatever should not wait."""
        self._lm, self._inbox, self._send, self._flush = lm, inbox, send, flush
        self._max_running, self._max_queued_tokens = max_running, max_queued_tokens
        self._batch = Batch(lm.checkpoint, most=max_running)
        self._waiting: list[Job] = []
        self._running: list[Job] = []
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
        while self._listen():
            self._take_in()
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
        idle_s = OPENING_S if self._opening else HEARTBEAT_S
        for message in self._inbox.take(wait_s=0.0 if self._running else idle_s):
            if isinstance(message, Stop):
                return False
            if isinstance(message, Cancel):
                self._cancel(message.id)
            else:
                self._take_up(Job(message))
        return True

    def _take_up(self, job: Job) -> None:
        """Queues what takes many steps; answers the rest at once, so that it never waits behind a long text."""
        if self._is_late(job):
            return
        self._worked_s = time.monotonic()
        with self._answering(job):
            question = job.ask.question
            if isinstance(question, GenerateRequest):
                self._check_queue(question)
                job.generation = self._lm.start(question, request_id=job.ask.id, owner=job.ask.owner)
                self._waiting.append(job)
            elif isinstance(question, ScoreRequest):
                job.steps = scored(job.ask, question, self._lm, self._send)
                self._waiting.append(job)
            elif isinstance(question, SearchRequest):
                self._begin_search(job, question)
            elif isinstance(question, AppendToSessionRequest):
                job.steps = appended(job.ask, question, self._lm, self._send)
                self._waiting.append(job)
            elif isinstance(question, LoadDatastoreRequest):
                opening = self._opener.submit(Memory.open, question.path, self._lm.checkpoint, question.store or "")
                self._opening.append((job, opening, partial(self._lm.take_in, replace=question.replace)))
            elif isinstance(question, DeleteDocumentsRequest):
                deleting = self._deleter.submit(self._lm.deleting, question.document_ids, store=question.store)
                self._opening.append((job, deleting, lambda move: move()))
            elif isinstance(question, CatchUp):
                self._opening.append((job, self._deleter.submit(self._lm.newer), partial(self._catch_up, question)))
            else:
                self._send(Result(job.ask.id, answer_to(self._lm, question, job.ask.owner)))

    def _begin_search(self, job: Job, question: SearchRequest) -> None:
        """Its first step at once; a text that takes more waits for its turn with the others."""
        job.steps = searched(job.ask, question, self._lm, self._send)
        with suppress(StopIteration):
            next(job.steps)
            self._waiting.append(job)

    def _take_in(self) -> None:
        """Takes into service what has been opened, in one step."""
        for opened in [each for each in self._opening if each[1].done()]:
            self._opening.remove(opened)
            job, opening, use = opened
            with self._answering(job):
                self._send(Result(job.ask.id, use(opening.result())))
        if self._newer is not None and self._newer.done():
            for take in self._newer.result():
                take()
            self._newer = None

    def _catch_up(self, question: CatchUp, newer: list[Callable[[], bool]]) -> None:
        for take in newer:
            take()
        if question.store is not None and self._lm.get_datastore(question.store).manifest < question.manifest:
            raise Unavailable(f"manifest {question.manifest} of {question.store} could not be read")

    def _check_queue(self, question: GenerateRequest) -> None:
        """A prompt has at most as many tokens as bytes, and mostly a third: that is near enough for a bound."""
        queued = sum(each.num_tokens for each in self._waiting)
        if queued and queued + len(question.prompt.encode(errors="replace")) // 3 > self._max_queued_tokens:
            raise Overloaded(
                f"{queued:,} tokens of prompts are waiting, and {self._max_queued_tokens:,} are all that this server"
                f" takes; try again in {RETRY_AFTER_S:g} s",
                retry_after_s=RETRY_AFTER_S,
            )

    def _cancel(self, id_: str) -> None:
        """Drops a job without an answer. One that has ended meanwhile is not there any more, which is as good."""
        for job in (*self._waiting, *self._running):
            if job.ask.id == id_:
                self._drop(job)

    def _expire(self) -> None:
        for job in (*self._waiting, *self._running):
            if self._is_late(job):
                self._drop(job)

    def _is_late(self, job: Job) -> bool:
        """Whether a job's time ran out; if so, that is its answer."""
        deadline_s = job.ask.deadline_s
        if deadline_s is None or time.monotonic() < deadline_s:
            return False
        allowed_s = deadline_s - job.ask.asked_s
        late = DeadlineExceeded(f"the {allowed_s:.3g} s allowed for the call ran out; allow more, or ask for less")
        self._send(Failed(job.ask.id, late))
        return True

    def _drop(self, job: Job) -> None:
        """Frees a job's place, and what it holds."""
        (self._running if job in self._running else self._waiting).remove(job)
        if job.member:
            self._batch.leave(job.member)
        self._free(job)

    def _free(self, job: Job) -> None:
        """Lets go of what a job holds; a session that it did not come to the end of is as it was."""
        if job.steps:
            job.steps.close()
        if job.generation:
            job.generation.close()

    def _admit(self) -> None:
        """Fills the places that are free; the next one is whose caller has the fewest running, and waits longest."""
        while self._waiting and len(self._running) < self._max_running:
            running = Counter(job.ask.caller for job in self._running)
            job = min(self._waiting, key=lambda job: running[job.ask.caller])
            self._waiting.remove(job)
            with self._answering(job):
                self._start(job)
                self._running.append(job)

    def _start(self, job: Job) -> None:
        """Gives a generation its place; what has steps of its own has one."""
        if generation := job.generation:
            try:
                if not generation.goes_alone:
                    job.member = self._batch.join(generation)
                job.telling = Telling(job.ask, generation, self._send, self._pace)
                if generation.goes_alone:
                    job.steps = alone(generation, job.telling)
            except BaseException:
                self._free(job)
                raise

    def _step_batch(self) -> None:
        """One token more for every generation that runs."""
        if not len(self._batch):
            return
        jobs = {job.member: job for job in self._running if job.member}
        try:
            members = self._batch.step()
        except Exception:
            log.exception("a step of %d generations failed", len(jobs))
            for job in jobs.values():
                self._send(Failed(job.ask.id, internal_error(job.ask.id)))
                self._drop(job)
            return
        for member in members:
            job = jobs[member]
            told = False
            with self._answering(job):
                if member.failure:
                    raise member.failure
                assert job.telling is not None  # it runs
                job.telling.add(member.tokens)
                told = True
            if member.is_done or not told:
                self._drop(job)

    def _step_next(self) -> None:
        """One step of what goes by itself, in turn."""
        job = next((job for job in self._running if job.steps), None)
        if job is None or job.steps is None:
            return
        self._running.remove(job)
        goes_on = False
        with self._answering(job):
            next(job.steps)
            goes_on = True
        if goes_on:
            self._running.append(job)
        else:
            self._free(job)

    @contextmanager
    def _answering(self, job: Job) -> Iterator[None]:
        """Whatever goes wrong with a job is its own answer, and no other job's trouble."""
        try:
            yield
        except StopIteration:
            pass
        except MemlmError as error:
            self._send(Failed(job.ask.id, error))
        except Exception:
            log.exception("request %s failed", job.ask.id)
            self._send(Failed(job.ask.id, internal_error(job.ask.id)))

    def _beat(self) -> None:
        """Tells now and then that the loop goes round: a process that merely exists proves nothing."""
        now_s = time.monotonic()
        if now_s - self._beat_s >= HEARTBEAT_S:
            self._beat_s = now_s
            if self._newer is None:
                self._newer = self._opener.submit(self._lm.newer)
            self._lm.sessions.expire()
            self._send(Heartbeat(self._stats()))
            self._rest(now_s)

    def _rest(self, now_s: float) -> None:
        """Once nothing has been done for a while, gives the system the memory that it took."""
        if self._running or self._waiting:
            self._worked_s = now_s
        elif self._worked_s is not None and now_s - self._worked_s >= REST_S:
            self._worked_s = None
            self._batch.rest()
            give_back()

    def _stats(self) -> Stats:
        sessions = self._lm.sessions
        tokens = sum(job.num_tokens for job in self._waiting)
        return Stats(len(self._running), len(self._waiting), tokens, len(sessions), sessions.num_bytes)


def internal_error(request_id: str) -> InternalError:
    """What a caller is told of a bug of ours: no more than where to look for it."""
    return InternalError(f"a bug in the server; its log tells more under request {request_id}")
