"""Questions with their answers -> how a model is best asked with passages, saved with the model where that gains.

Each question is asked in each way with the same passages. The way that is right most often on half of the documents is
compared with the defaults of the model's size on the other half.
"""

from __future__ import annotations

import json
import re
import string
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Bool, Int64

from memlm.api.answers import AnswerRequest, FindPassagesRequest
from memlm.api.passages import Passage
from memlm.base.progress import Progress, silent
from memlm.base.steps import run_steps
from memlm.errors import Corrupt, InvalidInput
from memlm.generation.answer_settings import AnswerSettings
from memlm.generation.engine import Engine
from memlm.prompting.answers import stream_request

NUMBERS = (1, 2, 4, 8)  # of passages
TOKENS = 40  # of an answer
LEAST_DOCUMENTS = 8
MAX_CHARACTERS = 1000  # of a question, which every prompt has room for
ASKING = "ask"  # the phase of a progress


@dataclass(frozen=True, slots=True)
class Question:
    """A question, and texts of which a right answer has one."""

    text: str
    answers: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class TriedWay:
    """Settings, and the shares of questions that they answered rightly: in the half of the documents that they were
    chosen on, and in the other half.
    """

    settings: AnswerSettings
    right: float
    right_elsewhere: float


@dataclass(frozen=True, slots=True)
class AnswerTuning:
    """The ways that were tried, the defaults of the model's size first, the settings that were chosen, the numbers of
    questions and documents, and whether they are in force from now on: their gain over those before exceeds twice its
    standard error.
    """

    ways: tuple[TriedWay, ...]
    chosen: AnswerSettings
    questions: int
    documents: int
    kept: bool


def read_questions(path: Path) -> list[Question]:
    """Reads JSON Lines of `question` and `answers`, a list of texts or one text. Raises InvalidInput, naming the line,
    for others, and for a file without questions.
    """
    questions = list[Question]()
    try:
        lines = path.read_text(encoding="utf-8-sig").split("\n")  # a text may have other line ends
    except UnicodeDecodeError as error:
        raise InvalidInput(f"{path} is not UTF-8 ({error.reason}); convert it", field="questions") from error
    for number, line in enumerate(lines, 1):
        if line.strip():
            try:
                questions.append(_question_of(json.loads(line)))
            except (ValueError, TypeError, KeyError, RecursionError) as error:
                raise InvalidInput(
                    f'{path}, line {number}: expected {{"question": "...", "answers": ["..."]}} ({error})',
                    field="questions",
                ) from error
    if not questions:
        raise InvalidInput(f"{path} has no questions", field="questions")
    return questions


def _question_of(row: Any) -> Question:
    text, answers = row["question"], [row["answers"]] if isinstance(row["answers"], str) else row["answers"]
    if not isinstance(text, str) or not 0 < len(text.strip()) <= MAX_CHARACTERS:
        raise ValueError(f"a question is a text of 1 to {MAX_CHARACTERS:,} characters")
    if not isinstance(answers, list) or not answers or not all(isinstance(each, str) for each in answers):
        raise ValueError("answers are a list of texts")
    if not all(map(normalized, answers)):
        raise ValueError("an answer has a word that is no article")
    return Question(text, tuple(answers))


def tune_answers(
    engine: Engine, questions: Sequence[Question], *, label: str, progress: Progress = silent
) -> AnswerTuning:
    """Asks all questions in all ways. Where the best one gains over the settings in force on documents that it was not
    chosen on, it is saved with the model, or where it is the default, nothing is saved any more. Raises InvalidInput
    for questions about fewer than eight documents.
    """
    default = AnswerSettings.of_size(engine.info.num_parameters)
    try:
        used = engine.answers
    except Corrupt:
        used = default
    ways = [default, *(way for way in _ways() if way != default)]
    ways += [] if any(map(used.asks_as, ways)) else [used]
    before = next(number for number, way in enumerate(ways) if used.asks_as(way))
    right_WQ, documents_Q = _ask(engine, questions, ways, progress)
    count = len(np.unique(documents_Q))
    if count < LEAST_DOCUMENTS:
        raise InvalidInput(
            f"the passages of the questions are of {count} documents; give questions about {LEAST_DOCUMENTS} at least,"
            " since the settings are checked on other documents than they are chosen on",
            field="questions",
        )
    is_elsewhere_Q = documents_Q % 2 == 1
    tried = [
        TriedWay(way, float(right_Q[~is_elsewhere_Q].mean()), float(right_Q[is_elsewhere_Q].mean()))
        for way, right_Q in zip(ways, right_WQ, strict=True)
    ]
    order = [before, *range(len(ways))]  # of equal ones the first: nothing changes without a gain
    best = max(order, key=lambda way: tried[way].right)
    gains_Q = right_WQ[best].astype(float) - right_WQ[before]
    gain, gain_error = _mean(gains_Q[is_elsewhere_Q], documents_Q[is_elsewhere_Q])
    chosen = replace(ways[best], tuned_on=f"{label} ({len(questions)} questions)", gain=gain, gain_error=gain_error)
    kept = best != before and gain > 2 * gain_error
    if kept and best:
        chosen.save(engine.checkpoint.path)
    elif kept:
        AnswerSettings.remove(engine.checkpoint.path)
    return AnswerTuning(tuple(tried), chosen, len(questions), count, kept)


def _ways() -> list[AnswerSettings]:
    alone = [AnswerSettings(1, points_out=points_out) for points_out in (True, False)]
    return [*alone, *(AnswerSettings(number, points_out=False) for number in NUMBERS[1:])]


def _ask(
    engine: Engine, questions: Sequence[Question], ways: Sequence[AnswerSettings], progress: Progress
) -> tuple[Bool[np.ndarray, "W Q"], Int64[np.ndarray, " Q"]]:
    """Which answers of each way are right, and the number of the document that each question's best passage is of."""
    right_WQ, documents = np.zeros((len(ways), len(questions)), bool), list[str]()
    try:
        for place, question in enumerate(questions):
            found = run_steps(engine.find_passages(FindPassagesRequest(question.text, k=max(NUMBERS))))
            documents.append(found[0].document_id if found else "")
            for number, way in enumerate(ways):
                engine.ask_by(way)
                text = _answer(engine, question.text, found[: way.num_passages])
                right_WQ[number, place] = contains(text, question.answers)
                progress(ASKING, place * len(ways) + number + 1, len(questions) * len(ways))
    finally:
        engine.ask_by(None)
    numbers = {document: number for number, document in enumerate(sorted(set(documents)))}
    return right_WQ, np.array([numbers[each] for each in documents])


def _answer(engine: Engine, question: str, passages: Sequence[Passage]) -> str:
    request = AnswerRequest.of(question, passages, {}, {"temperature": 0.0, "max_tokens": TOKENS})
    events = [event for event in stream_request(engine, request) if isinstance(event, tuple)]
    return "".join(token.text for tokens in events for token in tokens)


def _mean(values_Q: np.ndarray, documents_Q: Int64[np.ndarray, " Q"]) -> tuple[float, float]:
    """The mean, and its standard error over documents."""
    mean, sums = float(values_Q.mean()), np.bincount(documents_Q, values_Q - values_Q.mean())
    count = len(np.unique(documents_Q))
    return mean, float(np.sqrt((sums**2).sum() * count / max(1, count - 1)) / len(values_Q))


def normalized(text: str) -> str:
    """Words without case, punctuation and articles, as SQuAD compares answers (arXiv 1606.05250)."""
    bare = "".join(each for each in text.lower() if each not in string.punctuation)
    return " ".join(re.sub(r"\b(a|an|the)\b", " ", bare).split())


def contains(text: str, answers: Sequence[str]) -> bool:
    """Whether the words of one of the answers follow each other in a text."""
    return any(f" {normalized(each)} " in f" {normalized(text)} " for each in answers)
