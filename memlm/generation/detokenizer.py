"""Generated tokens -> text that may be shown: whole characters only, and nothing of a stop string.

A token's bytes may end in the middle of a character, and a stop string may begin in one token and end in another. A
token is released once no character and no stop string that touches it can still change.
"""

from __future__ import annotations

import codecs
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from memlm.api.generation import Token


class StopMatcher:
    """Finds a stop string in a text that comes in pieces, with the Knuth-Morris-Pratt algorithm. Its cost is linear in
    the text. The last `matched` characters of the text are the beginning of the stop string.
    """

    def __init__(self, stop: str) -> None:
        self.stop, self.matched = stop, 0
        self._shorter = [0]  # for each length that was matched: the longest shorter beginning that ends there as well

    def feed(self, text: str) -> int | None:
        """Takes more of the text. Returns how many characters of it complete the stop string, or None."""
        for place, character in enumerate(text):
            while self.matched and self.stop[self.matched] != character:
                self.matched = self._shorter[self.matched - 1]
            self.matched += self.stop[self.matched] == character
            if self.matched == len(self.stop):
                return place + 1
            if self.matched > len(self._shorter):
                self._learn()
        return None

    def _learn(self) -> None:
        """Extends the table by one length when that is first matched: long stop strings cost nothing."""
        next_, length = len(self._shorter), self._shorter[-1]
        while length and self.stop[length] != self.stop[next_]:
            length = self._shorter[length - 1]
        self._shorter.append(length + (self.stop[length] == self.stop[next_]))


@dataclass
class Detokenizer:
    """Holds tokens back as long as their text is not certain. `stopped_by` is the stop string reached, if any.

    A character that spans tokens belongs to the token that completes it. The earlier tokens add no text.
    """

    stop: Sequence[str] = ()
    stopped_by: str | None = None
    _waiting: deque[Token] = field(default_factory=deque)
    _length: int = 0  # characters of all that waits
    _incomplete: int = 0  # tokens at the end that share a character with what is still to come
    _decoder: codecs.IncrementalDecoder = field(
        default_factory=lambda: codecs.getincrementaldecoder("utf-8")("replace")
    )
    _matchers: tuple[StopMatcher, ...] = ()

    def __post_init__(self) -> None:
        self._matchers = tuple(map(StopMatcher, self.stop))

    def push(self, token: Token) -> list[Token]:
        """Takes the next token and fills in its `text`. Returns the tokens that became certain."""
        text = self._decoder.decode(token.bytes)
        self._incomplete = (1 if text else self._incomplete + 1) if self._decoder.getstate()[0] else 0
        self._waiting.append(replace(token, text=text))
        before, self._length = self._length, self._length + len(text)
        if found := self._first_stop(text, before):
            self._cut(*found)
            return self._release(self._length)
        possible = max((matcher.matched for matcher in self._matchers), default=0)
        return self._release(self._length - possible)

    def finish(self) -> list[Token]:
        """Returns the tokens that are still waiting, after the last token. An incomplete character becomes U+FFFD."""
        rest, self._incomplete = self._decoder.decode(b"", final=True), 0
        if rest:
            last = self._waiting.pop()
            self._waiting.append(replace(last, text=last.text + rest))
            self._length += len(rest)
        return self._release(self._length)

    def _first_stop(self, text: str, before: int) -> tuple[int, str] | None:
        """Returns the earliest stop string in the waiting text, the longest of two with one beginning, and its
        beginning.

        The waiting text has `before` characters and the new `text`.
        """
        found = [
            (before + end - len(matcher.stop), -len(matcher.stop), matcher.stop)
            for matcher in self._matchers
            if (end := matcher.feed(text)) is not None
        ]
        if not found:
            return None
        begin, _, stop = min(found)
        return begin, stop

    def _cut(self, begin: int, stop: str) -> None:
        """Drops the stop string and all text behind it."""
        self.stopped_by, self._incomplete = stop, 0
        while self._waiting and self._length - len(self._waiting[-1].text) >= begin:
            self._length -= len(self._waiting.pop().text)
        if self._length > begin:
            last = self._waiting.pop()
            self._waiting.append(replace(last, text=last.text[: begin - self._length]))
        self._length = begin

    def _release(self, num_certain: int) -> list[Token]:
        """Releases the tokens with all of their text in the first `num_certain` waiting characters."""
        released = []
        while len(self._waiting) > self._incomplete and len(self._waiting[0].text) <= num_certain:
            token = self._waiting.popleft()
            num_certain -= len(token.text)
            self._length -= len(token.text)
            released.append(token)
        return released
