"""What a word is, and where the words of a phrase follow each other in a text."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

MOST_WORDS = 100  # of a phrase

# Scripts without spaces between words count each character as a word.
_UNSPACED = "\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff"
_WORD = re.compile(rf"[{_UNSPACED}]|[^\W_{_UNSPACED}]+")


def words_of(text: str) -> list[str]:
    """The words of a text: runs of letters and digits, without case."""
    return [word.casefold() for word in _WORD.findall(text)]


def phrase_places(text: str, phrase: Sequence[str]) -> Iterator[tuple[int, int]]:
    """The first and last character (exclusive) of each place where the words of a phrase follow each other."""
    found = [(match.start(), match.end(), match.group().casefold()) for match in _WORD.finditer(text)]
    words = [word for _, _, word in found]
    for begin in range(len(words) - len(phrase) + 1):
        if words[begin] == phrase[0] and words[begin : begin + len(phrase)] == list(phrase):
            yield found[begin][0], found[begin + len(phrase) - 1][1]
