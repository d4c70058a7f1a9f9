"""The front's end of a pipe: starts an inference worker, asks it, hears it, and starts another when it dies.

Two threads keep the pipe off the event loop: one writes what is asked, one reads what is answered and hands it over.
All else happens on the loop.
"""

from __future__ import annotations

import asyncio
import logging
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from secrets import token_hex
from typing import Any, TypeAlias

from memlm.api.generation import Finished
from memlm.errors import MemlmError, Overloaded, Unavailable
from memlm.server.config import ServerConfig
from memlm.server.inference.messages import (
    Answer,
    Ask,
    Cancel,
    CatchUp,
    Events,
    Failed,
    FromWorker,
    Heartbeat,
    Loaded,
    Lost,
    NotLoaded,
    Question,
    Result,
    Stop,
    ToWorker,
)
from memlm.server.processes import forking
from memlm.server.quota import Holding, Quota, share_of
from memlm.server.telemetry.metrics import Stats

RETRY_AFTER_S, LEAST_RETRY_S, MOST_RETRY_S = 1.0, 0.05, 60.0
ENDS_KEPT = 16
JOIN_S = 5.0
STALE_BEAT_S = 10.0  # a worker whose loop did not move for so long serves nobody
LOOK_S = 0.25  # between looks at a worker's heartbeat
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.5, 30.0

log = logging.getLogger("memlm.server")

Outgoing: TypeAlias = "queue.SimpleQueue[ToWorker | None]"


class Call:
    """A question that was asked, and what has been answered to it and not been taken yet.

    The bytes of events that wait are `held`, `most` of one call. More than that is refused: their client does not read
    them as fast as they come.
    """

    def __init__(self, held: Holding, most: int) -> None:
        self._held, self._most = held, most
        self._answers: list[Answer] = []
        self._news = asyncio.Event()

    def put(self, answer: Answer) -> None:
        """Adds an answer. Raises Overloaded where too many bytes wait to be taken."""
        size = _num_bytes(answer)
        if self._held.amount + size > self._most:
            raise Overloaded(f"more than {self._most:,} bytes of this generation waited; read it as fast as it comes")
        self._held.take(size)
        self._answers.append(answer)
        self._news.set()

    async def take(self) -> list[Answer]:
        """All that has come since the last time; waits for the first of it."""
        await self._news.wait()
        self._news.clear()
        taken, self._answers = self._answers, []
        self._held.give(self._held.amount)
        return taken


def _num_bytes(answer: Answer) -> int:
    """Bytes of the tokens in an answer; other answers are small, or come alone."""
    if not isinstance(answer, Events):
        return 0
    return sum(len(token) for event in answer.events if isinstance(event, tuple) for token in event)


def event_quota(config: ServerConfig) -> Quota:
    """Bytes of events that may wait for their clients, or be kept for resuming."""
    total = max(config.max_event_bytes, config.max_stream_bytes)
    return Quota("bytes of events that wait for clients", total, max(share_of(total), config.max_stream_bytes))


class WorkerLink:
    """A worker process, and the questions that it has not answered yet."""

    def __init__(
        self,
        config: ServerConfig,
        place: int,
        stores: Callable[[], Mapping[str, Path]],
        event_bytes: Quota | None = None,
        forget: Callable[[str, Collection[str] | None], None] = lambda store, document_ids: None,
    ) -> None:
        """Starts nothing yet. Takes what each worker may take on, its place among them, what tells of the datastores
        that one that starts is to load, the bytes of events that may wait for their clients, and what takes deleted
        documents out of events.
        """
        self._forget = forget
        self._event_bytes = event_quota(config) if event_bytes is None else event_bytes
        self._config, self.place, self._stores = config, place, stores
        self.stats = Stats()
        self._calls: dict[str, Call] = {}
        self._ended_s: deque[float] = deque(maxlen=ENDS_KEPT)
        self._outgoing: Outgoing = queue.SimpleQueue()
        self._process: BaseProcess | None = None
        self._loaded: asyncio.Future[None] | None = None
        self._given: Mapping[str, Path] = {}
        self._catching_up: asyncio.Task[None] | None = None
        self._gone = asyncio.Event()
        self._keeper: asyncio.Task[None] | None = None
        self._watcher: asyncio.Task[None] | None = None
        self.is_loaded = self.is_up = False
        self._beat_s, self._silent_looks = 0.0, 0

    async def start(self) -> None:
        """Starts a worker and waits until it is loaded. Raises what kept it from loading."""
        await self._launch()
        self._keeper = asyncio.create_task(self._keep())
        self._watcher = asyncio.create_task(self._watch())

    async def stop(self, patience_s: float) -> None:
        """Tells the worker to stop, and waits for it; one that does not stop, or is still loading, is killed."""
        for task in (self._keeper, self._watcher):
            if task is not None:
                task.cancel()
        if self._process is None:
            return
        if self.is_up:
            self._outgoing.put(Stop())
            await asyncio.to_thread(self._process.join, patience_s)
        if self._process.is_alive():
            self._process.kill()
            await asyncio.to_thread(self._process.join, JOIN_S)
        self._outgoing.put(None)

    def restart(self, why: str) -> None:
        """Ends the worker, so that another takes its place, with the datastores that are in service now."""
        log.error("inference worker %d is started again: %s", self.place, why)
        if self._process is not None:
            self._process.kill()

    @property
    def is_serving(self) -> bool:
        """Whether the worker has loaded and its loop has moved of late."""
        return self.is_up and self.beat_age_s < min(STALE_BEAT_S, self._config.worker_timeout_s)

    @property
    def beat_age_s(self) -> float:
        """Seconds since the worker's loop last told that it moves."""
        return time.monotonic() - self._beat_s

    @property
    def num_open(self) -> int:
        """Questions that somebody waits for the answers of."""
        return len(self._calls)

    @contextmanager
    def ask(
        self,
        question: Question | CatchUp,
        time_left_s: float | None,
        *,
        id_: str = "",
        caller: str = "",
        owner: str = "",
        ours: bool = False,
    ) -> Iterator[Call]:
        """Asks, under an id. Leaving before the last answer has come tells the worker that nobody waits any more.

        Raises Overloaded at once where there is too much to do already, unless the question is the server's own;
        Unavailable while there is no worker.
        """
        self.check_room(ours=ours)
        id_, now_s = id_ or token_hex(8), time.monotonic()
        deadline_s = None if time_left_s is None else now_s + time_left_s
        with self._event_bytes.hold(caller) as held:
            self._calls[id_] = call = Call(held, self._config.max_stream_bytes)
            self._outgoing.put(Ask(id_, question, now_s, deadline_s, caller, owner))
            try:
                yield call
            finally:
                self._cancel(id_)

    def _cancel(self, id_: str) -> None:
        """Tells the worker that nobody waits any more, unless the last answer has come."""
        if self._calls.pop(id_, None) is not None:
            self._outgoing.put(Cancel(id_))

    async def answer(self, question: Question | CatchUp, time_left_s: float | None = None, **about: Any) -> Any:
        """The one answer to a question; `about` as of `ask`. Raises its error."""
        with self.ask(question, time_left_s, **about) as asked:
            (answer,) = await asked.take()
        if isinstance(answer, Result):
            return answer.value
        raise answer.error if isinstance(answer, Failed) else TypeError(f"{type(answer).__name__} is no answer")

    def check_room(self, *, ours: bool = False) -> None:
        """Raises Overloaded where there is too much to do already, Unavailable while there is no worker."""
        if not (self.is_up or (ours and self.is_loaded)):
            raise Unavailable("the inference worker is being started again; try again in a moment")
        if not ours and self.num_open >= self._config.max_running + self._config.max_queued:
            wait_s = self._wait_s()
            raise Overloaded(
                f"{self.num_open} requests are running or waiting, which is all that this server takes; try again in"
                f" {wait_s:.2g} s",
                retry_after_s=wait_s,
            )

    def _wait_s(self) -> float:
        """How long a place takes to become free, as the last ones did."""
        if len(self._ended_s) < 2:
            return RETRY_AFTER_S
        pace_s = (self._ended_s[-1] - self._ended_s[0]) / (len(self._ended_s) - 1)
        return min(max(pace_s, LEAST_RETRY_S), MOST_RETRY_S)

    async def _launch(self) -> None:
        """One worker, from its start until it is loaded."""
        context, loop = forking(), asyncio.get_running_loop()
        ours, theirs = context.Pipe()
        self._loaded, self._gone, self._outgoing = loop.create_future(), asyncio.Event(), queue.SimpleQueue()
        self._given = dict(self._stores())
        arguments = (theirs, self._config, self._given, self.place, self._keeper is not None)
        process = context.Process(target=_run_worker, args=arguments, name=f"worker {self.place}", daemon=True)
        self._process = process
        to_worker = process, theirs, ours, self._outgoing
        threading.Thread(target=_start_and_write, args=to_worker, name="to worker", daemon=True).start()
        threading.Thread(target=self._read, args=(ours, loop), name="from worker", daemon=True).start()
        await self._loaded

    async def _keep(self) -> None:
        """Starts another worker whenever one dies; waits longer each time that one cannot even load."""
        pause_s = FIRST_PAUSE_S
        while True:
            await self._gone.wait()
            await self._bury()
            try:
                await self._launch()
                pause_s = FIRST_PAUSE_S
            except MemlmError as error:
                log.error("inference worker %d could not be started again: %s", self.place, error)
                await asyncio.sleep(pause_s)
                pause_s = min(2 * pause_s, LONGEST_PAUSE_S)

    async def _watch(self) -> None:
        """Kills a loaded worker that sends nothing for `worker_timeout_s`.

        Silence is counted in looks, not read off a clock: a front that stood still itself blames no worker.
        """
        while True:
            await asyncio.sleep(LOOK_S)
            self._silent_looks += 1
            if self.is_loaded and self._silent_looks * LOOK_S >= self._config.worker_timeout_s:
                self.is_up = False
                self.restart(f"it sent no heartbeat for {self._config.worker_timeout_s:g} s")
                await self._gone.wait()

    async def _bury(self) -> None:
        assert self._process is not None  # there was one that is gone
        if self._process.pid is not None:
            await asyncio.to_thread(self._process.join, JOIN_S)
            self._process.kill()
        log.error("inference worker %d died (exit code %s); starting another", self.place, self._process.exitcode)

    def _read(self, pipe: Connection, loop: asyncio.AbstractEventLoop) -> None:
        """Thread: hands over what the worker says, until it is gone or the loop is closed."""
        with suppress(RuntimeError), pipe:
            try:
                while True:
                    loop.call_soon_threadsafe(self._hear, pipe.recv())  # all that a turn of its loop had to say
            except (EOFError, OSError):
                loop.call_soon_threadsafe(self._lose)

    def _hear(self, messages: Sequence[FromWorker]) -> None:
        self._beat_s, self._silent_looks = time.monotonic(), 0
        for message in messages:
            self._hear_one(message)

    def _hear_one(self, message: FromWorker) -> None:
        if isinstance(message, Heartbeat):
            self.stats = message.stats
        elif isinstance(message, Loaded):
            self._come_up()
        elif isinstance(message, NotLoaded):
            self._settle(message.error)
        elif isinstance(message, Lost):
            self._forget(message.store, message.document_ids)
        elif call := self._calls.get(message.id):
            if _is_last(message):
                del self._calls[message.id]
                self._ended_s.append(self._beat_s)
            try:
                call.put(message)
            except Overloaded as error:
                call.put(Failed(message.id, error))
                self._cancel(message.id)

    def _come_up(self) -> None:
        """It has loaded. What changed meanwhile comes before anybody else's question."""
        if self._given != self._stores():
            self.restart("the datastores in service changed while it loaded")
            return
        self.is_loaded = True
        self._catching_up = asyncio.create_task(self._catch_up())

    async def _catch_up(self) -> None:
        try:
            await self.answer(CatchUp(), ours=True)
        except MemlmError as error:
            self.restart(str(error))
        else:
            self.is_up = True
            self._settle(None)

    def _lose(self) -> None:
        """The worker is gone: whoever waits for it is told so."""
        self.is_loaded = self.is_up = False
        self.stats = Stats()
        self._settle(Unavailable("the inference worker died while it was loading; the server's log may say why"))
        for id_, call in self._calls.items():
            call.put(Failed(id_, Unavailable("the inference worker died at this request or another; ask again")))
        self._calls.clear()
        self._outgoing.put(None)
        self._gone.set()

    def _settle(self, error: MemlmError | None) -> None:
        if self._loaded is None or self._loaded.done():
            return
        if error is None:
            self._loaded.set_result(None)
        else:
            self._loaded.set_exception(error)


def _is_last(answer: Answer) -> bool:
    return not isinstance(answer, Events) or isinstance(answer.events[-1], Finished)


def _start_and_write(process: BaseProcess, theirs: Connection, pipe: Connection, outgoing: Outgoing) -> None:
    """Thread: starts the worker, and sends what it is asked, until there is nothing more to ask or nobody to ask it."""
    with theirs:  # the first start of all waits until torch is loaded
        process.start()
    with suppress(OSError):
        while (message := outgoing.get()) is not None:
            pipe.send(message)


def _run_worker(
    pipe: Connection, config: ServerConfig, stores: Mapping[str, Path], place: int, restarted: bool
) -> None:
    """What a worker's process runs. The front never loads torch."""
    from memlm.server.inference.worker import run_worker

    run_worker(pipe, config, stores, place, restarted)
