"""The inference worker: the process that owns the model and its stores.

One loop takes what the front asks, drops what is cancelled or too late before it costs anything, and gives every
running question one step in turn. A question is worked on as a generator: each `next` is one step, and closing it
frees what it holds.
"""

from __future__ import annotations

import logging
import os
import queue
import signal
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection

import torch

from memlm.api import GenerateRequest
from memlm.errors import DeadlineExceeded, InternalError, MemlmError
from memlm.language_model import LanguageModel, load
from memlm.questions import ScoreRequest
from memlm.server.answers import Steps, steps_of
from memlm.server.config import ServerConfig
from memlm.server.messages import (
    Ask,
    Cancel,
    Failed,
    FromWorker,
    Heartbeat,
    Loaded,
    NotLoaded,
    Stop,
    ToWorker,
)

log = logging.getLogger("memlm.server.worker")

HEARTBEAT_S = 0.5


def run_worker(pipe: Connection, config: ServerConfig) -> None:
    """The worker process, from loading to its end, which comes with `Stop` or with the front's own end."""
    # A terminal and a service manager signal the whole group; it is for the front to say what that means.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    logging.basicConfig(level=config.log_level.upper(), format="%(asctime)s %(name)s %(levelname)s %(message)s")
    inbox, outbox = Inbox(pipe), Outbox(pipe)
    # Said even where nothing changes: what torch was never told, Faiss's own setting would change under it.
    torch.set_num_threads(config.num_threads or torch.get_num_threads())
    try:
        lm = load(config.model, config.stores, dtype=config.dtype)
    except MemlmError as error:
        outbox.send(NotLoaded(error))
        return
    with lm:
        outbox.send(Loaded())
        Worker(lm, inbox, outbox.send, config.max_running).run()


class Inbox:
    """What the front has said, read by a thread of its own, so that the front never waits to say it."""

    def __init__(self, pipe: Connection) -> None:
        """Starts reading."""
        self._pipe = pipe
        self._messages: queue.SimpleQueue[ToWorker] = queue.SimpleQueue()
        threading.Thread(target=self._read, name="inbox", daemon=True).start()

    def take(self, *, wait_s: float) -> list[ToWorker]:
        """All that has come; where nothing has, waits for the first of it."""
        taken: list[ToWorker] = []
        try:
            taken.append(self._messages.get(timeout=wait_s) if wait_s else self._messages.get_nowait())
            while True:
                taken.append(self._messages.get_nowait())
        except queue.Empty:
            return taken

    def _read(self) -> None:
        try:
            while True:
                self._messages.put(self._pipe.recv())
        except (EOFError, OSError):
            _leave()


class Outbox:
    """What the front is told."""

    def __init__(self, pipe: Connection) -> None:
        """Takes the worker's end of the pipe."""
        self._pipe = pipe

    def send(self, message: FromWorker) -> None:
        """Tells it."""
        try:
            self._pipe.send(message)
        except OSError:
            _leave()


def _leave() -> None:
    """The front is gone, and with it all who could wait for an answer. What is on disk stands a kill at any point."""
    os._exit(1)


@dataclass(frozen=True, slots=True)
class Job:
    """A question that has been taken up, and the steps that answer it."""

    ask: Ask
    steps: Steps


class Worker:
    """The loop, and what it has to do."""

    def __init__(self, lm: LanguageModel, inbox: Inbox, send: Callable[[FromWorker], None], max_running: int) -> None:
        """Takes a loaded model, and where to hear and to answer."""
        self._lm, self._inbox, self._send, self._max_running = lm, inbox, send, max_running
        self._waiting: list[Job] = []
        self._running: list[Job] = []
        self._beat_s = 0.0

    def run(self) -> None:
        """Goes round until `Stop`."""
        while self._listen():
            self._expire()
            self._admit()
            for job in tuple(self._running):
                self._step(job)
            self._beat()

    def _listen(self) -> bool:
        """Takes what the front says; False for `Stop`. Sleeps where there is nothing to do."""
        for message in self._inbox.take(wait_s=0.0 if self._running else HEARTBEAT_S):
            if isinstance(message, Stop):
                return False
            if isinstance(message, Cancel):
                self._cancel(message.id)
            else:
                self._take_up(message)
        return True

    def _take_up(self, ask: Ask) -> None:
        """Queues what takes many steps; does the rest at once, so that it never waits behind a long text."""
        job = Job(ask, steps_of(ask, self._lm, self._send))
        if isinstance(ask.question, GenerateRequest | ScoreRequest):
            self._waiting.append(job)
        elif not self._is_late(job):
            self._step(job)

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
        """Frees a job's place, and what its steps hold."""
        (self._running if job in self._running else self._waiting).remove(job)
        job.steps.close()

    def _admit(self) -> None:
        while self._waiting and len(self._running) < self._max_running:
            self._running.append(self._waiting.pop(0))

    def _step(self, job: Job) -> None:
        """One step of a job. Whatever goes wrong in it is its own answer, and no other job's trouble."""
        try:
            next(job.steps)
            return
        except StopIteration:
            pass
        except MemlmError as error:
            self._send(Failed(job.ask.id, error))
        except Exception:
            log.exception("request %s failed", job.ask.id)
            self._send(Failed(job.ask.id, internal_error(job.ask.id)))
        if job in self._running:
            self._running.remove(job)

    def _beat(self) -> None:
        """Tells now and then that the loop goes round: a process that merely exists proves nothing."""
        now_s = time.monotonic()
        if now_s - self._beat_s >= HEARTBEAT_S:
            self._beat_s = now_s
            self._send(Heartbeat())


def internal_error(request_id: str) -> InternalError:
    """What a caller is told of a bug of ours: no more than where to look for it."""
    return InternalError(f"a bug in the server; its log tells more under request {request_id}")
