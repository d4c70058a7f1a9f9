"""Requests about sessions, and their description. `memlm.api.handles.Session` is the handle."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from memlm.api.paging import check_page_size, page_of
from memlm.api.params import MAX_TTL_S
from memlm.api.request import Request
from memlm.errors import InvalidInput, check_range


@dataclass(frozen=True, slots=True)
class SessionInfo:
    """Size, times and reading progress of a session.

    `num_bytes` is its size in RAM. Times are seconds since 1970. It expires at `expires_s` unless it is used. While it
    is `busy`, `reading_done` of `reading` tokens have been read: of an append, or again after a span was forgotten. Its
    text is read with the `adapter`, None for the model alone.
    """

    name: str
    num_tokens: int
    num_bytes: int
    created_s: float
    used_s: float
    expires_s: float
    busy: bool = False
    reading: int = 0
    reading_done: int = 0
    adapter: str | None = None


@dataclass(frozen=True, slots=True)
class CreateSessionRequest(Request[SessionInfo]):
    """Creates an empty session that expires `ttl_s` seconds after its last use, for texts read with an `adapter`."""

    ttl_s: float | None = None
    adapter: str | None = None

    def __post_init__(self) -> None:
        check_range("ttl_s", self.ttl_s, above=0, most=MAX_TTL_S)


@dataclass(frozen=True, slots=True)
class AppendToSessionRequest(Request[SessionInfo]):
    """Appends text or tokens to a session."""

    session: str
    text: str = ""
    token_ids: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class GetSessionRequest(Request[SessionInfo]):
    """Describes a session."""

    session: str


@dataclass(frozen=True, slots=True)
class SessionPage:
    """One page of sessions, created last first. `next_page_token` is empty on the last page."""

    sessions: tuple[SessionInfo, ...]
    next_page_token: str = ""


@dataclass(frozen=True, slots=True)
class ListSessionsRequest(Request[SessionPage]):
    """Lists the caller's sessions. `page_size=0` asks for all, `page_token` for the next page."""

    page_size: int = 0
    page_token: str = ""

    def __post_init__(self) -> None:
        check_page_size(self.page_size)

    def page(self, sessions: Iterable[SessionInfo]) -> SessionPage:
        """The page of all these sessions. Raises InvalidInput for a token of another form."""
        placed = page_of(sessions, lambda session: (-session.created_s, session.name), self.page_size, self.page_token)
        return SessionPage(*placed)


@dataclass(frozen=True, slots=True)
class ForkSessionRequest(Request[SessionInfo]):
    """Copies a session under a new name."""

    session: str


@dataclass(frozen=True, slots=True)
class ForgetInSessionRequest(Request[SessionInfo]):
    """Forgets the tokens of a session from `start` up to `stop`, counted from 0."""

    session: str
    start: int
    stop: int

    def __post_init__(self) -> None:
        check_range("start", self.start, least=0, whole=True)
        check_range("stop", self.stop, least=0, whole=True)
        if self.stop <= self.start:
            raise InvalidInput(
                f"the span from {self.start:,} up to {self.stop:,} has no token; expected a stop above the start",
                field="stop",
            )


@dataclass(frozen=True, slots=True)
class DeleteSessionRequest(Request[SessionInfo]):
    """Deletes a session."""

    session: str
