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
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection

import torch

from memlm.api import Finished, GenerateRequest, Token
from memlm.errors import DeadlineExceeded, InternalError, MemlmError
from memlm.language_model import LanguageModel, load
from memlm.questions import ScoreRequest
from memlm.server.answers import answer, score_steps
from memlm.server.messages import (
    Ask,
    Cancel,
    Events,
    Failed,
    FromWorker,
    Heartbeat,
    Loaded,
    NotLoaded,
    Result,
    Stop,
    ToWorker,
)

logger = logging.getLogger("memlm.server.worker")

HEARTBEAT_S = 0.5
# Each message costs both processes about a tenth of a millisecond, which a fast model's next token would wait for;
# what comes within a hundredth of a second looks simultaneous to a reader.
COALESCE_S = 0.01


@dataclass(frozen=True, slots=True)
class WorkerConfig:
    """What a worker loads, and how much it does at a time."""

    model: str
    stores: tuple[str, ...]
    max_running: int
    num_threads: int | None


def run_worker(connection: Connection, config: WorkerConfig) -> None:
    """The worker process, from loading to its end, which comes with `Stop` or with the front's own end."""
    # A terminal and a service manager signal the whole group; it is for the front to say what that means.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s %(levelname)s %(message)s")
    inbox = Inbox(connection)
    try:
        if config.num_threads is not None:
            torch.set_num_threads(config.num_threads)
        lm = load(config.model, config.stores)
    except MemlmError as error:
        connection.send(NotLoaded(error))
        return
    with lm:
        connection.send(Loaded())
        Worker(lm, inbox, connection, max_running=config.max_running).run()


class Inbox:
    """What the front has said, read by a thread of its own, so that the front never waits to say it."""

    def __init__(self, connection: Connection) -> None:
        """Starts reading."""
        self._connection = connection
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
                self._messages.put(self._connection.recv())
        except (EOFError, OSError):
            # The front is gone, and with it everybody who could wait for an answer, whatever the loop is doing. What
            # is on disk stands a kill at any point.
            os._exit(1)


@dataclass
class Job:
    """A question that has been taken up, and the steps that answer it."""

    ask: Ask
    steps: Iterator[None]


class Worker:
    """The loop, and what it has to do."""

    def __init__(self, lm: LanguageModel, inbox: Inbox, connection: Connection, *, max_running: int) -> None:
        """Takes a loaded model."""
        self._lm, self._inbox, self._connection, self._max_running = lm, inbox, connection, max_running
        self._waiting: deque[Job] = deque()
        self._running: list[Job] = []
        self._last_beat_s = 0.0

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
                self._forget(message.call_id)
            else:
                self._take_up(message)
        return True

    def _take_up(self, ask: Ask) -> None:
        """Queues what takes long; answers the rest at once, so that it never waits behind a long text."""
        if isinstance(ask.question, GenerateRequest):
            self._waiting.append(Job(ask, self._generate(ask, ask.question)))
        elif isinstance(ask.question, ScoreRequest):
            self._waiting.append(Job(ask, self._score(ask, ask.question)))
        elif not self._is_late(ask):
            self._step(Job(ask, self._answer(ask)))

    def _forget(self, call_id: int) -> None:
        for jobs in (self._waiting, self._running):
            for job in [job for job in jobs if job.ask.call_id == call_id]:
                self._drop(job)

    def _expire(self) -> None:
        for job in (*self._waiting, *self._running):
            if self._is_late(job.ask):
                self._drop(job)

    def _is_late(self, ask: Ask) -> bool:
        """Whether a question's time ran out; if so, that is its answer."""
        if ask.deadline_s is None or time.monotonic() < ask.deadline_s:
            return False
        allowed_s = ask.deadline_s - ask.asked_s
        late = DeadlineExceeded(f"the {allowed_s:.3g} s allowed for the call ran out; allow more, or ask for less")
        self._send(Failed(ask.call_id, late))
        return True

    def _drop(self, job: Job) -> None:
        """Frees a job's place and all that it holds."""
        (self._running if job in self._running else self._waiting).remove(job)
        job.steps.close()  # type: ignore[attr-defined]  # a generator

    def _admit(self) -> None:
        while self._waiting and len(self._running) < self._max_running:
            self._running.append(self._waiting.popleft())

    def _step(self, job: Job) -> None:
        """One step of a job. Whatever goes wrong in it is its answer, and nobody else's trouble."""
        try:
            next(job.steps)
            return
        except StopIteration:
            pass
        except MemlmError as error:
            self._send(Failed(job.ask.call_id, error))
        except Exception:
            logger.exception("request %s failed", job.ask.request_id)
            self._send(Failed(job.ask.call_id, internal_error(job.ask.request_id)))
        if job in self._running:
            self._running.remove(job)
