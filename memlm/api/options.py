"""The keyword options of `generate`, `chat`, `score`, `search` and `trace`, typed: editors complete and check them.

They are the fields of SamplingParams, RetrievalParams, StreamRequest and TraceRequest, in process and over gRPC alike.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TypedDict

from memlm.api.params import StoreWeight


class SamplingOptions(TypedDict, total=False):
    """The fields of `SamplingParams`; `stop` may be one string."""

    max_tokens: int | None
    temperature: float | None
    top_k: int | None
    top_p: float | None
    min_p: float | None
    repetition_penalty: float | None
    seed: int | None
    stop: str | Sequence[str] | None
    time_limit_s: float | None


class RetrievalOptions(TypedDict, total=False):
    """The fields of `RetrievalParams`; `stores` may be names, or weights by name, and `exclude_documents` one name."""

    store: str | None
    use_store: bool
    k: int | None
    lam: float | None
    knn_temperature: float | None
    nprobe: int | None
    spalm: bool
    stores: Sequence[str | StoreWeight] | Mapping[str, float]
    loop_guard: bool | None
    exclude_documents: str | Sequence[str] | None
    context_cache: int | None
    as_of: str | None


class FilterOptions(TypedDict, total=False):
    """The documents to look at; `documents` may be one string, and `where` values by field."""

    documents: str | Sequence[str]
    where: Mapping[str, str] | Sequence[str]
    as_of: str | None


class TraceOptions(FilterOptions, total=False):
    """The fields of `TraceRequest`."""

    min_tokens: int
    spans_per_token: float
    max_documents: int
    rank_by: str


class AnswerOptions(SamplingOptions, RetrievalOptions, total=False):
    """What a stream of tokens takes in a session, whose name is known."""

    neighbors: int
    top_logprobs: int
    early_exit: bool
    drafts: int | None
    draft: str
    adapter: str | None
    resume_s: float | None


class TurnOptions(AnswerOptions, total=False):
    """The options of a session's `chat`."""

    num_passages: int | None


class StreamOptions(AnswerOptions, total=False):
    """The options of `answer`, beside its own."""

    session: str | None


class ChatOptions(StreamOptions, TurnOptions, total=False):
    """The options of `chat`."""


class GenerateOptions(StreamOptions, total=False):
    """The options of `generate`."""

    prompt_token_ids: Sequence[int]


class ContinueOptions(AnswerOptions, total=False):
    """The options of a session's `generate`."""

    prompt_token_ids: Sequence[int]
