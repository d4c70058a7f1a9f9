"""/mcp: one message of JSON-RPC in a POST, and one answer, without sessions: nothing is kept for a client.

The SDK answers the message (`serve_one`), and this port does the rest, as for its other paths: it bounds the body,
looks at Host, Origin and token, and cancels the work of a client that leaves. The SDK's own application has limits and
tasks of its own, needs a lifespan, and goes on with a tool whose client has left.

An answer that takes long becomes a stream of events, whose comments keep proxies from closing the connection.
"""

from __future__ import annotations

import asyncio
import json
from contextlib import aclosing
from importlib import import_module
from typing import Any

from memlm.api.answers import Answer, AnswerRequest
from memlm.api.generation import Accepted, Completion, Finished, Token
from memlm.api.request import Request
from memlm.errors import InvalidInput, NotFound
from memlm.server.frontend.auth import Principal
from memlm.server.frontend.service import Service
from memlm.server.http.events import EVENTS, HEADERS, HEARTBEAT, HEARTBEAT_S
from memlm.server.http.exchange import JSON, Exchange
from memlm.server.http.mcp.tools import R
from memlm.server.http.reading import LARGE_BYTES
from memlm.server.http.schema import parse_json
from memlm.wire.codec import tokens_from_wire

ACCEPTED = 202  # a notification, to which there is no answer


async def handle(service: Service, exchange: Exchange) -> None:
    """Answers one message. Raises NotFound where the SDK is not installed."""
    exchange.check_content_type(JSON)
    caller, data = await service.read_unnamed(exchange)
    try:
        message = await asyncio.to_thread(import_module, "memlm.server.http.mcp.message")  # a second, the first time
    except ImportError as error:
        missing = (
            f"this server has no MCP, since {error.name} is not installed; where it runs, pip install 'memlm[mcp]'"
        )
        raise NotFound(missing) from error
    try:
        body = await asyncio.to_thread(parse_json, data, {}) if len(data) > LARGE_BYTES else parse_json(data, {})
    except InvalidInput as error:
        await exchange.reply_json(*message.unreadable(str(error)))
        return
    if "id" not in body:
        await exchange.reply(b"", ACCEPTED)
        return
    work = asyncio.ensure_future(message.answer(body, exchange.headers, _ServiceHost(service, exchange, caller)))
    try:
        await _reply(exchange, work)
    finally:
        work.cancel()


async def _reply(exchange: Exchange, work: asyncio.Future[tuple[dict[str, Any], int]]) -> None:
    takes_events = "text/event-stream" in exchange.headers.get("accept", "")
    await asyncio.wait([work], timeout=HEARTBEAT_S if takes_events else None)
    if work.done():
        await exchange.reply_json(*work.result())
        return
    await exchange.begin(200, EVENTS, HEADERS)
    while not work.done():
        await exchange.write(HEARTBEAT)
        await asyncio.wait([work], timeout=HEARTBEAT_S)
    body, _ = work.result()
    await exchange.write(b"event: message\ndata: " + json.dumps(body).encode() + b"\n\n", more=False)


class _ServiceHost:
    """The service as the caller of one exchange may use it. Fulfils `Host`: each request is a call of its own."""

    def __init__(self, service: Service, exchange: Exchange, caller: Principal) -> None:
        self._service, self._exchange, self._caller = service, exchange, caller

    def may_call(self, call: str) -> bool:
        return self._caller.may_call(call)

    async def ask(self, request: Request[R]) -> R:
        async with self._service.admit(type(request).__name__.removesuffix("Request"), self._exchange) as call:
            answer: R = await self._service.ask(call, request)
        return answer

    async def answer(self, request: AnswerRequest) -> Answer:
        accepted, tokens, finished = None, list[Token](), None
        async with (
            self._service.admit("Answer", self._exchange) as call,
            aclosing(self._service.stream(call, request)) as events,
        ):
            async for event in events:
                if isinstance(event, tuple):
                    tokens += tokens_from_wire(event)
                elif isinstance(event, Accepted):
                    accepted = event
                else:
                    finished = event
        assert accepted is not None
        assert isinstance(finished, Finished)
        text = "".join(token.text for token in tokens)
        return Answer.of(Completion(text, tuple(tokens), accepted, finished))
