"""The front end's handle on replicas, engines that Ray Serve places on a cluster, replaces and adds to.

The front end stays the ingress, and chooses a replica for each request as it does among workers. It learns which
replicas there are from `Router`, the part of Ray Serve in this process, which sends each call to the chosen one. The
name of a session ends in the id of its replica. The sessions of a replica that is gone are read from their files by
others, where there is a session folder.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from ray.exceptions import RayError
from ray.serve.exceptions import RayServeException

from memlm.distributed.cluster import reason
from memlm.errors import MemlmError, Unavailable
from memlm.generation.sessions.fence import SessionFence
from memlm.generation.sessions.names import home_of, names_in
from memlm.server.config import ServerConfig
from memlm.server.inference.messages import Adopt
from memlm.server.inference.pool import EnginePool
from memlm.server.inference.replicas.applications import LOOKS, WATCH_S
from memlm.server.inference.replicas.deployment import GONE, Deployment
from memlm.server.inference.replicas.replica_handle import POLL_S, ReplicaHandle
from memlm.server.inference.requests import EngineHandle
from memlm.server.inference.threads import call_soon, in_thread
from memlm.server.telemetry.datastores import StoreStats

DEATH_POLL_S, DEATH_LOOKS = 0.2, 2
STATUS_POLL_S = 2.0
STATUS_LIMIT_S, MAX_STATUS_LIMIT_S = 30.0, 600.0  # for Ray Serve to tell its applications
ROOM_S = 30.0  # until a warning that the cluster may lack room
MIN_PAUSE_S, MAX_PAUSE_S = 0.5, 30.0
RESTORED_AT_ONCE = 32  # sessions, of which each replica reads one after the other
MOST_LOST = 4  # replicas that died while they read a session
STOP_S, STOP_AT_ONCE_S = 65.0, 10.0  # for a deployment to end

log = logging.getLogger("memlm.server")

watchers: dict[str, Callable[[Mapping[str, str]], None]] = {}  # by the name of the application


class ReplicaPool(EnginePool):
    """All replicas of one server."""

    kind = "replica"

    def __init__(
        self,
        config: ServerConfig,
        stores: Callable[[], Mapping[str, Path]],
        on_store_stats: Callable[[Sequence[StoreStats]], None] = lambda stores: None,
        fence: SessionFence | None = None,
    ) -> None:
        """As `EnginePool`. `on_store_stats` is called with the figures of each heartbeat. The application on the
        cluster gets the name in the `fence`.
        """
        super().__init__(config, stores)
        self._on_store_stats, self._deployment = on_store_stats, Deployment(config, fence)
        self._calls: Any = None
        self._handles: dict[str, ReplicaHandle] = {}  # of those that Ray Serve runs
        self._leaving: dict[str, ReplicaHandle] = {}  # until their processes are gone and their sessions elsewhere
        self._homes: dict[str, str] = {}  # of sessions that were read from their files: the ids of their replicas
        self._tasks = set[asyncio.Task[None]]()
        self._has_started, self._one_at_a_time = False, asyncio.Lock()
        self._start: asyncio.Future[None] | None = None
        self._deploying: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """As `EnginePool.start`, with a cluster of its own where none is given."""
        loop = asyncio.get_running_loop()
        self._start = loop.create_future()
        watchers[self._deployment.name] = lambda replicas: call_soon(loop, self._on_replicas, replicas)
        self._deploying = asyncio.create_task(self._deploy())
        await asyncio.shield(self._deploying)
        self._begin(self._watch_deployment(self._start))
        await self._start
        await self._restore(None)
        self._has_started = True

    async def _deploy(self) -> None:
        await in_thread(self._deployment.join, stays=True)  # Linux ends a cluster with the thread that started it
        _restore_signal_handlers()
        self._calls = await in_thread(self._deployment.start)
        self._calls.options(stream=True)  # makes the router

    async def stop(self, timeout_s: float) -> None:
        """As `EnginePool.stop`, with the cluster if it was started for them. Does not wait for ever for Ray, and not
        long without a `timeout_s`. May be called again, also while it is being cancelled.
        """
        end_s = STOP_S if timeout_s else STOP_AT_ONCE_S
        if self._deploying is not None:  # its thread cannot be cancelled, and would leave an application
            _, unfinished = await asyncio.wait((self._deploying,), timeout=end_s)
            if unfinished:
                log.warning("Ray has not joined a cluster and deployed replicas after %g s", end_s)
                self._deploying.cancel()  # so that nothing is deployed once it has joined
        watchers.pop(self._deployment.name, None)
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*(each.stop(timeout_s) for each in [*self._handles.values(), *self._leaving.values()]))
        await in_thread(self._deployment.stop, end_s)

    @property
    def _workers(self) -> Sequence[EngineHandle]:
        return [each for each in self._handles.values() if each.is_loaded]

    @property
    def num_open(self) -> int:
        """Requests in flight, with those of replicas that are leaving."""
        return sum(each.num_open for each in [*self._handles.values(), *self._leaving.values()])

    def _owner_of(self, session: str) -> EngineHandle:
        id_ = self._homes.get(session) or home_of(session)
        if (handle := self._handles.get(id_)) is not None and handle.is_loaded:
            return handle
        if id_ in self._leaving and self._config.session_dir is not None:
            raise Unavailable("the session is on its way to another replica; try again in a moment")
        return self._least_loaded()  # which knows no such session

    async def _gather_answers(self, request: Any, time_left_s: float | None = None, **origin: Any) -> list[Any]:
        """As that of `EnginePool`. Raises Unavailable while sessions are between two replicas."""
        if self._leaving and self._config.session_dir is not None:
            raise Unavailable("sessions are on their way to other replicas; try again in a moment")
        return await super()._gather_answers(request, time_left_s, **origin)

    def _end_leaving(self) -> None:
        """Fails the requests of replicas that are leaving: they are not told of changes."""
        for handle in self._leaving.values():
            handle.end()

    async def _watch_deployment(self, start: asyncio.Future[None]) -> None:
        """Fails the start where Ray Serve has given up, and says where it waits for room. Ends the process once the
        application is gone later: without one, no replica comes back.
        """
        began_s, has_warned, is_silent, num_gone, limit_s = time.monotonic(), False, False, 0, STATUS_LIMIT_S
        while True:
            await asyncio.sleep(STATUS_POLL_S)
            try:
                async with asyncio.timeout(limit_s):
                    why = await in_thread(self._deployment.problem)
            except (RayError, RayServeException, TimeoutError) as error:  # which says nothing of the replicas
                if not is_silent:
                    why = f"no answer within {limit_s:g} s" if isinstance(error, TimeoutError) else reason(error)
                    log.warning("Ray Serve does not tell how the replicas are: %s", why)
                is_silent = True
                if isinstance(error, TimeoutError):  # the thread stays, so that there should not be many
                    limit_s = min(2 * limit_s, MAX_STATUS_LIMIT_S)
                continue
            is_silent, num_gone, limit_s = False, num_gone + 1 if why == GONE else 0, STATUS_LIMIT_S
            if start.done() and (start.cancelled() or start.exception() is not None):
                return
            if start.done() and num_gone >= LOOKS:
                await self._end_process()
            if why is not None and (why != GONE or num_gone >= LOOKS):
                self._fail_start(Unavailable(f"Ray Serve cannot start replicas: {why}"))
            wanted = self._config.cluster.replicas
            is_late = not start.done() and time.monotonic() - began_s > ROOM_S
            if is_late and not has_warned and len(self._handles) < wanted:
                has_warned = True
                log.warning("%d of %d replicas run; the Ray cluster may lack room", len(self._handles), wanted)

    async def _end_process(self) -> None:
        """Ends a server that can give no answer any more, so that a service manager starts it again."""
        log.error("the replicas' application on the Ray cluster is gone, and so the server ends; start it again")
        await in_thread(self._deployment.leave)
        os._exit(1)

    def _fail_start(self, error: MemlmError) -> None:
        if self._start is not None and not self._start.done():
            self._start.set_exception(error)

    def _on_replicas(self, actors: Mapping[str, str]) -> None:
        """Takes the replicas that Ray Serve runs now: their ids, and the names of their actors."""
        for id_ in [id_ for id_ in self._handles if id_ not in actors]:
            self._leaving[id_] = handle = self._handles.pop(id_)
            handle.leave()
            self._begin(self._retire(handle))
        for id_ in [id_ for id_ in actors if id_ not in self._handles and id_ not in self._leaving]:
            self._handles[id_] = handle = ReplicaHandle(
                self._deployment.per_replica, id_, actors[id_], self._calls, self._stores, self.event_bytes,
                self.mark_deleted, self._on_store_stats,
            )  # fmt: skip
            handle.files = self._files
            self._begin(self._join(handle))

    def _begin(self, work: Any) -> None:
        self._tasks.add(task := asyncio.create_task(work))
        task.add_done_callback(self._tasks.discard)

    async def _join(self, handle: ReplicaHandle) -> None:
        """Lets a replica load, again and again while it cannot. At the start of the server the first error counts."""
        pause_s = MIN_PAUSE_S
        while self._handles.get(handle.id) is handle:
            try:
                await handle.start(restarted=self._has_started)
            except MemlmError as error:
                if self._start is not None and not self._start.done():
                    self._fail_start(error)
                    return
                log.error("%s could not be started: %s", handle.name, error)
                await asyncio.sleep(pause_s)
                pause_s = min(2 * pause_s, MAX_PAUSE_S)
            else:
                log.info("%s is ready: %s", handle.name, handle.where)
                ready = sum(each.is_ready for each in self._handles.values())
                if ready >= self._config.cluster.replicas and self._start is not None and not self._start.done():
                    self._start.set_result(None)
                return

    async def _retire(self, handle: ReplicaHandle) -> None:
        """Waits for the end of a replica that Ray Serve runs no more. Then others take its sessions."""
        log.warning("%s is gone; Ray Serve replaces one that died", handle.name)
        await _until_it_is_gone(handle)
        handle.end()
        try:
            await self._restore(handle.id)
        finally:
            del self._leaving[handle.id]

    async def _restore(self, gone: str | None) -> None:
        """Lets the replicas read the files of sessions whose replica is gone (None: of all sessions).

        Raises the error of a file at the start of the server. Later such a session is lost.
        """
        if (folder := self._config.session_dir) is None:
            return
        names = set(await asyncio.to_thread(names_in, folder))
        self._homes = {name: id_ for name, id_ in self._homes.items() if name in names}
        mine = [name for name in sorted(names) if gone is None or (self._homes.get(name) or home_of(name)) == gone]
        at_once = asyncio.Semaphore(RESTORED_AT_ONCE)
        await asyncio.gather(*(self._restore_session(name, at_once) for name in mine))

    async def _restore_session(self, name: str, at_once: asyncio.Semaphore) -> None:
        lost = set[str]()
        while True:
            handle = None
            try:
                async with self._one_at_a_time if lost else at_once:  # a file that kills replicas costs no other
                    handle = self._least_loaded()
                    assert isinstance(handle, ReplicaHandle)
                    await handle.ask(Adopt(name), internal=True)
            except Unavailable:
                lost |= {handle.name} if handle is not None else set()  # one may fail often before it is known as lost
                if len(lost) == MOST_LOST:
                    log.warning(
                        "the session %s stays in its file: %d replicas died while they read it", name, MOST_LOST
                    )
                    return
                await asyncio.sleep(POLL_S)
            except MemlmError as error:
                if not self._has_started:
                    raise
                log.error("the session of a replica that is gone cannot be read: %s", error)
                return
            else:
                self._homes[name] = handle.id
                return


async def _until_it_is_gone(handle: ReplicaHandle) -> None:
    """Waits until several looks in a row, `WATCH_S` apart, do not find a replica's process: a cluster that starts again
    lacks processes for a moment, and one that lives would write its sessions beside their next replica.
    """
    num_missed = 0
    while num_missed < DEATH_LOOKS:
        if num_missed:
            await asyncio.sleep(WATCH_S)
        num_missed = 0 if await in_thread(handle.is_alive) else num_missed + 1
        if not num_missed:
            await asyncio.sleep(DEATH_POLL_S)


def _restore_signal_handlers() -> None:
    """Ray has replaced them by some that log a stack and end the process. Python's own are known as before."""
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.getsignal(number))
        signal.siginterrupt(number, False)
