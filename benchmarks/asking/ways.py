"""A question and a way of asking it -> what a model answers, from which source, and how much of it is right."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from benchmarks.questions import Question
from memlm.api.answers import Answer, AnswerRequest, FindPassagesRequest
from memlm.api.passages import Passage, PassagesBy
from memlm.base.steps import run_steps
from memlm.generation.generation import Generation
from memlm.generation.likelihood import loglikelihood
from memlm.generation.mixture import QUESTION_POWER
from memlm.language_model import LanguageModel
from memlm.prompting.answers import start_request
from memlm.prompting.tune_answers import contains, normalized

SHOWN = "shown"  # the source and its sentence without a model
RIGHT_PASSAGE = "right passage"  # its passage is given: the bound of every search
MODEL_ALONE = "alone"
ROOM = {"budget": 4096}  # for eight passages in one prompt
WAYS: dict[str, dict[str, Any]] = {
    SHOWN: {},
    MODEL_ALONE: {"num_passages": 0, "use_store": False},
    "datastore": {"num_passages": 0},
    "default": {},
    "passages 4": {"num_passages": 4, **ROOM},
    "passages 8": {"num_passages": 8, **ROOM},
    "rows": {"mixture": True},
    "rows 1": {"mixture": True, "num_passages": 1},
    "rows 4": {"mixture": True, "num_passages": 4},
    "rows 8": {"mixture": True, "num_passages": 8},
    "neighbors": {"loop_guard": True},  # the default of generation, but to name it mixes neighbors in beside passages
    RIGHT_PASSAGE: {},
}
TOKENS, SHORT_TOKENS = 40, 16
SHORT = " Answer in a few words."
_OWN = ("num_passages", "passages_by", "budget", "mixture")  # settings of an AnswerRequest, not of its stream


@dataclass(frozen=True, slots=True)
class Asked:
    """An answer of at most 40 tokens, the passage that it shows as its source, and milliseconds to the first token: of
    wall clock, and of the processor.
    """

    answer: Answer
    source: Passage | None
    first_token_ms: float
    processor_ms: float


def ask(lm: LanguageModel, question: Question, way: str, *, by: str = "auto") -> dict[str, Any] | None:
    """What a way answers, as the fields of a row. None where the stores lack the passage that the way needs.

    `right` is whether the model's own words contain an answer, `sentence_right` whether the sentence that is shown
    does, `source_right` whether it is of a document that answers. `exact` and `f1` are of a second, short answer from
    the same passages, by the rules of SQuAD (arXiv 1606.05250), and `logprob` is that of the first right answer, in
    nats. A question without answers has only those of the source.
    """
    if way == SHOWN:
        return _shown(lm, question, by)
    options, given = {**WAYS[way], "temperature": 0.0}, None
    if way == RIGHT_PASSAGE:
        if (passage := right_passage(lm, question)) is None:
            return None
        given = [passage]
    else:
        options["passages_by"] = by
    asked = _asked(lm, question.text, given, options)
    row: dict[str, Any] = {
        "text": asked.answer.text,
        **_source_figures(question, asked.source),
        "first_token_ms": asked.first_token_ms,
        "processor_ms": asked.processor_ms,
        "prompt_tokens": asked.answer.num_prompt_tokens,
    }
    if question.answers:
        row |= _judged(lm, question, asked, options)
    return row


def _shown(lm: LanguageModel, question: Question, by: str) -> dict[str, Any]:
    """The first passage that an answer by default would find, whose sentence an answer shows."""
    request = FindPassagesRequest(question.text, k=1, by=PassagesBy(by))
    begin_s, begin_processor_s = time.perf_counter(), time.process_time()
    found = run_steps(lm.engine.find_passages(request, (), close=True))
    ms, processor_ms = 1000 * (time.perf_counter() - begin_s), 1000 * (time.process_time() - begin_processor_s)
    times = {"first_token_ms": ms, "processor_ms": processor_ms, "prompt_tokens": 0}
    return {**_source_figures(question, found[0] if found else None), **times}


def _source_figures(question: Question, source: Passage | None) -> dict[str, Any]:
    sentence = "" if source is None or source.sentence is None else source.sentence.text
    figures: dict[str, Any] = {"source": source.place if source else "", "sentence": sentence}
    if question.answers:
        figures["sentence_right"] = contains(sentence, question.answers)
        figures["source_right"] = source is not None and question.is_about(source)
    return figures


def _judged(lm: LanguageModel, question: Question, asked: Asked, options: Mapping[str, Any]) -> dict[str, Any]:
    passages = [*asked.answer.passages]
    behind = {name: value for name, value in options.items() if name not in ("num_passages", "passages_by")}
    short = lm.answer(question.text + SHORT, passages, **behind, max_tokens=SHORT_TOKENS).text
    short = short.strip().partition("\n")[0]
    return {
        "right": contains(asked.answer.text, question.answers),
        "short": short,
        "exact": any(normalized(short) == normalized(each) for each in question.answers),
        "f1": max(f1(short, each) for each in question.answers),
        "logprob": logprob(lm, question.text, passages, behind, question.answers[0]),
    }


def right_passage(lm: LanguageModel, question: Question) -> Passage | None:
    """Of the passages of the documents that answer, the best one that has an answer, or else the best one."""
    documents = [each.id for store in lm.engine.stores.model_stores([]) for each in store.snapshot.documents()]
    some = [each for each in documents if question.names(each)]
    found = lm.find_passages(question.text, k=8, documents=some) if some else ()
    return next((each for each in found if question.is_answered_by(each)), found[0] if found else None)


def _asked(lm: LanguageModel, text: str, passages: list[Passage] | None, options: Mapping[str, Any]) -> Asked:
    begin_s, begin_processor_s = time.perf_counter(), time.process_time()
    stream = lm.stream_answer(text, passages, **options, max_tokens=TOKENS)
    next(stream, None)
    first_ms, processor_ms = time.perf_counter() - begin_s, time.process_time() - begin_processor_s
    answer = Answer.of(stream.result())
    return Asked(answer, source_of(answer), 1000 * first_ms, 1000 * processor_ms)


def source_of(answer: Answer) -> Passage | None:
    """The passage that an answer shows as its source: of a mixture, the one with the largest share, unless the model
    alone has more; or else the best one.
    """
    if not answer.passage_shares:
        return answer.passages[0] if answer.passages else None
    place = max(range(len(answer.passage_shares)), key=answer.passage_shares.__getitem__)
    alone = 1 - sum(answer.passage_shares)
    return answer.passages[place] if answer.passage_shares[place] >= alone else None


def logprob(lm: LanguageModel, text: str, passages: list[Passage], options: Mapping[str, Any], answer: str) -> float:
    """The log-probability in nats of an answer behind the prompt, or the prompts of a mixture, of a question."""
    settings = {name: value for name, value in options.items() if name in _OWN}
    streamed = {name: value for name, value in options.items() if name not in _OWN}
    request = AnswerRequest.of(text, passages, settings, {**streamed, "max_tokens": TOKENS})
    started, ids = run_steps(start_request(lm.engine, request)), lm.tokenize(answer)
    try:
        rows = [(_logprior(lm, each), _logprob(lm, each, each.pending_ids, ids)) for each in started.generations]
    finally:
        for each in started.generations:
            each.close()
    logpriors, logprobs = map(np.array, zip(*rows, strict=True))
    return float(np.logaddexp.reduce(logpriors + logprobs) - np.logaddexp.reduce(logpriors))


def _logprior(lm: LanguageModel, row: Generation) -> float:
    """The logarithm of what a row of a mixture weighs before the answer, up to a constant."""
    if row.scored_from is None:
        return 0.0
    read, scored = row.pending_ids[: row.scored_from + 1], row.pending_ids[row.scored_from + 1 :]
    return QUESTION_POWER * _logprob(lm, row, read, scored)


def _logprob(lm: LanguageModel, row: Generation, read: Sequence[int], ids: Sequence[int]) -> float:
    return loglikelihood(lm.checkpoint, read, ids, row.retriever, row.past)[0]


def f1(text: str, answer: str) -> float:
    """The harmonic mean of the shares of words that a text and an answer have in common."""
    some, others = normalized(text).split(), normalized(answer).split()
    common = (Counter(some) & Counter(others)).total()
    return 2 * common / (len(some) + len(others)) if common else 0.0
