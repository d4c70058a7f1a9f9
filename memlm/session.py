"""A session as its user has it, whether the model is in this process or behind a server.

with lm.session() as session:            # or client.session()
session.append(open("long.txt"))
for token in session.generate("In short,", max_tokens=100):
print(token.text, end="")
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import IO, Any, Protocol, TypeAlias

from memlm.events import TokenStream
from memlm.reports import SessionInfo

Text: TypeAlias = "str | IO[str] | Iterable[str]"


class Host(Protocol):
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

    def __init__(self, host: Host, name: str) -> None:
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
