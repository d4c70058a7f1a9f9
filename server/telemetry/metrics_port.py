"""The metrics port: /metrics for Prometheus, /livez, /readyz and /health, over HTTP/1.1, one request a connection."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from http import HTTPStatus
from typing import NamedTuple

from prometheus_client import CollectorRegistry
from prometheus_client.exposition import choose_encoder

from memlm.errors import InvalidInput, PermissionDenied
from memlm.server.sites import Sites

LIMIT_S = 5.0  # for a request and its answer
CONNECTIONS = 16  # at a time; of more the oldest is closed
HEAD_BYTES = 8192
PLAIN = "text/plain; charset=utf-8"


class _Reply(NamedTuple):
    status: HTTPStatus
    body: bytes
    kind: str = PLAIN


class _Request(NamedTuple):
    """The head of a request. The path is without its query."""

    method: str
    path: str
    http_version: str
    hosts: list[str]
    accept: str


class MetricsPort:
    """An HTTP server without TLS or tokens."""

    def __init__(self, registry: CollectorRegistry, is_ready: Callable[[], bool], sites: Sites) -> None:
        self._registry, self._is_ready, self._sites = registry, is_ready, sites
        self._server: asyncio.Server | None = None
        self._open: dict[asyncio.Timeout, None] = {}  # the oldest first

    async def start(self, host: str, port: int) -> None:
        """Starts to listen. Raises InvalidInput for an address that is not available."""
        try:
            self._server = await asyncio.start_server(
                self._serve, host, port, limit=HEAD_BYTES, backlog=CONNECTIONS, reuse_address=True
            )
        except OSError as error:
            raise InvalidInput(
                f"cannot serve metrics at {host}:{port} ({error.strerror}); choose another port", field="metrics_port"
            ) from error

    def close(self) -> None:
        if self._server is not None:
            self._server.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        limit = asyncio.timeout(LIMIT_S)
        try:
            async with limit:
                self._open[limit] = None
                if len(self._open) > CONNECTIONS:
                    self._close_oldest()
                request = _request_of(await reader.readuntil(b"\r\n\r\n"))
                reply = await self._reply_to(request)
                writer.write(_encoded(reply, with_body=request.method != "HEAD"))
                await writer.drain()
        except (TimeoutError, asyncio.IncompleteReadError, asyncio.LimitOverrunError, OSError):
            pass  # the client was too slow, sent too much, or left
        finally:
            self._open.pop(limit, None)
            writer.close()

    def _close_oldest(self) -> None:
        oldest = next(iter(self._open))
        del self._open[oldest]
        if not oldest.expired():
            oldest.reschedule(asyncio.get_running_loop().time())

    async def _reply_to(self, request: _Request) -> _Reply:
        try:
            self._sites.check_host(request.hosts, request.http_version)
        except PermissionDenied as error:
            return _Reply(HTTPStatus.FORBIDDEN, f"{error}\n".encode())
        except InvalidInput as error:
            return _Reply(HTTPStatus.BAD_REQUEST, f"{error}\n".encode())
        if request.method not in ("GET", "HEAD"):
            return _Reply(HTTPStatus.METHOD_NOT_ALLOWED, b"only GET and HEAD\n")
        path = request.path
        if path == "/metrics":
            encode, kind = choose_encoder(request.accept)
            return _Reply(HTTPStatus.OK, await asyncio.to_thread(encode, self._registry), kind)
        if path == "/livez":
            return _Reply(HTTPStatus.OK, b"alive\n")
        if path in ("/health", "/readyz"):
            is_ready = self._is_ready()
            status = HTTPStatus.OK if is_ready else HTTPStatus.SERVICE_UNAVAILABLE
            return _Reply(status, b"serving\n" if is_ready else b"not serving\n")
        return _Reply(HTTPStatus.NOT_FOUND, b"not found; there are /metrics, /livez, /readyz and /health\n")


def _request_of(head: bytes) -> _Request:
    first, *lines = head.decode("latin-1").split("\r\n")
    method, _, rest = first.partition(" ")
    target, _, version = rest.partition(" ")
    headers = [(name.lower(), value.strip()) for name, _, value in (line.partition(":") for line in lines)]
    return _Request(
        method,
        target.partition("?")[0],
        version.removeprefix("HTTP/"),
        [value for name, value in headers if name == "host"],
        next((value for name, value in headers if name == "accept"), ""),
    )


def _encoded(reply: _Reply, *, with_body: bool) -> bytes:
    head = (
        f"HTTP/1.1 {reply.status.value} {reply.status.phrase}\r\nContent-Type: {reply.kind}\r\n"
        f"Content-Length: {len(reply.body)}\r\nConnection: close\r\n\r\n"
    )
    return head.encode() + (reply.body if with_body else b"")
