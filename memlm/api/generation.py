"""Requests about generations and the events of their streams: accepted, tokens with their sources, finished.

Probabilities are natural logarithms; offsets count tokens or characters of the document as their names say; distances
are squared L2.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Generator, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, TypeAlias

from memlm.api.params import MAX_TOKEN_IDS
from memlm.errors import InternalError, InvalidInput


@dataclass(frozen=True, slots=True)
class Neighbor:
    """One entry of a datastore that was retrieved, and the place it came from.

    `weight` is its share of p_kNN before tokens are summed (None in a plain search without a temperature);
    `token_offset` counts tokens and `char_offset` characters from the document's start (of the text as the tokenizer
    gives it back), `line` lines from 1. `metadata` is the document's.
    """

    store: str
    document_id: str
    title: str
    token_offset: int
    char_offset: int
    line: int
    token_id: int
    token_text: str
    distance: float
    weight: float
    snippet: str
    metadata: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Alternative:
    """A token that could have come instead, and its log-probability in the mixture."""

    token_id: int
    text: str
    logprob: float


@dataclass(frozen=True, slots=True)
class Token:
    """One generated token.

    `text` is what it adds to the output: empty while a character or a possible stop string is incomplete. `bytes`
    are the token's own. `logprob` is the mixture's (before temperature and filters), `lm_logprob` the model's,
    `knn_logprob` the memory's (None where no memory was asked; -inf where it never saw this token here). `lam` is
    the weight of the memory.
    """

    id: int
    text: str
    bytes: bytes
    logprob: float
    lm_logprob: float
    knn_logprob: float | None = None
    lam: float = 0.0
    neighbors: tuple[Neighbor, ...] = ()
    top_logprobs: tuple[Alternative, ...] = ()

    @property
    def knn_share(self) -> float:
        """How much of this token's probability came from memory: lam p_kNN / p, between 0 and 1."""
        if self.knn_logprob is None or self.lam == 0.0 or self.knn_logprob == -math.inf:
            return 0.0
        return min(1.0, self.lam * math.exp(self.knn_logprob - self.logprob))


class FinishReason(StrEnum):
    """Why a generation ended."""

    END = "end"  # the model ended the text
    STOP = "stop"  # a stop string was reached
    LENGTH = "length"  # max_tokens, or the model's context, was used up
    TIME = "time"  # time_limit_s ran out


@dataclass(frozen=True, slots=True)
class Usage:
    """What a request cost. `searches` are tokens for which an index was searched, and nothing took a search's place;
    `lam` is the mean over the generated tokens. Times are milliseconds of wall clock and overlap with nothing, save
    `retrieval_ms`, a part of prefill and decode: asking the memories, for this request alone or several at once.
    """

    prompt_tokens: int = 0
    generated_tokens: int = 0
    retrieved_neighbors: int = 0
    searches: int = 0
    queue_ms: float = 0.0
    prefill_ms: float = 0.0
    decode_ms: float = 0.0
    retrieval_ms: float = 0.0
    lam: float = 0.0


@dataclass(frozen=True, slots=True)
class Accepted:
    """The first event of every generation: the seed in use, and the memory as resolved from request and store."""

    request_id: str
    seed: int
    store: str | None
    k: int
    lam: float
    knn_temperature: float


@dataclass(frozen=True, slots=True)
class Finished:
    """The last event of every generation."""

    reason: FinishReason
    stop_string: str | None
    usage: Usage


@dataclass(frozen=True, slots=True)
class Completion:
    """A generation, whole: its text, its tokens, and what was told before and after them."""

    text: str
    tokens: tuple[Token, ...]
    accepted: Accepted
    finished: Finished


GenerationEvent: TypeAlias = "Accepted | tuple[Token, ...] | Finished"


class TokenStream(Iterator[Token]):
    """The tokens of one generation, as they come; `accepted` is there from the start, `finished` after the last token.

    Closing it early (`close`, or leaving a `with` block) stops the work behind it.
    """

    def __init__(self, events: Generator[GenerationEvent, None, None]) -> None:
        """Waits for the first event, so that a request that is refused is refused here."""
        self._events = events
        first = next(events)
        if not isinstance(first, Accepted):
            raise InternalError(f"a generation began with {type(first).__name__}, not with Accepted")
        self.accepted: Accepted = first
        self.finished: Finished | None = None
        self._ready: deque[Token] = deque()

    def __next__(self) -> Token:
        """The next token; waits for it."""
        while not self._ready:
            self._hear()
        return self._ready.popleft()

    def take(self) -> tuple[Token, ...] | None:
        """All that has come since the last time; waits for the first of it. None at the end."""
        with suppress(StopIteration):
            while not self._ready:
                self._hear()
        taken = tuple(self._ready)
        self._ready.clear()
        return taken or None

    def _hear(self) -> None:
        event = next(self._events)
        if isinstance(event, Finished):
            self.finished = event
        elif isinstance(event, tuple):
            self._ready.extend(event)

    def close(self) -> None:
        """Stops the generation if it is still going on."""
        self._events.close()

    def __enter__(self) -> TokenStream:
        """Closes at the end of the block."""
        return self

    def __exit__(self, *_: object) -> None:
        """Closes."""
        self.close()


@dataclass(frozen=True, slots=True)
class ResumeGenerationRequest:
    """Go on with this generation, from this token on."""

    request_id: str
    offset: int = 0

    def __post_init__(self) -> None:
        """Refuses what is no token's place."""
        if self.offset < 0:
            raise InvalidInput(f"offset is {self.offset}; expected 0 or more", field="offset")


@dataclass(frozen=True, slots=True)
class CancelGenerationRequest:
    """Nobody will come back to this generation."""

    request_id: str


@dataclass(frozen=True, slots=True)
class TokenizeRequest:
    """Which tokens make this text?"""

    text: str


@dataclass(frozen=True, slots=True)
class DetokenizeRequest:
    """Which text do these tokens make?"""

    token_ids: tuple[int, ...]

    def __post_init__(self) -> None:
        """Refuses more than one call may bring."""
        if len(self.token_ids) > MAX_TOKEN_IDS:
            raise InvalidInput(
                f"token_ids has {len(self.token_ids):,} ids; at most {MAX_TOKEN_IDS:,} in one call", field="token_ids"
            )
