"""Feedback memory: feedback on earlier answers stands in a datastore, and comes into later prompts.

MemPrompt (arXiv 2201.06009): a question with its feedback is remembered. A later question takes the feedback of the
most similar earlier one into its prompt, so that a mistake is not made twice, without training.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace

from memlm.api.chat import ChatRequest, Message
from memlm.api.datastores import RememberRequest, SearchRequest, text_id
from memlm.api.generation import Neighbor
from memlm.base.phrases import words_of
from memlm.errors import InvalidInput, check_kind

FOLDER = "feedback/"  # of the documents' ids, so that other documents of the datastore are not searched
CANDIDATES = 64  # places where the model was in a similar state; several may be of one question
LEAST_SIMILARITY, NEAREST_BONUS = 0.45, 0.15  # measured on paraphrases (benchmarks/log/2026-11-26-feedback.md)
NOTE = "(Feedback on an earlier answer to a similar question: {})"


def feedback_request(question: str, feedback: str, store: str | None) -> RememberRequest:
    """Makes the request that remembers feedback on the answer to a question, in place of earlier feedback on it. Raises
    InvalidInput for an empty text.
    """
    for name, text in (("question", question), ("feedback", feedback)):
        check_kind(name, text, str, "a text")
        if not text.strip():
            raise InvalidInput(f"{name} is empty; give some text", field=name)
    # The state at the end of the question is the key of the line end behind it.
    return RememberRequest.of(
        f"{question}\n{feedback}",
        store,
        document_id=FOLDER + text_id(question),
        metadata={"question": question, "feedback": feedback},
        replace=True,
    )


def nearest_request(request: ChatRequest, store: str) -> SearchRequest:
    """Makes the search for feedback on questions like that of a conversation's last message."""
    return SearchRequest(request.messages[-1].content, store, k=CANDIDATES, documents=(FOLDER,))


def with_feedback(request: ChatRequest, found: Sequence[Neighbor]) -> ChatRequest:
    """The request, whose last message ends with the feedback on the most similar question that a search found, if there
    is a similar one. It finds no passages unless it says how many: documents with feedback would be among them.
    """
    last, request = request.messages[-1], replace(request, num_passages=request.num_passages or 0)
    fields = ((each.metadata.get("question"), each.metadata.get("feedback")) for each in found)
    known = {asked: said for asked, said in fields if isinstance(asked, str) and isinstance(said, str)}
    if (question := most_similar(last.content, list(known))) is None:
        return request
    content = f"{last.content}\n\n{NOTE.format(known[question])}"
    return replace(request, messages=(*request.messages[:-1], Message(last.role, content)))


def most_similar(question: str, others: Sequence[str]) -> str | None:
    """The question that shares most of its words, where a word counts more the fewer questions have it. `others` begin
    with the one whose end the model sees as most alike, which gets a bonus. None if all are too different.
    """
    words = {each: set(words_of(each)) for each in (question, *others)}
    counts = Counter(word for each in words.values() for word in each)
    weight = {word: math.log((1 + len(words)) / count) for word, count in counts.items()}
    scores = {other: _similarity(words[question], words[other], weight) for other in others}
    if others:
        scores[others[0]] += NEAREST_BONUS
    best = max(others, key=lambda other: scores[other], default=None)
    return best if best is not None and scores[best] >= LEAST_SIMILARITY else None


def _similarity(words: set[str], others: set[str], weight: Mapping[str, float]) -> float:
    """The cosine of two sets of weighted words, 1 for equal ones."""
    shared, *norms = (sum(weight[word] for word in each) for each in (words & others, words, others))
    return shared / math.sqrt(norms[0] * norms[1]) if shared else 0.0
