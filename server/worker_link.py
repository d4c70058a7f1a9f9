"""The front's end of the pipe: starts the worker, asks it, hears it, and starts another when it dies.

Two threads keep the pipe off the event loop: one writes what is asked, one reads what is answered and hands it
over. All else happens on the loop.
"""

from __future__ import annotations

import asyncio
import logging
import multiprocessing
import queue
import threading
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from multiprocessing.connection import Connection
from secrets import token_hex
from typing import Any

from memlm.server import messages as m
from memlm.server.config import ServerConfig

from memlm.errors import InternalError, MemlmError, Overloaded, Unavailable

RETRY_AFTER_S = 1.0
JOIN_S = 5.0

log = logging.getLogger("memlm.server")


class WorkerLink:
    """One worker process and the questions it has not answered yet."""

    def __init__(self, config: ServerConfig) -> None:
        """Starts nothing yet."""
        self._config = config
        self._context = multiprocessing.get_context("spawn")
        self._pending: dict[str, asyncio.Queue[m.FromWorker]] = {}
        self._outgoing: queue.SimpleQueue[m.FromFront | None] = queue.SimpleQueue()
        self._process: Any = None
        self._loaded: asyncio.Future[None] | None = None
        self._closing = False
        self.last_beat = 0.0

    async def start(self) -> None:
        """Starts a worker and waits until it is loaded. Raises what kept it from loading."""
        loop = asyncio.get_running_loop()
        ours, theirs = self._context.Pipe()
        self._loaded, self._outgoing = loop.create_future(), queue.SimpleQueue()
        self._process = self._context.Process(
            target=_run_worker, args=(theirs, self._config), name="memlm-worker", daemon=True
        )
        self._process.start()
        theirs.close()
        for work in (_write, self._read):
            threading.Thread(target=work, args=(ours, self._outgoing, loop), daemon=True).start()
        await self._loaded

    @property
    def is_alive(self) -> bool:
        """Whether the worker has loaded and its process runs."""
        return bool(self._loaded and self._loaded.done() and self._process.is_alive())

    @property
    def num_pending(self) -> int:
        """Questions that are not answered yet."""
        return len(self._pending)

    @asynccontextmanager
    async def ask(self, question: m.Question, time_left_s: float | None) -> AsyncIterator[asyncio.Queue[m.FromWorker]]:
        """Asks; the answers come into the queue. Leaving early, for whatever reason, tells the worker that nobody
        waits.

        Raises Overloaded at once where there is too much to do already, Unavailable while there is no worker.
        """
        if self.num_pending >= self._config.max_running + self._config.max_queued:
            raise Overloaded(
                f"{self.num_pending} requests are running or waiting; try again", retry_after_s=RETRY_AFTER_S
            )
        if not self.is_alive:
            raise Unavailable("the inference worker is being started again; try again in a moment")
        id_, answers, now = token_hex(8), asyncio.Queue[m.FromWorker](), time.monotonic()
        self._pending[id_] = answers
        self._outgoing.put(m.Ask(id_, question, None if time_left_s is None else now + time_left_s, now))
        try:
            yield answers
        finally:
            if self._pending.pop(id_, None) is not None:
                self._outgoing.put(m.Cancel(id_))

    async def stop(self, patience_s: float) -> None:
        """Tells the worker to stop and waits for it; one that does not is killed."""
        self._closing = True
        if self._process is None:
            return
        self._outgoing.put(m.Stop())
        await asyncio.to_thread(self._process.join, patience_s)
        if self._process.is_alive():
            self._process.kill()
            await asyncio.to_thread(self._process.join, JOIN_S)
        self._outgoing.put(None)

    def _read(self, pipe: Connection, outgoing: queue.SimpleQueue[Any], loop: asyncio.AbstractEventLoop) -> None:
        """Thread: hands over what the worker says, until it is gone."""
        try:
            while True:
                loop.call_soon_threadsafe(self._hear, pipe.recv())
        except (EOFError, OSError):
            outgoing.put(None)
        except RuntimeError:
            return  # the loop is closed
        try:
            loop.call_soon_threadsafe(self._mourn)
        except RuntimeError:
            return

    def _hear(self, message: m.FromWorker) -> None:
        self.last_beat = time.monotonic()
        if isinstance(message, m.Loaded):
            self._settle(None)
        elif isinstance(message, m.Failed) and not message.id:
            self._settle(message.error)
        elif isinstance(message, m.Events):
            answers = self._pending.pop(message.id, None) if message.last else self._pending.get(message.id)
            if answers is not None:
                answers.put_nowait(message)
        elif isinstance(message, m.Answer | m.Failed):
            answers = self._pending.pop(message.id, None)
            if answers is not None:
                answers.put_nowait(message)

    def _mourn(self) -> None:
        """The worker is gone: whoever waits is told so, and unless the server is closing another one starts."""
        self._settle(InternalError("the inference worker died while it was loading; its log says why"))
        for id_, answers in self._pending.items():
            answers.put_nowait(m.Failed(id_, Unavailable("the inference worker died; try again")))
        self._pending.clear()
        if not self._closing and self._process.is_alive() is False and self.last_beat:
            log.error("the inference worker died (exit code %s); starting another", self._process.exitcode)
            self._restart = asyncio.ensure_future(self._start_again())

    async def _start_again(self) -> None:
        self.last_beat = 0.0
        try:
            await self.start()
        except MemlmError as error:
            log.error("the inference worker cannot start again: %s", error)

    def _settle(self, error: MemlmError | None) -> None:
        if self._loaded is None or self._loaded.done():
            return
        if error is None:
            self._loaded.set_result(None)
        else:
            self._loaded.set_exception(error)


def _write(pipe: Connection, outgoing: queue.SimpleQueue[m.FromFront | None], loop: Any) -> None:
    """Thread: writes what is asked, until told to end or until nobody reads."""
    while (message := outgoing.get()) is not None:
        try:
            pipe.send(message)
        except OSError:
            return


def _run_worker(pipe: Connection, config: ServerConfig) -> None:
    """The first thing that runs in the worker's process: only there is torch loaded."""
    from memlm.server.worker import run_worker

    run_worker(pipe, config)
