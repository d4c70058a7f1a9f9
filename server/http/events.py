"""Server-sent events: the answer to a request with `stream`."""

from __future__ import annotations

import asyncio
from types import TracebackType
from typing import Self

from memlm.errors import MemlmError
from memlm.server.http.answers import server_sent
from memlm.server.http.errors import body_of
from memlm.server.http.exchange import Exchange

EVENTS = "text/event-stream; charset=utf-8"
HEADERS = {"cache-control": "no-cache", "x-accel-buffering": "no"}  # the second keeps nginx from collecting events
DONE = b"data: [DONE]\n\n"
HEARTBEAT = b": waiting\n\n"  # a comment, which clients skip
HEARTBEAT_S = 10.0  # without an event; proxies close a connection that is silent for 30 or 60 s


class EventStream:
    """Sends events. While none comes, sends comments, so that no proxy takes the request for dead.

    The status is sent with the first event or comment. An error within the block is an answer of its own before that,
    and the last event after it.
    """

    def __init__(self, exchange: Exchange) -> None:
        self._exchange, self._writing = exchange, asyncio.Lock()
        self._sent_s = asyncio.get_running_loop().time()
        self._beating: asyncio.Task[None] | None = None

    async def write(self, data: bytes, *, more: bool = True) -> None:
        """Sends an event, once the client has taken enough of those before."""
        async with self._writing:
            if not self._exchange.has_begun:
                await self._exchange.begin(200, EVENTS, HEADERS)
            await self._exchange.write(data, more=more)
            self._sent_s = asyncio.get_running_loop().time()

    async def _beat(self) -> None:
        while True:
            wait_s = self._sent_s + HEARTBEAT_S - asyncio.get_running_loop().time()
            if wait_s > 0:
                await asyncio.sleep(wait_s)
            else:
                await self.write(HEARTBEAT)

    async def __aenter__(self) -> Self:
        self._beating = asyncio.create_task(self._beat())
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        assert self._beating is not None
        self._beating.cancel()
        await asyncio.wait([self._beating])
        if error is None:
            await self.write(DONE, more=False)
        elif isinstance(error, MemlmError) and self._exchange.has_begun:
            await self.write(server_sent(body_of(error)), more=False)
