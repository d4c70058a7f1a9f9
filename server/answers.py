"""What the worker says to a question: a generation's events as they come, one answer to everything else."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Generator, Sequence
from dataclasses import replace
from typing import Any, TypeAlias

from memlm.events import Finished, Token
from memlm.generate import Generation
from memlm.language_model import LanguageModel
from memlm.questions import (
    AppendToSessionRequest,
    CreateSessionRequest,
    DeleteSessionRequest,
    DetokenizeRequest,
    ForkSessionRequest,
    GetDatastoreRequest,
    GetModelRequest,
    GetSessionRequest,
    ListDatastoresRequest,
    ListSessionsRequest,
    Question,
    ScoreRequest,
    SearchRequest,
    TokenizeRequest,
    UnloadDatastoreRequest,
)
from memlm.server.messages import Answer, Ask, Events, Result
from memlm.wire import WireEvent, token_to_wire

Send: TypeAlias = Callable[[Answer], None]
Steps: TypeAlias = Generator[None, None, None]

# A message costs two processes about a tenth of a millisecond each, which a fast model's next token would wait for;
# what comes within a fiftieth of a second looks simultaneous to a reader.
COALESCE_S = 0.02
# And all together no more often than that: under load a message carries several tokens, not the server's time.
MESSAGES_PER_S = 250


class Pace:
    """When what was drawn is told: of all generations at one beat, since front and clients take less over many
    messages that come at once than over as many that come one by one.
    """

    def __init__(self, num_running: Callable[[], int]) -> None:
        """Takes what tells how many are told of."""
        self._num_running, self._last_s, self.beats = num_running, -math.inf, 0

    def turn(self) -> None:
        """One more turn of the loop: a beat where COALESCE_S have passed, or longer where many are told of."""
        now_s = time.monotonic()
        if now_s - self._last_s >= max(COALESCE_S, self._num_running() / MESSAGES_PER_S):
            self._last_s, self.beats = now_s, self.beats + 1


class Telling:
    """Tells of one generation: the first token at once, then once a beat what has come."""

    def __init__(self, ask: Ask, generation: Generation, send: Send, pace: Pace) -> None:
        """Its time in the queue ends here: tells that it is accepted."""
        self._id, self._generation, self._send, self._pace = ask.id, generation, send, pace
        self._queue_ms = 1000 * (time.monotonic() - ask.asked_s)
        self._told_beat, self._untold = -1, list[Token]()
        send(Events(ask.id, (generation.accepted,)))

    def add(self, tokens: Sequence[Token]) -> None:
        """What a step gave; after the last one the generation is finished, and that is told too."""
        self._untold += tokens
        if finished := self._generation.finished:
            self._tell(self._with_queue_time(finished))
        elif self._untold and self._told_beat != self._pace.beats:
            self._tell()

    def _tell(self, *last: Finished) -> None:
        events: tuple[WireEvent, ...] = (tuple(map(token_to_wire, self._untold)), *last) if self._untold else last
        self._told_beat, self._untold = self._pace.beats, []
        self._send(Events(self._id, events))

    def _with_queue_time(self, finished: Finished) -> Finished:
        return replace(finished, usage=replace(finished.usage, queue_ms=self._queue_ms))


def scored(ask: Ask, request: ScoreRequest, lm: LanguageModel, send: Send) -> Steps:
    """The steps in which a text is scored, a few windows each."""
    score = yield from lm.score_steps(request.text, request.memory, token_scores=request.token_scores)
    send(Result(ask.id, score))


def searched(ask: Ask, request: SearchRequest, lm: LanguageModel, send: Send) -> Steps:
    """The steps in which a text is read whose likes are sought; most texts take one."""
    told = lm.search_steps(request.text, k=request.k, store=request.store, nprobe=request.nprobe)
    send(Result(ask.id, (yield from told)))


def appended(ask: Ask, request: AppendToSessionRequest, lm: LanguageModel, send: Send) -> Steps:
    """The steps in which a session reads more, a piece each."""
    told = lm.sessions.append(request.session, request.text, token_ids=request.token_ids, owner=ask.owner)
    send(Result(ask.id, (yield from told)))


def alone(generation: Generation, telling: Telling) -> Steps:
    """The steps of a generation that goes by itself: how many layers it reads differs from token to token."""
    while generation.finished is None:
        telling.add(generation.step())
        yield


def answer_to(lm: LanguageModel, question: Question, owner: str) -> Any:
    """The answer to what takes one step; `owner` is whose sessions are meant."""
    match question:
        case TokenizeRequest(text):
            return lm.tokenize(text)
        case DetokenizeRequest(token_ids):
            return lm.detokenize(token_ids)
        case GetModelRequest():
            return lm.info
        case ListDatastoresRequest():
            return lm.stores
        case GetDatastoreRequest(store):
            return lm.get_datastore(store)
        case UnloadDatastoreRequest(store):
            return lm.unload_datastore(store)
        case CreateSessionRequest(ttl_s):
            return lm.sessions.create(owner=owner, ttl_s=ttl_s)
        case GetSessionRequest(session):
            return lm.sessions.get(session, owner=owner)
        case ListSessionsRequest():
            return lm.sessions.list(owner=owner)
        case ForkSessionRequest(session):
            return lm.sessions.fork(session, owner=owner)
        case DeleteSessionRequest(session):
            return lm.sessions.delete(session, owner=owner)
        case _:
            raise TypeError(f"no answer to a {type(question).__name__}")
