"""Passages of documents, the units of text that are put into prompts."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from memlm.base.options import option
from memlm.base.passage_texts import PAGES, format_of
from memlm.errors import check_range

MAX_PASSAGES = 256  # of one answer
FEW_PASSAGES, MORE_PASSAGES = 1, 4  # that are found by default: further ones distract a small model
LARGE_MODEL = 1_000_000_000  # parameters
BUDGET = 1024  # tokens of the passages of a chat, or of an answer's prompt, by default
PASSAGES = "Passages"
NUM_PASSAGES_OPTION = option(
    "Passages to find. 0: none.",
    panel=PASSAGES,
    default=f"{FEW_PASSAGES}, or {MORE_PASSAGES} for a model of a billion parameters",
)


class PassagesBy(StrEnum):
    """What a search for passages compares with the question."""

    AUTO = "auto"  # its words, and its meaning where there is an encoder
    WORDS = "words"  # BM25
    MEANING = "meaning"  # the vectors of the encoder


@dataclass(frozen=True, slots=True)
class Sentence:
    """The sentence of a passage that has the most of what a question asks, or the row, item or line in its place.

    It begins `offset` characters behind the begin of the passage's text, in a `line` of its document, from 1, and on a
    `page`, slide or sheet, 0 where there is none. `words` are those of the question, as it writes them.
    """

    text: str
    offset: int = 0
    line: int = 0
    page: int = 0
    words: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Passage:
    """A passage of a document, and the score that it was found with.

    `token_offset` counts tokens from the start of the document, and `num_tokens` are its length. `headings` are those
    above `text` and those with which it begins, the highest first. `first_line` and `last_line` are those of `text` in
    its document, from 1, and 0 where a caller gave the passage without them. `first_page` and `last_page` are those of
    a format with pages, slides or sheets, else 0. `also` are the places of passages of nearly the same text, which do
    not count as results of their own. `sentence` is the one that is likeliest to answer, None in a text without any.
    By words, `score` is BM25. By meaning, it is a cosine. By auto, it is BM25 as
    a share of its most plus a cosine, or BM25 where no passage has a vector.
    """

    store: str
    document_id: str
    title: str
    token_offset: int
    num_tokens: int
    text: str
    score: float
    metadata: Mapping[str, Any] = field(default_factory=dict)
    first_line: int = 0
    last_line: int = 0
    headings: tuple[str, ...] = ()
    first_page: int = 0
    last_page: int = 0
    also: tuple[str, ...] = ()
    sentence: Sentence | None = None

    @property
    def place(self) -> str:
        """Where a person finds it: `guide.pdf, page 3`, `guide.html, Creating branches` or `notes/port.md:3-9`. The
        document alone, where no more is known.
        """
        return self._place(self.first_line, self.last_line, self.first_page, self.last_page)

    @property
    def sentence_place(self) -> str:
        """Where a person finds its sentence: `notes/port.md:5`."""
        if self.sentence is None:
            return self.place
        return self._place(self.sentence.line, 0, self.sentence.page, 0)

    def _place(self, first_line: int, last_line: int, first_page: int, last_page: int) -> str:
        if first_page:
            word = PAGES.get(format_of(self.metadata), "page")
            if last_page > first_page:
                return f"{self.document_id}, {word}s {first_page}-{last_page}"
            return f"{self.document_id}, {word} {first_page}"
        if format_of(self.metadata):  # lines of a converted text are seen by nobody
            return ", ".join((self.document_id, *self.headings[-1:]))
        return self.document_id + f":{first_line}" * bool(first_line) + f"-{last_line}" * (last_line > first_line)

    @property
    def size(self) -> int:
        """Characters of its texts and of its metadata as JSON. Raises TypeError or ValueError for other metadata."""
        pointed = () if self.sentence is None else (self.sentence.text, *self.sentence.words)
        texts = (self.store, self.document_id, self.title, self.text, *pointed)
        lists = sum(1 + len(each) for each in (*self.headings, *self.also))
        try:
            return sum(map(len, texts)) + lists + (len(json.dumps(dict(self.metadata))) if self.metadata else 0)
        except RecursionError:
            raise ValueError("it is nested too deeply") from None


@dataclass(frozen=True, slots=True)
class AnswerPrompt:
    """The prompt of an answer, its `num_tokens` with those of the chat template, and its passages, the best first.

    `numbers` are those under which the passages stand in the prompt, so that an answer may name them. `left_out` are
    the passages without room. Of a mixture, `text` is the prompt of the first passage, and each passage has one.
    """

    text: str
    num_tokens: int
    passages: tuple[Passage, ...] = ()
    numbers: tuple[int, ...] = ()
    left_out: tuple[Passage, ...] = ()

    @property
    def size(self) -> int:
        """Characters of the text and of all passages."""
        return len(self.text) + sum(passage.size for passage in (*self.passages, *self.left_out))


def check_num_passages(number: int | None) -> None:
    """Raises InvalidInput for a number of passages to find that is out of range."""
    check_range("num_passages", number, least=0, most=MAX_PASSAGES, whole=True)
