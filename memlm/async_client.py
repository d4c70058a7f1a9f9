"""`Client`, awaited.

async with AsyncClient("localhost:50051") as client:
async for token in await client.generate("def main(", max_tokens=64):
print(token.text, end="")
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import AsyncIterator, Sequence
from types import TracebackType
from typing import Any, Self

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from memlm import wire
from memlm.api import (
    Accepted,
    DeleteReport,
    Finished,
    GenerateRequest,
    ModelInfo,
    Neighbor,
    Score,
    StoreInfo,
    Token,
)
from memlm.client import DEFAULT_TIMEOUT_S, READY_POLL_S, channel_options, score_request, told_as_ours
from memlm.errors import DeadlineExceeded, InternalError
from memlm.status import error_of
from memlm.v1 import datastores_pb2 as stores
from memlm.v1 import datastores_pb2_grpc, generation_pb2_grpc
from memlm.v1 import generation_pb2 as gen


class AsyncClient:
    """The same as `Client`, awaited: `stream = await client.generate(...)`, then `async for token in stream`."""

    def __init__(self, target: str, *, timeout_s: float = DEFAULT_TIMEOUT_S) -> None:
        """Connects when first used; `target` is HOST:PORT."""
        self.target, self.timeout_s = target, timeout_s
        self._channel = grpc.aio.insecure_channel(target, options=channel_options())
        self._generation = generation_pb2_grpc.GenerationStub(self._channel)
        self.datastores = AsyncDatastores(self)

    async def generate(self, prompt: str, *, timeout_s: float | None = None, **options: Any) -> AsyncTokenStream:
        """See `Client.generate`."""
        request = wire.generate_request_to(GenerateRequest.of(prompt, options))
        call = self._generation.Generate(request, timeout=self.timeout_s if timeout_s is None else timeout_s)
        return await AsyncTokenStream.begin(call, self.target)

    async def score(
        self, text: str, *, token_scores: bool = False, timeout_s: float | None = None, **memory: Any
    ) -> Score:
        """See `Client.score`."""
        request = score_request(text, token_scores, memory)
        return wire.score_from(await self._call(self._generation.Score, request, timeout_s))

    async def search(
        self, store: str | None, text: str, *, k: int = 8, nprobe: int | None = None, timeout_s: float | None = None
    ) -> tuple[Neighbor, ...]:
        """See `Client.search`."""
        request = stores.SearchRequest(text=text, store=store, k=k, nprobe=nprobe)
        answer = await self._call(self.datastores._stub.Search, request, timeout_s)
        return tuple(map(wire.neighbor_from, answer.neighbors))

    async def tokenize(self, text: str, *, timeout_s: float | None = None) -> list[int]:
        """See `Client.tokenize`."""
        return list((await self._call(self._generation.Tokenize, gen.TokenizeRequest(text=text), timeout_s)).token_ids)

    async def detokenize(self, token_ids: Sequence[int], *, timeout_s: float | None = None) -> str:
        """See `Client.detokenize`."""
        request = gen.DetokenizeRequest(token_ids=token_ids)
        return str((await self._call(self._generation.Detokenize, request, timeout_s)).text)

    async def get_model(self, *, timeout_s: float | None = None) -> ModelInfo:
        """See `Client.get_model`."""
        return wire.model_from(await self._call(self._generation.GetModel, gen.GetModelRequest(), timeout_s))

    async def wait_until_ready(self, timeout_s: float = DEFAULT_TIMEOUT_S) -> None:
        """See `Client.wait_until_ready`."""
        check, deadline = health_pb2_grpc.HealthStub(self._channel).Check, time.monotonic() + timeout_s
        while (left := deadline - time.monotonic()) > 0:
            try:
                answer = await check(health_pb2.HealthCheckRequest(), timeout=left, wait_for_ready=True)
            except grpc.RpcError as error:
                raise DeadlineExceeded(f"{self.target} is not ready: {error_of(error, self.target)}") from None
            if answer.status == health_pb2.HealthCheckResponse.SERVING:
                return
            await asyncio.sleep(READY_POLL_S)
        raise DeadlineExceeded(f"{self.target} answers, but was not ready within {timeout_s:g} s; look at its log")

    async def close(self) -> None:
        """See `Client.close`."""
        await self._channel.close()

    async def __aenter__(self) -> Self:
        """Closes at the end of the block."""
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Closes."""
        await self.close()

    async def _call(self, method: Any, request: Any, timeout_s: float | None) -> Any:
        with told_as_ours(self.target):
            return await method(request, timeout=self.timeout_s if timeout_s is None else timeout_s)


class AsyncDatastores:
    """The same as `Datastores`, awaited."""

    def __init__(self, client: AsyncClient) -> None:
        """`AsyncClient.datastores` is one."""
        self._client = client
        self._stub = datastores_pb2_grpc.DatastoresStub(client._channel)

    async def list(self, *, timeout_s: float | None = None) -> tuple[StoreInfo, ...]:
        """See `Datastores.list`."""
        answer = await self._client._call(self._stub.ListDatastores, stores.ListDatastoresRequest(), timeout_s)
        return tuple(map(wire.store_from, answer.datastores))

    async def delete_documents(
        self, store: str | None, document_ids: Sequence[str], *, timeout_s: float | None = None
    ) -> DeleteReport:
        """See `Datastores.delete_documents`."""
        request = stores.DeleteDocumentsRequest(store=store, document_ids=document_ids)
        return wire.deleted_from(await self._client._call(self._stub.DeleteDocuments, request, timeout_s))


class AsyncTokenStream(AsyncIterator[Token]):
    """The tokens of one generation, as they come; see `TokenStream`."""

    def __init__(self, call: Any, target: str, accepted: Accepted) -> None:
        """`begin` makes one."""
        self._call, self._target = call, target
        self.accepted = accepted
        self.finished: Finished | None = None
        self._ready: deque[Token] = deque()

    @classmethod
    async def begin(cls, call: Any, target: str) -> Self:
        """Waits for the first event, so that a request that is refused is refused here."""
        with told_as_ours(target):
            first = wire.event_from(await call.read())
        if not isinstance(first, Accepted):
            raise InternalError(f"a generation began with {type(first).__name__}, not with Accepted")
        return cls(call, target, first)

    async def __anext__(self) -> Token:
        """The next token; waits for it."""
        while not self._ready:
            with told_as_ours(self._target):
                message = await self._call.read()
            if message is grpc.aio.EOF:
                raise StopAsyncIteration
            event = wire.event_from(message)
            if isinstance(event, Finished):
                self.finished = event
            elif isinstance(event, tuple):
                self._ready.extend(event)
        return self._ready.popleft()

    async def close(self) -> None:
        """Stops the generation if it is still going on."""
        self._call.cancel()

    async def __aenter__(self) -> Self:
        """Closes at the end of the block."""
        return self

    async def __aexit__(self, *_: object) -> None:
        """Closes."""
        await self.close()
