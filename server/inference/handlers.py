"""The steps in which a worker serves a request: a generation's events as they come, one answer to everything else."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, Protocol, TypeAlias

from memlm.api.datastores import GetDatastoreRequest, ListDatastoresRequest, SearchRequest, UnloadDatastoreRequest
from memlm.api.generation import DetokenizeRequest, Finished, Token, TokenizeRequest
from memlm.api.params import GenerateRequest
from memlm.api.request import Request
from memlm.api.scoring import ScoreRequest
from memlm.api.server import GetModelRequest
from memlm.api.sessions import (
    AppendToSessionRequest,
    CreateSessionRequest,
    DeleteSessionRequest,
    ForkSessionRequest,
    GetSessionRequest,
    ListSessionsRequest,
)
from memlm.base.steps import Steps
from memlm.errors import InvalidInput
from memlm.generation.batch import Batch, RunningSequence
from memlm.generation.engine import Engine
from memlm.generation.generation import Generation
from memlm.server.inference.cache_budget import CacheBudget
from memlm.server.inference.messages import Answer, Events, Refresh, Result, Submission
from memlm.wire.codec import WireEvent, token_to_wire

Send: TypeAlias = Callable[[Answer], None]

# A message costs two processes about a tenth of a millisecond each, which a fast model's next token would wait for;
# what comes within a fiftieth of a second looks simultaneous to a reader.
COALESCE_S = 0.02
# And all together no more often than that: under load a message carries several tokens, not the server's time.
MESSAGES_PER_S = 250
MAX_TOKEN_BYTES = 4 << 20  # of its neighbors' metadata above all; a message has room for a few


class GenerationSlot(Protocol):
    """A job as its steps see it: what it draws from, and its place in the batch while it has one."""

    generation: Generation | None
    sequence: RunningSequence | None
    cache_bytes: int


class FlushTimer:
    """When what was drawn is told: of all generations at one beat, since front and clients take less over many
    messages that come at once than over as many that come one by one.
    """

    def __init__(self, num_running: Callable[[], int]) -> None:
        """Takes what tells how many are told of."""
        self._num_running, self._last_s, self.flushes = num_running, -math.inf, 0

    def tick(self) -> None:
        """One more turn of the loop: a beat where COALESCE_S have passed, or longer where many are told of."""
        now_s = time.monotonic()
        if now_s - self._last_s >= max(COALESCE_S, self._num_running() / MESSAGES_PER_S):
            self._last_s, self.flushes = now_s, self.flushes + 1


def _encoded(token: Token) -> bytes:
    """A token as it is sent. Raises InvalidInput where its neighbors make it too large."""
    data = token_to_wire(token)
    if len(data) > MAX_TOKEN_BYTES:
        raise InvalidInput(
            f"a token with {len(token.neighbors)} neighbors has {len(data):,} bytes, and {MAX_TOKEN_BYTES:,} at most"
            " are sent; ask for fewer neighbors",
            field="neighbors",
        )
    return data


class TokenStreamer:
    """Tells of one generation: the first token at once, then once a beat what has come."""

    def __init__(self, submission: Submission, generation: Generation, send: Send, flush_timer: FlushTimer) -> None:
        """Its time in the queue ends here: tells that it is accepted."""
        self._id, self._generation, self._send, self._flush_timer = submission.id, generation, send, flush_timer
        self._queue_ms = 1000 * (time.monotonic() - submission.submitted_s)
        self._sent_at_flush, self._unsent = -1, list[Token]()
        send(Events(submission.id, (generation.accepted,)))

    def add(self, tokens: Sequence[Token]) -> None:
        """What a step gave; after the last one the generation is finished, and that is told too."""
        self._unsent += tokens
        if finished := self._generation.finished:
            self._send_tokens(self._with_queue_time(finished))
        elif self._unsent and self._sent_at_flush != self._flush_timer.flushes:
            self._send_tokens()

    def _send_tokens(self, *last: Finished) -> None:
        events: tuple[WireEvent, ...] = (tuple(map(_encoded, self._unsent)), *last) if self._unsent else last
        self._sent_at_flush, self._unsent = self._flush_timer.flushes, []
        self._send(Events(self._id, events))

    def _with_queue_time(self, finished: Finished) -> Finished:
        return replace(finished, usage=replace(finished.usage, queue_ms=self._queue_ms))


def generate_steps(
    submission: Submission,
    engine: Engine,
    batch: Batch,
    send: Send,
    flush_timer: FlushTimer,
    slot: GenerationSlot,
    cache_budget: CacheBudget,
) -> Steps[None]:
    """A generation from its request to its last token. It draws in the batch, or by itself where it must."""
    request = submission.request
    assert isinstance(request, GenerateRequest)
    generation = slot.generation = yield from engine.start(request, request_id=submission.id, owner=submission.owner)
    try:
        slot.cache_bytes = cache_budget.required_bytes(generation)
        yield None  # waits for a place among those that run
        sequence = slot.sequence = yield from batch.add(generation)
        streamer = TokenStreamer(submission, generation, send, flush_timer)
        while True:
            yield None  # until the batch has drawn a token
            if sequence.failure is not None:
                raise sequence.failure
            if sequence.is_done:
                break
            streamer.add(sequence.tokens)
        slot.sequence = None
        if sequence.state is not None:
            yield from generation.commit_to_session(sequence.state)  # what is acknowledged is on the disk
        streamer.add(sequence.tokens)
    finally:
        if slot.sequence is not None:
            batch.remove(slot.sequence)
        generation.close()


def answer_and_send(submission: Submission, engine: Engine, send: Send) -> Steps[None]:
    """Any other request, from its first step to its answer."""
    assert not isinstance(submission.request, Refresh)
    send(Result(submission.id, (yield from answer_steps(engine, submission.request, submission.owner))))


def answer_steps(engine: Engine, request: Request[Any], owner: str) -> Steps[Any]:
    """The steps to the answer of a request; `owner` is the owner of its sessions."""
    sessions = engine.sessions
    match request:
        case ScoreRequest(text, retrieval, token_scores):
            return (yield from engine.score(text, retrieval, token_scores=token_scores))
        case SearchRequest(text, store, k, nprobe):
            return (yield from engine.search(text, k=k, store=store, nprobe=nprobe))
        case TokenizeRequest(text):
            return (yield from engine.checkpoint.tokenizer.pack_steps(text))
        case DetokenizeRequest(token_ids):
            return (yield from engine.checkpoint.tokenizer.decode_steps(token_ids, whole=True))
        case CreateSessionRequest(ttl_s):
            return (yield from sessions.create(owner=owner, ttl_s=ttl_s))
        case AppendToSessionRequest(session, text, token_ids):
            return (yield from sessions.append(session, text, token_ids=token_ids, owner=owner))
        case ForkSessionRequest(session):
            return (yield from sessions.fork(session, owner=owner))
        case DeleteSessionRequest(session):
            return (yield from sessions.delete(session, owner=owner))
        case GetSessionRequest(session):
            return sessions.get(session, owner=owner)
        case ListSessionsRequest():
            return sessions.list(owner=owner)
        case GetModelRequest():
            return engine.info
        case ListDatastoresRequest():
            return engine.stores.infos
        case GetDatastoreRequest(store):
            return engine.stores.info(store)
        case UnloadDatastoreRequest(store):
            return engine.stores.unload(store)
        case _:
            raise TypeError(f"no answer to a {type(request).__name__}")
