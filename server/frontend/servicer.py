"""The gRPC servicer: bytes from the network to requests, to the service, and back.

The contract's descriptors list the calls and `memlm.wire.codec` converts their messages, so that two handlers serve all
of them: one for calls with one answer, one for streams.
"""

from __future__ import annotations

import asyncio
from array import array
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing, asynccontextmanager
from functools import partial
from typing import Any, TypeVar

import grpc
from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass

from memlm.api.scoring import Score
from memlm.errors import InvalidInput, MemlmError
from memlm.server.frontend.service import AdmittedCall, Service
from memlm.v1 import datastores_pb2
from memlm.wire import codec
from memlm.wire.limits import DEFAULT_MAX_MESSAGE_BYTES
from memlm.wire.status import trailer_of

LARGE_BYTES, LARGE_ITEMS = 1 << 14, 1 << 12  # messages from there on are converted in threads

_T = TypeVar("_T")


class Servicer:
    """Serves every call of the contract over gRPC."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self._converter_threads = ThreadPoolExecutor(2, "convert")

    def handlers(self) -> tuple[grpc.GenericRpcHandler, ...]:
        """The handlers of every service in the contract, for a gRPC server."""
        return tuple(
            grpc.method_handlers_generic_handler(
                service.full_name, {method.name: self._handler(method) for method in service.methods}
            )
            for service in codec.SERVICES
        )

    def _handler(self, method: Any) -> grpc.RpcMethodHandler:
        request_type = GetMessageClass(method.input_type)
        if method.server_streaming:
            stream = partial(self._stream, method.name, request_type)
            return grpc.stream_stream_rpc_method_handler(stream)  # its events are bytes
        answer = self._answer_stream if method.client_streaming else self._answer
        return grpc.stream_unary_rpc_method_handler(
            partial(answer, method.name, request_type), response_serializer=_serialize
        )

    async def _answer(
        self, name: str, request_type: type[Message], _: object, context: grpc.aio.ServicerContext
    ) -> Any:
        """Handles a call with one request and one answer."""
        async with self._admitted(name, context) as call:
            request = await self._parse_request(request_type, await self._service.read_message(call))
            return await self._encode_answer(request, await self._service.ask(call, request))

    async def _answer_stream(
        self, name: str, request_type: type[Message], _: object, context: grpc.aio.ServicerContext
    ) -> Any:
        """Handles a call with many requests, AppendToSession or AddDocuments, and one answer."""
        async with self._admitted(name, context) as call:
            requests = (
                await self._parse_request(request_type, data) async for data in self._service.read_messages(call)
            )
            if request_type is datastores_pb2.AddDocumentsRequest:
                return codec.to_wire(await self._service.add_documents(call, requests))
            return await self._encode_answer(*await self._service.append(call, requests))

    async def _stream(
        self, name: str, request_type: type[Message], _: object, context: grpc.aio.ServicerContext
    ) -> None:
        """Handles a generation."""
        async with self._admitted(name, context) as call:
            request = await self._parse_request(request_type, await self._service.read_message(call))
            async with aclosing(self._service.stream(call, request)) as events:
                async for event in events:
                    await context.write(codec.event_to_wire(event))

    @asynccontextmanager
    async def _admitted(self, name: str, context: grpc.aio.ServicerContext) -> AsyncIterator[AdmittedCall]:
        """Admits a call, and turns any error inside into the call's status."""
        try:
            async with self._service.admit(name, context) as call:
                yield call
        except MemlmError as error:
            try:
                await context.abort(*trailer_of(error))
            except grpc.aio.InternalError:  # the call ended meanwhile by its own deadline
                raise asyncio.CancelledError from None

    async def _parse_request(self, request_type: type[Message], data: bytes) -> Any:
        """Decodes a request, a large one in a thread."""
        return await self._convert(
            len(data) > LARGE_BYTES, lambda: codec.from_wire(codec.read_request(request_type, data))
        )

    async def _encode_answer(self, request: Any, answer: Any) -> Message:
        """Encodes an answer, one of many items in a thread. Raises InvalidInput if it is too large for a message."""
        items = answer.token_scores if isinstance(answer, Score) else answer
        is_large = isinstance(items, tuple | array) and len(items) > LARGE_ITEMS
        reply = await self._convert(is_large, lambda: codec.response_to_wire(request, answer))
        if (size := reply.ByteSize()) > DEFAULT_MAX_MESSAGE_BYTES:
            raise InvalidInput(
                f"the answer has {size:,} bytes, and a message takes {DEFAULT_MAX_MESSAGE_BYTES:,}; ask for less at"
                " once"
            )
        return reply

    async def _convert(self, is_large: bool, work: Callable[[], _T]) -> _T:
        """Runs some work, in a thread if it is large. It must not hold the interpreter's lock for long at a time."""
        return await asyncio.get_running_loop().run_in_executor(self._converter_threads, work) if is_large else work()


def _serialize(read_message: Message) -> bytes:
    return read_message.SerializeToString()
