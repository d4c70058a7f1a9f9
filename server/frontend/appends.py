"""Joins the messages of an append to a session."""

from __future__ import annotations

from array import array
from collections.abc import AsyncIterator

from memlm.api.sessions import AppendToSessionRequest
from memlm.errors import InvalidInput
from memlm.server.config import ServerConfig
from memlm.server.quota import Holding, Quota, share_of

ID_BYTES = 4


def append_quota(config: ServerConfig) -> Quota:
    """The quota of bytes of unfinished appends. A caller's share has room for at least one append."""
    append_bytes = config.max_append_bytes + config.max_message_bytes
    total = max(config.max_unfinished_bytes, append_bytes)
    return Quota("bytes of unfinished appends", total, max(share_of(total), append_bytes))


async def join_append(
    parts: AsyncIterator[AppendToSessionRequest], holding: Holding, config: ServerConfig
) -> AppendToSessionRequest:
    """Joins the messages of one append. Meanwhile it holds their bytes, and room for the next message.

    Raises InvalidInput for an append that is too large or names no or several sessions, and Overloaded if the caller's
    unfinished appends hold too much.
    """
    texts, token_ids, session, size = list[bytes](), array("i"), None, 0
    holding.take(config.max_message_bytes)
    async for part in parts:
        session = part.session if session is None else session
        if part.session not in ("", session):
            raise InvalidInput("the messages of one append name several sessions", field="session")
        text = part.text.encode()  # a string may take four bytes for each of its characters
        size += (num_bytes := len(text) + ID_BYTES * len(part.token_ids))
        if size > config.max_append_bytes:
            raise InvalidInput(
                f"more than {config.max_append_bytes:,} bytes in one append; append in several calls", field="text"
            )
        holding.take(num_bytes)
        texts.append(text)
        token_ids.extend(part.token_ids)
    holding.give(config.max_message_bytes)
    if session is None:
        raise InvalidInput("nothing was sent; the first message names the session", field="session")
    return AppendToSessionRequest(session, b"".join(texts).decode(), tuple(token_ids))
