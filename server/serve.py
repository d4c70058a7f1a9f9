"""Starting, serving, draining, stopping: the life of a server, as named steps."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import socket
import time
from collections.abc import Callable

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection
from memlm.server.config import ServerConfig
from memlm.server.front import Front
from memlm.server.worker_link import WorkerLink
from memlm.v1 import datastores_pb2, generation_pb2

from memlm.errors import InvalidInput

HEALTH_PERIOD_S = 0.25
STALE_BEAT_S = 10.0  # a loop that did not move for so long is not serving
STOP_S = 5.0

log = logging.getLogger("memlm.server")


def serve(config: ServerConfig, on_ready: Callable[[str], None]) -> int:
    """Serves until SIGTERM or SIGINT, then drains; a second signal stops at once. Gives the exit code.

    `on_ready` is told the address once requests are taken. Raises InvalidInput where the port is in use, and
    whatever keeps the model or a datastore from loading: NotFound, Incompatible, Corrupt.
    """
    logging.basicConfig(level=config.log_level.upper(), format="%(asctime)s %(name)s %(levelname)s %(message)s")
    _check_port(config)
    return asyncio.run(Server(config).run(on_ready))


class Server:
    """One server: a worker, a front, health."""

    def __init__(self, config: ServerConfig) -> None:
        """Starts nothing yet."""
        self._config = config
        self._worker = WorkerLink(config)
        self._front = Front(self._worker)
        self._health = health.aio.HealthServicer()
        self._signals = asyncio.Queue[str]()

    async def run(self, on_ready: Callable[[str], None]) -> int:
        """All the steps, in order; whatever happens, no process is left behind."""
        self._listen_to_signals()
        try:
            loading = asyncio.ensure_future(self._worker.start())
            if not await self._unless_signalled(loading):
                return 0
            server, address = self._bind()
            await server.start()
            watching = asyncio.ensure_future(self._watch_health())
            on_ready(address)
            await self._signals.get()
            await self._drain(server)
            watching.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await watching
            return 0
        finally:
            await self._worker.stop(STOP_S)

    async def _unless_signalled(self, work: asyncio.Future[None]) -> bool:
        """Waits for some work, but not past a signal; tells whether the work was done."""
        signalled = asyncio.ensure_future(self._signals.get())
        await asyncio.wait((work, signalled), return_when=asyncio.FIRST_COMPLETED)
        if work.done():
            signalled.cancel()
            await work
            return True
        work.cancel()
        return False

    def _bind(self) -> tuple[grpc.aio.Server, str]:
        config = self._config
        server = grpc.aio.server(
            options=[
                ("grpc.so_reuseport", 0),
                ("grpc.max_receive_message_length", config.max_message_bytes),
                ("grpc.max_send_message_length", -1),
                ("grpc.keepalive_permit_without_calls", 1),
                ("grpc.http2.min_ping_interval_without_data_ms", 10_000),
            ]
        )
        server.add_generic_rpc_handlers(self._front.handlers())
        health_pb2_grpc.add_HealthServicer_to_server(self._health, server)
        reflection.enable_server_reflection((*_service_names(), health.SERVICE_NAME, reflection.SERVICE_NAME), server)
        try:
            port = server.add_insecure_port(f"{config.host}:{config.port}")
        except RuntimeError as error:
            raise _port_in_use(config) from error
        return server, f"{config.host}:{port}"

    async def _watch_health(self) -> None:
        """Tells what is true: serving while the worker's loop moves and the server takes requests."""
        while True:
            fresh = time.monotonic() - self._worker.last_beat < STALE_BEAT_S
            serving = self._worker.is_alive and fresh and not self._front.draining
            status = health_pb2.HealthCheckResponse.SERVING if serving else health_pb2.HealthCheckResponse.NOT_SERVING
            for name in ("", *_service_names()):
                await self._health.set(name, status)
            await asyncio.sleep(HEALTH_PERIOD_S)

    async def _drain(self, server: grpc.aio.Server) -> None:
        """Refuses what is new, lets what runs finish within `drain_s`, and cuts off what is left; or at a second
        signal.
        """
        log.warning("stopping: %d requests are running", self._worker.num_pending)
        self._front.draining = True
        await self._health.enter_graceful_shutdown()
        again = asyncio.ensure_future(self._signals.get())
        deadline = time.monotonic() + self._config.drain_s
        while self._worker.num_pending and time.monotonic() < deadline and not again.done():
            await asyncio.sleep(0.02)
        again.cancel()
        await server.stop(grace=0 if self._worker.num_pending else 0.5)

    def _listen_to_signals(self) -> None:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._signals.put_nowait, number.name)


def _service_names() -> tuple[str, ...]:
    files = (generation_pb2.DESCRIPTOR, datastores_pb2.DESCRIPTOR)
    return tuple(service.full_name for file in files for service in file.services_by_name.values())


def _check_port(config: ServerConfig) -> None:
    """Before the model is loaded: whether the port can be had."""
    try:
        family = socket.getaddrinfo(config.host, config.port, type=socket.SOCK_STREAM)[0][0]
        with socket.socket(family) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind((config.host, config.port))
    except OSError as error:
        raise _port_in_use(config, error) from error


def _port_in_use(config: ServerConfig, error: OSError | None = None) -> InvalidInput:
    why = f" ({error.strerror})" if error and error.strerror else ""
    return InvalidInput(
        f"cannot listen on {config.host}:{config.port}{why}; choose another with --port, or 0 for any free one",
        field="port",
    )
