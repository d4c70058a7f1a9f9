"""A question and a passage -> the sentence of the passage that is likeliest to answer.

It is the one whose words of the question weigh most, each word counted once, with the weights of BM25. Words of the
title and the headings tell no sentence of a passage from another, and do not count. On 632 questions (XQuAD) the
sentence of the first passage has the answer for 80.5 %, ranked by BM25 for 78.0, by an encoder for 73.7 (of 300), and
the passage itself for 91.8: benchmarks/log/2026-11-28-sentences.md.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import replace
from itertools import chain

from memlm.api.passages import Passage, Sentence
from memlm.base.phrases import forms_of, terms_of
from memlm.base.sentences import sentences_of

MOST_WORDS = 500  # different words of a question that are looked up
LIGHT = 0.25  # of the heaviest word of a sentence, below which a word is not shown: "the" and "of" tell little

_RUN = re.compile(r"\w+(?:[-_./:]\w+)*")


class AskedWords:
    """The words of a question, as the terms that each may be in a passage, and their weights."""

    def __init__(self, words: Sequence[Sequence[str]], weights_W: Sequence[float]) -> None:
        self._numbers = {form: number for number, forms in enumerate(words) for form in forms}
        self._weights_W = weights_W

    @classmethod
    def among(cls, question: str, passages: Sequence[Passage]) -> AskedWords:
        """Weighs the words by the sentences of some passages that come from no datastore."""
        words = forms_of(question)[:MOST_WORDS]
        asked, having = cls(words, [0.0] * len(words)), [0] * len(words)
        sentences = [span.of(each.text) for each in passages for span in sentences_of(each.text)]
        for sentence in sentences:
            for number in asked.words_in(sentence):
                having[number] += 1
        return cls(words, [math.log1p((len(sentences) - count + 0.5) / (count + 0.5)) for count in having])

    def words_in(self, text: str) -> set[int]:
        """The numbers of the words that a text has."""
        return {self._numbers[term] for term in terms_of(text) if term in self._numbers}

    def point_out(self, passage: Passage) -> Passage:
        """The passage with its sentence. Equal ones count in their order, and a text without sentences has none."""
        spans, text = sentences_of(passage.text), passage.text
        spans = [span for span in spans if not span.is_heading] or spans  # it says what the others are about
        if not spans:
            return passage
        above = self.words_in(" ".join((passage.title, *passage.headings)))
        scores = [sum(self._weights_W[each] for each in self.words_in(span.of(text)) - above) for span in spans]
        found = spans[max(range(len(spans)), key=scores.__getitem__)]
        begin, shown = found.begin, found.of(text)
        has_lines, has_pages = passage.first_line > 0, passage.first_page > 0
        sentence = Sentence(
            text=shown,
            offset=begin,
            line=passage.first_line + text.count("\n", 0, begin) if has_lines else 0,
            page=passage.first_page + text.count("\f", 0, begin) if has_pages else 0,
            words=self._shown(shown),
        )
        return replace(passage, sentence=sentence)

    def _shown(self, sentence: str) -> tuple[str, ...]:
        """The words of the question as the sentence writes them, each once."""
        weights = {match.group(): self._weight_of(match.group()) for match in _RUN.finditer(sentence)}
        least = LIGHT * max(weights.values(), default=0.0)
        return tuple(run for run, weight in weights.items() if weight and weight >= least)

    def _weight_of(self, run: str) -> float:
        forms = chain.from_iterable(forms_of(run))  # the stem of a word alone may be that of any language
        return max((self._weights_W[self._numbers[form]] for form in forms if form in self._numbers), default=0.0)


def pointed_out(question: str, passages: Sequence[Passage]) -> tuple[Passage, ...]:
    """Passages that a caller gives, each with its sentence. One that has it keeps it."""
    if all(passage.sentence is not None for passage in passages):
        return tuple(passages)
    asked = AskedWords.among(question, passages)
    return tuple(passage if passage.sentence is not None else asked.point_out(passage) for passage in passages)
