"""The application of the HTTP port: routes, errors, health, metrics, pages."""

from __future__ import annotations

import asyncio
import difflib
import json
import logging
import os
from functools import partial
from pathlib import Path

from prometheus_client import CollectorRegistry
from prometheus_client.exposition import choose_encoder
from starlette.exceptions import HTTPException
from starlette.responses import Response
from starlette.routing import BaseRoute, Mount, Route, Router
from starlette.staticfiles import StaticFiles
from starlette.types import Message, Receive, Scope, Send

from memlm.errors import InternalError, MemlmError, NotFound
from memlm.server.frontend.service import Service
from memlm.server.http.endpoints import ENDPOINTS, Handler
from memlm.server.http.errors import NotAllowed, body_of, headers_of, status_of
from memlm.server.http.exchange import Exchange
from memlm.server.http.openapi import docs_page, openapi_document
from memlm.server.sites import Sites

PLAYGROUND = Path(__file__).parent / "playground"
HTML = "text/html; charset=utf-8"
SAFE = ("GET", "HEAD")
# No page of this port loads anything from elsewhere, or is shown inside another site's.
PAGE_HEADERS = {
    "content-security-policy": "default-src 'self'; style-src 'self' 'unsafe-inline'; frame-ancestors 'none'",
    "referrer-policy": "no-referrer",
}

# The playground shows texts of others: it runs its own modules only, and makes no element of a text.
PLAYGROUND_HEADERS = {
    "content-security-policy": "default-src 'self'; object-src 'none'; base-uri 'none'; form-action 'none';"
    " frame-ancestors 'none'; require-trusted-types-for 'script'; trusted-types 'none'",
    "referrer-policy": "no-referrer",
    "x-content-type-options": "nosniff",
    "cache-control": "no-cache",
}

log = logging.getLogger("memlm.server")


class HttpApp:
    """The ASGI application."""

    def __init__(self, service: Service, registry: CollectorRegistry) -> None:
        self._service, self._registry = service, registry
        config = service.config
        self._sites = Sites(config.allowed_hosts, config.host, is_open=config.auth_file is None)
        self._document = json.dumps(openapi_document()).encode()
        self._router = Router(self._routes(), redirect_slashes=False, default=_not_found)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        try:
            origin = self._admit(scope)
        except MemlmError as error:
            await _refuse(Exchange(self._service.config, scope, receive, send), error)
            return
        if origin is not None:
            send = partial(_send_to_page, origin, send)
            if _is_preflight(scope):
                await _preflight(scope, receive, send)
                return
        try:
            await self._router(scope, receive, send)
        except HTTPException:  # of the static files, which are asked for what is no endpoint
            await _refuse(Exchange(self._service.config, scope, receive, send), _unknown(scope["path"][:200]))

    def _admit(self, scope: Scope) -> str | None:
        """The origin whose pages may read the answer, if it is not the server's own page or program that asks.

        Raises an error for a request that is not for this server, or not from a page that may call it.
        """
        hosts = _header(scope, b"host")
        self._sites.check_host(hosts, scope["http_version"])
        return self._sites.admit_origin(_header(scope, b"origin"), "".join(hosts), is_preflight=_is_preflight(scope))

    def _routes(self) -> list[BaseRoute]:
        plain: dict[str, Handler] = {
            "/health": _health,
            "/readyz": _health,
            "/livez": _alive,
            "/metrics": self._metrics,
            "/openapi.json": self._openapi,
            "/docs": _docs,
        }
        methods: dict[str, dict[str, Handler]] = {path: {"GET": handler} for path, handler in plain.items()}
        for endpoint in ENDPOINTS:
            methods.setdefault(endpoint.path, {})[endpoint.method] = endpoint.handler
        apps = {path: _Methods(self._service, each) for path, each in methods.items()}
        ids = {path: app for path, app in apps.items() if path.endswith(":id}")}
        others = {path: app for path, app in apps.items() if path not in ids}
        slashed = {spelling: app for path, app in others.items() for spelling in _with_slash(path)}
        # An id may be of line ends alone, and a path with a slash at its end takes one line end behind it.
        routes = [Route(path, app) for path, app in (*others.items(), *ids.items(), *slashed.items())]
        return [*routes, Mount("/", _Playground(directory=PLAYGROUND, html=True))]

    async def _metrics(self, service: Service, exchange: Exchange) -> None:
        service.check_token(exchange)
        encode, kind = choose_encoder(exchange.headers.get("accept", ""))
        await exchange.reply(await asyncio.to_thread(encode, self._registry), content_type=kind)

    async def _openapi(self, service: Service, exchange: Exchange) -> None:
        await exchange.reply(self._document)


class _Playground(StaticFiles):
    """The files of the page at /."""

    def file_response(
        self, full_path: str | os.PathLike[str], stat_result: os.stat_result, scope: Scope, status_code: int = 200
    ) -> Response:
        response = super().file_response(full_path, stat_result, scope, status_code)
        response.headers.update(PLAYGROUND_HEADERS)
        return response


class _Methods:
    """The methods of one path, as an ASGI application."""

    def __init__(self, service: Service, handlers: dict[str, Handler]) -> None:
        self._service, self._handlers = service, handlers

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        exchange = Exchange(self._service.config, scope, receive, send)
        handler = self._handlers.get("GET" if scope["method"] == "HEAD" else scope["method"])
        try:
            if handler is None:
                allowed = ", ".join(self._handlers)
                raise NotAllowed(f"{scope['path'][:200]} takes {allowed}, and not {scope['method'][:20]}")
            if scope["method"] in SAFE:
                exchange.watch()
            await handler(self._service, exchange)
        except MemlmError as error:
            await _refuse(exchange, error)
        except asyncio.CancelledError:
            pass  # the client has left, or the server stops; the call has been recorded
        except Exception:
            log.exception("a request to %s failed", scope["path"])
            await _refuse(exchange, InternalError("a bug in the server; its log has the details"))
        finally:
            exchange.close()


def _with_slash(path: str) -> tuple[str, ...]:
    """The path with a slash at its end, which clients add. /docs has links from its folder."""
    return () if path == "/docs" else (f"{path}/",)


def _unknown(path: str) -> NotFound:
    paths = list(dict.fromkeys(endpoint.path.replace(":id", "") for endpoint in ENDPOINTS))
    near = difflib.get_close_matches(path, paths, n=1, cutoff=0.8)
    hint = f"; did you mean {near[0]}?" if near else ";"
    return NotFound(f"there is no {path!r} here{hint} there are {', '.join(paths)}, and /docs describes them")


def _header(scope: Scope, name: bytes) -> list[str]:
    return [value.decode("latin-1") for each, value in scope["headers"] if each == name]


def _is_preflight(scope: Scope) -> bool:
    """Whether a browser asks if a page may send a request."""
    return scope["method"] == "OPTIONS" and bool(_header(scope, b"access-control-request-method"))


async def _preflight(scope: Scope, receive: Receive, send: Send) -> None:
    """Allows a page any request: the answers say which ones there are."""
    headers = {
        "access-control-allow-methods": "GET, POST, DELETE",
        "access-control-allow-headers": ", ".join(_header(scope, b"access-control-request-headers")),
        "access-control-max-age": "600",
    }
    await Response(status_code=204, headers=headers)(scope, receive, send)


async def _send_to_page(origin: str, send: Send, message: Message) -> None:
    """Sends a part of an answer that pages of an origin may read."""
    if message["type"] == "http.response.start":
        shared = ((b"access-control-allow-origin", origin.encode("latin-1")), (b"vary", b"origin"),
                  (b"access-control-expose-headers", b"*"))  # fmt: skip
        message = {**message, "headers": [*message["headers"], *shared]}
    await send(message)


async def _refuse(exchange: Exchange, error: MemlmError) -> None:
    if not (exchange.has_begun or exchange.is_abandoned):
        await exchange.reply_json(body_of(error), status_of(error), headers_of(error))


async def _not_found(scope: Scope, receive: Receive, send: Send) -> None:
    raise HTTPException(404)


async def _health(service: Service, exchange: Exchange) -> None:
    """Whether requests are accepted and a worker answers them."""
    is_ready = service.is_ready
    await exchange.reply_json({"status": "serving" if is_ready else "not serving"}, 200 if is_ready else 503)


async def _alive(service: Service, exchange: Exchange) -> None:
    """Whether the front end answers."""
    await exchange.reply_json({"status": "alive"})


async def _docs(service: Service, exchange: Exchange) -> None:
    await exchange.reply(docs_page().encode(), content_type=HTML, headers=PAGE_HEADERS)
