"""Requests about generations, and the events of their streams: accepted, tokens with their sources, finished.

Probabilities are natural logarithms. Distances are squared L2. `memlm.api.handles.TokenStream` is the stream.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, TypeAlias

from memlm.api.html import completion_html
from memlm.api.passages import AnswerPrompt
from memlm.api.prompts import check_num_ids
from memlm.api.request import Request
from memlm.errors import check_range


@dataclass(frozen=True, slots=True)
class Neighbor:
    """One retrieved entry of a datastore and its place in a document.

    `weight` is the entry's share of p_kNN, before equal tokens are summed. `token_offset` counts tokens and
    `char_offset` characters from the start of the document, as the tokenizer decodes it. `line` counts from 1.
    `metadata` is the document's.
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
    """A likely token at this place, and its log-probability in the mixture."""

    token_id: int
    text: str
    logprob: float


@dataclass(frozen=True, slots=True)
class Token:
    """One generated token.

    `text` is the text that it adds to the output, empty while a character or a possible stop string is incomplete.
    `bytes` are the token's bytes. `logprob` is its log-probability in the mixture, before temperature and filters,
    `lm_logprob` in p_LM and `knn_logprob` in p_kNN: None without retrieval, -inf if no neighbor has this token. `lam`
    is the weight of p_kNN.

    Of an `Answer` from a mixture over passages, `passage_shares` is the share of each passage of the prompt in the
    token's probability: p(z | x) p(y | x, z) / p(y | x) of the passage z and the text y up to the token. What is
    missing to 1 is the share of the model alone. Empty where one prompt was read.
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
    passage_shares: tuple[float, ...] = ()

    @property
    def knn_share(self) -> float:
        """Share of p_kNN in the token's probability: lam p_kNN / p, between 0 and 1."""
        if self.knn_logprob is None or self.lam == 0.0 or self.knn_logprob == -math.inf:
            return 0.0
        return min(1.0, self.lam * math.exp(self.knn_logprob - self.logprob))


class FinishReason(StrEnum):
    """Why a generation ended."""

    END = "end"  # the model ended the text
    STOP = "stop"  # a stop string was reached
    LENGTH = "length"  # max_tokens, or the model's context, was used up
    TIME = "time"  # time_limit_s ran out


class DraftSource(StrEnum):
    """The place that a draft was copied from."""

    REQUEST = "request"  # the caller's draft
    TEXT = "text"  # the prompt and the output
    NEIGHBORS = "neighbors"  # the neighbors that have the sampled token
    DATASTORE = "datastore"  # a document of a datastore that holds the last tokens


@dataclass(frozen=True, slots=True)
class DraftUsage:
    """How many tokens one source drafted for a request, how many of them the answer took, and in how many drafts.

    `source` is "request" (the caller's draft), "text" (runs of the prompt and the answer), "neighbors" (continuations
    of the neighbors that named a token) or "datastore" (documents of the searched datastores).
    """

    source: str
    drafted: int
    accepted: int
    drafts: int = 0


@dataclass(frozen=True, slots=True)
class Usage:
    """Cost of a request.

    `cached_tokens` of the prompt were not read again: an earlier text of the caller began with them. `searches` counts
    the tokens for which an index was searched. `lam` is the mean over the generated tokens. Times are milliseconds of
    wall clock. `retrieval_ms` is part of prefill and decode, and includes searches that several requests share. `steps`
    counts the forward passes that named tokens: `generated_tokens / steps` is above 1 where drafts were accepted.
    `drafts` has an entry for each source that drafted anything.

    `searched_share` is the smallest share of the live entries of a datastore that a search could reach: below 1 where a
    shard did not answer a server that goes on without it. None without a search.
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
    steps: int = 0
    drafts: tuple[DraftUsage, ...] = ()
    searched_share: float | None = None
    cached_tokens: int = 0


@dataclass(frozen=True, slots=True)
class Accepted:
    """The first event of a generation: its seed, and its retrieval parameters with all defaults filled in. An answer to
    a question has its `prompt` too. `keyed_share` is the share of the stores' entries with keys, which neighbors come
    from: 0 for the model alone.
    """

    request_id: str
    seed: int
    store: str | None
    k: int
    lam: float
    knn_temperature: float
    prompt: AnswerPrompt | None = None
    keyed_share: float = 0.0


@dataclass(frozen=True, slots=True)
class Finished:
    """The last event of a generation."""

    reason: FinishReason
    stop_string: str | None
    usage: Usage


@dataclass(frozen=True, slots=True)
class Completion:
    """A complete generation. `str` of it is its text, and a notebook shows it with shades of memory."""

    text: str
    tokens: tuple[Token, ...]
    accepted: Accepted
    finished: Finished

    def __str__(self) -> str:
        return self.text

    def _repr_html_(self) -> str:
        prompt = self.accepted.prompt
        return completion_html(self.tokens, () if prompt is None else prompt.passages)


GenerationEvent: TypeAlias = "Accepted | tuple[Token, ...] | Finished"


@dataclass(frozen=True, slots=True)
class ResumeGenerationRequest(Request[Any]):
    """Resumes a generation's stream from the token at `offset`."""

    request_id: str
    offset: int = 0

    def __post_init__(self) -> None:
        check_range("offset", self.offset, least=0)


@dataclass(frozen=True, slots=True)
class CancelGenerationRequest(Request[None]):
    """Cancels a generation that waits to be resumed."""

    request_id: str


@dataclass(frozen=True, slots=True)
class TokenizeRequest(Request[Sequence[int]]):
    """Tokenizes a text."""

    text: str


@dataclass(frozen=True, slots=True)
class DetokenizeRequest(Request[str]):
    """Decodes tokens to text."""

    token_ids: tuple[int, ...]

    def __post_init__(self) -> None:
        check_num_ids("token_ids", self.token_ids)
