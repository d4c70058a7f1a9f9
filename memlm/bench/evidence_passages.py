"""Tables of `memlm bench evidence`: a datastore against passages of the same documents in the prompt.

Passages are found by BM25 or by the model's mean keys, as `memlm answer` finds them, and stand before the text or the
question (in-context retrieval, arXiv 2302.00083).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from memlm.api.params import RetrievalParams
from memlm.base.progress import Progress
from memlm.bench.evidence_domains import Prepared, logprobs_of
from memlm.bench.evidence_generation import ANSWER_TOKENS, AT_ONCE, begins_with
from memlm.bench.evidence_tokens import class_of
from memlm.bench.past import per_token
from memlm.data.corpus import Document
from memlm.data.windows import Window
from memlm.errors import InvalidInput
from memlm.indexing.option_trials import EncodedText
from memlm.language_model import LanguageModel
from memlm.model.checkpoint import Checkpoint
from memlm.prompting.builder import Part, build_prompt
from memlm.retrieval.encoder import BLOCK_WINDOWS, Encoder
from memlm.retrieval.retriever import Retriever

CHUNK, CONTEXT, ROOM = 128, 384, 256  # tokens: predicted at once, read before them, of these for passages
QUERY_TOKENS = 32  # the end of the text before a chunk
NUM_PASSAGES = 4  # found; those that fit into the room are taken
QUESTIONS, BUDGET = 100, 256
FEWEST_WORDS, MOST_WORDS = 6, 40  # before the answer, and of a sentence
KINDS = ("name", "number")


@dataclass(frozen=True, slots=True)
class Question:
    """The beginning of a sentence of a stored document, and the name or number that follows there."""

    document_id: str
    text: str
    answer: str


def passages(checkpoint: Checkpoint, prepared: Prepared, progress: Progress) -> list[dict[str, Any]]:
    """A row for each way of predicting the test documents, 128 tokens at a time, from 384 tokens: those before, or the
    128 before behind passages. `both` searches the datastore with the passages in the prompt.
    """
    nats: dict[str, list[float]] = {}
    sizes = list[int]()
    with LanguageModel(checkpoint, [prepared.store]) as lm:
        retriever = lm.engine.stores.retriever(RetrievalParams(context_cache=0))
        assert retriever is not None  # a datastore is loaded
        for number, document in enumerate(prepared.domain.test):
            found = _nats_of(lm, retriever, lm.tokenize(document.text))
            sizes.append(found.pop("tokens"))
            for way, each in found.items():
                nats.setdefault(way, []).append(each)
            progress("score", number + 1, len(prepared.domain.test))
    sizes_D, alone_D = np.array(sizes), np.array(nats["alone"])
    rows = []
    for way, sums in nats.items():
        level, level_error = per_token(np.array(sums), sizes_D)
        less, error = per_token(alone_D - np.array(sums), sizes_D)
        figures = {"nats_per_token": level, "nats_per_token_error": level_error}
        figures |= {"nats_less": less, "nats_less_error": error}
        rows.append({"text": prepared.domain.name, "way": way, "documents": len(sizes), **figures})
    return rows


def _nats_of(lm: LanguageModel, retriever: Retriever, ids: Sequence[int]) -> dict[str, Any]:
    """Nats of a document in each way, and the number of its tokens. The first chunk has nothing before it."""
    plain, augmented = list[Window](), list[Window]()
    for begin in range(CHUNK, len(ids), CHUNK):
        targets = ids[begin : begin + CHUNK]
        query = lm.detokenize(ids[max(0, begin - QUERY_TOKENS) : begin])
        before = ids[max(0, begin - CONTEXT) : begin]
        plain.append(window_of(lm, before, targets))
        found = passage_tokens(lm, query)
        augmented.append(window_of(lm, [*found, *before[len(before) - (CONTEXT - ROOM) :]], targets))
    sums: dict[str, Any] = {"tokens": sum(len(window.targets_N) for window in plain)}
    for windows, names in ((plain, ("alone", "datastore")), (augmented, ("passages", "both"))):
        read = _read(lm.checkpoint, windows)
        mixed_N = logprobs_of(read, retriever.search(read.keys_ND, read.max_logprobs_N))
        for name, logprobs_N in zip(names, (read.lm_logprobs_N, mixed_N), strict=True):
            sums[name] = -float(logprobs_N.sum(dtype=np.float64))
    return sums


def passage_tokens(lm: LanguageModel, query: str) -> list[int]:
    """The tokens of the best passages for a query by BM25, the best last, at most as many as there is room for."""
    taken = list[int]()
    for passage in lm.find_passages(query, k=NUM_PASSAGES):
        ids = lm.tokenize(f"{passage.text}\n\n")
        if len(ids) + len(taken) <= ROOM:
            taken = [*ids, *taken]
    return taken


def window_of(lm: LanguageModel, before: Sequence[int], targets: Sequence[int]) -> Window:
    """A window that reads the start of a text, the tokens before, and the targets, and predicts the targets."""
    inputs = [lm.checkpoint.tokenizer.start_id, *before, *targets[:-1]]
    return Window(np.array(inputs), np.array(targets))


def _read(checkpoint: Checkpoint, windows: Sequence[Window]) -> EncodedText:
    encoder, parts = Encoder(checkpoint.decoder), list[EncodedText]()
    for begin in range(0, len(windows), BLOCK_WINDOWS):
        block = windows[begin : begin + BLOCK_WINDOWS]
        parts += map(EncodedText.of, block, encoder.predictions(block))
    return EncodedText.joined(parts)


def questions(checkpoint: Checkpoint, prepared: Prepared, progress: Progress) -> list[dict[str, Any]]:
    """A row for each way of answering questions about the stored documents: the share of right answers, and the tokens
    of a prompt. `by_words` and `by_meaning` are the ways of finding passages.
    """
    asked = questions_of(prepared.domain.stored, QUESTIONS)
    alone, memory = {"use_store": False}, dict[str, Any]()
    rows = []
    with LanguageModel(checkpoint, [prepared.store]) as lm:
        ways: dict[str, tuple[str, dict[str, Any]]] = {
            "alone": ("", alone),
            "datastore": ("", memory),
            "passages by_words": ("words", alone),
            "passages by_meaning": ("meaning", alone),
            "both": ("words", memory),
        }
        for number, (way, (by, options)) in enumerate(ways.items()):
            prompts = [prompt_of(lm, question.text, by) for question in asked]
            right = _right(lm, asked, prompts, options)
            share, error = per_token(*by_document(asked, right))
            tokens, tokens_error = per_token(*by_document(asked, [len(lm.tokenize(prompt)) for prompt in prompts]))
            figures = {"right": share, "right_error": error}
            figures |= {"prompt_tokens": tokens, "prompt_tokens_error": tokens_error}
            rows.append({"text": prepared.domain.name, "way": way, "questions": len(asked), **figures})
            progress("ask", number + 1, len(ways), way)
    return rows


def _right(lm: LanguageModel, asked: Sequence[Question], prompts: Sequence[str], options: dict[str, Any]) -> list[bool]:
    """Whether each greedy answer begins with the right one."""
    right = list[bool]()
    for begin in range(0, len(asked), AT_ONCE):
        some = slice(begin, begin + AT_ONCE)
        answers = lm.generate_batch(prompts[some], temperature=0, max_tokens=ANSWER_TOKENS, context_cache=0, **options)
        right += [begins_with(each.text, question.answer) for each, question in zip(answers, asked[some], strict=True)]
    return right


def prompt_of(lm: LanguageModel, question: str, by: str) -> str:
    """The question, behind the passages that are found `by` words or meaning and fit, the best last."""
    if not by:
        return question
    found = tuple(passage.text for passage in lm.find_passages(question, k=NUM_PASSAGES, by=by))
    count: Callable[[str], int] = lambda text: len(lm.tokenize(text))  # noqa: E731
    return build_prompt([Part("passages", found)], question, budget=BUDGET, count_tokens=count).text


def questions_of(documents: Sequence[Document], count: int, seed: int = 0) -> list[Question]:
    """Draws questions, no answer twice for a document. Raises InvalidInput where the documents give none."""
    every = [question for document in documents for question in _questions_in(document)]
    if not every:
        raise InvalidInput("the stored documents have no sentence with a name or number; give more", field="domains")
    order = np.random.default_rng(seed).permutation(len(every))
    return [every[place] for place in order[:count]]


def _questions_in(document: Document) -> Iterator[Question]:
    """One for each sentence whose first name or number behind six words is new in it, and no answer yet."""
    known = set[str]()
    for sentence in document.text.replace("\n", ". ").split(". "):
        words = sentence.split(" ")
        if not FEWEST_WORDS < len(words) <= MOST_WORDS:
            continue
        for place in range(FEWEST_WORDS, len(words)):
            answer = words[place].strip(",;:()[]\"'.")
            if answer and words[place].startswith(answer) and class_of(answer) in KINDS:
                if answer not in known and answer not in (before := " ".join(words[:place])):
                    known.add(answer)
                    yield Question(document.id, before, answer)
                break


def by_document(asked: Sequence[Question], figures: Sequence[float]) -> tuple[np.ndarray, np.ndarray]:
    """The sum of a figure over the questions of each document, and the numbers of these."""
    names = {name: place for place, name in enumerate(dict.fromkeys(question.document_id for question in asked))}
    places = [names[question.document_id] for question in asked]
    return np.bincount(places, np.asarray(figures, float)), np.bincount(places)
