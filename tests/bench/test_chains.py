"""Texts of chains are what the chains ask for, and a model that writes them gives right answers."""

import re
from itertools import pairwise
from types import SimpleNamespace

import numpy as np
import pytest

from memlm.bench import chains
from memlm.bench.chains import (
    CONTEXT,
    GREEDY,
    TEXTS,
    ChainTexts,
    answered,
    bench_chains,
    new_questions,
    tokenizer,
)
from memlm.training.validation import PADDING


def facts_of(text):
    return re.findall(r"From (\w) to (\w)\.", text)


def digit(text):
    """The last digit of a sum."""
    return str(sum(map(int, text.split())))[-1]


class Solver:
    """Writes what follows a prompt by the rules of the tasks, and likes the facts that lead on."""

    def __init__(self):
        self.num_calls = 0

    def write(self, prompt):
        question = prompt.rsplit("Question: ", 1)[-1].split("\n")[0]
        if prompt.endswith("Therefore,"):
            (begin, middle), (again, end) = facts_of(prompt)
            assert middle == again
            return f" From {begin} to {end}.\n"
        if prompt.endswith("Work:"):
            digits = question.split()
            return " " + " ".join(digit(" ".join(digits[:n])) for n in range(1, len(digits) + 1)) + "\nAnswer:"
        if prompt.endswith("\n1."):
            digits = question.split()
            parts = [" ".join(digits[:n]) for n in range(2, len(digits))]
            return " " + "\n".join([parts[0], *(f"{n}. {part}" for n, part in enumerate(parts[1:], 2))]) + "\n\n"
        assert prompt.endswith("Answer:")
        if " steps from " not in question:
            return f" {digit(question)}\n"
        steps, symbol = question.split(" steps from ")
        facts = facts_of(prompt)
        if len(facts) == 1:  # it was inferred
            assert facts[0][0] == symbol
            return f" {facts[0][1]}\n"
        for _ in range(int(steps)):
            symbol = dict(facts)[symbol]
        return f" {symbol}\n"

    def select(self, prompt):
        """The longest way from the symbol of the question, then the step behind it."""
        told, used = prompt.split("To answer it, we use:")
        symbol, facts = told.rstrip()[-1], facts_of(told)
        if not used:
            return " From {} to {}.".format(*[fact for fact in facts if fact[0] == symbol][-1])
        (_, reached), *others = facts_of(used)
        assert not others
        return " From {} to {}.".format(*next(fact for fact in facts if fact[0] == reached))

    def generate(self, prompt, **options):
        assert options.items() >= {**GREEDY, "stop": options["stop"]}.items()
        self.num_calls += 1
        written = self.write(prompt).split(options["stop"])[0]
        finished = SimpleNamespace(usage=SimpleNamespace(generated_tokens=1))
        return SimpleNamespace(result=lambda: SimpleNamespace(text=written, finished=finished))

    def loglikelihood(self, context, continuation):
        return (0.0 if continuation == self.select(context) else -1.0), False

    def tokenize(self, text):
        return [0]


@pytest.mark.parametrize("row", TEXTS)
def test_a_model_learns_to_write_what_follows_by_the_rules(row):
    generator, solver = np.random.default_rng(0), Solver()
    for _ in range(40):
        prompt = ""
        for piece in TEXTS[row](generator):
            if piece.is_written and prompt.endswith("use:"):
                first = solver.select(prompt)
                assert piece.text == first + solver.select(prompt + first)
            elif piece.is_written:
                assert piece.text == solver.write(prompt)
            prompt += piece.text


@pytest.mark.parametrize(("row", "calls"), [*zip(TEXTS, (1, 2, 6, 1, 3), strict=True)])
def test_chains_ask_for_the_steps_that_were_learned(row, calls):
    solver = Solver()
    for question in new_questions(row, 0, 20):
        solver.num_calls = 0
        assert answered(solver, row, question) == (question.answer, calls)
        assert solver.num_calls == calls


@pytest.mark.parametrize("row", TEXTS)
def test_positions_that_a_model_writes_ask_for_their_tokens(row):
    drawn = ChainTexts(TEXTS[row]).draw(np.random.default_rng(3), 8, 0)
    generator = np.random.default_rng(3)
    for inputs_T, targets_T in zip(*drawn, strict=True):
        text = TEXTS[row](generator)
        written = "".join(piece.text for piece in text if piece.is_written)
        assert tokenizer().decode(targets_T[targets_T != PADDING].tolist()) == written
        # The model is asked with the ids of whole prompts, which have to be those of the pieces.
        whole = tokenizer().prompt("".join(piece.text for piece in text))
        assert inputs_T[: len(whole)].tolist() == list(whole)[: len(inputs_T)]
        assert all(target in (PADDING, after) for target, after in zip(targets_T, inputs_T[1:], strict=False))
        assert len(whole) + GREEDY["max_tokens"] <= CONTEXT


def test_each_question_is_another_one_and_a_way_has_no_short_cut():
    questions = new_questions("hops, alone", 0, 50)
    assert len({question.facts for question in questions}) == 50
    for question in questions:
        steps, symbol = dict(facts_of("".join(question.facts))), question.text[-1]
        way = [symbol]
        for _ in range(6):
            way.append(steps[way[-1]])
        assert way[-1] == symbol != question.answer == way[3]
        assert len({*pairwise(way)}) == 6
    assert {len(question.text.split()) for question in new_questions("sum, alone", 0, 9)} == {6}
    assert new_questions("sum, alone", 0, 9) == new_questions("sum, scratchpad", 0, 9)


def test_each_row_trains_a_model_and_counts_whole_answers(monkeypatch):
    figures = bench_chains(0, steps=1, questions=1)
    assert list(figures) == list(TEXTS)
    assert all(row["exact_match"] < 1 and row["steps"] == 1 and row["tokens_an_answer"] > 0 for row in figures.values())
    monkeypatch.setattr(chains, "TEXTS", {"sum, alone": TEXTS["sum, alone"]})
    answers = iter(["right", "wrong", "right", "right"])
    monkeypatch.setattr(
        chains, "answered", lambda lm, row, asked: (asked.answer if next(answers) == "right" else "no", 2)
    )
    row = bench_chains(0, steps=1, questions=4)["sum, alone"]
    assert (row["exact_match"], row["tokens_an_answer"]) == (0.75, 2)
