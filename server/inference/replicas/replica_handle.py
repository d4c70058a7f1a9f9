"""The front end's handle on one replica: sends it requests over Ray Serve, and asks for its heartbeats."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import ActorUnavailableError, RayActorError, RayError, RayTaskError
from ray.serve.exceptions import RayServeException

from memlm.distributed.cluster import reason
from memlm.errors import Incompatible, InternalError, Unavailable
from memlm.server.config import ServerConfig
from memlm.server.inference.messages import Failed, Loaded, Submission
from memlm.server.inference.replicas.applications import NAMESPACE, exists
from memlm.server.inference.requests import EngineHandle
from memlm.server.quota import Quota
from memlm.server.telemetry.datastores import StoreStats

POLL_S = 0.5  # between heartbeats
REFUSED_STOP_S = 60.0  # for the end of an engine that must not serve
GONE = RayError, RayServeException  # of calls that did not reach a replica, or lost it

log = logging.getLogger("memlm.server")


class ReplicaHandle(EngineHandle):
    """One replica, and its requests in flight."""

    kind = "replica"

    def __init__(
        self,
        config: ServerConfig,
        id_: str,
        actor: str,
        calls: Any,
        stores: Callable[[], Mapping[str, Path]],
        event_bytes: Quota,
        on_documents_deleted: Callable[[str, Collection[str] | None], None],
        on_store_stats: Callable[[Sequence[StoreStats]], None],
    ) -> None:
        """`actor` is the name of its process on the cluster, and `calls` Ray Serve's handle on all replicas."""
        super().__init__(config, f"replica {id_}", stores, event_bytes, on_documents_deleted, on_store_stats)
        self.id, self.actor, self.where = id_, actor, ""
        self._calls = calls.options(session_id=id_)
        self._streams = calls.options(session_id=id_, stream=True)
        self._relays: dict[str, asyncio.Task[None]] = {}
        self._watching: list[asyncio.Task[None]] = []
        self._arrived = 0  # the number of the latest message beside answers

    async def start(self, *, restarted: bool) -> None:
        """Lets the replica load, and waits until it has. Raises the error that kept it from that."""
        self._loaded = asyncio.get_running_loop().create_future()
        self._start_stores = dict(self._stores())
        stores = {name: path.absolute() for name, path in self._start_stores.items()}
        try:
            answer = await self._calls.load.remote(self.id, stores, restarted)
        except GONE as error:
            raise Unavailable(f"the {self.name} died while it was loading; Ray's logs may say why") from error
        if answer is None:
            raise Unavailable(f"the {self.name} is gone")
        loaded, self.where = answer
        self._on_messages([loaded])
        if isinstance(loaded, Loaded) and not self._loaded.done():
            self._watching = [asyncio.create_task(work()) for work in (self._poll, self._kill_if_silent)]
        try:
            await self._loaded
        except Incompatible:
            if isinstance(loaded, Loaded):  # what it may not serve; Ray Serve would replace the process without a pause
                await self._stop_engine(REFUSED_STOP_S)
            raise

    async def stop(self, timeout_s: float) -> None:
        """Ends the engine, and waits for that up to `timeout_s`."""
        self.leave()
        if timeout_s and self.is_loaded:
            await self._stop_engine(timeout_s)

    def leave(self) -> None:
        """Ends the heartbeats of a replica that gets no more requests."""
        self.is_ready = False
        self._exited.set()
        for task in self._watching:
            task.cancel()

    def end(self) -> None:
        """Fails the requests in flight of a replica whose process has ended."""
        for task in list(self._relays.values()):
            task.cancel()
        self._fail_all()

    def restart(self, why: str) -> None:
        """As `EngineHandle.restart`. Ray Serve replaces the process."""
        log.error("%s is started again: %s", self.name, why)
        self.is_ready = False
        with suppress(ValueError, RayError):  # it is gone, or Ray does not answer
            ray.kill(ray.get_actor(self.actor, namespace=NAMESPACE))

    async def _stop_engine(self, timeout_s: float) -> None:
        with suppress(*GONE, TimeoutError):
            await asyncio.wait_for(self._calls.stop.remote(self.id), timeout_s)

    def is_alive(self) -> bool:
        """Whether the cluster has the process. Asks it, which may take a moment."""
        return exists(self.actor)

    def _send(self, submission: Submission) -> None:
        self._relays[submission.id] = asyncio.create_task(self._relay(submission))

    def _send_cancel(self, id_: str) -> None:
        if (relay := self._relays.get(id_)) is not None:
            relay.cancel()

    async def _relay(self, submission: Submission) -> None:
        """Carries one request to the replica, and its answers back."""
        id_, deadline_s = submission.id, submission.deadline_s
        left_s = None if deadline_s is None else deadline_s - time.monotonic()
        try:
            response = self._streams.answer.remote(
                self.id, id_, submission.request, left_s, submission.caller, submission.owner
            )
            try:
                async for answers in response:
                    self._on_messages(answers)
            except asyncio.CancelledError:
                response.cancel()
                raise
        except Exception as error:
            if isinstance(error, GONE) and not isinstance(error, RayTaskError):
                return
            log.exception("request %s failed on its way to or from the %s", id_, self.name)
            why = f"a bug in the server; its log has the details under request {id_}"
            self._on_answer(Failed(id_, InternalError(why)))
        finally:
            if id_ in self._pending:  # without an answer
                self._on_answer(Failed(id_, Unavailable("the replica died at this request or another; ask again")))
            del self._relays[id_]

    async def _poll(self) -> None:
        """Asks for heartbeats, until the replica is gone."""
        try:
            while (numbered := await self._heartbeat()) is not None:
                if numbered:
                    self._arrived = numbered[-1][0]
                    self._on_messages([message for _, message in numbered])
                await asyncio.sleep(POLL_S)
        except GONE as error:
            log.warning("%s sends no heartbeats: %s", self.name, reason(error))
        finally:
            self.is_ready = False  # until Ray Serve has seen it, too

    async def _heartbeat(self) -> Any:
        """The messages that have not arrived yet, numbered. None from a replica that is gone."""
        try:
            return await self._calls.heartbeat.remote(self.id, self._arrived)
        except ActorUnavailableError:  # for a moment, as far as Ray knows
            return ()
        except RayActorError:
            return None
