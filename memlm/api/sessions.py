"""Requests about sessions, their description, and the handle that works in process and with a server.

with lm.session() as session:            # or client.session()
session.append(open("long.txt"))
for token in session.generate("In short,", max_tokens=100):
print(token.text, end="")
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import IO, Any, Protocol, TypeAlias

from memlm.api.generation import TokenStream
from memlm.api.params import MAX_TTL_S, _PlainRequest
from memlm.errors import InvalidInput

Text: TypeAlias = "str | IO[str] | Iterable[str]"


class SessionHost(Protocol):
    """What has sessions."""

    def generate(self, prompt: str, **options: Any) -> TokenStream:
        """Goes on from a session with `session=name`."""

    def append_to_session(self, name: str, text: str = "", *, token_ids: Sequence[int] = ()) -> SessionInfo:
        """Reads more."""

    def get_session(self, name: str) -> SessionInfo:
        """What is known of it."""

    def fork_session(self, name: str) -> SessionInfo:
        """A copy."""

    def delete_session(self, name: str) -> SessionInfo:
        """Forgets it."""


class Session:
    """One session; leaving its block forgets it."""

    def __init__(self, host: SessionHost, name: str) -> None:
        """`LanguageModel.session` and `Client.session` make one; an old one is taken up by its name."""
        self._host, self.name = host, name

    def info(self) -> SessionInfo:
        """How much it holds, and when it goes. Raises NotFound where it has gone."""
        return self._host.get_session(self.name)

    def append(self, text: Text = "", *, token_ids: Sequence[int] = ()) -> SessionInfo:
        """Reads a text (a string, an open file, or pieces), or tokens, into the model's memories: all, or nothing."""
        return self._host.append_to_session(self.name, whole(text), token_ids=token_ids)

    def generate(self, prompt: str = "", **options: Any) -> TokenStream:
        """Goes on; when the stream has come to its end, the session holds prompt and tokens too."""
        return self._host.generate(prompt, session=self.name, **options)

    def fork(self) -> Session:
        """Another one that has read the same, and goes its own way."""
        return Session(self._host, self._host.fork_session(self.name).name)

    def delete(self) -> None:
        """Forgets it."""
        self._host.delete_session(self.name)

    def __enter__(self) -> Session:
        """Forgets it at the end of the block."""
        return self

    def __exit__(self, *_: object) -> None:
        """Forgets it."""
        self.delete()


def whole(text: Text) -> str:
    """A text in one piece."""
    if isinstance(text, str):
        return text
    return text.read() if hasattr(text, "read") else "".join(text)


@dataclass(frozen=True, slots=True)
class SessionInfo:
    """One session: how much text it holds, in how many bytes of memory, when it was made and last used, and when it
    goes unless it is used (seconds since 1970). While it is `busy`, `reading_done` of `reading` tokens that were
    appended have been read.
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


@dataclass(frozen=True, slots=True)
class _SessionRequest:
    """A question about a session."""

    session: str


@dataclass(frozen=True, slots=True)
class CreateSessionRequest:
    """A session that nobody has read anything into, for `ttl_s` seconds after its last use."""

    ttl_s: float | None = None

    def __post_init__(self) -> None:
        """Refuses what is no time."""
        if self.ttl_s is not None and not 0 < self.ttl_s <= MAX_TTL_S:
            raise InvalidInput(f"ttl_s is {self.ttl_s}; expected above 0 and at most {MAX_TTL_S:,.0f}", field="ttl_s")


@dataclass(frozen=True, slots=True)
class AppendToSessionRequest:
    """Read this into a session."""

    session: str
    text: str = ""
    token_ids: tuple[int, ...] = ()


class GetSessionRequest(_SessionRequest):
    """What is known of this session?"""

    __slots__ = ()


class ListSessionsRequest(_PlainRequest):
    """Which sessions are the caller's?"""

    __slots__ = ()


class ForkSessionRequest(_SessionRequest):
    """Another session that has read the same."""

    __slots__ = ()


class DeleteSessionRequest(_SessionRequest):
    """Forget this session."""

    __slots__ = ()
