"""One message of JSON-RPC -> its answer, by the SDK. A message says in its headers and its body which version it is of.

Up to 2025-11-25 a client begins with `initialize`, which is answered as any other message. From 2026-07-28 on each
message carries its version, and needs no beginning.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from typing import Any

import anyio
import mcp_types as types
from mcp.server.connection import Connection
from mcp.server.runner import modern_error_data, serve_one
from mcp.shared.exceptions import NoBackChannelError
from mcp.shared.inbound import (
    ERROR_CODE_HTTP_STATUS,
    MCP_PROTOCOL_VERSION_HEADER,
    InboundLadderRejection,
    classify_inbound_request,
)
from mcp.shared.transport_context import TransportContext
from mcp_types.version import HANDSHAKE_PROTOCOL_VERSIONS
from pydantic import ValidationError

from memlm.server.http.mcp.protocol import server_of
from memlm.server.http.mcp.tools import Host

Reply = tuple[dict[str, Any], int]  # the body of an answer, and its status


async def answer(message: Mapping[str, Any], headers: Mapping[str, str], host: Host) -> Reply:
    """The answer to a message that wants one, and its status."""
    try:
        request = types.JSONRPCRequest.model_validate(dict(message))
    except ValidationError:
        return _error(
            None, types.INVALID_REQUEST, "the body is no request of JSON-RPC 2.0; send jsonrpc, id and method"
        )
    version = headers.get(MCP_PROTOCOL_VERSION_HEADER)
    is_modern = version is not None and version not in HANDSHAKE_PROTOCOL_VERSIONS
    if is_modern:
        route = classify_inbound_request(message, headers=headers)
        if isinstance(route, InboundLadderRejection):
            return _error(request.id, route.code, route.message, route.data)
        connection = Connection.from_envelope(route.protocol_version, route.client_info, route.client_capabilities)
    else:
        connection = Connection.from_envelope(version or types.DEFAULT_NEGOTIATED_VERSION, None, None)
    try:
        result = await serve_one(
            _SERVER, _Dispatch(request.id), request.method, request.params, connection=connection, lifespan_state=host
        )
    except Exception as error:
        shown = modern_error_data(error)  # logs what is a bug
        reply, status = _error(request.id, shown.code, shown.message, shown.data)
        return reply, status if is_modern else 200
    return {"jsonrpc": "2.0", "id": request.id, "result": result}, 200


def unreadable(reason: str) -> Reply:
    """The answer to a body that is no JSON object."""
    return _error(None, types.PARSE_ERROR, reason)


@dataclass
class _Dispatch:
    """The way back to the client while its request is answered, as the SDK wants it: there is none."""

    request_id: Any
    transport: Any = field(default_factory=lambda: TransportContext(kind="streamable-http", can_send_request=False))
    message_metadata: None = None
    can_send_request: bool = False
    cancel_requested: anyio.Event = field(default_factory=anyio.Event)

    async def send_raw_request(self, method: str, params: Any, opts: Any = None) -> dict[str, Any]:
        raise NoBackChannelError(method)

    async def notify(self, method: str, params: Any, opts: Any = None) -> None:
        """Drops the notification: no stream waits for it."""

    async def progress(self, progress: float, total: float | None = None, message: str | None = None) -> None:
        """Drops it, too."""


def _error(request_id: Any, code: int, message: str, data: Any = None) -> Reply:
    error = {"code": code, "message": message, **({} if data is None else {"data": data})}
    return {"jsonrpc": "2.0", "id": request_id, "error": error}, ERROR_CODE_HTTP_STATUS.get(code, 200)


def _no_lifespan(_: Any) -> AbstractAsyncContextManager[Host]:
    raise AssertionError("each request brings its host")


_SERVER = server_of(_no_lifespan)
