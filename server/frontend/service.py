"""The gRPC servicer: bytes from the network to requests, to a worker, and back. Nothing here blocks or loads torch.

The contract's descriptors list the calls and `memlm.wire.codec` converts their messages, so that two handlers serve all
of them: one for calls with one answer, one for streams.
"""

from __future__ import annotations

import asyncio
import logging
import sys
from array import array
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing, asynccontextmanager, contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import grpc
from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass

from memlm.api.datastores import (
    AddDocumentsRequest,
    DeleteDocumentsRequest,
    JobRequest,
    LoadDatastoreRequest,
    UnloadDatastoreRequest,
)
from memlm.api.generation import CancelGenerationRequest
from memlm.api.operations import (
    CancelOperationRequest,
    DeleteOperationRequest,
    GetOperationRequest,
    ListOperationsRequest,
    OperationRequest,
    WaitOperationRequest,
)
from memlm.api.params import StreamRequest
from memlm.api.scoring import Score
from memlm.api.server import GetServerInfoRequest, ServerInfo
from memlm.base.version import __version__
from memlm.errors import InternalError, InvalidInput, MemlmError, Unavailable
from memlm.server.config import ServerConfig
from memlm.server.frontend.appends import append_quota, join_append
from memlm.server.frontend.auth import Authenticator, Principal
from memlm.server.frontend.message_reader import MessageReader
from memlm.server.frontend.rights import Rights
from memlm.server.frontend.streams import GenerationStreams
from memlm.server.inference.pool import WorkerPool
from memlm.server.jobs.service import JobService
from memlm.server.quota import Quota, share_of
from memlm.server.registry import DatastoreRegistry
from memlm.server.telemetry.calls import CallLogger, CallRecord, Tracer
from memlm.server.telemetry.metrics import Metrics
from memlm.v1 import datastores_pb2
from memlm.wire import codec
from memlm.wire.limits import DEFAULT_MAX_MESSAGE_BYTES
from memlm.wire.status import trailer_of

MAX_WAIT_S = 3600.0  # for an operation's end, where the call has no deadline
ANSWER_S = 0.5  # of a deadline that is left for the answer
LARGE_BYTES, LARGE_ITEMS = 1 << 14, 1 << 12  # messages from there on are converted in threads

_T = TypeVar("_T")

log = logging.getLogger("memlm.server")


class Servicer:
    """Serves every call of the contract. `num_admitted` counts the calls so far. While `is_draining`, new requests
    fail.
    """

    def __init__(
        self,
        workers: WorkerPool,
        config: ServerConfig,
        authenticator: Authenticator,
        metrics: Metrics,
        stores: DatastoreRegistry,
        tracer: Tracer | None = None,
    ) -> None:
        self._workers, self._config, self._authenticator, self._metrics = workers, config, authenticator, metrics
        self._stores, self._rights, self._calls = stores, Rights(config, stores), CallLogger(metrics, tracer)
        self._jobs, self._streams = (
            JobService(config, stores, metrics, workers),
            GenerationStreams(workers, config.max_stream_bytes),
        )
        self._open = Quota("open calls", sys.maxsize, config.max_caller_calls)
        self._appends = append_quota(config)
        self._reader = MessageReader(config.max_receiving, share_of(config.max_receiving), config.message_timeout_s)
        self._converter_threads = ThreadPoolExecutor(2, "convert")
        self.is_draining = False
        self.num_admitted = 0

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
            return grpc.stream_stream_rpc_method_handler(stream, response_serializer=_serialize)
        answer = self._answer_stream if method.client_streaming else self._answer
        return grpc.stream_unary_rpc_method_handler(
            partial(answer, method.name, request_type), response_serializer=_serialize
        )

    async def _answer(
        self, call: str, request_type: type[Message], _: object, context: grpc.aio.ServicerContext
    ) -> Any:
        """Handles a call with one request and one answer."""
        async with self._recorded(call, context) as (record, caller):
            data = await self._reader.read_message(context, _queue_key(caller, context))
            return await self._dispatch(record, caller, await self._parse_request(request_type, data), context)

    async def _answer_stream(
        self, call: str, request_type: type[Message], _: object, context: grpc.aio.ServicerContext
    ) -> Any:
        """Handles a call with many requests, AppendToSession or AddDocuments, and one answer."""
        async with self._recorded(call, context) as (record, caller):
            requests = (
                await self._parse_request(request_type, data) async for data in self._reader.read_messages(context)
            )
            if request_type is datastores_pb2.AddDocumentsRequest:
                operation = await self._add_documents(record, caller, _queue_key(caller, context), requests)
                return codec.to_wire(self._rights.redact(caller, operation))
            self._workers.check_room()  # before anything is read
            with self._appends.hold(_queue_key(caller, context)) as held:
                request = await join_append(requests, held, self._config)
                return await self._dispatch(record, caller, request, context)

    async def _dispatch(
        self, call: CallRecord, caller: Principal, request: Any, context: grpc.aio.ServicerContext
    ) -> Any:
        """Returns the encoded answer to a request."""
        request = self._rights.authorize(call.name, caller, request)
        if isinstance(request, GetServerInfoRequest):
            answer: Any = self._info()
        elif isinstance(request, JobRequest | OperationRequest):
            answer = await self._handle_job_request(request, caller, context)
        elif isinstance(request, CancelGenerationRequest):
            self._streams.cancel(request.request_id, caller.name)
            answer = None
        elif isinstance(request, LoadDatastoreRequest | UnloadDatastoreRequest):
            answer = await self._change_stores(request, call)
        else:
            origin = {"id_": call.id, "caller": _queue_key(caller, context), "owner": caller.name}
            left_s = context.time_remaining()
            if isinstance(request, DeleteDocumentsRequest):
                answer = await self._jobs.delete_documents(request, left_s, **origin)
            else:
                answer = await self._workers.answer(request, left_s, **origin)
        return await self._encode_answer(request, self._rights.redact(caller, answer))

    async def _change_stores(self, request: LoadDatastoreRequest | UnloadDatastoreRequest, call: CallRecord) -> Any:
        """Loads or unloads a datastore on all workers."""
        if isinstance(request, UnloadDatastoreRequest):
            name = request.store
            return await self._workers.broadcast(request, lambda _: self._stores.remove(name), id_=call.id)
        path = Path(request.path)
        self._stores.check_put(request.store or path.resolve().name, path)  # before a worker has it
        return await self._workers.broadcast(request, lambda info: self._stores.put(info.name, path), id_=call.id)

    async def _handle_job_request(
        self, request: JobRequest | OperationRequest, caller: Principal, context: grpc.aio.ServicerContext
    ) -> Any:
        """Starts a job, or does a request about an operation."""
        jobs, owner = self._jobs, caller.name
        match request:
            case GetOperationRequest(name):
                return jobs.get(name, owner)
            case ListOperationsRequest(page_size, page_token):
                return jobs.list(owner, page_size, page_token)
            case WaitOperationRequest(name, timeout_s):
                left_s = context.time_remaining()
                max_wait_s = MAX_WAIT_S if left_s is None else max(0.0, left_s - ANSWER_S)
                return await jobs.wait(name, owner, min(timeout_s or max_wait_s, max_wait_s))
            case CancelOperationRequest(name):
                return await jobs.cancel(name, owner)
            case DeleteOperationRequest(name):
                return await jobs.delete(name, owner)
            case _:
                return await jobs.submit(request, owner)

    async def _add_documents(
        self, call: CallRecord, caller: Principal, queue_key: str, requests: AsyncIterator[AddDocumentsRequest]
    ) -> Any:
        """Writes documents to a file as they arrive, since they may exceed the RAM, and starts a job that adds them."""
        first = await anext(requests, None)
        if first is None:
            raise InvalidInput("nothing was sent; the first message says which datastore", field="store")
        request = self._rights.authorize(call.name, caller, replace(first, documents=()))
        self._jobs.check(request)  # before anything is read
        with self._jobs.upload(queue_key) as upload:
            await asyncio.to_thread(upload.add, first.documents)
            async for more in requests:
                await asyncio.to_thread(upload.add, more.documents)
            await asyncio.to_thread(upload.finish)
            return await self._jobs.submit(request, caller.name, upload)

    async def _stream(
        self, call: str, request_type: type[Message], _: object, context: grpc.aio.ServicerContext
    ) -> None:
        """Handles a generation. Events that come while one is being sent are merged into the next one."""
        async with self._recorded(call, context) as (record, caller):
            data = await self._reader.read_message(context, _queue_key(caller, context))
            request = self._rights.authorize(call, caller, await self._parse_request(request_type, data))
            self._check_neighbors(request)
            record.record_request(request, prompts=self._config.log_prompts)
            origin = {"id_": record.id, "caller": _queue_key(caller, context), "owner": caller.name}
            left_s = context.time_remaining()
            async with aclosing(self._streams.events(request, left_s, **origin)) as events:
                async for event in events:
                    record.record_event(event, self._metrics)
                    await context.write(codec.event_to_wire(event))

    @property
    def num_open(self) -> int:
        """Calls that have been admitted and have not ended."""
        return self._open.taken

    @property
    def jobs(self) -> JobService:
        return self._jobs

    @asynccontextmanager
    async def _recorded(
        self, name: str, context: grpc.aio.ServicerContext
    ) -> AsyncIterator[tuple[CallRecord, Principal]]:
        """Admits and records a call, and turns any error inside into the call's status."""
        try:
            with self._calls.watch(name, context) as call:
                try:
                    with self._admitted(call, context) as caller:
                        yield call, caller
                except (MemlmError, grpc.aio.AbortError):
                    raise
                except Exception as error:
                    log.exception("call %s failed", call.id)
                    bug = f"a bug in the server; its log has the details under call {call.id}"
                    raise InternalError(bug) from error
        except MemlmError as error:
            try:
                await context.abort(*trailer_of(self._rights.redact_error(call.stores, error)))
            except grpc.aio.InternalError:  # the call ended meanwhile by its own deadline
                raise asyncio.CancelledError from None

    @contextmanager
    def _admitted(self, call: CallRecord, context: grpc.aio.ServicerContext) -> Iterator[Principal]:
        """Authenticates and counts a call. Raises before any byte of its message is read."""
        caller = self._authenticator.authenticate(context.invocation_metadata())
        call.caller, call.stores = caller.name, caller.stores
        caller.check(call.name)
        self.num_admitted += 1
        with self._open.hold(_queue_key(caller, context), 1):
            yield caller

    def _info(self) -> ServerInfo:
        config = self._config
        return ServerInfo(
            version=__version__,
            needs_token=not self._authenticator.is_open,
            max_message_bytes=config.max_message_bytes,
            max_append_bytes=config.max_append_bytes,
            max_running=config.max_running,
            max_queued=config.max_queued,
            max_queued_tokens=config.max_queued_tokens,
            max_cache_bytes=config.cache_bytes,
            max_session_bytes=config.max_session_bytes,
            session_ttl_s=config.session_ttl_s,
            max_sessions=config.max_sessions,
            max_sessions_per_caller=config.max_sessions_per_caller,
            max_upload_bytes=config.max_upload_bytes,
            max_neighbors=config.max_neighbors,
            max_jobs=config.max_jobs if config.store_dir and config.index_workers else 0,
            max_upload_documents=config.max_upload_documents,
            max_unfinished_bytes=config.max_unfinished_bytes,
            max_streams=config.max_streams,
            max_caller_calls=config.max_caller_calls,
            message_timeout_s=config.message_timeout_s,
            connection_idle_s=config.connection_idle_s,
            max_stream_bytes=config.max_stream_bytes,
            max_event_bytes=config.max_event_bytes,
        )

    def _check_neighbors(self, request: Any) -> None:
        """Raises InvalidInput for more neighbors than `max_neighbors`: they are described in a step that all
        generations share.
        """
        most = self._config.max_neighbors
        if isinstance(request, StreamRequest) and request.neighbors > most:
            raise InvalidInput(
                f"neighbors is {request.neighbors}; this server reports at most {most} for each token",
                field="neighbors",
            )

    async def _parse_request(self, request_type: type[Message], data: bytes) -> Any:
        """Decodes a request, a large one in a thread."""
        if self.is_draining:
            raise Unavailable("the server is stopping; ask another one, or this one later")
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


def _queue_key(caller: Principal, context: grpc.aio.ServicerContext) -> str:
    """The key by which callers take turns: the token's name, or without tokens the client's address."""
    return caller.name or str(context.peer())


def _serialize(read_message: Message) -> bytes:
    return read_message.SerializeToString()
