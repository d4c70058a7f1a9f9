"""Generated tokens -> text that may be shown: whole characters only, and nothing of a stop string.

A token's bytes may end in the middle of a character, and a stop string may begin in one token and end in another. A
token is let go once no character and no stop string that touches it can still change; until then it waits.
"""

from __future__ import annotations

import codecs
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from memlm.events import Token


@dataclass
class TextStream:
    """Holds tokens back as long as their text is not certain. `stopped_by` is the stop string reached, if any.

    A character that spans tokens belongs to the token that completes it; the earlier ones add no text.
    """

    stop: Sequence[str] = ()
    stopped_by: str | None = None
    _waiting: deque[Token] = field(default_factory=deque)
    _text: str = ""  # the text of all that waits
    _incomplete: int = 0  # tokens at the end that share a character with what is still to come
    _decoder: codecs.IncrementalDecoder = field(
        default_factory=lambda: codecs.getincrementaldecoder("utf-8")("replace")
    )

    def push(self, token: Token) -> list[Token]:
        """Takes the next token (its `text` is filled in here) and gives those that became certain."""
        text = self._decoder.decode(token.bytes)
        self._incomplete = (1 if text else self._incomplete + 1) if self._decoder.getstate()[0] else 0
        self._waiting.append(replace(token, text=text))
        self._text += text
        if found := self._first_stop():
            self._cut(*found)
            return self._release(len(self._text))
        return self._release(len(self._text) - self._possible_stop())

    def finish(self) -> list[Token]:
        """Gives what is still waiting: nothing more will come. A character left incomplete becomes U+FFFD."""
        rest, self._incomplete = self._decoder.decode(b"", final=True), 0
        if rest:
            last = self._waiting.pop()
            self._waiting.append(replace(last, text=last.text + rest))
            self._text += rest
        return self._release(len(self._text))

    def _first_stop(self) -> tuple[int, str] | None:
        """Where the earliest stop string begins in the waiting text; the longest wins where two begin together."""
        found = [(self._text.find(stop), -len(stop), stop) for stop in self.stop if stop in self._text]
        if not found:
            return None
        begin, _, stop = min(found)
        return begin, stop

    def _cut(self, begin: int, stop: str) -> None:
        """Drops the stop string and all behind it, with the tokens that have nothing before it."""
        self.stopped_by, self._incomplete = stop, 0
        kept, place = deque[Token](), 0
        for token in self._waiting:
            if place >= begin:
                break
            kept.append(replace(token, text=token.text[: begin - place]))
            place += len(token.text)
        self._waiting, self._text = kept, self._text[:begin]

    def _possible_stop(self) -> int:
        """How many characters at the end may be the beginning of a stop string."""
        longest = max((len(stop) for stop in self.stop), default=0)
        for size in range(min(longest - 1, len(self._text)), 0, -1):
            if any(stop.startswith(self._text[-size:]) for stop in self.stop):
                return size
        return 0

    def _release(self, num_certain: int) -> list[Token]:
        """Lets go the tokens whose text lies within the first `num_certain` waiting characters."""
        released = []
        while len(self._waiting) > self._incomplete and len(self._waiting[0].text) <= num_certain:
            token = self._waiting.popleft()
            num_certain -= len(token.text)
            self._text = self._text[len(token.text) :]
            released.append(token)
        return released
