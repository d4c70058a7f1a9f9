"""Reads an answer as it comes: its content, its thought, and its calls.

A text that may be the beginning of a call or of a tag is held back until more of the answer decides. A call is held
back until its end, since only then it is known that its arguments are JSON. A piece that looks like a call and is none,
or calls a tool that was not offered, stays content: nothing of the answer is lost, and no client runs a tool that it
does not have.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

from memlm.api.chat import Message
from memlm.api.replies.families import HARMONY
from memlm.api.replies.harmony import HarmonyReader
from memlm.api.replies.pieces import Piece, PieceReader
from memlm.api.replies.tags import TagReader
from memlm.api.tools import MAX_CALLS, ReplyFormat, Tool, ToolCall

ID_CHARACTERS = 9  # as Mistral's templates demand it


@dataclass(frozen=True, slots=True)
class Delta:
    """The new parts of an answer since the last delta."""

    content: str = ""
    reasoning: str = ""
    tool_calls: tuple[ToolCall, ...] = ()


class ReplyReader:
    """Reads one answer, in any cuts. `request_id` is that of `Accepted`, from which the ids of calls follow. Unless
    `parallel`, calls behind the first one are left out.
    """

    def __init__(
        self, reply: ReplyFormat, tools: Sequence[Tool], *, request_id: str = "", parallel: bool = True
    ) -> None:
        by_name = {tool.name: tool for tool in tools}
        is_harmony = reply.calls == HARMONY
        self._reader: PieceReader = HarmonyReader(by_name) if is_harmony else TagReader(reply, by_name)
        self._request_id, self._most_calls = request_id, MAX_CALLS if parallel else 1
        self._calls = list[ToolCall]()
        self._contents, self._thoughts = list[str](), list[str]()

    def feed(self, text: str) -> Delta:
        """Takes more of the answer, and returns the parts that became certain."""
        return self._delta(self._reader.feed(text))

    def finish(self) -> Delta:
        """Returns the rest, after the last of the answer."""
        return self._delta(self._reader.finish())

    @property
    def message(self) -> Message:
        """The certain parts, as a message of the assistant."""
        return Message("assistant", _said(self._contents), tuple(self._calls), reasoning=_said(self._thoughts))

    def _delta(self, pieces: Sequence[Piece]) -> Delta:
        delta = Delta(
            "".join(piece.content for piece in pieces),
            "".join(piece.reasoning for piece in pieces),
            self._add_calls(pieces),
        )
        self._contents.append(delta.content)
        self._thoughts.append(delta.reasoning)
        return delta

    def _add_calls(self, pieces: Sequence[Piece]) -> tuple[ToolCall, ...]:
        new = [call for piece in pieces for call in piece.calls][: self._most_calls - len(self._calls)]
        before = len(self._calls)
        self._calls += [ToolCall(self._id(before + place), *call) for place, call in enumerate(new)]
        return tuple(self._calls[before:])

    def _id(self, number: int) -> str:
        return hashlib.sha256(f"{self._request_id}/{number}".encode()).hexdigest()[:ID_CHARACTERS]


def read_reply(
    text: str, reply: ReplyFormat, tools: Sequence[Tool], *, request_id: str = "", parallel: bool = True
) -> Message:
    """A whole answer as a message of the assistant. The arguments are those of `ReplyReader`."""
    reader = ReplyReader(reply, tools, request_id=request_id, parallel=parallel)
    reader.feed(text)
    reader.finish()
    return reader.message


def _said(texts: Sequence[str]) -> str:
    return "".join(texts).replace("\0", "\ufffd")  # a message has no NUL, and a model may write one
