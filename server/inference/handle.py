"""The front end's handle on one inference worker: starts the process, sends it requests, and replaces it when it dies.

Two threads keep the pipe off the event loop: one writes requests, one reads answers and passes them to the loop.
Everything else runs on the loop.
"""

from __future__ import annotations

import asyncio
import logging
import queue
import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from typing import TypeAlias

from memlm.errors import InternalError, MemlmError
from memlm.generation.sessions.fence import SessionFence
from memlm.server.config import ServerConfig
from memlm.server.inference.messages import Cancel, Failed, Stop, Submission, ToWorker
from memlm.server.inference.requests import EngineHandle
from memlm.server.processes import process_context
from memlm.server.quota import Quota
from memlm.server.telemetry.datastores import StoreStats

JOIN_S = 5.0
MIN_PAUSE_S, MAX_PAUSE_S = 0.5, 30.0

log = logging.getLogger("memlm.server")

Outgoing: TypeAlias = "queue.SimpleQueue[ToWorker | None]"


class WorkerHandle(EngineHandle):
    """A worker process and its requests in flight."""

    def __init__(
        self,
        config: ServerConfig,
        number: int,
        stores: Callable[[], Mapping[str, Path]],
        event_bytes: Quota | None = None,
        on_documents_deleted: Callable[[str, Collection[str] | None], None] = lambda store, document_ids: None,
        on_store_stats: Callable[[Sequence[StoreStats]], None] = lambda stores: None,
        fence: SessionFence | None = None,
    ) -> None:
        """As `EngineHandle`, with the worker's number as its name. `fence` is that of the session folder."""
        name = f"inference worker {number}"
        super().__init__(config, name, stores, event_bytes, on_documents_deleted, on_store_stats)
        self.number, self._fence = number, fence
        self._outgoing: Outgoing = queue.SimpleQueue()
        self._process: BaseProcess | None = None
        self._supervisor: asyncio.Task[None] | None = None
        self._watcher: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Starts a worker and waits until it is loaded. Raises the error that kept it from loading."""
        await self._launch()
        self._supervisor = asyncio.create_task(self._supervise())
        self._watcher = asyncio.create_task(self._kill_if_silent())

    async def stop(self, timeout_s: float) -> None:
        """Stops the worker and waits up to `timeout_s`. A worker that does not stop, or is still loading, is killed."""
        for task in (self._supervisor, self._watcher):
            if task is not None:
                task.cancel()
        if self._process is None:
            return
        if self.is_ready:
            self._outgoing.put(Stop())
            await asyncio.to_thread(self._process.join, timeout_s)
        if self._process.is_alive():
            self._process.kill()
            await asyncio.to_thread(self._process.join, JOIN_S)
        self._outgoing.put(None)

    def restart(self, why: str) -> None:
        """As `EngineHandle.restart`."""
        log.error("inference worker %d is started again: %s", self.number, why)
        if self._process is not None:
            self._process.kill()

    def _send(self, submission: Submission) -> None:
        self._outgoing.put(submission)

    def _send_cancel(self, id_: str) -> None:
        self._outgoing.put(Cancel(id_))

    async def _launch(self) -> None:
        """Starts a process and waits until it is loaded."""
        context, loop = process_context(), asyncio.get_running_loop()
        pipe, worker_end = context.Pipe()
        self._loaded, self._exited, self._outgoing = loop.create_future(), asyncio.Event(), queue.SimpleQueue()
        self._start_stores = dict(self._stores())
        restarted = self._supervisor is not None
        arguments = (worker_end, self._config, self._start_stores, self.number, restarted, self._fence)
        process = context.Process(target=_run_worker, args=arguments, name=f"worker {self.number}", daemon=True)
        self._process = process

        def fail(failed: Failed) -> None:
            loop.call_soon_threadsafe(self._on_answer, failed)

        to_worker = process, worker_end, pipe, self._outgoing, fail
        threading.Thread(target=_start_and_write, args=to_worker, name="to worker", daemon=True).start()
        threading.Thread(target=self._read, args=(pipe, loop), name="from worker", daemon=True).start()
        try:
            await self._loaded
        except MemlmError:
            if process.pid is not None:
                process.kill()  # one that loaded what it may not serve would stay
            raise

    async def _supervise(self) -> None:
        """Replaces each worker that dies. Waits longer after each replacement that cannot load."""
        pause_s = MIN_PAUSE_S
        while True:
            await self._exited.wait()
            await self._reap()
            try:
                await self._launch()
                pause_s = MIN_PAUSE_S
            except MemlmError as error:
                log.error("inference worker %d could not be started again: %s", self.number, error)
                await asyncio.sleep(pause_s)
                pause_s = min(2 * pause_s, MAX_PAUSE_S)

    async def _reap(self) -> None:
        assert self._process is not None  # there was one that is gone
        if self._process.pid is not None:
            await asyncio.to_thread(self._process.join, JOIN_S)
            self._process.kill()
        log.error("inference worker %d died (exit code %s); starting another", self.number, self._process.exitcode)

    def _read(self, pipe: Connection, loop: asyncio.AbstractEventLoop) -> None:
        """Thread: passes the worker's messages to the loop until the worker is gone or the loop is closed."""
        with suppress(RuntimeError), pipe:
            try:
                while True:
                    loop.call_soon_threadsafe(self._on_messages, pipe.recv())  # all that a turn of its loop had to say
            except (EOFError, OSError):
                loop.call_soon_threadsafe(self._on_exit)

    def _on_exit(self) -> None:
        """Fails every request in flight."""
        self._fail_all()
        self._outgoing.put(None)
        self._exited.set()


def _start_and_write(
    process: BaseProcess, worker_end: Connection, pipe: Connection, outgoing: Outgoing, fail: Callable[[Failed], None]
) -> None:
    """Thread: starts the worker and writes messages to it, until a None, a closed pipe or a closed loop.

    A request that cannot be pickled ends by `fail`, alone.
    """
    with worker_end:  # the first start of all waits until torch is loaded
        process.start()
    with suppress(OSError, RuntimeError):
        while (message := outgoing.get()) is not None:
            try:
                pickled = ForkingPickler.dumps(message)
            except Exception as error:
                log.exception("a message could not be sent to an inference worker")
                if isinstance(message, Submission):
                    why = f"the request could not be sent to a worker ({type(error).__name__}); see the server's log"
                    fail(Failed(message.id, InternalError(why)))
            else:
                pipe.send_bytes(pickled)


def _run_worker(
    pipe: Connection,
    config: ServerConfig,
    stores: Mapping[str, Path],
    number: int,
    restarted: bool,
    fence: SessionFence | None,
) -> None:
    """The main function of a worker process. Imported there only, since the front end never loads torch."""
    from memlm.server.inference.startup import run_worker

    run_worker(pipe, config, stores, number, restarted, fence)
