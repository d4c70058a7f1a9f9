"""How the awaited client's questions travel: `memlm.client.transport`, awaited."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Iterable, Sequence
from contextlib import aclosing, suppress
from typing import TYPE_CHECKING, Any

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from memlm.api.datastores import AddDocumentsRequest, NewDocument
from memlm.api.generation import CancelGenerationRequest, Finished, GenerationEvent
from memlm.api.params import GenerateRequest
from memlm.api.sessions import AppendToSessionRequest
from memlm.client.resume import StreamResumer, Tls
from memlm.client.transport import (
    READY_POLL_S,
    channel_to,
    metadata_of,
    not_ready,
    rpcs_by_request,
    stream_broke_off,
    translate_rpc_errors,
)
from memlm.client.uploads import RequestStream, add_document_requests, append_requests
from memlm.errors import MemlmError, NotFound, Unavailable
from memlm.wire import codec

if TYPE_CHECKING:
    from memlm.data.corpus import Document


class AsyncTransport:
    """A channel and the calls over it, in the event loop that runs when it is first used."""

    def __init__(
        self, target: str, timeout_s: float, max_message_bytes: int, token: str | None, tls: Tls | None
    ) -> None:
        """See `Transport`."""
        self._target, self._timeout_s, self._max_message_bytes = target, timeout_s, max_message_bytes
        self._channel, self._metadata = channel_to(grpc.aio, target, max_message_bytes, tls), metadata_of(token)
        self._rpcs = rpcs_by_request(self._channel)

    async def ask(self, question: Any, timeout_s: float | None = None) -> Any:
        """See `Transport.ask`."""
        message = codec.to_wire(question)
        with translate_rpc_errors(self._target):
            reply = await self._call(type(question), message, timeout_s)
        return codec.response_from_wire(reply)

    async def append(self, session: str, text: str, token_ids: Sequence[int], timeout_s: float | None) -> Any:
        """See `Transport.append`."""
        messages = append_requests(session, text, token_ids)
        with translate_rpc_errors(self._target):
            reply = await self._call(AppendToSessionRequest, messages, timeout_s)
        return codec.response_from_wire(reply)

    async def add(
        self, request: AddDocumentsRequest, documents: Iterable[NewDocument | Document], timeout_s: float | None
    ) -> Any:
        """See `Transport.add`."""
        messages = RequestStream(add_document_requests(request, documents, self._max_message_bytes))
        with messages.reraising_producer_errors(), translate_rpc_errors(self._target):
            call = self._call(AddDocumentsRequest, messages, timeout_s)
            messages.bind_call(call)
            reply = await call
        return codec.response_from_wire(reply)

    async def events(self, request: GenerateRequest, timeout_s: float | None) -> AsyncGenerator[GenerationEvent, None]:
        """See `Transport.events`."""
        heard = StreamResumer(request, self._allowed_s(timeout_s))
        try:
            while True:
                try:
                    async with aclosing(self._heard(heard)) as events:
                        async for event in events:
                            if heard.is_new(event):
                                yield event
                    return
                except (Unavailable, NotFound) as error:
                    await asyncio.sleep(heard.resume(error))
        except GeneratorExit:
            if heard.must_be_cancelled:
                with suppress(MemlmError):
                    await self.ask(CancelGenerationRequest(heard.request_id))
            raise

    async def wait_until_ready(self, timeout_s: float) -> None:
        """See `Transport.wait_until_ready`."""
        check, deadline_s = health_pb2_grpc.HealthStub(self._channel).Check, time.monotonic() + timeout_s
        while (left_s := deadline_s - time.monotonic()) > 0:
            with suppress(grpc.RpcError):
                health = await check(health_pb2.HealthCheckRequest(), timeout=left_s, wait_for_ready=True)
                if health.status == health_pb2.HealthCheckResponse.SERVING:
                    return
            await asyncio.sleep(READY_POLL_S)
        raise not_ready(self._target, timeout_s)

    async def close(self) -> None:
        """See `Transport.close`."""
        await self._channel.close()

    def _call(self, question: type, sent: Any, timeout_s: float | None) -> Any:
        """A call that asks a kind of question, begun."""
        return self._rpcs[question.__name__](sent, timeout=self._allowed_s(timeout_s), metadata=self._metadata)

    def _allowed_s(self, timeout_s: float | None) -> float:
        return self._timeout_s if timeout_s is None else timeout_s

    async def _heard(self, heard: StreamResumer) -> AsyncGenerator[GenerationEvent, None]:
        """The events of one connection, to the last."""
        asked = codec.to_wire(heard.question)
        with translate_rpc_errors(self._target):
            call = self._call(type(heard.question), asked, heard.left_s)
        try:
            event: GenerationEvent = ()
            while not isinstance(event, Finished):
                with translate_rpc_errors(self._target):
                    message = await call.read()
                if message is grpc.aio.EOF:
                    raise stream_broke_off(self._target)
                event = codec.event_from_wire(message)
                yield event
            with suppress(grpc.RpcError):  # the status says no more than the event did; not to wait for it is to cancel
                await call.read()
        finally:
            call.cancel()
