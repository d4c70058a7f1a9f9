"""Requests about the loaded model and the server's limits."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from memlm.api.params import MAX_NEIGHBORS, MAX_STOP_STRINGS, MAX_STORES, MAX_TOP_LOGPROBS
from memlm.api.prompts import MAX_TOKEN_IDS
from memlm.api.request import Request


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """Shape, limits and fingerprints of the loaded model, and the names of its loaded `adapters`."""

    name: str
    num_parameters: int
    vocab_size: int
    context_length: int
    dim: int
    num_layers: int
    dtype: str
    model_fingerprint: str
    tokenizer_fingerprint: str
    device: str = ""
    adapters: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class TokenizerInfo:
    """The special tokens of the loaded model, and the source of its chat template, None where it has none.

    `special_tokens` are all of them, with their ids. `bos_token` is what documents are read after, `eos_token` what
    ends a text. `adds_bos`: a text that is a prompt is read after special tokens.
    """

    special_tokens: Mapping[str, int]
    bos_token: str | None
    eos_token: str | None
    unk_token: str | None
    pad_token: str | None
    adds_bos: bool
    chat_template: str | None


@dataclass(frozen=True, slots=True)
class ServerInfo:
    """Version and limits of a server, which refuses requests beyond them. `needs_token`: calls need a bearer token."""

    version: str
    needs_token: bool
    max_message_bytes: int
    max_append_bytes: int
    max_running: int
    max_queued: int
    max_queued_tokens: int
    max_session_bytes: int
    session_ttl_s: float
    max_neighbors: int = MAX_NEIGHBORS
    max_top_logprobs: int = MAX_TOP_LOGPROBS
    max_stop_strings: int = MAX_STOP_STRINGS
    max_stores: int = MAX_STORES
    max_upload_bytes: int = 0
    max_jobs: int = 0
    max_sessions: int = 0
    max_sessions_per_caller: int = 0
    max_token_ids: int = MAX_TOKEN_IDS
    max_upload_documents: int = 0
    max_unfinished_bytes: int = 0
    max_streams: int = 0
    max_caller_calls: int = 0
    message_timeout_s: float = 0.0
    connection_idle_s: float = 0.0
    max_cache_bytes: int = 0
    max_stream_bytes: int = 0
    max_event_bytes: int = 0


@dataclass(frozen=True, slots=True)
class GetModelRequest(Request[ModelInfo]):
    """Describes the loaded model."""


@dataclass(frozen=True, slots=True)
class GetTokenizerRequest(Request[TokenizerInfo]):
    """Describes the loaded model's tokenizer."""


@dataclass(frozen=True, slots=True)
class GetServerInfoRequest(Request[ServerInfo]):
    """Describes the server's limits."""
