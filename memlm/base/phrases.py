"""Words of a text, and the places where those of a phrase follow each other.

A word is a run of letters, digits and their marks, without case, in one Unicode form. In scripts that put no spaces
between words, and in Korean, whose particles are written on to nouns, each letter is a word: so a phrase is found
within a run of letters.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterator, Sequence
from functools import cache, lru_cache
from typing import NamedTuple

MOST_WORDS = 100  # of a phrase
RULE = "2"  # of words: tables that were made by another one are made anew

# Kana, Han and Hangul, Thai, Lao, Burmese, Khmer: without their digits, which make numbers.
_UNSPACED = (
    "\u3005-\u3007\u3041-\u3096\u309d-\u309f\u30a1-\u30fa\u30fc-\u30ff\u31f0-\u31ff\u3400-\u4dbf\u4e00-\u9fff"
    "\uf900-\ufaff\U00020000-\U0003ffff\uac00-\ud7a3\u3131-\u318e\u0e01-\u0e32\u0e40-\u0e46\u0e81-\u0eb2"
    "\u0ebd-\u0ec6\u0edc-\u0edf\u1000-\u103f\u1050-\u108f\u109a-\u109f\uaa60-\uaa7f\u1780-\u17d3\u17d7\u17dc"
)
# A syllable of Hangul in its parts.
_JAMO = r"[\u1100-\u115f\ua960-\ua97c]+[\u1160-\u11a7\ud7b0-\ud7c6]*[\u11a8-\u11ff\ud7cb-\ud7fb]*"
_EMOJI = "\u2600-\u27bf\U0001f000-\U0001faff"
# Vowel signs that Hebrew, Arabic and Syriac leave out at will, and characters that are not seen.
_UNSEEN = re.compile(
    "[\u0591-\u05bd\u05bf\u05c1\u05c2\u05c4\u05c5\u05c7\u0610-\u061a\u0640\u064b-\u0652\u0656-\u065f\u0670"
    "\u06d6-\u06dc\u06df-\u06e4\u06e7\u06e8\u06ea-\u06ed\u0711\u0730-\u074a"
    "\u00ad\u034f\u180b-\u180f\u200c-\u200f\u2060-\u2064\ufe00-\ufe0f\ufeff\U000e0100-\U000e01ef]"
)
_ATTACHED = "\u00ad\u0640\u200c-\u200f\u2060-\u2064\ufeff\u0e33\u0eb3"  # beside marks; Thai and Lao AM hold one
_SIGNED = r"[^\W\d_](?:[+\uff0b]{2}|[#\uff03])(?!\w)"  # C++ and C#
_KEPT_SIGNS = str.maketrans("+#", "\uff0b\uff03")  # which no tokenizer of SQLite takes for punctuation
_ASCII = re.compile("[a-z0-9]+")


class _Found(NamedTuple):
    begin: int
    end: int
    word: str
    is_letter: bool  # of a script that counts each letter as a word


def words_of(text: str) -> list[str]:
    """The words of a text, as they are compared."""
    if text.isascii() and "#" not in text and "++" not in text:  # mostly, and then quickly
        return _ASCII.findall(text.lower())
    return [found.word for found in _words(text)]


def terms_of(text: str) -> list[str]:
    """The words of a text, and each two letters that stand together in a script that counts each letter as a word: by
    single letters alone, all texts in such a script are alike.
    """
    if text.isascii():
        return words_of(text)
    terms, last = list[str](), None
    for found in _words(text):
        terms.append(found.word)
        if last is not None and last.is_letter and found.is_letter and last.end >= found.begin:
            terms.append(last.word + found.word)
        last = found
    return terms


def phrase_places(text: str, phrase: Sequence[str]) -> Iterator[tuple[int, int]]:
    """The first and last character (exclusive) of each place where the words of a phrase follow each other."""
    found = list(_words(text))
    words = [each.word for each in found]
    for begin in range(len(words) - len(phrase) + 1):
        if words[begin] == phrase[0] and words[begin : begin + len(phrase)] == list(phrase):
            yield found[begin].begin, found[begin + len(phrase) - 1].end


def _words(text: str) -> Iterator[_Found]:
    for match in _pattern().finditer(text):
        begin, end = match.span()
        for word, is_letter in _compared(match.group()):
            yield _Found(begin, end, word, is_letter)


@lru_cache(1 << 16)
def _compared(run: str) -> tuple[tuple[str, bool], ...]:
    """The words of a run of characters. Mostly it is one. "½" are two, and each narrow kana is one."""
    folded = _UNSEEN.sub("", unicodedata.normalize("NFKD", run).casefold()).replace("i\u0307", "i")  # İ, as in İstanbul
    matches = _pattern().finditer(unicodedata.normalize("NFKC", folded))
    return tuple((match.group().translate(_KEPT_SIGNS), match.lastgroup == "letter") for match in matches)


@cache
def _pattern() -> re.Pattern[str]:
    marks = _marks() + _ATTACHED
    letter, other = rf"(?P<letter>{_JAMO}[{marks}]*|[{_UNSPACED}][{marks}]*)", rf"[^\W_{_UNSPACED}]"
    return re.compile(rf"{letter}|(?<!\w){_SIGNED}|[{_EMOJI}][{marks}]*|{other}(?:{other}|[{marks}])*")


def _marks() -> str:
    """The characters that are marks of others, as ranges of a pattern."""
    ranges, last = list[list[int]](), -2
    for point in (*range(0x300, 0x1F000), *range(0xE0100, 0xE01F0)):  # no others have marks
        if not unicodedata.category(chr(point)).startswith("M"):
            continue
        if point != last + 1:
            ranges.append([point, point])
        ranges[-1][1] = last = point
    return "".join(f"{chr(begin)}-{chr(end)}" for begin, end in ranges)
