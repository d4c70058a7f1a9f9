"""Sends requests over gRPC and returns responses as dataclasses, awaited.

The clients import this module when they connect, so that importing them leaves gRPC out of a process that may fork.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import AsyncGenerator, Callable, Iterable
from contextlib import aclosing, suppress
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from memlm.api.datastores import AddDocumentsRequest, NewDocument
from memlm.api.generation import CancelGenerationRequest, Finished, GenerationEvent
from memlm.api.operations import OperationInfo
from memlm.api.params import StreamRequest
from memlm.api.request import Request
from memlm.api.sessions import AppendToSessionRequest
from memlm.client.channel import (
    aio_read,
    aio_result,
    aio_run,
    aio_start,
    channel_to,
    metadata_of,
    not_ready,
    rpcs_by_request,
    stream_broke_off,
    translate_rpc_errors,
)
from memlm.client.resume import StreamResumer, Tls
from memlm.client.uploads import AsyncRequestStream, add_document_requests, append_requests, sync_requests
from memlm.errors import MemlmError, NotFound, Unavailable
from memlm.wire import codec

if TYPE_CHECKING:
    from memlm.data.corpus import Document
    from memlm.data.synced_folder import SyncedFolder

READY_POLL_S = 0.05

R = TypeVar("R")


class AsyncTransport:
    """A channel and the calls over it. A forked child opens its own channel at its first call."""

    def __init__(
        self, target: str, timeout_s: float, max_message_bytes: int, token: str | None, tls: Tls | None
    ) -> None:
        """Takes the arguments of the client. Raises InvalidInput if a file of `tls` cannot be read."""
        self._target, self._timeout_s, self._max_message_bytes = target, timeout_s, max_message_bytes
        self._metadata, self._open = metadata_of(token), partial(channel_to, grpc.aio, target, max_message_bytes, tls)
        self._connect()

    async def ask(self, request: Request[R], timeout_s: float | None = None) -> R:
        """Sends a request, one to append to a session in several messages, and returns its response."""
        message = append_requests(request) if isinstance(request, AppendToSessionRequest) else codec.to_wire(request)
        with translate_rpc_errors(self._target):
            reply = await self._rpc(type(request))(message, **self._options(timeout_s))
        return codec.response_from_wire(request, reply)

    async def run(self, work: Callable[[], R]) -> R:
        """Does work that reads files, before a call."""
        return await aio_run(work)

    async def add(
        self,
        request: AddDocumentsRequest,
        documents: Iterable[NewDocument | Document] | SyncedFolder,
        timeout_s: float | None,
    ) -> OperationInfo:
        """Uploads documents, or of a request with `sync` those of a folder, and starts to add them."""
        of_kind: Any = sync_requests if request.sync else add_document_requests
        messages = AsyncRequestStream(of_kind(request, documents, self._max_message_bytes))
        with messages.reraising_producer_errors(), translate_rpc_errors(self._target):
            call = aio_start(self._rpc(AddDocumentsRequest), messages, **self._options(timeout_s))
            messages.bind_call(call)
            reply = await aio_result(call)
        return codec.response_from_wire(request, reply)

    async def stream(self, request: StreamRequest, timeout_s: float | None) -> AsyncGenerator[GenerationEvent, None]:
        """The events of a generation, over as many connections as it takes. Closing it stops the generation."""
        resumer = StreamResumer(request, self._timeout(timeout_s))
        try:
            while True:
                try:
                    async with aclosing(self._connection_events(resumer)) as events:
                        async for event in events:
                            if resumer.is_new(event):
                                yield event
                    return
                except (Unavailable, NotFound) as error:
                    await asyncio.sleep(resumer.resume(error))
        except GeneratorExit:
            if resumer.must_be_cancelled:
                with suppress(MemlmError):
                    await self.ask(CancelGenerationRequest(resumer.request_id))
            raise

    async def wait_until_ready(self, timeout_s: float) -> None:
        """Waits until the server serves. Raises Unavailable after `timeout_s`."""
        self._check_process()
        check, deadline_s = health_pb2_grpc.HealthStub(self._channel).Check, time.monotonic() + timeout_s
        while (left_s := deadline_s - time.monotonic()) > 0:
            with suppress(grpc.RpcError):
                health = await check(health_pb2.HealthCheckRequest(), timeout=left_s, wait_for_ready=True)
                if health.status == health_pb2.HealthCheckResponse.SERVING:
                    return
            await asyncio.sleep(READY_POLL_S)
        raise not_ready(self._target, timeout_s)

    async def close(self) -> None:
        """Closes the channel and stops the calls over it."""
        await self._channel.close()

    def _connect(self) -> None:
        self._channel, self._pid = self._open(), os.getpid()
        self._rpcs = rpcs_by_request(self._channel)

    def _check_process(self) -> None:
        if os.getpid() != self._pid:
            self._connect()

    def _rpc(self, request_type: type) -> Any:
        self._check_process()
        return self._rpcs[request_type.__name__]

    def _timeout(self, timeout_s: float | None) -> float:
        return self._timeout_s if timeout_s is None else timeout_s

    def _options(self, timeout_s: float | None) -> dict[str, Any]:
        return {"timeout": self._timeout(timeout_s), "metadata": self._metadata}

    async def _connection_events(self, resumer: StreamResumer) -> AsyncGenerator[GenerationEvent, None]:
        """The events of one connection, up to the last one."""
        message = codec.to_wire(resumer.request)
        with translate_rpc_errors(self._target):
            call = self._rpc(type(resumer.request))(message, **self._options(resumer.left_s))
        try:
            event: GenerationEvent = ()
            while not isinstance(event, Finished):
                with translate_rpc_errors(self._target):
                    reply = await aio_read(call)
                if reply is None:
                    raise stream_broke_off(self._target)
                event = codec.event_from_wire(reply)
                yield event
            with suppress(grpc.RpcError):  # the status says no more than the event, but leaving it unread is a cancel
                await aio_read(call)
        finally:
            call.cancel()
