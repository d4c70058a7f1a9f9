"""Evidence: generated text with its sources, and invented facts that are taught and deleted."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from math import sqrt
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

from benchmarks.evidence.domains import Prepared
from benchmarks.per_token import per_token
from memlm.api.datastores import NewDocument
from memlm.api.generation import Token
from memlm.base.progress import Progress
from memlm.index.store.snapshot import Snapshot
from memlm.language_model import LanguageModel
from memlm.model.files.checkpoint import Checkpoint

PROMPT_TOKENS, TOKENS, RUN = 64, 48, 4
SHARE = 0.5  # of a token's probability that comes from memory
PREDECESSORS = 3  # tokens before the token that its first source must contain too
AT_ONCE = 25
FACTS, ANSWER_TOKENS = 100, 12
BEGINS = (
    "Bar",
    "Dor",
    "Fen",
    "Gal",
    "Hur",
    "Kel",
    "Lom",
    "Mir",
    "Nax",
    "Pol",
    "Quil",
    "Ros",
    "Sav",
    "Tur",
    "Vel",
    "Zan",
)
MIDDLES = ("a", "e", "i", "o", "u", "ari", "eno", "ilo", "uba", "osi")
ENDS = ("dan", "fort", "gard", "kin", "lon", "mere", "nis", "ra", "sk", "ton", "vik", "wyn")
RELATIONS = ("The capital of {} is", "The bridge of {} was built by", "The oldest town of {} is", "The king of {} was")
NEAREST = {"k": 1, "lam": 0.9}  # options that follow the nearest neighbor, in place of those tuned on text
SETTINGS: dict[str, dict[str, Any]] = {"tuned": {}, "nearest": NEAREST}
FORMS = {"as_taught": "", "behind_other_text": "I read a long book about this when I was young. "}


@dataclass(frozen=True, slots=True)
class Fact:
    """A statement about invented names: the words before the answer, and the answer."""

    id: str
    question: str
    answer: str

    @property
    def text(self) -> str:
        """The statement."""
        return f"{self.question} {self.answer}."


def distinct_runs(ids: Sequence[int]) -> float:
    """The share of different runs of `RUN` tokens in a text."""
    runs = [tuple(ids[begin : begin + RUN]) for begin in range(len(ids) - RUN + 1)]
    return len(set(runs)) / max(1, len(runs))


def generation(checkpoint: Checkpoint, prepared: Prepared, progress: Progress) -> list[dict[str, Any]]:
    """A row for the model alone and one with the datastore: greedy continuations of the test documents' beginnings.

    `distinct` is the share of different runs of four tokens, `copied_tokens` the longest run that any stored document
    contains, `from_memory` the share of tokens of which memory gave more than half of the probability, and
    `attribution_precision` the share of these whose first source contains the token and the three tokens before it.
    """
    tokenizer, rows = checkpoint.tokenizer, []
    prompts = [tokenizer.encode(document.text)[:PROMPT_TOKENS].tolist() for document in prepared.domain.test]
    with LanguageModel(checkpoint, [prepared.store]) as lm:
        snapshot = lm.engine.stores.model_store().snapshot
        stored = [snapshot.tokens(document.id) for document in snapshot.documents()]
        for number, way in enumerate(("alone", "memory")):
            texts = list[tuple[Token, ...]]()
            for begin in range(0, len(prompts), AT_ONCE):
                completions = lm.generate_batch(
                    prompts[begin : begin + AT_ONCE], temperature=0, max_tokens=TOKENS, neighbors=1,
                    use_store=way == "memory", context_cache=0,
                )  # fmt: skip
                texts += [completion.tokens for completion in completions]
            row = {"text": prepared.domain.name, "way": way, "documents": len(texts)}
            rows.append(row | _figures(prompts, texts, snapshot, stored))
            progress("generate", number + 1, 2)
    return rows


def _figures(
    prompts: Sequence[list[int]],
    texts: Sequence[Sequence[Token]],
    snapshot: Snapshot,
    stored: Sequence[np.ndarray],
) -> dict[str, float]:
    """Figures of texts, with standard errors over these."""
    ids = [[token.id for token in text] for text in texts]
    sizes_D, ones_D = np.array([len(each) for each in ids], float), np.ones(len(ids))
    from_memory = [[token.knn_share > SHARE for token in text] for text in texts]
    right = [
        sum(is_attributed(number, text, prompt, snapshot) for number in np.flatnonzero(marks).tolist())
        for text, prompt, marks in zip(texts, prompts, from_memory, strict=True)
    ]
    counts_D = np.array([sum(marks) for marks in from_memory], float)
    figures = {
        "distinct": per_token(np.array([distinct_runs(each) for each in ids]), ones_D),
        "copied_tokens": per_token(np.array([longest_copied(each, stored) for each in ids], float), ones_D),
        "from_memory": per_token(counts_D, sizes_D),
    }
    if counts_D.any():
        figures["attribution_precision"] = per_token(np.array(right, float), counts_D)
    return {
        name + end: value for name, pair in figures.items() for end, value in zip(("", "_error"), pair, strict=True)
    }


def is_attributed(number: int, text: Sequence[Token], prompt: Sequence[int], snapshot: Snapshot) -> bool:
    """Whether the first source of a token of a text contains it and the tokens before it, which may be the prompt's."""
    token = text[number]
    if not token.neighbors:
        return False
    source = token.neighbors[0]
    wanted = [*prompt, *(each.id for each in text[: number + 1])][-1 - PREDECESSORS :]
    end = source.token_offset + 1
    return end >= len(wanted) and snapshot.tokens(source.document_id, end - len(wanted), end).tolist() == wanted


def longest_copied(ids: Sequence[int], stored: Sequence[np.ndarray]) -> int:
    """The length of the longest run of tokens that stands in a stored document."""
    documents = [each.astype("<u4").tobytes() for each in stored]
    longest = 0
    for begin in range(len(ids)):
        while begin + longest < len(ids) and _stands(ids[begin : begin + longest + 1], documents):
            longest += 1
    return longest


def _stands(ids: Sequence[int], documents: Sequence[bytes]) -> bool:
    run = np.asarray(ids, "<u4").tobytes()
    for document in documents:
        place = document.find(run)
        while place >= 0:
            if place % 4 == 0:  # and not in the middle of a token
                return True
            place = document.find(run, place + 1)
    return False


def facts(checkpoint: Checkpoint, prepared: Prepared, progress: Progress) -> list[dict[str, Any]]:
    """A row for each form of the question and setting: the share of invented facts that are answered right before they
    are taught, after, and after their deletion. A fact is right if the greedy answer begins with it.
    """
    taught, states = facts_of(FACTS), dict[str, dict[tuple[str, str], float]]()
    with TemporaryDirectory(prefix="memlm-bench-") as folder:
        store = Path(shutil.copytree(prepared.store, Path(folder) / "store"))
        with LanguageModel(checkpoint, [store]) as lm:
            states["before"] = _right(lm, taught)
            progress("ask", 1, 3)
            lm.remember([NewDocument(fact.id, fact.text) for fact in taught])
            states["taught"] = _right(lm, taught)
            progress("ask", 2, 3)
            lm.delete_documents([fact.id for fact in taught])
            states["deleted"] = _right(lm, taught)
            progress("ask", 3, 3)
    rows = []
    for form, setting in product(FORMS, SETTINGS):
        row: dict[str, Any] = {"text": prepared.domain.name, "way": f"{form} {setting}", "facts": len(taught)}
        for state, shares in states.items():
            share = shares[form, setting]
            row[f"right_{state}"] = share
            row[f"right_{state}_error"] = sqrt(share * (1 - share) / len(taught))
        rows.append(row)
    return rows


def facts_of(count: int, seed: int = 0) -> list[Fact]:
    """Facts about different invented names, which also are the answers."""
    generator = np.random.default_rng(seed)
    every = [begin + middle + end for begin in BEGINS for middle in MIDDLES for end in ENDS]
    names = generator.permutation(every)[: 2 * count].tolist()
    return [
        Fact(f"fact-{number}", RELATIONS[number % len(RELATIONS)].format(names[2 * number]), names[2 * number + 1])
        for number in range(count)
    ]


def _right(lm: LanguageModel, taught: Sequence[Fact]) -> dict[tuple[str, str], float]:
    """The share of facts that are answered right, for each form of the question and setting."""
    shares = {}
    for (form, before), (setting, options) in product(FORMS.items(), SETTINGS.items()):
        right = 0
        for begin in range(0, len(taught), AT_ONCE):
            batch = taught[begin : begin + AT_ONCE]
            prompts = [before + fact.question for fact in batch]
            answers = lm.generate_batch(prompts, temperature=0, max_tokens=ANSWER_TOKENS, **options)
            right += sum(begins_with(answer.text, fact.answer) for answer, fact in zip(answers, batch, strict=True))
        shares[form, setting] = right / len(taught)
    return shares


def begins_with(text: str, answer: str) -> bool:
    """Whether a text begins with an answer, and not with a longer word."""
    rest = text.strip().removeprefix(answer)
    return rest != text.strip() and not rest[:1].isalnum()
