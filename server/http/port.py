"""The HTTP port: a uvicorn server in the front end's loop, with bounds on connections and on the heads of requests."""

from __future__ import annotations

import asyncio
import logging
import re
import socket
import ssl
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any, cast

import uvicorn
from prometheus_client import CollectorRegistry
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from memlm.errors import InvalidInput
from memlm.server.config import ServerConfig
from memlm.server.frontend.service import Service
from memlm.server.frontend.watched_files import WatchedFiles
from memlm.server.http.app import HttpApp

HEAD_S, HANDSHAKE_S = 10.0, 10.0  # for the head of a request, and for TLS
MAX_HEAD_BYTES = 1 << 15
SEND_BYTES = 1 << 17  # of an answer that the system holds for a slow client, where it would grow to 4 MB
TOO_LONG = b"HTTP/1.1 431 Request Header Fields Too Large\r\nconnection: close\r\ncontent-length: 0\r\n\r\n"

log = logging.getLogger("memlm.server")


class HttpPort:
    """Holds its address from its creation on, and accepts connections from its start on."""

    def __init__(self, config: ServerConfig, num_connections: int) -> None:
        """Raises InvalidInput for an address that is not available."""
        assert config.http_port is not None
        self._config, self._num_connections = config, num_connections
        self._socket = _listen(config.host, config.http_port)
        self._server: _Server | None = None
        self._serving: asyncio.Task[None] | None = None

    @property
    def url(self) -> str:
        host, port = self._config.host, self._socket.getsockname()[1]
        return f"http{'s' * bool(self._config.tls_cert)}://{f'[{host}]' if ':' in host else host}:{port}"

    def start(self, service: Service, registry: CollectorRegistry) -> None:
        """Begins to accept requests."""
        logging.getLogger("uvicorn").setLevel(logging.ERROR)  # else each malformed request would be a warning
        settings = uvicorn.Config(
            HttpApp(service, registry),
            http=partial(_Protocol, self._num_connections, self._config.message_timeout_s),  # type: ignore[arg-type]  # makes the protocol
            loop="none",
            ws="none",
            lifespan="off",
            interface="asgi3",
            log_config=None,
            access_log=False,
            proxy_headers=False,
            server_header=False,
            timeout_keep_alive=round(self._config.connection_idle_s),
        )
        self._server = _Server(settings, _tls(self._config))
        self._socket.listen(settings.backlog)  # before the caller announces it; the task below begins later
        self._serving = asyncio.create_task(self._server.serve([self._socket]))

    async def stop(self, grace_s: float) -> None:
        """Stops to accept, and gives open answers `grace_s` for their last bytes."""
        if self._server is not None and self._serving is not None:
            self._server.config.timeout_graceful_shutdown = max(1, round(grace_s))
            self._server.should_exit = True
            self._server.force_exit = not grace_s
            with suppress(asyncio.CancelledError):
                await self._serving
        self._socket.close()


class _Server(uvicorn.Server):
    """uvicorn's, without its signal handlers, and with TLS that reads its certificates again."""

    def __init__(self, config: uvicorn.Config, tls: ssl.SSLContext | None) -> None:
        super().__init__(config)
        self._tls = tls

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        make: Any = partial(
            cast(Any, self.config.http_protocol_class),
            config=self.config,
            server_state=self.server_state,
            app_state=self.lifespan.state,
        )
        options: dict[str, Any] = {"ssl": self._tls, "ssl_handshake_timeout": HANDSHAKE_S} if self._tls else {}
        self.servers = [
            await asyncio.get_running_loop().create_server(make, sock=each, backlog=self.config.backlog, **options)
            for each in sockets or []
        ]
        self.started = True


class _Protocol(HttpToolsProtocol):
    """uvicorn's, with limits: on open connections, on the bytes and the seconds of a request's head, and on the seconds
    for which a client does not read.
    """

    def __init__(self, num_connections: int, write_s: float, **arguments: Any) -> None:
        super().__init__(**arguments)
        self._num_connections, self._write_s = num_connections, write_s
        self._write_timer: asyncio.TimerHandle | None = None
        self._head_timer: asyncio.TimerHandle | None = None
        self._is_in_head, self._head_bytes, self._is_refused = False, 0, False

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        if len(self.connections) >= self._num_connections:
            self._is_refused, self.transport = True, transport
            transport.abort()
            return
        transport.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BYTES)
        super().connection_made(transport)
        self._start_head_timer()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_head_timer()
        self._stop_write_timer()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self._is_refused:
            return
        cycle = cast("RequestResponseCycle | None", self.cycle)
        if self._head_timer is None and (cycle is None or cycle.response_complete):
            self._start_head_timer()
        self._head_bytes += len(data) if self._is_in_head else 0
        super().data_received(data)
        if self._is_in_head and self._head_bytes > MAX_HEAD_BYTES and not self.transport.is_closing():
            self.transport.write(TOO_LONG)
            self.transport.close()

    def on_message_begin(self) -> None:
        self._is_in_head, self._head_bytes = True, 0
        super().on_message_begin()

    def on_headers_complete(self) -> None:
        self._is_in_head = False
        self._stop_head_timer()
        scheme, _, rest = self.url.partition(b"://")
        if scheme.isalpha():  # a target with its host, which then counts in place of Host (RFC 9112, section 3.2.2)
            others = [(name, value) for name, value in self.headers if name != b"host"]
            self.headers[:] = [(b"host", re.split(rb"[/?#]", rest)[0]), *others]
        super().on_headers_complete()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._write_timer = self.loop.call_later(self._write_s, self.transport.abort)

    def resume_writing(self) -> None:
        self._stop_write_timer()
        super().resume_writing()

    def _stop_write_timer(self) -> None:
        if self._write_timer is not None:
            self._write_timer.cancel()
            self._write_timer = None

    def _start_head_timer(self) -> None:
        self._head_timer = self.loop.call_later(HEAD_S, self.transport.close)

    def _stop_head_timer(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None


class _ReloadedTls(ssl.SSLContext):
    """A context that gives each new connection the certificates that the files hold then.

    While certificate and key do not match, the previous ones stay in use.
    """

    _config: ServerConfig
    _files: WatchedFiles
    _current: ssl.SSLContext

    def watch(self, config: ServerConfig, files: WatchedFiles) -> None:
        self._config, self._files, self._current = config, files, _tls_context(config)

    def wrap_bio(self, *arguments: Any, **options: Any) -> ssl.SSLObject:
        try:
            if self._files.reload():
                self._current = _tls_context(self._config)
                log.info("certificates of the HTTP port were read again")
        except (OSError, ssl.SSLError) as error:
            log.error("certificates of the HTTP port were not read again, the last ones stay in use: %s", error)
        return self._current.wrap_bio(*arguments, **options)


def _tls(config: ServerConfig) -> ssl.SSLContext | None:
    """TLS with the certificates of the gRPC port. Raises InvalidInput for files that cannot be used."""
    if config.tls_cert is None or config.tls_key is None:
        return None
    context = _ReloadedTls(ssl.PROTOCOL_TLS_SERVER)
    try:
        context.watch(
            config, WatchedFiles(*(path for path in (config.tls_key, config.tls_cert, config.tls_client_ca) if path))
        )
    except (OSError, ssl.SSLError) as error:
        raise InvalidInput(f"a certificate cannot be used: {error}", field="tls_cert") from error
    return context


def _tls_context(config: ServerConfig) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    assert config.tls_cert is not None
    context.load_cert_chain(config.tls_cert, config.tls_key)
    if config.tls_client_ca is not None:
        context.load_verify_locations(config.tls_client_ca)
        context.verify_mode = ssl.CERT_REQUIRED
    return context


def _listen(host: str, port: int) -> socket.socket:
    try:
        family, kind, *_, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        listener = socket.socket(family, kind)
        try:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind(address)
        except OSError:
            listener.close()
            raise
    except OSError as error:
        raise InvalidInput(
            f"cannot serve HTTP at {host}:{port} ({error.strerror}); choose another port, or 0 for any free one",
            field="http_port",
        ) from error
    return listener
