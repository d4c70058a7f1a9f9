"""The front end's handles on index workers: one runs tasks in a process, all together are kept for the next job.

A worker that did a task keeps its model for `index_idle_s`. Everything runs on the event loop.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess

from memlm.errors import AlreadyExists, InvalidInput, Locked
from memlm.server.config import ServerConfig
from memlm.server.jobs.worker import (
    COMPACT,
    DELETE,
    Begun,
    Ended,
    FromIndexWorker,
    FromTask,
    Ready,
    Task,
    WorkerSettings,
    run_index_worker,
)
from memlm.server.processes import process_context

JOIN_S, REAP_S = 5.0, 1.0
REFUSALS = (AlreadyExists, InvalidInput, Locked)  # of a task, which say nothing about the process

log = logging.getLogger("memlm.server")


class IndexWorker:
    """An index worker, which starts at once. It `is_new` until it has waited for a job. It `has_begun` the latest task
    once it has read it, and `may_stay` once it has done it.
    """

    def __init__(self, settings: WorkerSettings) -> None:
        context = process_context()
        self._pipe, worker_end = context.Pipe()
        arguments = (worker_end, settings)
        self._process = context.Process(target=run_index_worker, args=arguments, name="index worker", daemon=True)
        self._task_pid: int | None = None
        self._is_killed, self._stays = False, settings.stays
        self.is_new, self.has_begun, self.may_stay = True, False, False
        self._started = asyncio.ensure_future(self._start(worker_end))

    async def run(self, task: Task, on_message: Callable[[FromTask], Awaitable[None]]) -> Ended | None:
        """Runs a task. Returns None if the process died or was killed."""
        self.has_begun = self.may_stay = False
        await asyncio.shield(self._started)
        while (message := await asyncio.to_thread(_receive, self._pipe)) is not None:
            if isinstance(message, Ready):
                if self.has_begun:  # the task's process is gone without a word
                    return None
                with suppress(OSError):  # it died, which the next message shows
                    await asyncio.to_thread(self._pipe.send, task)
            elif isinstance(message, Begun):
                self.has_begun, self._task_pid = True, message.pid
            elif isinstance(message, Ended):
                self._task_pid = None
                self.may_stay = self._stays and (message.error is None or isinstance(message.error, REFUSALS))
                return message
            else:
                await on_message(message)
        return None

    def kill(self) -> None:
        """Kills the process that does the task. The one that stays reaps it and ends, or else is killed too."""
        self._is_killed = True
        if self._process.pid is None:  # `_start` kills it
            return
        if self._task_pid is None or self._task_pid == self._process.pid:
            self._process.kill()
            return
        with suppress(ProcessLookupError):
            os.kill(self._task_pid, signal.SIGKILL)
        asyncio.get_running_loop().call_later(REAP_S, self._process.kill)

    async def close(self) -> None:
        """Closes the pipe, which ends the process, and waits for its end."""
        with suppress(OSError):
            await self._started
            await asyncio.to_thread(_end, self._pipe, self._process)

    async def _start(self, worker_end: Connection) -> None:
        with worker_end:
            await asyncio.to_thread(self._process.start)
        if self._is_killed:
            self._process.kill()


class IndexWorkers:
    """All index workers of a server: at most `index_workers`, at work or idle."""

    def __init__(self, config: ServerConfig) -> None:
        self._config, self._keeps = config, config.index_idle_s > 0
        self._idle, self._at_work = dict[IndexWorker, asyncio.TimerHandle](), set[IndexWorker]()
        self._closing = set[asyncio.Task[None]]()

    def prepare(self) -> None:
        """Starts a worker, which loads the model, unless one is idle or no more are allowed."""
        if self._keeps and not self._idle and len(self._at_work) < self._config.index_workers:
            self._keep(self._new(stays=True))

    @asynccontextmanager
    async def take(self, task: Task) -> AsyncIterator[IndexWorker]:
        """Gives the worker that was idle last, or a new one. It is kept afterwards if it may stay, and else ended."""
        if self._idle:
            worker, timer = self._idle.popitem()
            timer.cancel()
        else:
            needs_model = task.kind != DELETE and not (task.kind == COMPACT and task.check == "none")
            worker = self._new(stays=self._keeps and needs_model)
        self._at_work.add(worker)
        try:
            yield worker
        finally:
            self._at_work.discard(worker)
            if self._keeps and worker.may_stay:
                self._keep(worker)
            else:
                await asyncio.shield(self._close(worker))

    def drain(self) -> None:
        """Ends idle workers, and keeps none from now on."""
        self._keeps = False
        while self._idle:
            self._retire(next(iter(self._idle)))

    async def stop(self) -> None:
        """Kills all workers and waits for their ends."""
        self.drain()
        for worker in self._at_work:
            worker.kill()
        await asyncio.gather(*self._closing)

    def _new(self, *, stays: bool) -> IndexWorker:
        config = self._config
        return IndexWorker(
            WorkerSettings(
                config.model,
                config.dtype,
                config.device,
                nice=config.index_nice,
                log_level=config.log_level,
                log_format=config.log_format,
                stays=stays,
            )
        )

    def _keep(self, worker: IndexWorker) -> None:
        worker.is_new = False
        loop = asyncio.get_running_loop()
        self._idle[worker] = loop.call_later(self._config.index_idle_s, self._retire, worker)

    def _retire(self, worker: IndexWorker) -> None:
        self._idle.pop(worker).cancel()
        if self._config.index_ahead and self._keeps and not self._idle:
            self._keep(worker)
        else:
            self._close(worker)

    def _close(self, worker: IndexWorker) -> asyncio.Task[None]:
        closing = asyncio.create_task(worker.close())
        self._closing.add(closing)
        closing.add_done_callback(self._closing.discard)
        return closing


def _receive(pipe: Connection) -> FromIndexWorker | None:
    try:
        message: FromIndexWorker = pipe.recv()
        return message
    except (EOFError, OSError):
        return None


def _end(pipe: Connection, process: BaseProcess) -> None:
    pipe.close()
    process.join(JOIN_S)
    if process.is_alive():
        process.kill()
        process.join(JOIN_S)
