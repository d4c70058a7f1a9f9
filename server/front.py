"""The front: bytes from the network -> questions to the worker -> answers. No torch here, and nothing that blocks.

The contract's descriptors say which calls there are, and `memlm.wire` what each takes and gives, so that the whole
service is two functions: one for calls with one answer, one for streams.
"""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager
from functools import partial
from secrets import token_hex
from typing import Any, cast

import grpc
from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass

from memlm import __version__, wire
from memlm.api import Finished, GenerationEvent, ServerInfo, Token
from memlm.errors import InternalError, InvalidInput, MemlmError, Unavailable
from memlm.questions import AppendToSessionRequest, GetServerInfoRequest
from memlm.server.config import ServerConfig
from memlm.server.messages import Answer, Events, Failed, Result
from memlm.server.metrics import Metrics
from memlm.server.security import Caller, Guard
from memlm.server.worker_link import WorkerLink
from memlm.status import trailer_of
from memlm.v1 import datastores_pb2, generation_pb2, sessions_pb2

SERVICES = tuple(
    service
    for file in (generation_pb2, datastores_pb2, sessions_pb2)
    for service in file.DESCRIPTOR.services_by_name.values()
)

# Tokens are merged up to about half a megabyte, far from the limit of a message, however far behind a client is.
MAX_WEIGHT = 2048

log = logging.getLogger("memlm.server")


class Front:
    """The calls of the service. While `draining`, what is new is refused."""

    def __init__(self, worker: WorkerLink, config: ServerConfig, guard: Guard, metrics: Metrics) -> None:
        """Takes the link to a worker, who knows the callers, and what counts the calls."""
        self._worker, self._config, self._guard, self._metrics = worker, config, guard, metrics
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
        async with _telling(context), self._counted(call):
            caller = self._admitted(call, context)
            return await self._ask(caller, self._question(request_type, data), context)

    async def _collect(
        self,
        call: str,
        request_type: type[Message],
        messages: AsyncIterator[bytes],
        context: grpc.aio.ServicerContext,
    ) -> Any:
        """A call that brings a text in pieces: they are joined, and then asked as one question."""
        async with _telling(context), self._counted(call):
            caller = self._admitted(call, context)
            self._worker.check_room()  # before anything is read
            return await self._ask(caller, await self._joined(request_type, messages), context)

    async def _ask(self, caller: Caller, question: Any, context: grpc.aio.ServicerContext) -> Any:
        """The reply to a question with one answer."""
        if isinstance(question, GetServerInfoRequest):
            return wire.answer_to_wire(question, self._info())
        question = caller.restricted(question)
        turn = caller.name or context.peer()
        with self._worker.ask(question, context.time_remaining(), caller=turn, owner=caller.name) as asked:
            (answer,) = await asked.take()
        if isinstance(answer, Result):
            return wire.answer_to_wire(question, caller.visible(question, answer.value))
        raise _failure(answer)

    async def _joined(self, request_type: type[Message], messages: AsyncIterator[bytes]) -> AppendToSessionRequest:
        parts, size = list[AppendToSessionRequest](), 0
        async for data in messages:
            parts.append(self._question(request_type, data))
            size += len(data)
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
        async with _telling(context), self._counted(call):
            caller = self._admitted(call, context)
            question = caller.restricted(self._question(request_type, data))
            turn = caller.name or context.peer()
            with self._worker.ask(question, context.time_remaining(), caller=turn, owner=caller.name) as asked:
                event, watched = cast("GenerationEvent", ()), self._metrics.generation()
                while not isinstance(event, Finished):
                    for event in merged(await asked.take()):
                        watched.event(event)
                        await context.write(wire.event_to_wire(event))

    @asynccontextmanager
    async def _counted(self, call: str) -> AsyncIterator[None]:
        with self._metrics.call(call):
            yield

    def _admitted(self, call: str, context: grpc.aio.ServicerContext) -> Caller:
        caller = self._guard.caller(context.invocation_metadata())
        caller.check(call)
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
        )

    def _question(self, request_type: type[Message], data: bytes) -> Any:
        if self.draining:
            raise Unavailable("the server is stopping; ask another one, or this one later")
        return wire.from_wire(wire.read_request(request_type, data))


def merged(answers: Sequence[Answer]) -> Iterator[GenerationEvent]:
    """The events in some answers, with tokens that follow each other in one. Raises the failure that ends them."""
    tokens: list[Token] = []
    for answer in answers:
        for event in answer.events if isinstance(answer, Events) else ():
            if isinstance(event, tuple) and _weight(tokens) < MAX_WEIGHT:
                tokens += event
                continue
            if tokens:
                yield tuple(tokens)
            tokens = list(event) if isinstance(event, tuple) else []
            if not tokens:
                yield event
    if tokens:
        yield tuple(tokens)
    if not isinstance(answers[-1], Events):
        raise _failure(answers[-1])


def _weight(tokens: Sequence[Token]) -> int:
    """How many records a message of these tokens holds."""
    return sum(1 + len(token.neighbors) + len(token.top_logprobs) for token in tokens)


@asynccontextmanager
async def _telling(context: grpc.aio.ServicerContext) -> AsyncIterator[None]:
    """Whatever goes wrong inside becomes the status of the call: one place for all of them."""
    try:
        yield
    except MemlmError as error:
        await context.abort(*trailer_of(error))
    except grpc.aio.AbortError:
        raise
    except Exception:
        id_ = token_hex(8)
        log.exception("call %s failed", id_)
        await context.abort(*trailer_of(InternalError(f"a bug in the server; its log tells more under call {id_}")))


def _failure(answer: Answer) -> MemlmError:
    return answer.error if isinstance(answer, Failed) else InternalError(f"the worker answered {type(answer).__name__}")


def _serialize(message: Message) -> bytes:
    return message.SerializeToString()
