"""Where a call ends in a text that comes in pieces. Each character is looked at once, however the text is cut."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Protocol

from memlm.api.replies.families import CODER, GEMMA, HERMES, LLAMA, MISTRAL

MAX_HEAD_CHARACTERS = 300  # between [TOOL_CALLS] and [ARGS]: a name of up to 128, and an id
CLOSER = "</tool_call>"
FENCE = "```"
_JSON_MARKS = re.compile(r'["\\{}\[\]]')
_STRING_MARKS = re.compile(r'["\\]')
_CLOSER_MARKS = re.compile(r'["\\]|</tool_call>')
_NOT_SPACE = re.compile(r"\S")


class End(Protocol):
    """Finds the end of one call. The text is that from the call's first character on, longer each time."""

    def __call__(self, text: str) -> int | None:
        """The place behind the call, None if it is not in the text yet."""


class JsonEnd:
    """The end of the object or list of JSON behind `place`. Anything else ends at its first character."""

    def __init__(self, place: int = 0) -> None:
        self._place, self._depth, self._in_string = place, 0, False

    def __call__(self, text: str) -> int | None:
        if not self._depth and not self._begin(text):
            return self._place if self._place < len(text) else None
        while found := (_STRING_MARKS if self._in_string else _JSON_MARKS).search(text, self._place):
            mark, self._place = found[0], found.end()
            if mark == "\\" and self._in_string:
                if self._place == len(text):
                    self._place -= 1  # what it escapes is still to come
                    return None
                self._place += 1
            elif mark == '"':
                self._in_string = not self._in_string
            else:
                self._depth += {"{": 1, "[": 1, "}": -1, "]": -1}.get(mark, 0)
            if not self._depth:
                return self._place
        self._place = len(text)
        return None

    def _begin(self, text: str) -> bool:
        found = _NOT_SPACE.search(text, self._place)
        self._place = len(text) if found is None else found.start()
        if found is None or found[0] not in "{[":
            return False
        self._place, self._depth = self._place + 1, 1
        return True


class CloserEnd:
    """The end of the tag that closes a call. One in a string of JSON closes nothing."""

    def __init__(self, place: int) -> None:
        self._place, self._in_string, self._is_json = place, False, None

    _is_json: bool | None

    def __call__(self, text: str) -> int | None:
        if self._is_json is None:
            found = _NOT_SPACE.search(text, self._place)
            if found is None:
                return None
            self._is_json = found[0] == "{"
        if not self._is_json:
            return _behind(text, CLOSER, self._place)
        while found := (_STRING_MARKS if self._in_string else _CLOSER_MARKS).search(text, self._place):
            if found[0] == CLOSER:
                return found.end()
            if found[0] == "\\":
                if found.end() == len(text):
                    self._place = found.start()
                    return None
                self._place = found.end() + 1
                continue
            self._place, self._in_string = found.end(), not self._in_string
        self._place = max(self._place, len(text) if self._in_string else len(text) - len(CLOSER) + 1)
        return None


class MistralEnd:
    """The end of a list of calls, or of one as `name[ARGS]{...}`."""

    def __init__(self, place: int) -> None:
        self._place, self._json = place, None

    _json: JsonEnd | None

    def __call__(self, text: str) -> int | None:
        if self._json is None and (found := _NOT_SPACE.search(text, self._place)):
            head = text[found.start() : found.start() + MAX_HEAD_CHARACTERS]
            if head[0] in "{[":
                self._json = JsonEnd(found.start())
            elif (place := head.find("[ARGS]")) >= 0:
                self._json = JsonEnd(found.start() + place + len("[ARGS]"))
            elif len(head) == MAX_HEAD_CHARACTERS:
                return found.start() + MAX_HEAD_CHARACTERS
        return None if self._json is None else self._json(text)


def _fence_end(begin: int) -> End:
    return lambda text: _behind(text, FENCE, begin)


def _behind(text: str, closer: str, begin: int) -> int | None:
    place = text.find(closer, begin)
    return None if place < 0 else place + len(closer)


def _json_or_fence(begin: int) -> End:
    return _fence_end(begin) if begin > 1 else JsonEnd()


# Texts that begin a call anywhere, those that begin one where nothing else was said, what may stand between calls, and
# the end of a call whose first text is so long.
OPENERS: dict[str, tuple[str, ...]] = {
    HERMES: ("<tool_call>",),
    CODER: ("<tool_call>",),
    LLAMA: ("<|python_tag|>",),
    MISTRAL: ("[TOOL_CALLS]",),
    GEMMA: ("```tool_code", "```json", "```tool_call"),
}
STARTERS = {LLAMA: ("{",), GEMMA: ("{", "[")}
BETWEEN = {LLAMA: "; \n\t\r"}
END_OF: dict[str, Callable[[int], End]] = {
    HERMES: CloserEnd,
    CODER: CloserEnd,
    LLAMA: lambda begin: JsonEnd(begin if begin > 1 else 0),
    MISTRAL: MistralEnd,
    GEMMA: _json_or_fence,
}
