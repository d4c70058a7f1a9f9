"""Answers by chains of prompts (`memlm.prompting.chains`) beside answers without: of models that learned the chain's
texts, and of models that learned the answers alone (scratchpad, arXiv 2112.00114; least-to-most, 2205.10625;
selection-inference, 2205.09712).

| task | question | answer |
|---|---|---|
| sum | six digits | the last digit of their sum |
| hops | which symbol is three steps from another one? The facts are six steps, which make a circle | that symbol |

The models that answer alone also learn from easier questions of the same task: of two to six digits, of one to three
steps.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import accumulate
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, ClassVar, NamedTuple

import numpy as np

from memlm.bench.learning import TEST_STEP, config_for, learn
from memlm.bench.tasks import Drawn, Task
from memlm.data.tokenizer import Tokenizer
from memlm.language_model import LanguageModel, load
from memlm.model.checkpoint import save_checkpoint
from memlm.prompting.chains import least_to_most, scratchpad, selection_inference
from memlm.training.validation import PADDING

DIGITS, HOPS, SYMBOLS, CIRCLE = 6, 3, "abcdefghijkl", 6
CONTEXT, VOCAB_SIZE = 1024, 320  # room for chains of a model that writes too much
STEPS, SECONDS, QUESTIONS = 1500, 120.0, 100
SHAPE: dict[str, Any] = {"num_heads": 4, "num_kv_heads": 4, "context_length": CONTEXT}
TRAINING = {"learning_rate": 3e-3}
GREEDY: dict[str, Any] = {"temperature": 0, "max_tokens": 64}


class Piece(NamedTuple):
    """A part of a text: given, or to be written by the model."""

    text: str
    is_written: bool


class Question(NamedTuple):
    """A question of a task. `facts` is empty where the question has all that is needed."""

    text: str
    facts: tuple[str, ...]
    answer: str


Text = list[Piece]
Draw = Callable[[np.random.Generator], Text]


@dataclass(frozen=True, eq=False)
class ChainTexts(Task):
    """Texts of one form, as token ids. A position asks for its next token where a model has to write it."""

    learnt: ClassVar[float] = 0.999  # a chain has many tokens, and one wrong token can make its answer wrong
    draw_text: Draw

    @property
    def vocab_size(self) -> int:
        return tokenizer().vocab_size

    @property
    def num_tokens(self) -> int:
        return CONTEXT

    @property
    def chance(self) -> float:
        return 1 / self.vocab_size

    def draw(self, generator: np.random.Generator, rows: int, stage: Any) -> Drawn:
        """Returns random texts, padded to the longest one."""
        texts = [_encoded(self.draw_text(generator)) for _ in range(rows)]
        longest = max(len(ids) for ids, _ in texts)
        ids_BT = np.array([np.pad(ids, (0, longest - len(ids))) for ids, _ in texts])
        is_written_BT = np.array([np.pad(is_written, (0, longest - len(is_written))) for _, is_written in texts])
        return Drawn(ids_BT[:, :-1], np.where(is_written_BT, ids_BT, PADDING)[:, 1:])


@cache
def tokenizer() -> Tokenizer:
    """A tokenizer of these texts, in which a digit or a symbol and the space before it are one token."""
    generator = np.random.default_rng(0)
    texts = ["".join(piece.text for piece in draw(generator)) for draw in TEXTS.values() for _ in range(200)]
    return Tokenizer.train(texts, vocab_size=VOCAB_SIZE)


def draw_sum(generator: np.random.Generator, digits: int = DIGITS) -> Question:
    """Returns random digits, and the last digit of their sum."""
    digit_N = generator.integers(10, size=digits)
    return Question(" ".join(map(str, digit_N)), (), str(digit_N.sum() % 10))


def draw_hops(generator: np.random.Generator, hops: int = HOPS) -> Question:
    """Returns the steps of a circle of random symbols in random order, and the symbol some steps from the first."""
    symbols = _circle(generator)
    facts = [_fact(symbols, number, number + 1) for number in range(CIRCLE)]
    told = tuple(facts[number] for number in generator.permutation(CIRCLE))
    return Question(f"{hops} steps from {symbols[0]}", told, symbols[hops % CIRCLE])


def alone(question: Question) -> Text:
    """Returns a question, and its answer without a chain."""
    return [Piece(_prompt(question), False), Piece(f" {question.answer}\n", True)]


def with_work(generator: np.random.Generator) -> Text:
    """Returns a sum with a scratchpad, which holds the last digits of the sums so far."""
    question = draw_sum(generator)
    work = " ".join(str(total % 10) for total in accumulate(map(int, question.text.split())))
    return [
        Piece(f"Question: {question.text}\nWork:", False),
        Piece(f" {work}\nAnswer:", True),
        Piece(f" {question.answer}\n", True),
    ]


def with_parts(generator: np.random.Generator) -> Text:
    """Returns a sum that is split into those of its first digits, or the answers to all of them, one after another."""
    question = draw_sum(generator)
    digits = question.text.split()
    parts = [" ".join(digits[:count]) for count in range(2, DIGITS)]
    if generator.integers(2):
        split = "".join(f"\n{number}. {part}" for number, part in enumerate(parts[1:], start=2))
        asked = f"Question: {question.text}\nFirst answer these questions:\n1."
        return [Piece(asked, False), Piece(f" {parts[0]}{split}\n\n", True)]
    text = Text()
    for part in (*parts, question.text):
        text += alone(Question(part, (), str(sum(map(int, part.split())) % 10)))
    return text


def with_selection(generator: np.random.Generator) -> Text:
    """Returns a selection of facts before or behind the first inference, an inference, or an answer from one."""
    symbols = _circle(generator)
    facts = [_fact(symbols, number, number + 1) for number in range(CIRCLE)]
    reached = int(generator.integers(1, HOPS))  # a fact that was given or inferred
    known = [*(facts[number] for number in generator.permutation(CIRCLE)), *([_fact(symbols, 0, 2)] * (reached == 2))]
    selected = f"{_fact(symbols, 0, reached)} {facts[reached]}"
    asked = f"Question: {HOPS} steps from {symbols[0]}"
    kind = generator.integers(4)
    if kind < 2:
        return [Piece("\n".join([*known, asked, "To answer it, we use:"]), False), Piece(f" {selected}", True)]
    inferred = _fact(symbols, 0, reached + 1)
    if kind == 2:
        return [Piece(f"{selected} Therefore,", False), Piece(f" {inferred}\n", True)]
    return [Piece(f"{_fact(symbols, 0, HOPS)}\n{asked}\nAnswer:", False), Piece(f" {symbols[HOPS]}\n", True)]


TEXTS: dict[str, Draw] = {
    "sum, alone": lambda generator: alone(draw_sum(generator, int(generator.integers(2, DIGITS + 1)))),
    "sum, scratchpad": with_work,
    "sum, least to most": with_parts,
    "hops, alone": lambda generator: alone(draw_hops(generator, int(generator.integers(1, HOPS + 1)))),
    "hops, selection-inference": with_selection,
}


def bench_chains(seed: int, *, steps: int = STEPS, questions: int = QUESTIONS) -> Mapping[str, dict[str, float]]:
    """Trains a model of one size on the texts of each row. Returns the share of right answers to new questions
    (`exact_match`), the tokens generated for an answer, and the steps and seconds of learning.
    """
    figures = {}
    for row, draw_text in TEXTS.items():
        task = ChainTexts(draw_text)
        learned = learn(config_for(task, **SHAPE), task, steps=steps, seconds=SECONDS, seed=seed, training=TRAINING)
        with TemporaryDirectory() as folder:
            save_checkpoint(Path(folder), learned.decoder.eval(), tokenizer())
            with load(folder, dtype="float32", device="cpu") as lm:
                asked = new_questions(row, seed, questions)
                answers = [answered(lm, row, question) for question in asked]
        is_right = [text == question.answer for (text, _), question in zip(answers, asked, strict=True)]
        figures[row] = {
            "exact_match": float(np.mean(is_right)),
            "tokens_an_answer": float(np.mean([num_tokens for _, num_tokens in answers])),
            "steps": float(learned.steps),
            "seconds": learned.seconds,
        }
    return figures


def new_questions(row: str, seed: int, count: int) -> Sequence[Question]:
    """Returns questions of the row's task in full length, from a seed of their own."""
    generator = np.random.default_rng([seed, TEST_STEP, 1])
    draw = draw_sum if row.startswith("sum") else draw_hops
    return [draw(generator) for _ in range(count)]


def answered(lm: LanguageModel, row: str, question: Question) -> tuple[str, int]:
    """Returns a model's greedy answer, by the chain of a row or alone, and the number of generated tokens."""
    if row.endswith("alone"):
        completion = lm.generate(_prompt(question), stop="\n", **GREEDY).result()
        return completion.text.strip(), completion.finished.usage.generated_tokens
    if row == "sum, scratchpad":
        chain = scratchpad(lm, question.text, **GREEDY)
    elif row == "sum, least to most":
        chain = least_to_most(lm, question.text, max_parts=DIGITS, **GREEDY)
    else:
        chain = selection_inference(lm, question.text, question.facts, rounds=HOPS - 1, **GREEDY)
    return chain.answer, sum(step.num_tokens for step in chain.steps)


def _prompt(question: Question) -> str:
    return "\n".join([*question.facts, f"Question: {question.text}", "Answer:"])


def _circle(generator: np.random.Generator) -> list[str]:
    return [SYMBOLS[number] for number in generator.permutation(len(SYMBOLS))[:CIRCLE]]


def _fact(symbols: Sequence[str], begin: int, end: int) -> str:
    return f"From {symbols[begin]} to {symbols[end % CIRCLE]}."


def _encoded(text: Text) -> tuple[list[int], list[bool]]:
    """Returns the ids of a text behind the token of its start, and which of them a model writes."""
    ids = list(tokenizer().prompt(""))
    is_written = [False] * len(ids)
    for piece in text:
        new = tokenizer().encode(piece.text).tolist()
        ids, is_written = [*ids, *new], [*is_written, *[piece.is_written] * len(new)]
    return ids, is_written
