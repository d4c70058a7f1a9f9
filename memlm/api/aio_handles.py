"""Handles of token streams, sessions and operations, awaited. `memlm/api/handles.py` is generated from this file.

A handle works with any host that has the methods of its protocol:

    async with await client.session() as session:
        await session.append(open("long.txt"))
        async for token in await session.generate("In short,", max_tokens=100):
            print(token.text, end="")
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator, Iterable, Sequence
from contextlib import suppress
from typing import IO, Protocol, TypeAlias, Unpack

from memlm.api.chat import Conversation
from memlm.api.generation import Accepted, Completion, Finished, GenerationEvent, Token
from memlm.api.operations import JobReport, OperationInfo, check_deadline, wait_slice
from memlm.api.options import ChatOptions, ContinueOptions, GenerateOptions, TurnOptions
from memlm.api.sessions import SessionInfo
from memlm.errors import InternalError, InvalidInput

Text: TypeAlias = "str | IO[str] | Iterable[str]"


class AsyncTokenStream(AsyncIterator[Token]):
    """The tokens of one generation, as they arrive.

    `accepted` is set from the start, `finished` after the last token. Closing the stream early stops the generation.
    """

    def __init__(self, events: AsyncGenerator[GenerationEvent, None], accepted: Accepted) -> None:
        self._events = events
        self.accepted = accepted
        self.finished: Finished | None = None
        self._ready: deque[Token] = deque()
        self._received: list[Token] = []

    @classmethod
    async def begin(cls, events: AsyncGenerator[GenerationEvent, None]) -> AsyncTokenStream:
        """Waits for the first event. Raises the error of a request that is refused."""
        first = await anext(events)
        if not isinstance(first, Accepted):
            raise InternalError(f"a generation began with {type(first).__name__}, not with Accepted")
        return cls(events, first)

    async def __anext__(self) -> Token:
        while not self._ready:
            await self._receive()
        return self._ready.popleft()

    async def take(self) -> tuple[Token, ...] | None:
        """Returns all tokens that have arrived since the last call, at least one, or None at the end."""
        with suppress(StopAsyncIteration):
            while not self._ready:
                await self._receive()
        taken = tuple(self._ready)
        self._ready.clear()
        return taken or None

    async def _receive(self) -> None:
        event = await anext(self._events)
        if isinstance(event, Finished):
            self.finished = event
        elif isinstance(event, tuple):
            self._ready.extend(event)
            self._received.extend(event)

    async def result(self) -> Completion:
        """Waits for the end, and returns the whole generation, with the tokens that were taken before.

        Raises InvalidInput for a stream that was closed before its end.
        """
        async for _ in self:
            pass
        if self.finished is None:
            raise InvalidInput("the stream was closed before its end; iterate it, or ask again")
        text = "".join(token.text for token in self._received)
        return Completion(text, tuple(self._received), self.accepted, self.finished)

    def __repr__(self) -> str:
        state = "running" if self.finished is None else f"ended: {self.finished.reason}"
        return f"<{type(self).__name__} of {len(self._received)} tokens, {state}; iterate it, or take its result()>"

    async def aclose(self) -> None:
        """Stops the generation if it is still running."""
        await self._events.aclose()

    async def __aenter__(self) -> AsyncTokenStream:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()


class AsyncSessionHost(Protocol):
    """The methods that a session needs of its client or model."""

    async def generate(self, prompt: str | Sequence[int] = "", **options: Unpack[GenerateOptions]) -> AsyncTokenStream:
        """Generates from the context of the session in `session=name`."""

    async def chat(self, messages: Conversation, **options: Unpack[ChatOptions]) -> AsyncTokenStream:
        """Answers messages that follow the context of the session in `session=name`."""

    async def append_to_session(self, name: str, text: str = "", *, token_ids: Sequence[int] = ()) -> SessionInfo:
        """Appends text or tokens."""

    async def get_session(self, name: str) -> SessionInfo:
        """Describes a session."""

    async def forget_in_session(self, name: str, start: int, stop: int) -> SessionInfo:
        """Forgets the tokens from `start` up to `stop`."""

    async def fork_session(self, name: str) -> SessionInfo:
        """Copies a session."""

    async def delete_session(self, name: str) -> SessionInfo:
        """Deletes a session."""


class AsyncSession:
    """A session. Leaving its block deletes it. An existing session is opened by its name."""

    def __init__(self, host: AsyncSessionHost, name: str) -> None:
        self._host, self.name = host, name

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.name}>"

    async def info(self) -> SessionInfo:
        """Size and expiry. Raises NotFound if the session has expired."""
        return await self._host.get_session(self.name)

    async def append(self, text: Text = "", *, token_ids: Sequence[int] = ()) -> SessionInfo:
        """Appends a text (a string, an open file, or pieces) or tokens: all of it, or nothing on an error."""
        return await self._host.append_to_session(self.name, join(text), token_ids=token_ids)

    async def forget(self, start: int, stop: int) -> SessionInfo:
        """Forgets the tokens from `start` up to `stop`, counted from 0, as if they had never been appended.

        `info().num_tokens` before and after an append is the span of what was appended. The tokens behind the span are
        read again, or all that are left, if the model's window or memory has moved past `start`. Forks keep the span.
        Raises InvalidInput for a span without tokens or beyond the session's, Locked while the session is used.
        """
        return await self._host.forget_in_session(self.name, start, stop)

    async def generate(self, prompt: str | Sequence[int] = "", **options: Unpack[ContinueOptions]) -> AsyncTokenStream:
        """Generates from the session's context. At the end of the stream the session holds prompt and tokens too."""
        return await self._host.generate(prompt, session=self.name, **options)

    async def chat(self, messages: Conversation, **options: Unpack[TurnOptions]) -> AsyncTokenStream:
        """Answers new messages. At the end of the stream the session holds them and the answer too."""
        return await self._host.chat(messages, session=self.name, **options)

    async def fork(self) -> AsyncSession:
        """Copies the session. The copies are independent."""
        return AsyncSession(self._host, (await self._host.fork_session(self.name)).name)

    async def delete(self) -> None:
        """Deletes the session."""
        await self._host.delete_session(self.name)

    async def __aenter__(self) -> AsyncSession:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.delete()


class AsyncOperationHost(Protocol):
    """The methods that an operation needs of its client."""

    async def get(self, name: str) -> OperationInfo:
        """Returns the progress of an operation."""

    async def wait(self, name: str, timeout_s: float) -> OperationInfo:
        """Returns the progress of an operation when it has ended, or after `timeout_s`."""

    async def cancel(self, name: str) -> None:
        """Cancels an operation."""


class AsyncOperation:
    """A job on a datastore. It runs on without its handle. An existing operation is opened by its name.

    job = await client.datastores.build("docs", corpus="docs/")
    report = await job.result()
    """

    def __init__(self, host: AsyncOperationHost, name: str) -> None:
        self._host, self.name = host, name

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.name}>"

    async def progress(self, wait_s: float = 0.0) -> OperationInfo:
        """Returns its current progress, or with `wait_s` its progress when it has ended or after that time."""
        return await (self._host.wait(self.name, wait_s) if wait_s else self._host.get(self.name))

    async def wait(self, timeout_s: float | None = None) -> OperationInfo:
        """Waits until it is done, failed or cancelled. Raises DeadlineExceeded after `timeout_s`."""
        deadline_s = None if timeout_s is None else time.monotonic() + timeout_s
        while True:
            info = await self._host.wait(self.name, wait_slice(deadline_s))
            if info.has_ended:
                return info
            check_deadline(deadline_s, info)

    async def result(self, timeout_s: float | None = None) -> JobReport:
        """Waits for its report. Raises its error if it failed or was cancelled."""
        return (await self.wait(timeout_s)).outcome()

    async def cancel(self) -> None:
        """Cancels it and removes its unfinished work. An operation that has ended stays as it is."""
        await self._host.cancel(self.name)


def join(text: Text) -> str:
    """Joins a text that is given as a string, an open file or pieces."""
    if isinstance(text, str):
        return text
    return text.read() if hasattr(text, "read") else "".join(text)
