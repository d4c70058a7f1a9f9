"""Every call of the contract, whatever transport brings it: admitted, read, authorized, done, and redacted.

Nothing here blocks or loads torch. The transports are gRPC (`memlm.server.frontend.servicer`) and HTTP
(`memlm.server.http`).
"""

from __future__ import annotations

import asyncio
import logging
import sys
from collections.abc import AsyncGenerator, AsyncIterator, Iterator
from contextlib import aclosing, asynccontextmanager, contextmanager
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import grpc

from memlm.api.answers import AnswerRequest
from memlm.api.datastores import (
    AddDocumentsRequest,
    DeleteDocumentsRequest,
    JobRequest,
    ListDatastoresRequest,
    LoadDatastoreRequest,
    RememberRequest,
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
from memlm.api.server import (
    GetModelRequest,
    GetServerInfoRequest,
    GetTokenizerRequest,
    ModelInfo,
    ServerInfo,
    TokenizerInfo,
)
from memlm.api.sessions import AppendToSessionRequest, ListSessionsRequest
from memlm.base.version import __version__
from memlm.errors import InternalError, InvalidInput, MemlmError, Unavailable
from memlm.server.config import ServerConfig
from memlm.server.frontend.appends import append_quota, join_append
from memlm.server.frontend.auth import Authenticator, Principal
from memlm.server.frontend.message_reader import MessageReader
from memlm.server.frontend.rights import Rights
from memlm.server.frontend.streams import GenerationStreams
from memlm.server.inference.pool import EnginePool
from memlm.server.jobs.service import JobService
from memlm.server.quota import Quota, share_of
from memlm.server.registry import DatastoreRegistry
from memlm.server.telemetry.calls import CallLogger, CallRecord, Tracer, Transport
from memlm.server.telemetry.metrics import Metrics
from memlm.wire.codec import WireEvent

MAX_WAIT_S = 3600.0  # for an operation's end, where the call has no deadline
ANSWER_S = 0.5  # of a deadline that is left for the answer

log = logging.getLogger("memlm.server")


@dataclass(frozen=True, slots=True)
class AdmittedCall:
    """A call that is counted among the open ones: its record, its sender, and the connection that it came by."""

    record: CallRecord
    caller: Principal
    transport: Transport

    @property
    def queue_key(self) -> str:
        """The key by which callers take turns."""
        return _queue_key(self.caller, self.transport)

    @property
    def origin(self) -> dict[str, str]:
        """The part of the call that a worker learns."""
        return {"id_": self.record.id, "caller": self.queue_key, "owner": self.caller.name}


class Service:
    """Does every call of the contract. `num_admitted` counts the calls so far. While `is_draining`, new requests
    fail.
    """

    def __init__(
        self,
        workers: EnginePool,
        config: ServerConfig,
        authenticator: Authenticator,
        metrics: Metrics,
        stores: DatastoreRegistry,
        tracer: Tracer | None = None,
    ) -> None:
        self._workers, self.config, self._authenticator, self._metrics = workers, config, authenticator, metrics
        self._stores, self._rights, self._calls = stores, Rights(config, stores), CallLogger(metrics, tracer)
        self._jobs, self._streams = (
            JobService(config, stores, metrics, workers),
            GenerationStreams(workers, config.max_stream_bytes),
        )
        self._open = Quota("open calls", sys.maxsize, config.max_caller_calls)
        self._appends = append_quota(config)
        self._reader = MessageReader(config.max_receiving, share_of(config.max_receiving), config.message_timeout_s)
        self._model: ModelInfo | None = None
        self._tokenizer: TokenizerInfo | None = None
        self.is_draining = False
        self.num_admitted = 0

    async def load_model_info(self) -> None:
        """Asks a worker for the model's description. It stays the same while the server runs."""
        self._model = await self._workers.ask(GetModelRequest(), internal=True)
        self._metrics.describe(self.model_names[0], self._model)

    @property
    def model(self) -> ModelInfo:
        """The model's description, after `load_model_info`."""
        assert self._model is not None
        return self._model

    async def tokenizer_info(self) -> TokenizerInfo:
        """The description of the model's tokenizer, for which a worker is asked once."""
        if self._tokenizer is None:
            self._tokenizer = await self._workers.ask(GetTokenizerRequest(), internal=True)
        return self._tokenizer

    @property
    def model_names(self) -> tuple[str, ...]:
        """The names that mean the served model. The first is the one to show."""
        given = self.config.model
        return given.name, self.model.name, str(given)

    @property
    def adapter_names(self) -> tuple[str, ...]:
        """The adapters that a request may name."""
        return tuple(adapter.name for adapter in self.config.adapters)

    @property
    def is_ready(self) -> bool:
        """Whether requests are accepted and a worker's loop iterates. A process alone proves nothing."""
        return self._workers.is_serving and not self.is_draining

    @property
    def num_open(self) -> int:
        """Calls that have been admitted and have not ended."""
        return self._open.taken

    @property
    def jobs(self) -> JobService:
        return self._jobs

    @asynccontextmanager
    async def admit(self, name: str, transport: Transport) -> AsyncIterator[AdmittedCall]:
        """Admits and records a call, before any byte of its message is read. Raises any error inside as its caller may
        see it, and InternalError for a bug.
        """
        stores: frozenset[str] | None = frozenset()
        try:
            with self._calls.watch(name, transport) as record:
                try:
                    with self._admitted(record, transport) as caller:
                        stores = record.stores
                        yield AdmittedCall(record, caller, transport)
                except (MemlmError, grpc.aio.AbortError):
                    raise
                except Exception as error:
                    log.exception("call %s failed", record.id)
                    bug = f"a bug in the server; its log has the details under call {record.id}"
                    raise InternalError(bug) from error
        except MemlmError as error:
            raise self._rights.redact_error(stores, error) from error

    def check_token(self, transport: Transport) -> None:
        """Raises Unauthenticated for a request, to what is no call of the contract, without a token that is known."""
        self._authenticator.authenticate(transport.invocation_metadata())

    @contextmanager
    def _admitted(self, record: CallRecord, transport: Transport) -> Iterator[Principal]:
        """Authenticates and counts a call."""
        caller = self._authenticator.authenticate(transport.invocation_metadata())
        record.caller, record.stores = caller.name, caller.stores
        caller.check(record.name)
        self.num_admitted += 1
        with self._open.hold(_queue_key(caller, transport), 1):
            yield caller

    async def read_message(self, call: AdmittedCall) -> bytes:
        """Reads the message of a call with one request. Raises Unavailable while the server drains."""
        data = await self._reader.read_message(call.transport, call.queue_key)
        self._check_draining()
        return data

    async def read_messages(self, call: AdmittedCall) -> AsyncIterator[bytes]:
        """Reads the messages of a call with many requests."""
        async for data in self._reader.read_messages(call.transport):
            self._check_draining()
            yield data

    async def ask(self, call: AdmittedCall, request: Any) -> Any:
        """Returns the answer to a request, without what its caller may not see."""
        caller, left_s = call.caller, call.transport.time_remaining()
        request = self._rights.authorize(call.record.name, caller, request)
        if isinstance(request, GetServerInfoRequest):
            answer: Any = self._info()
        elif isinstance(request, JobRequest | OperationRequest):
            answer = await self._handle_job_request(request, caller, left_s)
        elif isinstance(request, CancelGenerationRequest):
            self._streams.cancel(request.request_id, caller.name)
            answer = None
        elif isinstance(request, LoadDatastoreRequest | UnloadDatastoreRequest):
            answer = await self._change_stores(request, call.record)
        elif isinstance(request, DeleteDocumentsRequest):
            answer = await self._jobs.delete_documents(request, left_s, **call.origin)
        elif isinstance(request, RememberRequest):
            answer = await self._jobs.remember(request, left_s, **call.origin)
        else:
            answer = await self._workers.ask(request, left_s, **call.origin)
        answer = self._rights.redact(caller, answer)
        return request.page(answer) if isinstance(request, ListDatastoresRequest | ListSessionsRequest) else answer

    async def append(self, call: AdmittedCall, parts: AsyncIterator[AppendToSessionRequest]) -> tuple[Any, Any]:
        """Joins the parts of an append to a session. Returns the joined request and its answer."""
        self._workers.check_room()  # before anything is read
        with self._appends.hold(call.queue_key) as held:
            request = await join_append(parts, held, self.config)
            return request, await self.ask(call, request)

    async def add_documents(self, call: AdmittedCall, requests: AsyncIterator[AddDocumentsRequest]) -> Any:
        """Writes documents to a file as they arrive, since they may exceed the RAM, and starts a job that adds them."""
        first = await anext(requests, None)
        if first is None:
            raise InvalidInput("nothing was sent; the first message says which datastore", field="store")
        opening = replace(first, documents=(), keep=(), num_documents=0)
        request = self._rights.authorize(call.record.name, call.caller, opening)
        self._jobs.check_before_upload(request, call.caller.name)
        with self._jobs.upload(call.queue_key, is_sync=bool(request.sync)) as upload:
            message = first
            await asyncio.to_thread(upload.take, message)
            async for message in requests:
                if message.sync:  # what came before would have been added, and nothing deleted
                    raise InvalidInput("sync is in a message behind the first; name the folder there", field="sync")
                await asyncio.to_thread(upload.take, message)
            await asyncio.to_thread(upload.finish, message.num_documents)
            may_create = call.caller.may_call("BuildDatastore")
            operation = await self._jobs.submit(request, call.caller.name, upload, may_create=may_create)
        return self._rights.redact(call.caller, operation)

    async def stream(self, call: AdmittedCall, request: Any) -> AsyncGenerator[WireEvent, None]:
        """Yields the events of a generation. Those that come while one is being sent are merged into the next one.

        Closing this generator ends a generation that cannot be resumed.
        """
        left_s = call.transport.time_remaining()
        request = self._rights.authorize(call.record.name, call.caller, request)
        self._check_neighbors(request)
        request = self._with_drafts(request)
        call.record.record_request(request, prompts=self.config.log_prompts)
        async with aclosing(self._streams.stream(request, left_s, **call.origin)) as events:
            async for event in events:
                call.record.record_event(event, self._metrics)
                yield event

    async def _change_stores(self, request: LoadDatastoreRequest | UnloadDatastoreRequest, call: CallRecord) -> Any:
        """Loads or unloads a datastore on all workers."""
        if isinstance(request, UnloadDatastoreRequest):
            name = request.store
            return await self._workers.broadcast(request, lambda _: self._stores.remove(name), id_=call.id)
        path = Path(request.path)
        self._stores.check_put(request.store or path.resolve().name, path)  # before a worker has it
        return await self._workers.broadcast(request, lambda info: self._stores.put(info.name, path), id_=call.id)

    async def _handle_job_request(
        self, request: JobRequest | OperationRequest, caller: Principal, left_s: float | None
    ) -> Any:
        """Starts a job, or does a request about an operation."""
        jobs, owner = self._jobs, caller.name
        match request:
            case GetOperationRequest(name):
                return jobs.get(name, owner)
            case ListOperationsRequest(page_size, page_token):
                return jobs.list(owner, page_size, page_token)
            case WaitOperationRequest(name, timeout_s):
                max_wait_s = MAX_WAIT_S if left_s is None else max(0.0, left_s - ANSWER_S)
                return await jobs.wait(name, owner, min(timeout_s or max_wait_s, max_wait_s))
            case CancelOperationRequest(name):
                return await jobs.cancel(name, owner)
            case DeleteOperationRequest(name):
                return await jobs.delete(name, owner)
            case _:
                return await jobs.submit(request, owner)

    def _info(self) -> ServerInfo:
        config = self.config
        limits = {each.name: getattr(config, each.name) for each in fields(ServerInfo) if hasattr(config, each.name)}
        return ServerInfo(
            version=__version__,
            needs_token=not self._authenticator.is_open,
            **limits
            | {
                "max_cache_bytes": config.cache_bytes,
                "max_jobs": config.max_jobs if config.store_dir and config.index_workers else 0,
            },
        )

    def _check_neighbors(self, request: Any) -> None:
        """Raises InvalidInput for more neighbors than `max_neighbors`: they are described in a step that all
        generations share.
        """
        most = self.config.max_neighbors
        if isinstance(request, StreamRequest) and request.neighbors > most:
            raise InvalidInput(
                f"neighbors is {request.neighbors}; this server reports at most {most} for each token",
                field="neighbors",
            )

    def _with_drafts(self, request: Any) -> Any:
        """The request, with the server's `drafts` where it leaves them open. Early exits and mixtures draft nothing."""
        drafts = self.config.drafts
        if drafts is None or not isinstance(request, StreamRequest) or request.early_exit:
            return request
        if isinstance(request, AnswerRequest) and request.mixture:
            return request
        return request if request.drafts is not None else replace(request, drafts=drafts)

    def _check_draining(self) -> None:
        if self.is_draining:
            raise Unavailable("the server is stopping; ask another one, or this one later")


def _queue_key(caller: Principal, transport: Transport) -> str:
    """The key by which callers take turns: the token's name, or without tokens the client's address."""
    return caller.name or str(transport.peer())
