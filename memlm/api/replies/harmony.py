"""Reads answers in OpenAI's harmony format: messages in channels, as gpt-oss writes them.

<|channel|>analysis<|message|>a thought<|end|><|start|>assistant<|channel|>final<|message|>the content<|return|>
<|channel|>commentary to=functions.NAME <|constrain|>json<|message|>{"a": 1}<|call|>
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from memlm.api.replies.calls import checked_arguments
from memlm.api.replies.pieces import Piece, place_of_held
from memlm.api.tools import Tool

MESSAGE = "<|message|>"
START = "<|start|>"
ENDS = ("<|end|>", "<|call|>", "<|return|>", START)
BEGINNINGS = ("<|channel|>", START, "to=")
_END = re.compile("|".join(map(re.escape, ENDS)))
_CHANNEL = re.compile(r"<\|channel\|>\s*(\w+)")
_RECIPIENT = re.compile(r"\bto=([^\s<]+)")


class HarmonyReader:
    """A `PieceReader`. A text without channels is content."""

    def __init__(self, tools: Mapping[str, Tool]) -> None:
        self._tools, self._rest, self._found, self._is_over = tools, "", list[Piece](), False
        self._in_head, self._channel, self._recipient = True, "final", ""
        self._is_new = True  # nothing of this message was given
        self._spoken = set[bool]()  # whether a thought was given, and whether a content was

    def feed(self, text: str) -> list[Piece]:
        self._rest += text
        while self._read_head() if self._in_head else self._read_text():
            pass
        found, self._found = self._found, []
        return found

    def finish(self) -> list[Piece]:
        self._is_over = True
        return self.feed("")

    def _read_head(self) -> bool:
        text = self._rest.lstrip()
        if not text or (not self._is_over and any(each.startswith(text) for each in BEGINNINGS)):
            return False
        if not text.startswith(BEGINNINGS):  # a text without a channel
            self._begin("final", "")
            return True
        head, found, rest = self._rest.partition(MESSAGE)
        if not found:
            return False
        self._rest = rest
        channel, recipient = _CHANNEL.search(head), _RECIPIENT.search(head)
        self._begin(channel[1] if channel else "final", recipient[1] if recipient else "")
        return True

    def _begin(self, channel: str, recipient: str) -> None:
        self._in_head, self._is_new, self._channel, self._recipient = False, True, channel, recipient

    def _read_text(self) -> bool:
        if found := _END.search(self._rest):
            text, after = self._rest[: found.start()], found.start() if found[0] == START else found.end()
            self._give(text)
            self._rest, self._in_head = self._rest[after:], True
            return True
        held = len(self._rest) if self._is_over else 0 if self._recipient else place_of_held(self._rest, ENDS)
        if held or self._is_over:
            self._give(self._rest[:held])
            self._rest = self._rest[held:]
        return False

    def _give(self, text: str) -> None:
        is_thought = self._channel == "analysis" and not self._recipient
        if self._recipient and (call := self._call(text)):
            self._found.append(Piece(calls=(call,)))
            return
        if not text:
            return
        text = "\n" * (self._is_new and is_thought in self._spoken) + text
        self._is_new = False
        self._spoken.add(is_thought)
        self._found.append(Piece(reasoning=text) if is_thought else Piece(content=text))

    def _call(self, text: str) -> tuple[str, str] | None:
        name = self._recipient.removeprefix("functions.")
        try:
            return (name, checked_arguments(text)) if name in self._tools else None
        except (ValueError, RecursionError):
            return None
