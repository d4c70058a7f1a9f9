"""The steps of each request: a generation sends events as it draws, every other request sends one result."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TypeAlias

from memlm.api.generation import Finished, Token
from memlm.api.params import StreamRequest
from memlm.api.passages import AnswerPrompt
from memlm.errors import InvalidInput
from memlm.generation.batch import Batch
from memlm.generation.engine import Engine
from memlm.generation.generation import Generation
from memlm.generation.mixture import Mixture
from memlm.prompting.answers import start_request
from memlm.server.inference.active_request import ActiveRequest, Advances, Life
from memlm.server.inference.cache_budget import CacheBudget
from memlm.server.inference.messages import Answer, Events, Refresh, Result, Submission, party_of
from memlm.wire.codec import WireEvent, token_to_wire

Send: TypeAlias = Callable[[Answer], None]

# A message costs two processes about 0.1 ms each, which would delay a fast model's next token. A reader does not notice
# that tokens of 20 ms come together. Under load a message carries several tokens of one generation, so that messages
# take a bounded part of the server's time.
COALESCE_S = 0.02
MESSAGES_PER_S = 250
MAX_TOKEN_BYTES = 4 << 20  # mostly its neighbors' metadata; a message has room for a few


class FlushTimer:
    """Decides when drawn tokens are sent: of all generations at once, since many messages at one time cost the front
    end and its clients less than the same messages one by one.
    """

    def __init__(self, num_running: Callable[[], int]) -> None:
        self._num_running, self._last_s, self.flushes = num_running, -math.inf, 0

    def tick(self) -> None:
        """Counts a flush if COALESCE_S have passed since the last one, or longer where many generations run."""
        now_s = time.monotonic()
        if now_s - self._last_s >= max(COALESCE_S, self._num_running() / MESSAGES_PER_S):
            self._last_s, self.flushes = now_s, self.flushes + 1


def _encoded(token: Token) -> bytes:
    """The encoded message of a token. Raises InvalidInput where its neighbors make it too large."""
    data = token_to_wire(token)
    if len(data) > MAX_TOKEN_BYTES:
        raise InvalidInput(
            f"a token with {len(token.neighbors)} neighbors has {len(data):,} bytes, and {MAX_TOKEN_BYTES:,} at most"
            " are sent; ask for fewer neighbors",
            field="neighbors",
        )
    return data


class TokenStreamer:
    """Sends the events of one generation: `Accepted` at once, the first token at once, then all tokens since the last
    flush together, and `Finished` with the last ones.
    """

    def __init__(
        self,
        submission: Submission,
        generation: Generation,
        send: Send,
        flush_timer: FlushTimer,
        prompt: AnswerPrompt | None = None,
    ) -> None:
        """`prompt` is one with passages."""
        self._id, self._generation, self._send, self._flush_timer = submission.id, generation, send, flush_timer
        self._queue_ms = 1000 * (time.monotonic() - submission.submitted_s)
        self._sent_at_flush, self._unsent = -1, list[Token]()
        send(Events(submission.id, (replace(generation.accepted, prompt=prompt),)))

    def add(self, tokens: Sequence[Token]) -> None:
        """Takes the tokens of a step."""
        self._unsent += tokens
        if finished := self._generation.finished:
            self._send_tokens(replace(finished, usage=replace(finished.usage, queue_ms=self._queue_ms)))
        elif self._unsent and self._sent_at_flush != self._flush_timer.flushes:
            self._send_tokens()

    def _send_tokens(self, *last: Finished) -> None:
        events: tuple[WireEvent, ...] = (tuple(map(_encoded, self._unsent)), *last) if self._unsent else last
        self._sent_at_flush, self._unsent = self._flush_timer.flushes, []
        self._send(Events(self._id, events))


def stream_and_send(
    active: ActiveRequest,
    engine: Engine,
    batch: Batch,
    send: Send,
    flush_timer: FlushTimer,
    cache_budget: CacheBudget,
) -> Advances:
    """A generation from its request to its last token."""
    submission, request = active.submission, active.submission.request
    assert isinstance(request, StreamRequest)
    party = party_of(submission.owner, submission.caller)
    started = yield from start_request(engine, request, request_id=submission.id, owner=submission.owner, caller=party)
    generation, active.generations = started.generation, started.generations
    try:
        num_rows = len(active.generations)
        copies = 1 if num_rows == 1 else 2  # the prompts of a mixture are kept beside their rows until the last is read
        active.cache_bytes = cache_budget.required_bytes(generation.max_positions, num_rows, copies)
        yield Life.WAITING
        if isinstance(started.text, Mixture):
            sequence = active.sequence = batch.add_mixture(started.text)
        else:
            sequence = active.sequence = yield from batch.add(started.text)
        streamer = TokenStreamer(submission, generation, send, flush_timer, started.prompt)
        while True:
            yield Life.DRAWING
            if sequence.failure is not None:
                raise sequence.failure
            if sequence.is_done:
                break
            streamer.add(sequence.tokens)
        active.sequence = None
        if sequence.state is not None:
            yield from generation.commit_to_session(sequence.state)  # on the disk before it is acknowledged
        streamer.add(sequence.tokens)
    finally:
        if active.sequence is not None:
            batch.remove(active.sequence)
        for each in active.generations:
            each.close()


def ask_and_send(submission: Submission, engine: Engine, send: Send) -> Advances:
    """Any other request, from its first step to its result."""
    assert not isinstance(submission.request, Refresh)
    send(Result(submission.id, (yield from engine.ask(submission.request, owner=submission.owner))))
