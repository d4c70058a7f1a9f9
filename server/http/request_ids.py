"""The id of a request over HTTP, the caller's `X-Request-Id` or a new one: in the answer, an error and the log."""

from __future__ import annotations

from functools import partial
from secrets import token_hex

from starlette.types import Message, Scope, Send

from memlm.server.telemetry.calls import REQUEST_ID, is_request_id

HEADER = REQUEST_ID.encode()


def with_id(scope: Scope, send: Send) -> tuple[Scope, Send]:
    """The request with exactly one id among its headers, and an answer that has it. An id that a log line could not
    hold as one word, or of more than 128 characters, is replaced.
    """
    given = [value for name, value in scope["headers"] if name == HEADER]
    own = given[0] if len(given) == 1 and is_request_id(given[0].decode("latin-1")) else token_hex(8).encode()
    headers = [(name, value) for name, value in scope["headers"] if name != HEADER]
    return {**scope, "headers": [*headers, (HEADER, own)]}, partial(_send, own, send)


async def _send(own: bytes, send: Send, message: Message) -> None:
    if message["type"] == "http.response.start":
        message = {**message, "headers": [*message["headers"], (HEADER, own)]}
    await send(message)
