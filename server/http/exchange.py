"""One request over HTTP and its answer: the transport of a call, as the service sees it."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Mapping
from contextlib import suppress
from typing import Any
from urllib.parse import parse_qsl

from starlette.types import Receive, Scope, Send

from memlm.errors import Cancelled, DeadlineExceeded, InvalidInput
from memlm.server.config import ServerConfig
from memlm.server.http.errors import TooLarge
from memlm.server.http.schema import Schema, check, normalized, refuse_unknown

JSON = "application/json"
MAX_QUERY_PARAMETERS = 32
DROPPED_BYTES, DROPPED_S = 32 << 20, 5.0  # of a refused body that are read, since a client may send all before it reads


class Exchange:
    """A request and its answer. Fulfils `Transport`.

    Once the body has been read, a client that leaves cancels the task of the request, as gRPC does.
    """

    def __init__(self, config: ServerConfig, scope: Scope, receive: Receive, send: Send) -> None:
        self._config, self._scope, self._receive, self._send = config, scope, receive, send
        self.headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]}
        self.path_params: Mapping[str, str] = scope.get("path_params", {})
        self.has_begun = self.is_abandoned = False
        self._has_read, self._task = False, asyncio.current_task()
        self._watching: asyncio.Task[None] | None = None

    def peer(self) -> str:
        host, port = self._scope.get("client") or ("", 0)
        return f"{'ipv6' if ':' in host else 'ipv4'}:{host}:{port}"

    def invocation_metadata(self) -> list[tuple[str, str]]:
        return list(self.headers.items())

    def time_remaining(self) -> float | None:
        return None

    async def read(self) -> bytes:
        """The whole body. Raises TooLarge above the limit of a message."""
        return b"".join([chunk async for chunk in self.chunks(self._config.max_message_bytes)])

    async def chunks(self, limit: int) -> AsyncIterator[bytes]:
        """The body as it comes. Raises TooLarge above a limit, and DeadlineExceeded for a client that stalls."""
        size = int(length) if (length := self.headers.get("content-length", "0")).isdigit() else 0
        self._check_size(size, limit)
        size, more = 0, True
        while more:
            try:
                async with asyncio.timeout(self._config.message_timeout_s):
                    message = await self._receive()
            except TimeoutError:
                limit_s = self._config.message_timeout_s
                raise DeadlineExceeded(f"nothing of the body came within {limit_s:g} s") from None
            if message["type"] == "http.disconnect":
                self.is_abandoned = True
                raise Cancelled("the client left before its request was complete")
            more, size = message.get("more_body", False), size + len(message.get("body", b""))
            self._check_size(size, limit)
            if not more:
                self.watch()
            yield message.get("body", b"")

    def query(self, parameters: Mapping[str, Schema]) -> dict[str, Any]:
        """The parameters of the URL. Raises InvalidInput for one that is unknown or has a wrong value."""
        text = self._scope["query_string"].decode("latin-1")
        try:
            pairs = parse_qsl(text, keep_blank_values=True, max_num_fields=MAX_QUERY_PARAMETERS)
        except ValueError as error:
            raise InvalidInput(f"the query of the URL cannot be read ({error})") from None
        values = {}
        for name, value in pairs:
            if name not in parameters:
                refuse_unknown(name, parameters)
            values[name] = normalized(_parsed(value, parameters[name]["type"]), parameters[name])
            check(values[name], parameters[name], name)
        return values

    def check_content_type(self, expected: str) -> None:
        """Raises InvalidInput for a body of another type. A page of another site cannot send JSON unasked."""
        given = self.headers.get("content-type", "").partition(";")[0].strip().lower()
        if given != expected:
            raise InvalidInput(f"the body's Content-Type is {given[:100]!r}; expected {expected}")

    def watch(self) -> None:
        """Cancels the request's task when the client leaves. Called once nothing more of the body is to come."""
        self._has_read = True
        if self._watching is None:
            self._watching = asyncio.create_task(self._wait_for_disconnect())

    async def _wait_for_disconnect(self) -> None:
        while (await self._receive())["type"] != "http.disconnect":
            pass
        self.is_abandoned = True
        if self._task is not None:
            self._task.cancel()

    def close(self) -> None:
        if self._watching is not None:
            self._watching.cancel()

    async def begin(self, status: int, content_type: str, headers: Mapping[str, str] = {}) -> None:
        """Sends the status and the headers."""
        self.has_begun = True
        pairs = {"content-type": content_type, "x-content-type-options": "nosniff", **headers}
        if not self._has_read:
            pairs["connection"] = "close"  # else the rest of the body would be read and dropped
        encoded = [(name.encode(), value.encode()) for name, value in pairs.items()]
        await self._send({"type": "http.response.start", "status": status, "headers": encoded})

    async def write(self, data: bytes, *, more: bool = True) -> None:
        """Sends a part of the answer, once the client has taken enough of the parts before."""
        await self._send({"type": "http.response.body", "body": data, "more_body": more})

    async def reply(
        self, body: bytes, status: int = 200, content_type: str = JSON, headers: Mapping[str, str] = {}
    ) -> None:
        """Sends a whole answer."""
        await self.begin(status, content_type, {"content-length": str(len(body)), **headers})
        if not self._has_read:
            await self.write(body)
            await self._drop_body()
            body = b""
        await self.write(body, more=False)

    async def _drop_body(self) -> None:
        size, more = 0, True
        with suppress(TimeoutError):
            async with asyncio.timeout(DROPPED_S):
                while more and size < DROPPED_BYTES:
                    message = await self._receive()
                    more, size = message.get("more_body", False), size + len(message.get("body", b""))

    async def reply_json(self, value: Any, status: int = 200, headers: Mapping[str, str] = {}) -> None:
        await self.reply(json.dumps(value, allow_nan=False).encode(), status, headers=headers)

    @staticmethod
    def _check_size(size: int, limit: int) -> None:
        if size > limit:
            raise TooLarge(f"the body has more than {limit:,} bytes, which is all that this server takes at once")


def _parsed(text: str, kind: str) -> Any:
    """A value of the URL, as the type that its schema names where the text is one."""
    if kind == "boolean":
        return {"true": True, "false": False}.get(text, text)
    if kind in ("integer", "number"):
        try:
            return int(text) if kind == "integer" and text.isdecimal() and len(text) < 20 else float(text)
        except ValueError:
            return text
    return text
