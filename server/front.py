"""The front: gRPC calls -> questions to the worker -> answers. No torch here, and nothing that blocks.

`HANDLERS` is the whole service: a function for each call. Around each stands the same wrapping, once: requests that
are no valid protobuf are INVALID_ARGUMENT, errors become status with details, and a call that ends early cancels
its work.
"""

from __future__ import annotations

import asyncio
import logging
import traceback
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import grpc
from google.protobuf.message import DecodeError
from google.protobuf.message_factory import GetMessageClass
from memlm.server import messages as m
from memlm.server.worker_link import WorkerLink
from memlm.v1 import datastores_pb2 as stores
from memlm.v1 import generation_pb2 as gen

from memlm import wire
from memlm.errors import InternalError, InvalidInput, MemlmError, Unavailable
from memlm.status import status_of

MAX_DELETED_AT_ONCE = 10_000
DEFAULT_SEARCH_K = 8

log = logging.getLogger("memlm.server")


class Front:
    """The calls of the service. `draining` refuses whatever is new."""

    def __init__(self, worker: WorkerLink) -> None:
        """Takes the link to a worker."""
        self._worker = worker
        self.draining = False

    def handlers(self) -> tuple[grpc.GenericRpcHandler, ...]:
        """What a gRPC server is given: every call of every service in the contract."""
        return tuple(
            grpc.method_handlers_generic_handler(
                service.full_name, {method.name: self._handler_of(method) for method in service.methods}
            )
            for file in (gen, stores)
            for service in file.DESCRIPTOR.services_by_name.values()
        )

    async def generate(
        self, request: gen.GenerateRequest, time_left_s: float | None
    ) -> AsyncIterator[gen.GenerateEvent]:
        """Streams a generation's events; what piled up while one was being sent goes out together."""
        async with self._worker.ask(wire.generate_request_from(request), time_left_s) as answers:
            last = False
            while not last:
                answer = await answers.get()
                if not isinstance(answer, m.Events):
                    raise _error_in(answer)
                last = answer.last
                for event in answer.events:
                    yield wire.event_to(event)

    async def score(self, request: gen.ScoreRequest, time_left_s: float | None) -> gen.ScoreResponse:
        """See `LanguageModel.score`."""
        question = m.ScoreText(request.text, wire.memory_from(request.memory), request.token_scores)
        return wire.score_to(await self._answer(question, time_left_s))

    async def tokenize(self, request: gen.TokenizeRequest, time_left_s: float | None) -> gen.TokenizeResponse:
        """See `LanguageModel.tokenize`."""
        return gen.TokenizeResponse(token_ids=await self._answer(m.Tokenize(request.text), time_left_s))

    async def detokenize(self, request: gen.DetokenizeRequest, time_left_s: float | None) -> gen.DetokenizeResponse:
        """See `LanguageModel.detokenize`."""
        return gen.DetokenizeResponse(text=await self._answer(m.Detokenize(tuple(request.token_ids)), time_left_s))

    async def get_model(self, request: gen.GetModelRequest, time_left_s: float | None) -> gen.Model:
        """See `LanguageModel.info`."""
        return wire.model_to(await self._answer(m.DescribeModel(), time_left_s))

    async def list_datastores(
        self, request: stores.ListDatastoresRequest, time_left_s: float | None
    ) -> stores.ListDatastoresResponse:
        """See `LanguageModel.stores`."""
        loaded = await self._answer(m.ListStores(), time_left_s)
        return stores.ListDatastoresResponse(datastores=map(wire.store_to, loaded))

    async def search(self, request: stores.SearchRequest, time_left_s: float | None) -> stores.SearchResponse:
        """See `LanguageModel.search`."""
        given = {"store": None, "k": DEFAULT_SEARCH_K, "nprobe": None, **wire.optional(request, "store", "k", "nprobe")}
        found = await self._answer(m.SearchText(request.text, **given), time_left_s)
        return stores.SearchResponse(neighbors=map(wire.neighbor_to, found))

    async def delete_documents(
        self, request: stores.DeleteDocumentsRequest, time_left_s: float | None
    ) -> stores.DeleteDocumentsResponse:
        """See `LanguageModel.delete_documents`."""
        ids = wire.document_ids_from(request, at_most=MAX_DELETED_AT_ONCE)
        store = wire.optional(request, "store").get("store")
        return wire.deleted_to(await self._answer(m.DeleteDocuments(tuple(ids), store), time_left_s))

    async def _answer(self, question: m.Question, time_left_s: float | None) -> Any:
        async with self._worker.ask(question, time_left_s) as answers:
            answer = await answers.get()
            if isinstance(answer, m.Answer):
                return answer.value
            raise _error_in(answer)

    def _handler_of(self, method: Any) -> grpc.RpcMethodHandler:
        """The wrapping of one call: `HANDLERS` names the function inside."""
        work = getattr(self, HANDLERS[method.name])
        read = _reader_of(GetMessageClass(method.input_type))
        if method.server_streaming:
            return grpc.unary_stream_rpc_method_handler(self._streaming(work), read, _serialize)
        return grpc.unary_unary_rpc_method_handler(self._unary(work), read, _serialize)

    def _unary(self, work: Callable[[Any, float | None], Awaitable[Any]]) -> Any:
        async def call(request: Any, context: grpc.aio.ServicerContext) -> Any:
            try:
                return await work(self._accepted(request), context.time_remaining())
            except Exception as error:
                await _abort(context, error)

        return call

    def _streaming(self, work: Callable[[Any, float | None], AsyncIterator[Any]]) -> Any:
        async def call(request: Any, context: grpc.aio.ServicerContext) -> AsyncIterator[Any]:
            try:
                async for message in work(self._accepted(request), context.time_remaining()):
                    yield message
            except Exception as error:
                await _abort(context, error)

        return call

    def _accepted(self, request: Any) -> Any:
        if self.draining:
            raise Unavailable("the server is stopping; ask another one")
        if isinstance(request, MemlmError):
            raise request
        return request


HANDLERS = {
    "Generate": "generate",
    "Score": "score",
    "Tokenize": "tokenize",
    "Detokenize": "detokenize",
    "GetModel": "get_model",
    "ListDatastores": "list_datastores",
    "Search": "search",
    "DeleteDocuments": "delete_documents",
}


def _reader_of(kind: Any) -> Callable[[bytes], Any]:
    """Parses a request; bytes that are none, or text that is not UTF-8, give the error to be told."""

    def read(raw: bytes) -> Any:
        try:
            return kind.FromString(raw)
        except (DecodeError, UnicodeDecodeError) as error:
            return InvalidInput(
                f"the request is no valid {kind.DESCRIPTOR.name}, or a text in it is not UTF-8 ({error})"
            )

    return read


def _serialize(message: Any) -> bytes:
    return bytes(message.SerializeToString())


def _error_in(answer: m.FromWorker) -> MemlmError:
    return answer.error if isinstance(answer, m.Failed) else InternalError("the worker gave no answer to the question")


async def _abort(context: grpc.aio.ServicerContext, error: Exception) -> None:
    """Ends a call with the status that tells the error; a bug of ours is told by name only, and logged whole."""
    if isinstance(error, grpc.aio.AbortError | asyncio.CancelledError):
        raise error
    if not isinstance(error, MemlmError):
        log.error("a call failed:\n%s", "".join(traceback.format_exception(error)))
        error = InternalError("the call failed by a bug of ours; the server's log says more")
    status = status_of(error)
    await context.abort(status.code, status.details, status.trailing_metadata)
