"""Words of a text, the places where those of a phrase follow each other, and the terms by which passages are searched.

A word is a run of letters, digits and their marks, without case, in one Unicode form. In scripts that put no spaces
between words, and in Korean, whose particles are written on to nouns, each letter is a word: so a phrase is found
within a run of letters.

A term is the stem of a word by a Snowball stemmer, or the word itself. Cyrillic words have Russian stems. Latin words
have those of the passage's language: that of English, German, French and Spanish of which it has the most function
words, English where none has more. The words of a question have every stem that they may have in a passage. So no
passage is lost that has the word itself, whichever language was found.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterator, Sequence
from functools import cache, lru_cache
from itertools import chain, pairwise
from operator import add
from typing import NamedTuple

import Stemmer

MOST_WORDS = 100  # of a phrase
RULE = f"3 snowball {Stemmer.version()}"  # of words and terms: tables that were made by another one are made anew

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
# Letters that have one form, in scripts that count each letter as a word, and their punctuation.
_PLAIN_LETTERS = "\u3041-\u3094\u30a1-\u30fa\u30fc\u4e00-\u9fff\uac00-\ud7a3"
_PLAIN = re.compile(rf"(?:[\x00-\x22\x24-*,-\x7f{_PLAIN_LETTERS}\u3001\u3002\u3008-\u3011！（），：；？]|\+(?!\+))*")
_PLAIN_WORDS, _PLAIN_PIECES = re.compile(f"[a-z0-9]+|[{_PLAIN_LETTERS}]"), re.compile(f"[a-z0-9]+|[{_PLAIN_LETTERS}]+")
# Names begin where no letter is before: else a long run of letters is tried from each of them.
_PLAIN_NAMES = re.compile("(?<![a-z0-9])[a-z0-9]+(?:[-_./:][a-z0-9]+)+")
_SEPARATOR = re.compile("[-_./:]")
_PUNCTUATION = str.maketrans("“”‘’‚„«»…–—\u2011•·", " " * 14)  # common between ASCII words, and in no word
_RUN_LENGTH = 64  # of text without a space, above which its words are not remembered
_RUNS = 1 << 17  # that are remembered for each language, about 30 MB
# Function words that only one of the languages has. Without accents, so that each has one form.
_FUNCTION_WORDS = {
    "english": "the of and to is that for with are be this by from not have it at which if you will they their we was"
    " has been how what where when who why does do can",
    "german": "der und das ist nicht dem den ein eine einen einer auf sich von zu werden oder auch wird sind bei nach"
    " durch wenn als wie mit kann wurde ich wir sie zur zum aus wer wo warum welche",
    "french": "le les et une du dans pour qui pas au avec ne ce cette sont elle ils aux ces nous vous leur dont ou est"
    " quel quelle comment pourquoi",
    "spanish": "el los las una del y con por para como su sus al lo pero este esta ser fue cuando donde muy son cual"
    " quien porque",
}
_LATIN = re.compile("[a-z\u00df-\u024f\u1e00-\u1eff]+")
_CYRILLIC = re.compile("[\u0400-\u052f]+")


class _Found(NamedTuple):
    begin: int
    end: int
    word: str
    is_letter: bool  # of a script that counts each letter as a word


def words_of(text: str) -> list[str]:
    """The words of a text, as they are compared."""
    return list(chain.from_iterable(map(_WORDS.__getitem__, text.split())))


def terms_of(text: str) -> list[str]:
    """The stems of a passage's words, and each two letters that stand together in a script that counts each letter as a
    word: by single letters alone, all texts in such a script are alike.
    """
    runs = text.split()
    return list(chain.from_iterable(map(_TERMS[_language_of(runs)].__getitem__, runs)))


def forms_of(question: str) -> list[tuple[str, ...]]:
    """The different words of a question, in their order, each as the terms that it may be in a passage. Words that
    share a term are one, and no term belongs to two words.
    """
    words, numbers = list[list[str]](), dict[str, int]()
    for run in question.split():
        for forms in zip(*(terms[run] for terms in _TERMS.values()), strict=True):
            number = next((numbers[form] for form in forms if form in numbers), len(words))
            if number == len(words):
                words.append([])
            new = [form for form in dict.fromkeys(forms) if form not in numbers]
            words[number] += new
            numbers |= dict.fromkeys(new, number)
    return [tuple(word) for word in words]


def phrase_places(text: str, phrase: Sequence[str]) -> Iterator[tuple[int, int]]:
    """The first and last character (exclusive) of each place where the words of a phrase follow each other."""
    found = list(_words(text))
    words = [each.word for each in found]
    for begin in range(len(words) - len(phrase) + 1):
        if words[begin] == phrase[0] and words[begin : begin + len(phrase)] == list(phrase):
            yield found[begin].begin, found[begin + len(phrase) - 1].end


class _Runs(dict[str, tuple[str, ...]]):
    """Remembers the words, or with a `language` the terms, of runs of text without a space. No word crosses a space."""

    def __init__(self, language: str | None) -> None:
        super().__init__()
        self._language = language

    def __missing__(self, run: str) -> tuple[str, ...]:
        words = _run_words(run) if self._language is None else _run_terms(run, self._language)
        if len(run) <= _RUN_LENGTH:
            if len(self) >= _RUNS:
                self.clear()
            self[run] = words
        return words


def _run_words(run: str) -> tuple[str, ...]:
    plain = run if run.isascii() else run.translate(_PUNCTUATION)
    if _PLAIN.fullmatch(plain):  # mostly, and then quickly
        return tuple(_PLAIN_WORDS.findall(plain.lower()))
    return tuple(found.word for found in _words(run))


def _run_terms(run: str, language: str) -> tuple[str, ...]:
    plain = run if run.isascii() else run.translate(_PUNCTUATION)
    return _plain_terms(plain.lower(), language) if _PLAIN.fullmatch(plain) else _any_terms(run, language)


def _plain_terms(run: str, language: str) -> tuple[str, ...]:
    terms = list[str]()
    for piece in _PLAIN_PIECES.findall(run):
        if piece.isascii():
            terms.append(_stem(piece, language))
        else:
            terms += (*piece, *map(add, piece, piece[1:]))
    return *terms, *(_SEPARATOR.sub("_", name) for name in _PLAIN_NAMES.findall(run))


def _any_terms(run: str, language: str) -> tuple[str, ...]:
    found, name = list(_words(run)), ""
    terms = [each.word if each.is_letter else _stem(each.word, language) for each in found]
    for last, each in pairwise(found):
        if last.is_letter and each.is_letter and last.end >= each.begin:
            terms.append(last.word + each.word)
        if not (last.is_letter or each.is_letter) and _SEPARATOR.fullmatch(run[last.end : each.begin]):
            name = f"{name or last.word}_{each.word}"
        elif name:
            terms.append(name)
            name = ""
    return (*terms, name) if name else tuple(terms)


@lru_cache(1 << 17)
def _stem(word: str, language: str) -> str:
    if _CYRILLIC.fullmatch(word):
        language = "russian"
    elif not _LATIN.fullmatch(word):
        return word
    stem: str = _stemmer(language).stemWord(word)
    return stem


@cache
def _stemmer(language: str) -> Stemmer.Stemmer:
    return Stemmer.Stemmer(language, 0)  # without a cache of its own, which no two threads may use


def _language_of(runs: list[str]) -> str:
    """The language of which a text has the most different function words. Of equal ones the first."""
    words = set(runs)
    return max(_TELLING, key=lambda language: len(words & _TELLING[language]))


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


_WORDS = _Runs(None)
_TELLING = {language: frozenset(words.split()) for language, words in _FUNCTION_WORDS.items()}
_TERMS = {language: _Runs(language) for language in _FUNCTION_WORDS}
