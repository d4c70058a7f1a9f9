"""Chains of prompts: small programs over any model or client, which keep each prompt with its result.

- `scratchpad` (arXiv 2112.00114): the model writes its work, and then the answer.
- `least_to_most` (arXiv 2205.10625): it splits a question, and answers the parts before the whole.
- `selection_inference` (arXiv 2205.09712): it selects facts, infers another one from them, and so on. A selected fact
  is always one of those that were given or inferred, because the model only ranks them.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from memlm.api.handles import TokenStream
from memlm.base.lists import items_of
from memlm.errors import InvalidInput, check_range

LINE_TOKENS = 64  # of an answer or an inference, by default
WORK_TOKENS = 256


class Writer(Protocol):
    """A model that continues prompts: `LanguageModel`, `Client`, or anything with their `generate`."""

    @property
    def generate(self) -> Callable[..., TokenStream]:
        """Continues a prompt, with options by name."""


class Ranker(Writer, Protocol):
    """A model that also scores continuations, as `LanguageModel` does."""

    def loglikelihood(self, context: str, continuation: str, /) -> tuple[float, bool]:
        """The log-probability of a continuation, and whether it is the likeliest."""

    def tokenize(self, text: str, /) -> Sequence[int]:
        """The token ids of a text."""


@dataclass(frozen=True, slots=True)
class ChainStep:
    """A prompt, its result, and the number of tokens that were generated, 0 for a choice."""

    prompt: str
    result: str
    num_tokens: int = 0


@dataclass(frozen=True, slots=True)
class ChainResult:
    """The answer of a chain, and all of its steps in order. The last step gave the answer."""

    answer: str
    steps: tuple[ChainStep, ...]

    def __str__(self) -> str:
        return self.answer


@dataclass(slots=True)
class _Trace:
    """The steps of a chain so far. `options` are those of `generate`."""

    model: Writer
    options: dict[str, Any]
    steps: list[ChainStep] = field(default_factory=list)

    def draw(self, prompt: str, stop: str, max_tokens: int) -> str:
        """Continues a prompt until a stop string, and returns the text without spaces around it."""
        completion = self.model.generate(prompt, **{"max_tokens": max_tokens, **self.options, "stop": stop}).result()
        self.steps.append(ChainStep(prompt, completion.text.strip(), completion.finished.usage.generated_tokens))
        return self.steps[-1].result

    def end(self, prompt: str) -> ChainResult:
        """Draws a line as the answer of the chain."""
        answer = self.draw(prompt, "\n", LINE_TOKENS)
        return ChainResult(answer, tuple(self.steps))


def scratchpad(model: Writer, question: str, *, examples: str = "", **options: Any) -> ChainResult:
    """Lets a model write its work before the answer. `examples` stand before the question, in the form

        Question: ...
        Work: ...
        Answer: ...

    and show the model how to work. `options` are those of `generate`. `max_tokens` holds for each of the two steps.
    """
    trace = _Trace(model, options)
    prompt = f"{examples}Question: {question}\nWork:"
    work = trace.draw(prompt, "\nAnswer:", WORK_TOKENS)
    return trace.end(f"{prompt} {work}\nAnswer:")


def least_to_most(
    model: Writer, question: str, *, examples: str = "", max_parts: int = 4, **options: Any
) -> ChainResult:
    """Lets a model split a question into at most `max_parts` simpler ones, and answer these before it. Each prompt
    holds the answers so far. `examples` stand before the first prompt only, and show how to split.
    """
    check_range("max_parts", max_parts, least=0, whole=True)
    trace = _Trace(model, options)
    split = trace.draw(f"{examples}Question: {question}\nFirst answer these questions:\n1.", "\n\n", WORK_TOKENS)
    parts = [re.sub(r"^\s*(?:\d+[.)]|[-*])\s*", "", line).strip() for line in split.splitlines()]
    known = ""
    for part in list(dict.fromkeys(part for part in parts if part and part != question))[:max_parts]:
        known += f"Question: {part}\nAnswer:"
        known += f" {trace.draw(known, chr(10), LINE_TOKENS)}\n"
    return trace.end(f"{known}Question: {question}\nAnswer:")


def selection_inference(
    model: Ranker, question: str, facts: Sequence[str], *, rounds: int = 2, num_selected: int = 2, **options: Any
) -> ChainResult:
    """Lets a model select `num_selected` facts and infer another one from them, `rounds` times, and answer a question
    from the last one. Raises InvalidInput for no facts.
    """
    facts = items_of("facts", facts)
    if not facts:
        raise InvalidInput("facts is empty; give at least one", field="facts")
    check_range("rounds", rounds, least=1, whole=True)
    check_range("num_selected", num_selected, least=1, whole=True)
    trace, known, inferred = _Trace(model, options), list(dict.fromkeys(facts)), ""
    for _ in range(rounds):
        selected = list[str]()
        for _ in range(min(num_selected, len(known))):
            others = [fact for fact in known if fact not in selected]
            used = "".join(["To answer it, we use:", *map(" {}".format, selected)])
            prompt = "\n".join([*known, f"Question: {question}", used])
            fact = others[choose(model, prompt, [f" {other}" for other in others])]
            trace.steps.append(ChainStep(prompt, fact))
            selected.append(fact)
        inferred = trace.draw(f"{' '.join(selected)} Therefore,", "\n", LINE_TOKENS)
        if inferred and inferred not in known:
            known.append(inferred)
    return trace.end(f"{inferred}\nQuestion: {question}\nAnswer:")


def choose(model: Ranker, prompt: str, choices: Sequence[str]) -> int:
    """The number of the choice with the highest log-probability a token after a prompt, the first of equals. Without
    the division by tokens, the shortest choice would win.
    """
    choices = items_of("choices", choices)
    if not choices:
        raise InvalidInput("choices is empty; give at least one", field="choices")
    means = [model.loglikelihood(prompt, each)[0] / max(1, len(model.tokenize(each))) for each in choices]
    return means.index(max(means))
