"""The front: bytes from the network -> questions to the worker -> answers. No torch here, and nothing that blocks.

The contract's descriptors say which calls there are, and `memlm.wire` what each takes and gives, so that the whole
service is two functions: one for calls with one answer, one for streams.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, AsyncIterator, Iterator, Sequence
from contextlib import aclosing, asynccontextmanager
from dataclasses import replace
from functools import partial
from typing import Any, cast

import grpc
from google.longrunning import operations_pb2
from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass

from memlm import __version__, wire
from memlm.errors import Cancelled, InternalError, InvalidInput, MemlmError, Unavailable
from memlm.events import Accepted, Finished
from memlm.questions import (
    AddDocumentsRequest,
    AppendToSessionRequest,
    CancelGenerationRequest,
    CancelOperationRequest,
    DeleteOperationRequest,
    GetOperationRequest,
    GetServerInfoRequest,
    JobRequest,
    ListOperationsRequest,
    LoadDatastoreRequest,
    OperationQuestion,
    ResumeGenerationRequest,
    UnloadDatastoreRequest,
    WaitOperationRequest,
)
from memlm.reports import ServerInfo
from memlm.server.calls import Call, Calls
from memlm.server.config import ServerConfig
from memlm.server.jobs import Jobs
from memlm.server.messages import Answer, Events, Failed
from memlm.server.metrics import Metrics
from memlm.server.runs import Run, Runs
from memlm.server.security import Caller, Guard
from memlm.server.stores import Stores
from memlm.server.tracing import Tracer
from memlm.server.workers import Workers
from memlm.status import trailer_of
from memlm.v1 import datastores_pb2, generation_pb2, sessions_pb2
from memlm.wire import WireEvent

SERVICES = tuple(
    service
    for file in (generation_pb2, datastores_pb2, sessions_pb2, operations_pb2)
    for service in file.DESCRIPTOR.services_by_name.values()
)

# However far behind a client is, tokens are merged up to this, which is far from the limit of a message.
MAX_EVENT_BYTES = 1 << 19

MAX_WAIT_S = 3600.0  # for an operation's end, where the call has no deadline
LOOK_S = 0.5  # between looks for whether anybody still follows a generation
ANSWER_S = 0.5  # of a deadline that is left for the answer

log = logging.getLogger("memlm.server")


class Front:
    """The calls of the service. While `draining`, what is new is refused."""

    def __init__(
        self,
        workers: Workers,
        config: ServerConfig,
        guard: Guard,
        metrics: Metrics,
        stores: Stores,
        tracer: Tracer | None = None,
    ) -> None:
        """Takes the inference workers, who knows the callers, what counts the calls, the datastores in service, and
        what traces.
        """
        self._workers, self._config, self._guard, self._metrics = workers, config, guard, metrics
        self._stores, self._calls = stores, Calls(metrics, tracer)
        self._jobs, self._runs = Jobs(config, stores, metrics, workers), Runs()
        self.draining = False

    def handlers(self) -> tuple[grpc.GenericRpcHandler, ...]:
        """What a gRPC server is given: every call of every service in the contract."""
        return tuple(
            grpc.method_handlers_generic_handler(
                service.full_name, {method.name: self._handler(method) for method in service.methods}
            )
            for service in SERVICES
        )

    def _handler(self, method: Any) -> grpc.RpcMethodHandler:
        """Requests come in as bytes: gRPC itself would tell INTERNAL of those that it cannot read."""
        request_type = GetMessageClass(method.input_type)
        if method.client_streaming:
            collect = partial(self._collect, method.name, request_type)
            return grpc.stream_unary_rpc_method_handler(collect, response_serializer=_serialize)
        if method.server_streaming:
            stream = partial(self._stream, method.name, request_type)
            return grpc.unary_stream_rpc_method_handler(stream, response_serializer=_serialize)
        return grpc.unary_unary_rpc_method_handler(
            partial(self._answer, method.name, request_type), response_serializer=_serialize
        )

    async def _answer(
        self, call: str, request_type: type[Message], data: bytes, context: grpc.aio.ServicerContext
    ) -> Any:
        """A call with one answer."""
        async with self._watched(call, context) as watched:
            caller = self._admitted(watched, context)
            return await self._ask(watched, caller, self._question(request_type, data), context)

    async def _collect(
        self,
        call: str,
        request_type: type[Message],
        messages: AsyncIterator[bytes],
        context: grpc.aio.ServicerContext,
    ) -> Any:
        """A call that brings in pieces what is to be read, or added."""
        async with self._watched(call, context) as watched:
            caller = self._admitted(watched, context)
            questions = (self._question(request_type, data) async for data in messages)
            if request_type is datastores_pb2.AddDocumentsRequest:
                return wire.to_wire(await self._added(caller, questions))
            self._workers.check_room()  # before anything is read
            return await self._ask(watched, caller, await self._joined(questions), context)

    async def _ask(self, call: Call, caller: Caller, question: Any, context: grpc.aio.ServicerContext) -> Any:
        """The reply to a question with one answer."""
        if isinstance(question, GetServerInfoRequest):
            return wire.answer_to_wire(question, self._info())
        question = caller.restricted(question)
        if isinstance(question, JobRequest | OperationQuestion):
            return wire.answer_to_wire(question, await self._about_jobs(question, caller, context))
        if isinstance(question, CancelGenerationRequest):
            self._runs.stop(question.request_id, self._runs.find(question.request_id, caller.name))
            return wire.answer_to_wire(question, None)
        if isinstance(question, LoadDatastoreRequest | UnloadDatastoreRequest):
            answer = await self._load(question, call, caller)
        else:
            turn = caller.name or context.peer()
            about = {"id_": call.id, "caller": turn, "owner": caller.name}
            answer = await self._workers.answer(question, context.time_remaining(), **about)
        return wire.answer_to_wire(question, caller.visible(question, answer))

    async def _load(self, question: LoadDatastoreRequest | UnloadDatastoreRequest, call: Call, caller: Caller) -> Any:
        """Takes a datastore into service, or out of it."""
        if isinstance(question, UnloadDatastoreRequest):
            name = question.store
            return await self._workers.everywhere(question, lambda _: self._stores.take_out(name), id_=call.id)
        path = self._stores.permitted(question.path)
        self._stores.check_put(question.store or path.resolve().name, path)  # before a worker has it
        question = replace(question, path=str(path))
        return await self._workers.everywhere(question, lambda told: self._stores.put(told.name, path), id_=call.id)

    async def _about_jobs(
        self, question: JobRequest | OperationQuestion, caller: Caller, context: grpc.aio.ServicerContext
    ) -> Any:
        """What begins long work, or asks after it."""
        jobs, owner = self._jobs, caller.name
        match question:
            case GetOperationRequest(name):
                return jobs.get(name, owner)
            case ListOperationsRequest(page_size, page_token):
                return jobs.list(owner, page_size, page_token)
            case WaitOperationRequest(name, timeout_s):
                left_s = context.time_remaining()
                longest_s = MAX_WAIT_S if left_s is None else max(0.0, left_s - ANSWER_S)
                return await jobs.wait(name, owner, min(timeout_s or longest_s, longest_s))
            case CancelOperationRequest(name):
                return await jobs.cancel(name, owner)
            case DeleteOperationRequest(name):
                return await jobs.delete(name, owner)
            case _:
                return await jobs.submit(question, owner)

    async def _added(self, caller: Caller, questions: AsyncIterator[AddDocumentsRequest]) -> Any:
        """Documents go to the disk as they come: there may be more of them than memory."""
        first = await anext(questions, None)
        if first is None:
            raise InvalidInput("nothing was sent; the first message says which datastore", field="store")
        about = caller.restricted(replace(first, documents=()))
        self._jobs.check(about)  # before anything is read
        with self._jobs.upload() as upload:
            await asyncio.to_thread(upload.add, first.documents)
            async for question in questions:
                await asyncio.to_thread(upload.add, question.documents)
            await asyncio.to_thread(upload.finish)
            return await self._jobs.submit(about, caller.name, upload)

    async def _joined(self, questions: AsyncIterator[AppendToSessionRequest]) -> AppendToSessionRequest:
        parts, size = list[AppendToSessionRequest](), 0
        async for part in questions:
            parts.append(part)
            size += len(part.text.encode()) + 4 * len(part.token_ids)
            if size > self._config.max_append_bytes:
                raise InvalidInput(
                    f"more than {self._config.max_append_bytes:,} bytes in one append; append in several calls",
                    field="text",
                )
        if not parts:
            raise InvalidInput("nothing was sent; the first message names the session", field="session")
        if any(part.session not in ("", parts[0].session) for part in parts):
            raise InvalidInput("the messages of one append name several sessions", field="session")
        token_ids = tuple(id_ for part in parts for id_ in part.token_ids)
        return AppendToSessionRequest(parts[0].session, "".join(part.text for part in parts), token_ids)

    async def _stream(
        self, call: str, request_type: type[Message], data: bytes, context: grpc.aio.ServicerContext
    ) -> None:
        """A generation. What comes while an event is being sent goes out together in the next one."""
        async with self._watched(call, context) as watched:
            caller = self._admitted(watched, context)
            question = caller.restricted(self._question(request_type, data))
            watched.asks(question, prompts=self._config.log_prompts)
            async with aclosing(self._events(watched, question, caller, context)) as events:
                async for event in events:
                    watched.hears(event, self._metrics)
                    await context.write(wire.event_to_wire(event))

    async def _events(
        self, call: Call, question: Any, caller: Caller, context: grpc.aio.ServicerContext
    ) -> AsyncGenerator[WireEvent, None]:
        """What a generation tells; of one that can be resumed, by way of what is kept of it."""
        if isinstance(question, ResumeGenerationRequest):
            run, offset = self._runs.find(question.request_id, caller.name), question.offset
        elif question.resume_s is not None:
            run, offset = Run(caller.name, question.resume_s), 0
            run.work = asyncio.create_task(self._go_on(run, self._drawn(call, question, caller, context)))
        else:
            async with aclosing(self._drawn(call, question, caller, context)) as events:
                async for event in events:
                    yield event
            return
        async with aclosing(run.follow(offset)) as events:
            async for event in events:
                yield event

    async def _drawn(
        self, call: Call, question: Any, caller: Caller, context: grpc.aio.ServicerContext
    ) -> AsyncGenerator[WireEvent, None]:
        """A generation's events, as they come. Who closes this tells the worker that nobody waits any more."""
        turn, left_s, event = caller.name or context.peer(), context.time_remaining(), cast("WireEvent", ())
        with self._workers.ask(question, left_s, id_=call.id, caller=turn, owner=caller.name) as asked:
            while not isinstance(event, Finished):
                for event in merged(await asked.take()):
                    yield event

    async def _go_on(self, run: Run, events: AsyncGenerator[WireEvent, None]) -> None:
        """Task: a generation goes on, whoever follows it, until nobody has come back for too long."""
        run.keeper = asyncio.create_task(self._look_after(run))
        try:
            async with aclosing(events):
                async for event in events:
                    run.add(event)
                    if isinstance(event, Accepted):
                        self._runs.keep(run)
        except MemlmError as error:
            run.fail(error)
        except asyncio.CancelledError:
            run.fail(Cancelled("the generation was cancelled"))
        except Exception:
            log.exception("a generation failed")
            run.fail(InternalError("a bug in the server; its log tells more"))

    async def _look_after(self, run: Run) -> None:
        """Task: forgets a generation that nobody came back to, ended or not."""
        while not run.is_given_up:
            await asyncio.sleep(min(LOOK_S, run.keep_s))
        if run.accepted is not None:
            self._runs.stop(run.accepted.request_id, run)
        elif run.work is not None:
            run.work.cancel()

    @property
    def jobs(self) -> Jobs:
        """Long work on datastores."""
        return self._jobs

    @asynccontextmanager
    async def _watched(self, name: str, context: grpc.aio.ServicerContext) -> AsyncIterator[Call]:
        """Whatever goes wrong inside becomes the status of the call: one place for all of them."""
        try:
            with self._calls.watch(name, context) as call:
                try:
                    yield call
                except (MemlmError, grpc.aio.AbortError):
                    raise
                except Exception as error:
                    log.exception("call %s failed", call.id)
                    bug = f"a bug in the server; its log tells more under call {call.id}"
                    raise InternalError(bug) from error
        except MemlmError as error:
            try:
                await context.abort(*trailer_of(error))
            except grpc.aio.InternalError:  # the call's own deadline was there first: nobody is left to tell
                raise asyncio.CancelledError from None

    def _admitted(self, call: Call, context: grpc.aio.ServicerContext) -> Caller:
        caller = self._guard.caller(context.invocation_metadata())
        call.caller = caller.name
        caller.check(call.name)
        return caller

    def _info(self) -> ServerInfo:
        config = self._config
        return ServerInfo(
            version=__version__,
            needs_token=not self._guard.is_open,
            max_message_bytes=config.max_message_bytes,
            max_append_bytes=config.max_append_bytes,
            max_running=config.max_running,
            max_queued=config.max_queued,
            max_queued_tokens=config.max_queued_tokens,
            max_session_bytes=config.max_session_bytes,
            session_ttl_s=config.session_ttl_s,
            max_upload_bytes=config.max_upload_bytes,
            max_jobs=config.max_jobs if config.store_dir and config.index_workers else 0,
        )

    def _question(self, request_type: type[Message], data: bytes) -> Any:
        if self.draining:
            raise Unavailable("the server is stopping; ask another one, or this one later")
        return wire.from_wire(wire.read_request(request_type, data))


def merged(answers: Sequence[Answer]) -> Iterator[WireEvent]:
    """The events in some answers, with tokens that follow each other in one. Raises the failure that ends them."""
    tokens, size = list[bytes](), 0
    for answer in answers:
        for event in answer.events if isinstance(answer, Events) else ():
            if tokens and (size >= MAX_EVENT_BYTES or not isinstance(event, tuple)):
                yield tuple(tokens)
                tokens, size = [], 0
            if isinstance(event, tuple):
                tokens += event
                size += sum(map(len, event))
            else:
                yield event
    if tokens:
        yield tuple(tokens)
    if not isinstance(answers[-1], Events):
        raise _failure(answers[-1])


def _failure(answer: Answer) -> MemlmError:
    return answer.error if isinstance(answer, Failed) else InternalError(f"the worker answered {type(answer).__name__}")


def _serialize(message: Message) -> bytes:
    return message.SerializeToString()
