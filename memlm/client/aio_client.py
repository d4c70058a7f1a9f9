"""The client, awaited.

async with AsyncClient("localhost:50051") as client:
async for token in await client.generate("def main(", max_tokens=64):
print(token.text, end="")
"""

from __future__ import annotations

from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import suppress
from types import TracebackType
from typing import Any, cast

from memlm.api.datastores import SearchRequest
from memlm.api.generation import (
    Accepted,
    DetokenizeRequest,
    Finished,
    GenerationEvent,
    Neighbor,
    Token,
    TokenizeRequest,
)
from memlm.api.params import GenerateRequest, RetrievalParams
from memlm.api.scoring import Score, ScoreRequest
from memlm.api.server import GetModelRequest, GetServerInfoRequest, ModelInfo, ServerInfo
from memlm.api.sessions import (
    CreateSessionRequest,
    DeleteSessionRequest,
    ForkSessionRequest,
    GetSessionRequest,
    ListSessionsRequest,
    SessionInfo,
    Text,
    whole,
)
from memlm.client.aio_datastores import AsyncDatastores, AsyncOperations
from memlm.client.resume import DEFAULT_TIMEOUT_S, Tls
from memlm.errors import InternalError
from memlm.wire.limits import DEFAULT_MAX_MESSAGE_BYTES


class AsyncClient:
    """The same as `Client`, awaited: `stream = await client.generate(...)`, then `async for token in stream`."""

    def __init__(
        self,
        target: str,
        *,
        timeout_s: float = DEFAULT_TIMEOUT_S,
        max_message_bytes: int = DEFAULT_MAX_MESSAGE_BYTES,
        token: str | None = None,
        tls: Tls | None = None,
    ) -> None:
        """Connects when first used, in the event loop that runs then; `target` is HOST:PORT."""
        from memlm.client.aio_transport import AsyncTransport  # here, so that only who connects loads gRPC

        self.target = target
        self._transport = AsyncTransport(target, timeout_s, max_message_bytes, token, tls)
        self.operations = AsyncOperations(self._transport)
        self.datastores = AsyncDatastores(self._transport, self.operations)

    async def generate(self, prompt: str, *, timeout_s: float | None = None, **options: Any) -> AsyncTokenStream:
        """See `Client.generate`."""
        return await AsyncTokenStream.begin(self._transport.events(GenerateRequest.of(prompt, options), timeout_s))

    async def score(
        self, text: str, *, token_scores: bool = False, timeout_s: float | None = None, **retrieval: Any
    ) -> Score:
        """See `Client.score`."""
        return cast(
            Score,
            await self._transport.ask(ScoreRequest(text, RetrievalParams.of(**retrieval), token_scores), timeout_s),
        )

    async def search(
        self, store: str | None, text: str, *, k: int = 8, nprobe: int | None = None, timeout_s: float | None = None
    ) -> tuple[Neighbor, ...]:
        """See `Client.search`."""
        return tuple(await self._transport.ask(SearchRequest(text, store, k, nprobe), timeout_s))

    async def tokenize(self, text: str, *, timeout_s: float | None = None) -> list[int]:
        """See `Client.tokenize`."""
        return list(await self._transport.ask(TokenizeRequest(text), timeout_s))

    async def detokenize(self, token_ids: Sequence[int], *, timeout_s: float | None = None) -> str:
        """See `Client.detokenize`."""
        return str(await self._transport.ask(DetokenizeRequest(tuple(token_ids)), timeout_s))

    async def get_model(self, *, timeout_s: float | None = None) -> ModelInfo:
        """See `Client.get_model`."""
        return cast(ModelInfo, await self._transport.ask(GetModelRequest(), timeout_s))

    async def get_server_info(self, *, timeout_s: float | None = None) -> ServerInfo:
        """See `Client.get_server_info`."""
        return cast(ServerInfo, await self._transport.ask(GetServerInfoRequest(), timeout_s))

    async def session(self, *, ttl_s: float | None = None, timeout_s: float | None = None) -> AsyncSession:
        """See `Client.session`."""
        return AsyncSession(self, (await self._transport.ask(CreateSessionRequest(ttl_s), timeout_s)).name)

    async def append_to_session(
        self, name: str, text: str = "", *, token_ids: Sequence[int] = (), timeout_s: float | None = None
    ) -> SessionInfo:
        """See `Client.append_to_session`."""
        return cast(SessionInfo, await self._transport.append(name, text, token_ids, timeout_s))

    async def get_session(self, name: str, *, timeout_s: float | None = None) -> SessionInfo:
        """See `Client.get_session`."""
        return cast(SessionInfo, await self._transport.ask(GetSessionRequest(name), timeout_s))

    async def list_sessions(self, *, timeout_s: float | None = None) -> tuple[SessionInfo, ...]:
        """See `Client.list_sessions`."""
        return tuple(await self._transport.ask(ListSessionsRequest(), timeout_s))

    async def fork_session(self, name: str, *, timeout_s: float | None = None) -> SessionInfo:
        """See `Client.fork_session`."""
        return cast(SessionInfo, await self._transport.ask(ForkSessionRequest(name), timeout_s))

    async def delete_session(self, name: str, *, timeout_s: float | None = None) -> SessionInfo:
        """See `Client.delete_session`."""
        return cast(SessionInfo, await self._transport.ask(DeleteSessionRequest(name), timeout_s))

    async def wait_until_ready(self, timeout_s: float = DEFAULT_TIMEOUT_S) -> None:
        """See `Client.wait_until_ready`."""
        await self._transport.wait_until_ready(timeout_s)

    async def close(self) -> None:
        """See `Client.close`."""
        await self._transport.close()

    async def __aenter__(self) -> AsyncClient:
        """Closes at the end of the block."""
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Closes."""
        await self.close()


class AsyncSession:
    """The same as `memlm.api.sessions.Session`, awaited: `async with await client.session() as session`."""

    def __init__(self, client: AsyncClient, name: str) -> None:
        """`AsyncClient.session` makes one; an old one is taken up by its name."""
        self._client, self.name = client, name

    async def info(self) -> SessionInfo:
        """See `Session.info`."""
        return await self._client.get_session(self.name)

    async def append(self, text: Text = "", *, token_ids: Sequence[int] = ()) -> SessionInfo:
        """See `Session.append`."""
        return await self._client.append_to_session(self.name, whole(text), token_ids=token_ids)

    async def generate(self, prompt: str = "", **options: Any) -> AsyncTokenStream:
        """See `Session.generate`."""
        return await self._client.generate(prompt, session=self.name, **options)

    async def fork(self) -> AsyncSession:
        """See `Session.fork`."""
        return AsyncSession(self._client, (await self._client.fork_session(self.name)).name)

    async def delete(self) -> None:
        """See `Session.delete`."""
        await self._client.delete_session(self.name)

    async def __aenter__(self) -> AsyncSession:
        """Forgets it at the end of the block."""
        return self

    async def __aexit__(self, *_: object) -> None:
        """Forgets it."""
        await self.delete()


class AsyncTokenStream(AsyncIterator[Token]):
    """The tokens of one generation, as they come; `TokenStream`, awaited."""

    def __init__(self, events: AsyncGenerator[GenerationEvent, None], accepted: Accepted) -> None:
        """`begin` makes one."""
        self._events = events
        self.accepted = accepted
        self.finished: Finished | None = None
        self._ready: deque[Token] = deque()

    @classmethod
    async def begin(cls, events: AsyncGenerator[GenerationEvent, None]) -> AsyncTokenStream:
        """Waits for the first event, so that a request that is refused is refused here."""
        first = await anext(events)
        if not isinstance(first, Accepted):
            raise InternalError(f"a generation began with {type(first).__name__}, not with Accepted")
        return cls(events, first)

    async def __anext__(self) -> Token:
        """The next token; waits for it."""
        while not self._ready:
            await self._hear()
        return self._ready.popleft()

    async def take(self) -> tuple[Token, ...] | None:
        """All that has come since the last time; waits for the first of it. None at the end."""
        with suppress(StopAsyncIteration):
            while not self._ready:
                await self._hear()
        taken = tuple(self._ready)
        self._ready.clear()
        return taken or None

    async def _hear(self) -> None:
        event = await anext(self._events)
        if isinstance(event, Finished):
            self.finished = event
        elif isinstance(event, tuple):
            self._ready.extend(event)

    async def aclose(self) -> None:
        """Stops the generation if it is still going on."""
        await self._events.aclose()

    async def __aenter__(self) -> AsyncTokenStream:
        """Closes at the end of the block."""
        return self

    async def __aexit__(self, *_: object) -> None:
        """Closes."""
        await self.aclose()
