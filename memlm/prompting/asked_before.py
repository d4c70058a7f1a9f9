"""The tokens of a session -> what its user has asked, between what the model's template writes around a message."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import takewhile

from memlm.api.chat import Message
from memlm.data.chat import ChatTemplate
from memlm.data.tokenizer import Tokenizer

PROBES = "a", "7"  # two contents that have no token in common


def user_messages(ids: Sequence[int], template: ChatTemplate, tokenizer: Tokenizer) -> Iterator[str]:
    """The texts of the user messages that an answer follows, the latest first. None where the template writes nothing
    by which they differ from others. Raises InvalidInput for one that refuses a conversation of one user message.
    """
    before, behind = _frame(template, tokenizer)
    if not before or not behind:
        return
    end = _last(ids, behind, len(ids))
    while end >= 0:
        begin = _last(ids, before, end)
        if begin < 0:
            return
        yield tokenizer.decode(ids[begin + len(before) : end])
        end = _last(ids, behind, begin)


def _frame(template: ChatTemplate, tokenizer: Tokenizer) -> tuple[list[int], list[int]]:
    """The tokens before a user message, those that no other turn has before it, and those between it and an answer."""
    asked = [[Message("user", probe)] for probe in PROBES]
    one, other = (template.encode(each, tokenizer) for each in asked)
    later, other_later = (template.encode(each, tokenizer, continued=True) for each in asked)
    before = _shared(_shared(one, other)[::-1], _shared(later, other_later)[::-1])[::-1]
    return before, _shared(one[::-1], other[::-1])[::-1]


def _shared(one: Sequence[int], other: Sequence[int]) -> list[int]:
    """The tokens with which both begin."""
    return [token for token, _ in takewhile(lambda pair: pair[0] == pair[1], zip(one, other, strict=False))]


def _last(ids: Sequence[int], part: Sequence[int], end: int) -> int:
    """Where a part of the tokens before `end` begins that is the last one of these tokens. -1: nowhere."""
    size = len(part)
    places = range(end - size, -1, -1)
    return next((place for place in places if ids[place] == part[0] and [*ids[place : place + size]] == [*part]), -1)
