"""The pieces of an answer, as readers give them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple, Protocol

from memlm.api.replies.calls import Call


class Piece(NamedTuple):
    """Some of an answer: of one of the three."""

    content: str = ""
    reasoning: str = ""
    calls: tuple[Call, ...] = ()


class PieceReader(Protocol):
    """Reads an answer that comes in any cuts. Joined, the pieces are the same for all."""

    def feed(self, text: str) -> list[Piece]:
        """Takes more of the text, and returns the pieces that became certain."""

    def finish(self) -> list[Piece]:
        """Returns the rest, after the last of the text."""


def place_of_held(text: str, tags: Iterable[str]) -> int:
    """Where the end of a text begins that may be the beginning of a tag, and the white space before it."""
    begin = len(text)
    for tag in tags:
        for length in range(min(len(tag) - 1, len(text)), 0, -1):
            if tag.startswith(text[-length:]):
                begin = min(begin, len(text) - length)
                break
    return len(text[:begin].rstrip())
