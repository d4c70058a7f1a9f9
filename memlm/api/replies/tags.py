"""Reads answers in which calls and thoughts stand between tags, as most families write them."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from memlm.api.replies.calls import calls_in
from memlm.api.replies.families import tags_of
from memlm.api.replies.pieces import Piece, place_of_held
from memlm.api.replies.scanning import BETWEEN, END_OF, OPENERS, STARTERS, End
from memlm.api.tools import ReplyFormat, Tool


class TagReader:
    """A `PieceReader`. White space around thoughts and calls is left out."""

    def __init__(self, reply: ReplyFormat, tools: Mapping[str, Tool]) -> None:
        self._family, self._tools, self._in_thought = reply.calls, tools, reply.in_thought
        self._openers, self._starters = OPENERS.get(reply.calls, ()), STARTERS.get(reply.calls, ())
        self._between = BETWEEN.get(reply.calls, "") + " \n\t\r"
        self._tags = tags_of(reply.thought) if reply.thought else ("", "")
        self._rest, self._found, self._is_over = "", list[Piece](), False
        self._space = ""  # before the next of the content
        self._is_trimmed = False  # a call or a thought came last
        self._has_spoken = False
        self._end: End | None = None
        self._step: Callable[[], bool] = self._begin if reply.thought else self._speak

    def feed(self, text: str) -> list[Piece]:
        self._rest += text
        while self._step():
            pass
        found, self._found = self._found, []
        return found

    def finish(self) -> list[Piece]:
        self._is_over = True
        found = self.feed("")
        if self._space and not self._is_trimmed:
            found.append(Piece(content=self._space))
        self._space = ""
        return found

    def _begin(self) -> bool:
        """Looks for a thought, which nothing but white space comes before."""
        text, tag = self._rest.lstrip(), self._tags[0]
        if not self._is_over and tag.startswith(text) and text != tag:
            return False
        if text.startswith(tag):
            self._rest, self._in_thought = text[len(tag) :], True
        self._is_trimmed = self._in_thought
        self._step = self._think if self._in_thought else self._speak
        return True

    def _think(self) -> bool:
        thought, closed, after = self._rest.partition(self._tags[1])
        if closed or self._is_over:
            self._add_thought(thought.rstrip())
            self._rest, self._space, self._is_trimmed, self._step = after, "", True, self._speak
            return True
        held = place_of_held(self._rest, self._tags[1:])
        self._add_thought(self._rest[:held])
        self._rest = self._rest[held:]
        return False

    def _add_thought(self, text: str) -> None:
        text = text.lstrip() if self._is_trimmed else text
        if text:
            self._found.append(Piece(reasoning=text))
            self._is_trimmed = False

    def _speak(self) -> bool:
        """Gives the content up to the next call."""
        if self._starts_call():
            return True
        if not self._after_space() and (self._is_trimmed or self._starters) and not self._has_spoken:
            self._rest = "" if self._is_trimmed and self._is_over else self._rest
            if not self._is_over:
                return False
        found = [(place, opener) for opener in self._openers if (place := self._rest.find(opener)) >= 0]
        if found:
            place, opener = min(found)
            self._say(self._rest[:place])
            self._open(self._rest[place:], len(opener))
            return True
        held = len(self._rest) if self._is_over else place_of_held(self._rest, self._openers)
        self._say(self._rest[:held])
        self._rest = self._rest[held:]
        return False

    def _after_space(self) -> str:
        return self._rest.lstrip(self._between if self._is_trimmed else None)

    def _starts_call(self) -> bool:
        text = self._after_space()
        if self._has_spoken or not text.startswith(self._starters):
            return False
        if not self._is_trimmed:
            self._space += self._rest[: len(self._rest) - len(text)]
        self._open(text, 1)
        return True

    def _open(self, text: str, opener: int) -> None:
        self._rest, self._end, self._step = text, END_OF[self._family](opener), self._call

    def _call(self) -> bool:
        assert self._end is not None
        end = self._end(self._rest)
        if end is None and not self._is_over:
            return False
        piece, self._rest = self._rest[:end], self._rest[end or len(self._rest) :]
        calls = calls_in(self._family, piece, self._tools)
        if calls is None:
            self._say(piece)
        else:
            self._found.append(Piece(calls=tuple(calls)))
            self._space, self._is_trimmed = "", True
        self._step = self._speak
        return True

    def _say(self, text: str) -> None:
        """Gives content. White space at its end waits for more."""
        text = text.lstrip() if self._is_trimmed else self._space + text
        said = text.rstrip()
        self._space = text[len(said) :]
        if said:
            self._found.append(Piece(content=said))
            self._is_trimmed, self._has_spoken = False, True
