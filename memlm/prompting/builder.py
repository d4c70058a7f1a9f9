"""Parts of a prompt, each with a budget of tokens -> one text that fits, and a list of the pieces that were left out.

A piece of text is taken whole or not at all, and the question is never cut. The best piece of a part comes last, next
to the question, where models use it most (arXiv 2307.03172).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from memlm.api.answers import cited as cited
from memlm.api.passages import Passage
from memlm.base.passage_texts import lines_above
from memlm.errors import InvalidInput, check_range

CountTokens: TypeAlias = Callable[[str], int]

BETWEEN = "\n\n"


@dataclass(frozen=True, slots=True)
class Part:
    """Pieces of text, the best first. Together they take at most `budget` tokens, None: as many as the prompt has."""

    name: str
    pieces: tuple[str, ...]
    budget: int | None = None

    def __post_init__(self) -> None:
        """Raises InvalidInput for a budget below 0."""
        check_range("budget", self.budget, least=0, whole=True)


@dataclass(frozen=True, slots=True)
class BuiltPrompt:
    """A prompt, the number of its tokens, and the numbers of the pieces of each part that are in it or were left out.

    Numbers count from 0, and are in the order of the pieces: the best first.
    """

    text: str
    num_tokens: int
    taken: Mapping[str, tuple[int, ...]]
    left_out: Mapping[str, tuple[int, ...]]


def build_prompt(parts: Sequence[Part], question: str, *, budget: int, count_tokens: CountTokens) -> BuiltPrompt:
    """Builds a prompt of at most `budget` tokens: the parts in their order, then the question.

    Pieces are tried in the order of the parts, the best first. One that does not fit is left out, and the next one is
    tried. `count_tokens` counts the tokens of a text. It is called once or twice for each piece. Raises InvalidInput
    for a question that alone does not fit, and for two parts of one name.
    """
    taken: dict[str, list[int]] = {part.name: [] for part in parts}
    if len(taken) != len(parts):
        raise InvalidInput("two parts have one name; give each its own", field="parts")
    num_tokens = count_tokens(question)
    if num_tokens > budget:
        raise InvalidInput(
            f"the question has {num_tokens:,} tokens, and the prompt a budget of {budget:,}; shorten the question, or"
            " raise the budget",
            field="budget",
        )
    for part in parts:
        for number, _ in enumerate(part.pieces):
            taken[part.name].append(number)
            fits_part = part.budget is None or count_tokens(_joined([part], taken)) <= part.budget
            size = count_tokens(_joined(parts, taken, question)) if fits_part else budget + 1
            if size <= budget:
                num_tokens = size
            else:
                taken[part.name].pop()
    left_out = {part.name: tuple(sorted({*range(len(part.pieces))} - {*taken[part.name]})) for part in parts}
    text = _joined(parts, taken, question)
    return BuiltPrompt(text, num_tokens, {name: tuple(numbers) for name, numbers in taken.items()}, left_out)


def _joined(parts: Sequence[Part], taken: Mapping[str, Sequence[int]], *behind: str) -> str:
    """The pieces that were taken, the best of each part last."""
    pieces = [part.pieces[number] for part in parts for number in reversed(taken[part.name])]
    return BETWEEN.join([*pieces, *behind])


def numbered(passages: Sequence[Passage]) -> tuple[str, ...]:
    """Passages as pieces of a prompt, each under its number from 1, its title, or else the id of its document, and the
    headings above its text.
    """
    return tuple(f"[{number}] {_above(passage)}\n{passage.text}" for number, passage in enumerate(passages, 1))


def alone(passage: Passage, *, points_out: bool) -> str:
    """A passage that is the only one of a prompt. If `points_out`, its sentence stands once more behind it."""
    piece, sentence = f"Text: {_above(passage)}\n{passage.text}", passage.sentence
    if not points_out or sentence is None or sentence.text == passage.text.strip():
        return piece
    return f"{piece}{BETWEEN}Most relevant sentence: {sentence.text}"


def _above(passage: Passage) -> str:
    name = passage.title or passage.document_id
    above = [line for line in lines_above(name, passage.headings, passage.text) if line != name]
    return ", ".join(" ".join(line.split()) for line in (name, *above))
