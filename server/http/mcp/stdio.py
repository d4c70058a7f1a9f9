"""MCP over standard input and output, for a model in this process or for a server."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from threading import Event
from typing import TYPE_CHECKING, Any

from mcp.server.stdio import stdio_server

from memlm.api.answers import Answer, AnswerRequest
from memlm.api.datastores import DeleteDocumentsRequest
from memlm.api.request import Request
from memlm.client import Client
from memlm.errors import Cancelled
from memlm.server.http.mcp.protocol import server_of
from memlm.server.http.mcp.tools import Host, R

if TYPE_CHECKING:
    from memlm.language_model import LanguageModel

CALLS = 8  # to a server, at a time


def serve(host: LanguageModel | Client) -> None:
    """Serves the client of this process until it closes standard input. All else that is written to standard output
    goes to standard error. A model does one request after the other.
    """
    with ThreadPoolExecutor(CALLS if isinstance(host, Client) else 1) as threads:
        asyncio.run(_serve(LocalHost(host, threads)))


async def _serve(host: Host) -> None:
    @asynccontextmanager
    async def lifespan(_: Any) -> AsyncIterator[Host]:
        yield host

    server = server_of(lifespan)
    async with stdio_server() as (receiving, sending):
        await server.run(receiving, sending, server.create_initialization_options())


class LocalHost:
    """A model or a client. Fulfils `Host`.

    The rights of a token are known to its server alone, which refuses the other calls.
    """

    def __init__(self, host: LanguageModel | Client, threads: ThreadPoolExecutor) -> None:
        self._host, self._threads = host, threads

    def may_call(self, call: str) -> bool:
        return True

    async def ask(self, request: Request[R]) -> R:
        return await self._run(lambda: self._ask(request))

    async def answer(self, request: AnswerRequest) -> Answer:
        has_left = Event()
        try:
            return await self._run(lambda: self._answer(request, has_left))
        finally:
            has_left.set()

    async def _run(self, work: Callable[[], R]) -> R:
        return await asyncio.get_running_loop().run_in_executor(self._threads, work)

    def _ask(self, request: Request[R]) -> R:
        if isinstance(self._host, Client):
            return self._host.ask(request)
        self._host.refresh()  # other commands may have changed the datastores
        if isinstance(request, DeleteDocumentsRequest):
            deleted: Any = self._host.delete_documents(request.document_ids, store=request.store)
            return deleted
        return self._host.ask(request)

    def _answer(self, request: AnswerRequest, has_left: Event) -> Answer:
        if not isinstance(self._host, Client):
            self._host.refresh()
        with self._host.stream(request) as tokens:
            while not has_left.is_set() and tokens.take():
                pass
            if has_left.is_set():
                raise Cancelled("the client no longer waits for the answer")
            return Answer.of(tokens.result())
