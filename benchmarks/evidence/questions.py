"""Evidence: questions about stored documents, with a datastore and with passages in the prompt.

The questions are made by rule from the stored text: the words before a name or a number, and the beginning of a
definition. Passages are found by BM25, as `memlm answer` finds them without an encoder, and stand before the question
(in-context retrieval, arXiv 2302.00083).
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from jaxtyping import Float

from benchmarks.evidence.domains import Prepared, differences
from benchmarks.evidence.generation import NEAREST, begins_with
from benchmarks.evidence.passages import NUM_PASSAGES
from benchmarks.evidence.tokens import class_of
from benchmarks.per_token import per_token
from memlm.base.progress import Progress
from memlm.data.corpus import Document
from memlm.errors import InvalidInput
from memlm.language_model import LanguageModel
from memlm.model.files.checkpoint import Checkpoint
from memlm.prompting.builder import Part, build_prompt

BUDGET = 256  # tokens of a prompt
AT_ONCE, SPARE_TOKENS = 50, 3  # prompts answered side by side, and tokens generated beyond those of the right answer
FEWEST_WORDS, MOST_WORDS = 6, 40  # before the answer, and of a sentence
DEFINITION = "definition"
KINDS = ("name", "number", DEFINITION)
ALL = "all"
# Isabelle's `definition NAME :: "TYPE" where "NAME x = ..."`, a function and a constant of Python, and "X is a ...".
RULES = (
    r"(?P<question>\bdefinition\s+[^\"]{1,80}(?:\"[^\"]{0,120}\"[^\"]{0,40})?\bwhere\b[^\"]{0,40}"
    r"\"[^\"]{1,100}?\s(?:\\<equiv>|≡|==|=))\s+(?P<answer>[^\s\"]+(?: [^\s\"]+)?)",
    r"^\s*(?P<question>(?:async )?def \w+\((?:(?:self|cls),)?) ?(?!self\b|cls\b)(?P<answer>\w+(?:, \w+)?)",
    r"^(?P<question>[A-Z_][A-Z0-9_]{2,} =) (?P<answer>[^\s]+(?: [^\s]+)?)",
    r"(?:^|[.] )\s*(?P<question>(?:[A-Z][\w'-]* ){1,6}(?:is|was|are|were) (?:a|an|the)) (?P<answer>\w+(?: \w+)?)",
)
DEFINITIONS = tuple(re.compile(rule, flags=re.MULTILINE) for rule in RULES)
PAIRS = (
    ("both", "passages by_words"),
    ("passages by_words", "datastore"),
    ("datastore nearest", "datastore"),
    ("datastore", "alone"),
)


@dataclass(frozen=True, slots=True)
class Question:
    """A beginning that stands in a stored document, and the name, number or definition that follows there."""

    document_id: str
    kind: str
    text: str
    answer: str


def questions(checkpoint: Checkpoint, prepared: Prepared, progress: Progress) -> list[dict[str, Any]]:
    """A row for each way of answering questions and each kind of question: the share of right answers, and the tokens
    of a prompt. `datastore nearest` follows the nearest neighbor. The rows of `questions-differences` compare two ways.
    """
    asked = questions_of(prepared.domain.stored, prepared.sizes.questions)
    alone, memory = {"use_store": False}, dict[str, Any]()
    rows, wrong = list[dict[str, Any]](), dict[str, Float[np.ndarray, " D"]]()
    bare, behind = [question.text for question in asked], list[str]()
    with LanguageModel(checkpoint, [prepared.store]) as lm:
        for question in asked:
            behind.append(prompt_of(lm, question.text))
            progress("find by words", len(behind), len(asked))
        ways: dict[str, tuple[list[str], dict[str, Any]]] = {
            "alone": (bare, alone),
            "datastore": (bare, memory),
            "datastore nearest": (bare, NEAREST),
            "passages by_words": (behind, alone),
            "both": (behind, memory),
        }
        for way, (prompts, options) in ways.items():
            right = right_answers(lm, asked, prompts, options, lambda *done, way=way: progress(f"ask {way}", *done))
            sizes = [len(lm.tokenize(prompt)) for prompt in prompts]
            wrong[way], counts_D = by_document(asked, [not each for each in right])
            rows += _rows(prepared.domain.name, way, asked, right, sizes)
    return rows + differences("questions", prepared.domain.name, wrong, counts_D, PAIRS)


def _rows(
    text: str, way: str, asked: Sequence[Question], right: Sequence[bool], sizes: Sequence[int]
) -> Iterator[dict[str, Any]]:
    """A row for all questions, and one for each kind that there is. An error is over `documents`, and is 0 for one."""
    for kind in (ALL, *KINDS):
        chosen = [place for place, question in enumerate(asked) if kind in (ALL, question.kind)]
        if not chosen:
            continue
        some = [asked[place] for place in chosen]
        documents = len({question.document_id for question in some})
        share, error = per_token(*by_document(some, [right[place] for place in chosen]))
        tokens, tokens_error = per_token(*by_document(some, [sizes[place] for place in chosen]))
        figures = {"right": share, "right_error": error}
        figures |= {"prompt_tokens": tokens, "prompt_tokens_error": tokens_error}
        yield {"text": text, "way": way, "cut": kind, "documents": documents, "questions": len(chosen), **figures}


def right_answers(
    lm: LanguageModel,
    asked: Sequence[Question],
    prompts: Sequence[str],
    options: dict[str, Any],
    progress: Callable[[int, int], None],
) -> list[bool]:
    """Whether each greedy answer begins with the right one. Questions with equally long answers are asked together, and
    generation ends a few tokens behind the longest of these answers.
    """
    lengths = [len(lm.tokenize(f" {question.answer}")) for question in asked]
    order = sorted(range(len(asked)), key=lambda place: (lengths[place], len(prompts[place])))
    right = [False] * len(asked)
    for begin in range(0, len(order), AT_ONCE):
        places = order[begin : begin + AT_ONCE]
        answers = lm.generate_batch(
            [prompts[place] for place in places], temperature=0, context_cache=0,
            max_tokens=lengths[places[-1]] + SPARE_TOKENS, **options,
        )  # fmt: skip
        for place, answer in zip(places, answers, strict=True):
            right[place] = begins_with(answer.text, asked[place].answer)
        progress(begin + len(places), len(order))
    return right


def prompt_of(lm: LanguageModel, question: str) -> str:
    """The question, behind the passages that are found by words and fit, the best last."""
    found = tuple(passage.text for passage in lm.find_passages(question, k=NUM_PASSAGES, by="words"))
    count: Callable[[str], int] = lambda text: len(lm.tokenize(text))  # noqa: E731
    return build_prompt([Part("passages", found)], question, budget=BUDGET, count_tokens=count).text


def questions_of(documents: Sequence[Document], count: int, seed: int = 0) -> list[Question]:
    """Draws questions, as many of each kind as there are or their share of the count. No two have the same text, and no
    name or number is asked for twice for a document. Raises InvalidInput where the documents give none.
    """
    every = [
        question for document in documents for question in (*_facts_in(document), *_definitions_in(document))
    ]  # fmt: skip
    texts = Counter(question.text for question in every)
    generator = np.random.default_rng(seed)
    by_kind = []
    for kind in KINDS:
        some = [question for question in every if question.kind == kind and texts[question.text] == 1]
        by_kind.append([some[place] for place in generator.permutation(len(some))])
    turns = sorted((place, number) for number, some in enumerate(by_kind) for place in range(len(some)))
    if not turns:
        raise InvalidInput(
            "the stored documents have no sentence with a name or number, and no definition; give more", field="domains"
        )
    return [by_kind[number][place] for place, number in turns[:count]]


def _facts_in(document: Document) -> Iterator[Question]:
    """One for each sentence whose first name or number behind six words is new in it, and no answer yet."""
    known = set[str]()
    for sentence in document.text.replace("\n", ". ").split(". "):
        words = sentence.strip().split(" ")
        if not FEWEST_WORDS < len(words) <= MOST_WORDS:
            continue
        for place in range(FEWEST_WORDS, len(words)):
            answer = words[place].strip(",;:()[]\"'.")
            if answer and words[place].startswith(answer) and (kind := class_of(answer)) in KINDS:
                if answer not in known and answer not in (before := " ".join(words[:place])):
                    known.add(answer)
                    yield Question(document.id, kind, before, answer)
                break


def _definitions_in(document: Document) -> Iterator[Question]:
    """One for each definition of Isabelle or Python and each sentence of the form "X is a ..."."""
    for number, rule in enumerate(DEFINITIONS):
        for found in rule.finditer(document.text):
            question, answer = found["question"], found["answer"]
            is_prose = number == len(DEFINITIONS) - 1
            if is_prose and "name" not in {class_of(word) for word in question.split()}:
                continue  # "It is a ..." and "This was the ..." define nothing
            if any(letter.isalnum() for letter in answer) and answer not in question:
                yield Question(document.id, DEFINITION, question, answer)


def by_document(
    asked: Sequence[Question], figures: Sequence[float]
) -> tuple[Float[np.ndarray, " D"], Float[np.ndarray, " D"]]:
    """The sum of a figure over the questions of each document, and the numbers of these."""
    names = {name: place for place, name in enumerate(dict.fromkeys(question.document_id for question in asked))}
    places = [names[question.document_id] for question in asked]
    return np.bincount(places, np.asarray(figures, float)), np.bincount(places).astype(float)
