"""A question -> the steps that answer it. Each `next` is one step; what a step has to tell, it sends."""

from __future__ import annotations

import time
from collections.abc import Callable, Generator
from dataclasses import replace
from typing import Any, TypeAlias

from memlm.api import Finished, GenerateRequest, Token
from memlm.language_model import LanguageModel
from memlm.questions import (
    DeleteDocumentsRequest,
    DetokenizeRequest,
    GetModelRequest,
    ListDatastoresRequest,
    Question,
    ScoreRequest,
    SearchRequest,
    TokenizeRequest,
)
from memlm.server.messages import Answer, Ask, Events, Result

Steps: TypeAlias = Generator[None, None, None]
Send: TypeAlias = Callable[[Answer], None]

# A message costs two processes about a tenth of a millisecond each, which a fast model's next token would wait for;
# what comes within a fiftieth of a second looks simultaneous to a reader.
COALESCE_S = 0.02


def steps_of(ask: Ask, lm: LanguageModel, send: Send) -> Steps:
    """How a question is answered. Nothing happens before the first step."""
    if isinstance(ask.question, GenerateRequest):
        return _generate(ask, ask.question, lm, send)
    if isinstance(ask.question, ScoreRequest):
        return _score(ask, ask.question, lm, send)
    return _answer(ask, lm, send)


def _generate(ask: Ask, request: GenerateRequest, lm: LanguageModel, send: Send) -> Steps:
    """One token a step. The first is told at once, then what has come whenever COALESCE_S have passed."""
    queue_ms = 1000 * (time.monotonic() - ask.asked_s)
    generation = lm.start(request, request_id=ask.id)
    send(Events(ask.id, (generation.accepted,)))
    told_s, untold = 0.0, list[Token]()
    while generation.finished is None:
        untold += generation.step()
        if untold and time.monotonic() - told_s >= COALESCE_S:
            send(Events(ask.id, (tuple(untold),)))
            told_s, untold = time.monotonic(), []
        yield
    finished = _with_queue_time(generation.finished, queue_ms)
    send(Events(ask.id, (tuple(untold), finished) if untold else (finished,)))


def _with_queue_time(finished: Finished, queue_ms: float) -> Finished:
    return replace(finished, usage=replace(finished.usage, queue_ms=queue_ms))


def _score(ask: Ask, request: ScoreRequest, lm: LanguageModel, send: Send) -> Steps:
    """One window a step."""
    score = yield from lm.score_steps(request.text, request.memory, token_scores=request.token_scores)
    send(Result(ask.id, score))


def _answer(ask: Ask, lm: LanguageModel, send: Send) -> Steps:
    """All in one step."""
    send(Result(ask.id, _ask_model(lm, ask.question)))
    yield from ()


def _ask_model(lm: LanguageModel, question: Question) -> Any:
    match question:
        case TokenizeRequest(text):
            return lm.tokenize(text)
        case DetokenizeRequest(token_ids):
            return lm.detokenize(token_ids)
        case GetModelRequest():
            return lm.info
        case SearchRequest(text, store, k, nprobe):
            return lm.search(text, k=k, store=store, nprobe=nprobe)
        case ListDatastoresRequest():
            return lm.stores
        case DeleteDocumentsRequest(document_ids, store):
            return lm.delete_documents(document_ids, store=store)
        case _:
            raise TypeError(f"no answer to a {type(question).__name__}")
