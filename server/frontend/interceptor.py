"""Limits for gRPC's own services: health, which needs no token, and reflection, which does."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

import grpc

from memlm.errors import MemlmError
from memlm.server.config import ServerConfig
from memlm.server.frontend.auth import Authenticator
from memlm.server.frontend.message_reader import MessageReader
from memlm.server.quota import Quota
from memlm.wire.status import trailer_of

HEALTH, REFLECTION = "/grpc.health.", "/grpc.reflection."
SLOTS, PER_CONNECTION, LIMIT_S = 8, 2, 10.0  # for messages of callers that need no token
CALLS, CALLS_PER_CONNECTION = 1024, 16


class BuiltinServicesInterceptor(grpc.aio.ServerInterceptor):  # type: ignore[misc]  # grpc has no types of its own
    """Bounds the resources of callers without a token, and requires a token for reflection. The servicer limits its own
    calls.
    """

    def __init__(self, authenticator: Authenticator, config: ServerConfig) -> None:
        self._authenticator = authenticator
        self._reader = MessageReader(SLOTS, PER_CONNECTION, min(LIMIT_S, config.message_timeout_s))
        self._open = Quota("open calls of health and reflection", CALLS, CALLS_PER_CONNECTION)

    async def intercept_service(self, continuation: Any, details: Any) -> Any:
        """Wraps the handlers of health and reflection."""
        handler = await continuation(details)
        if handler is None or not details.method.startswith((HEALTH, REFLECTION)):
            return handler
        needs_token = details.method.startswith(REFLECTION)
        if handler.unary_unary is not None:
            answer = partial(self._answer, handler, needs_token)
            return grpc.stream_unary_rpc_method_handler(answer, response_serializer=handler.response_serializer)
        stream = partial(self._stream, handler, needs_token)
        return grpc.stream_stream_rpc_method_handler(stream, response_serializer=handler.response_serializer)

    async def _answer(self, handler: Any, needs_token: bool, _: object, context: grpc.aio.ServicerContext) -> Any:
        async with self._admitted(needs_token, context):
            return await handler.unary_unary(await self._read_request(handler, context), context)

    async def _stream(self, handler: Any, needs_token: bool, _: object, context: grpc.aio.ServicerContext) -> None:
        async with self._admitted(needs_token, context):
            if handler.unary_stream is not None:
                await handler.unary_stream(await self._read_request(handler, context), context)
                return
            requests = (handler.request_deserializer(data) async for data in self._reader.read_messages(context))
            async for reply in handler.stream_stream(requests, context):
                await context.write(reply)

    async def _read_request(self, handler: Any, context: grpc.aio.ServicerContext) -> Any:
        return handler.request_deserializer(await self._reader.read_message(context, context.peer()))

    @asynccontextmanager
    async def _admitted(self, needs_token: bool, context: grpc.aio.ServicerContext) -> AsyncIterator[None]:
        """Refuses a call before any of its message is read, and turns any error inside into the call's status."""
        try:
            if needs_token:
                self._authenticator.authenticate(context.invocation_metadata())
            with self._open.hold(context.peer(), 1):
                yield
        except MemlmError as error:
            await context.abort(*trailer_of(error))
