"""The life of a server in named steps: check, load, bind, serve, drain, stop. Also its TLS certificates."""

from __future__ import annotations

import asyncio
import ipaddress
import logging
import signal
import socket
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from memlm.base.machine import raise_file_limit
from memlm.distributed.cluster import prepare
from memlm.errors import InvalidInput
from memlm.generation.sessions.fence import SessionFence
from memlm.server.config import ServerConfig
from memlm.server.frontend.auth import Authenticator
from memlm.server.frontend.interceptor import BuiltinServicesInterceptor
from memlm.server.frontend.service import Service
from memlm.server.frontend.servicer import Servicer
from memlm.server.frontend.watched_files import WatchedFiles, warn_if_world_readable
from memlm.server.inference.handle import JOIN_S
from memlm.server.inference.pool import EnginePool, WorkerPool
from memlm.server.ownership import lock_folders
from memlm.server.processes import file_limit, trim_heap
from memlm.server.registry import DatastoreRegistry
from memlm.server.telemetry.calls import Tracer
from memlm.server.telemetry.logs import start_logging
from memlm.server.telemetry.metrics import Metrics
from memlm.wire import codec
from memlm.wire.limits import DEFAULT_MAX_MESSAGE_BYTES, KEEPALIVE_S

if TYPE_CHECKING:
    from memlm.server.http.port import HttpPort

HEALTH_PERIOD_S = 0.25
TRIM_AFTER_S = 5.0
POLL_S = 0.02
GRACE_S = 0.5  # for the last bytes of answers; calls that watch health would never end
HANDSHAKE_S = 10  # within which a connection has to begin with HTTP/2
RESERVED_FILES = 256  # for uploads, pipes, libraries
STOPPED_AT_ONCE = 1  # the exit code after a second signal

log = logging.getLogger("memlm.server")


def serve(config: ServerConfig, on_ready: Callable[[str, str | None], None]) -> int:
    """Serves until SIGTERM or SIGINT, then drains. A second signal stops at once. Returns the exit code: 0, or 1 after
    a second signal.

    `on_ready` is called with the address, and the URL of the HTTP port if there is one, once requests are accepted.
    Raises InvalidInput for an address that is not available, Locked if another server uses a folder, and NotFound,
    Incompatible or Corrupt for a model or datastore that cannot be loaded.
    """
    start_logging(config.log_level, config.log_format)
    raise_file_limit()
    with lock_folders(config) as fence:
        return asyncio.run(_Server(config, fence).run(on_ready))


class _Server:
    def __init__(self, config: ServerConfig, fence: SessionFence | None) -> None:
        self._config = config
        self._metrics = Metrics()
        self._registry = DatastoreRegistry(config.stores, config.store_dir)
        self._metrics.datastores.watch(lambda: self._registry.paths)
        self._workers = _engines(config)(config, lambda: self._registry.paths, self._metrics.datastores.add, fence)
        self._metrics.observe_workers(lambda: self._workers.heartbeat_age_s, lambda: self._workers.stats)
        self._authenticator = Authenticator(config.auth_file)
        self._credentials = server_credentials(config)
        self._tracer = None if config.otlp is None else Tracer(config.otlp)
        self._service = Service(self._workers, config, self._authenticator, self._metrics, self._registry, self._tracer)
        self._http_port: HttpPort | None = None
        self._health = health.aio.HealthServicer()
        self._stop_requested, self._stop_forced = asyncio.Event(), asyncio.Event()

    async def run(self, on_ready: Callable[[str, str | None], None]) -> int:
        """Runs all steps in order. However it ends, no process is left."""
        self._handle_signals()
        if warning := exposure_warning(self._config):
            log.warning(warning)
        _check_address(self._config)
        self._http_port = _http_port(self._config)
        try:
            if not await _run_until_signal(self._stop_requested, self._workers.start()):
                return 0
            server, address = self._bind()
            await self._service.load_model_info()
            await server.start()
            if self._http_port is not None:
                self._http_port.start(self._service, self._metrics.registry)
            await self._publish_health()
            watching, trimming = (
                asyncio.create_task(work()) for work in (self._watch_health, self._trim_heap_when_idle)
            )
            self._service.jobs.start()
            on_ready(address, None if self._http_port is None else self._http_port.url)
            await self._stop_requested.wait()
            watching.cancel()
            trimming.cancel()
            return await self._drain(server)
        finally:
            if self._http_port is not None:
                await self._http_port.stop(0)
            await self._service.jobs.stop()
            if self._tracer is not None:
                await asyncio.to_thread(self._tracer.close)
            await self._stop_workers()

    async def _stop_workers(self) -> None:
        """Until a second signal with patience, without from then on."""
        is_forced = self._stop_forced.is_set()
        if is_forced or not await _run_until_signal(self._stop_forced, self._workers.stop(JOIN_S)):
            await self._workers.stop(0)

    def _handle_signals(self) -> None:
        def on_signal(number: signal.Signals) -> None:
            log.info("%s: stopping%s", number.name, " at once" if self._stop_requested.is_set() else "")
            (self._stop_forced if self._stop_requested.is_set() else self._stop_requested).set()

        for number in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().add_signal_handler(number, on_signal, number)

    def _bind(self) -> tuple[grpc.aio.Server, str]:
        config = self._config
        server = grpc.aio.server(
            interceptors=[BuiltinServicesInterceptor(self._authenticator, config)],
            options=[
                ("grpc.so_reuseport", 0),  # else a second server would silently share the port
                ("grpc.max_receive_message_length", config.max_message_bytes),
                ("grpc.max_send_message_length", max(config.max_message_bytes, DEFAULT_MAX_MESSAGE_BYTES)),
                ("grpc.http2.bdp_probe", 0),  # would let each call send 4 MiB before the server asks for any
                ("grpc.max_concurrent_streams", config.max_streams),
                ("grpc.max_allowed_incoming_connections", _num_connections(config)),
                ("grpc.server_handshake_timeout_ms", 1000 * HANDSHAKE_S),
                ("grpc.max_connection_idle_ms", round(1000 * config.connection_idle_s)),
                # Finds clients that vanished without a word; agrees to the pings that our own client sends.
                ("grpc.keepalive_time_ms", 1000 * KEEPALIVE_S),
                ("grpc.keepalive_permit_without_calls", 1),
                ("grpc.http2.min_ping_interval_without_data_ms", 500 * KEEPALIVE_S),
            ],
        )
        server.add_generic_rpc_handlers(Servicer(self._service).handlers())
        health_pb2_grpc.add_HealthServicer_to_server(self._health, server)
        reflection.enable_server_reflection((*_service_names(), health.SERVICE_NAME, reflection.SERVICE_NAME), server)
        try:
            address = _address(config.host, config.port)
            if self._credentials is None:
                port = server.add_insecure_port(address)
            else:
                port = server.add_secure_port(address, self._credentials)
        except RuntimeError as error:
            raise _bind_error(config, str(error)) from error
        return server, _address(config.host, port)

    async def _watch_health(self) -> None:
        while True:
            await asyncio.sleep(HEALTH_PERIOD_S)
            await self._publish_health()

    async def _trim_heap_when_idle(self) -> None:
        """Returns unused RAM to the system after TRIM_AFTER_S without calls."""
        trimmed_at = 0
        while True:
            before = self._service.num_admitted
            await asyncio.sleep(TRIM_AFTER_S)
            if self._service.num_admitted == before != trimmed_at and not self._service.num_open:
                trimmed_at = before
                await asyncio.to_thread(trim_heap)

    async def _publish_health(self) -> None:
        answer = health_pb2.HealthCheckResponse
        status = answer.SERVING if self._service.is_ready else answer.NOT_SERVING
        for name in ("", *_service_names()):
            await self._health.set(name, status)

    async def _drain(self, server: grpc.aio.Server) -> int:
        """Refuses new requests and waits for running ones, until `drain_s` or a second signal."""
        self._service.is_draining = True
        self._service.jobs.drain()
        await self._health.enter_graceful_shutdown()
        log.info("draining: %d requests are open", self._workers.num_open)
        with suppress(TimeoutError):
            await asyncio.wait_for(_run_until_signal(self._stop_forced, self._wait_until_idle()), self._config.drain_s)
        log.info("stopping: %d requests are cut off", self._workers.num_open)
        grace_s = 0 if self._workers.num_open else GRACE_S
        if self._http_port is not None:
            await self._http_port.stop(grace_s)
        await server.stop(grace_s)
        return STOPPED_AT_ONCE if self._stop_forced.is_set() else 0

    async def _wait_until_idle(self) -> None:
        while self._workers.num_open:
            await asyncio.sleep(POLL_S)


async def _run_until_signal(signalled: asyncio.Event, work: Awaitable[None]) -> bool:
    """Awaits some work, until an event is set. Returns whether the work was done, and raises its error."""
    working, waiting = asyncio.ensure_future(work), asyncio.ensure_future(signalled.wait())
    try:
        await asyncio.wait((working, waiting), return_when=asyncio.FIRST_COMPLETED)
        if working.done():
            await working
        return working.done()
    finally:
        working.cancel()
        waiting.cancel()


def _engines(config: ServerConfig) -> Callable[..., EnginePool]:
    """The class of the pool. Raises InvalidInput for replicas where Ray Serve is not installed."""
    if not config.cluster.is_ray:
        return WorkerPool
    prepare(config.cluster.address)
    try:
        from memlm.server.inference.replicas.replicas import ReplicaPool
    except ImportError as error:
        raise InvalidInput(
            f"the engine ray needs Ray Serve, and {error.name} is not installed; pip install 'memlm[replicas]'",
            field="engine",
        ) from error
    return ReplicaPool


def _http_port(config: ServerConfig) -> HttpPort | None:
    """The HTTP port, if there is to be one. Raises InvalidInput where the extra is not installed, or the address is not
    available.
    """
    if config.http_port is None:
        return None
    try:
        from memlm.server.http.port import HttpPort
    except ImportError as error:
        raise InvalidInput(
            f"HTTP needs {error.name}, which is not installed; pip install 'memlm[http]'", field="http_port"
        ) from error
    return HttpPort(config, _num_connections(config))


def _num_connections(config: ServerConfig) -> int:
    """`max_connections` of each port, limited by the files that the process may open."""
    limit = max(1, (file_limit() - RESERVED_FILES) // (1 if config.http_port is None else 2))
    if limit < config.max_connections:
        log.warning(
            "only %d connections fit the limit of open files (%d); raise it (ulimit -Hn, LimitNOFILE), or lower"
            " max_connections",
            limit,
            file_limit(),
        )
    return min(config.max_connections, limit)


def _service_names() -> tuple[str, ...]:
    return tuple(service.full_name for service in codec.SERVICES)


def _address(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def _check_address(config: ServerConfig) -> None:
    """Raises InvalidInput if the address is not available, before the model is loaded. gRPC's error has no reason."""
    try:
        family, kind, *_, address = socket.getaddrinfo(config.host, config.port, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(address)
    except OSError as error:
        raise _bind_error(config, error.strerror or str(error)) from error


def _bind_error(config: ServerConfig, why: str) -> InvalidInput:
    return InvalidInput(
        f"cannot listen on {_address(config.host, config.port)} ({why}); choose another port, or 0 for any free one",
        field="port",
    )


def server_credentials(config: ServerConfig) -> grpc.ServerCredentials | None:
    """TLS credentials, or None without a certificate.

    Changed files are read again at the next connection. While certificate and key do not match, the previous ones stay
    in use. Raises InvalidInput for files that cannot be read.
    """
    if config.tls_cert is None or config.tls_key is None:
        return None
    paths = [path for path in (config.tls_key, config.tls_cert, config.tls_client_ca) if path is not None]
    try:
        files = WatchedFiles(*paths)
        warn_if_world_readable(config.tls_key)
    except OSError as error:
        raise InvalidInput(f"a certificate cannot be read: {error}", field="tls_cert") from error

    def certificates() -> Any:
        key, cert, *client_ca = files.contents
        return grpc.ssl_server_certificate_configuration([(key, cert)], client_ca[0] if client_ca else None)

    def changed() -> Any:
        try:
            if not files.reload():
                return None
            log.info("certificates were read again")
            return certificates()
        except OSError as error:
            log.error("certificates were not read again, the last ones stay in use: %s", error)
            return None

    return grpc.dynamic_ssl_server_credentials(certificates(), changed, config.tls_client_ca is not None)


def exposure_warning(config: ServerConfig) -> str | None:
    """A warning for an operator whose server other machines can reach without TLS or tokens."""
    if _is_loopback(config.host) or (config.tls_cert and (config.auth_file or config.tls_client_ca)):
        return None
    lacks = [name for name, is_given in (("TLS", config.tls_cert), ("tokens", config.auth_file)) if not is_given]
    return (
        f"WARNING: {config.host} can be reached from other machines, without {' and without '.join(lacks)}: anyone"
        " there can use it and read its traffic. Give --tls-cert, --tls-key and --auth-file, or --host 127.0.0.1"
    )


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
