"""What is told of a text, a model, a server, a datastore or a session. Probabilities are natural logarithms."""

from __future__ import annotations

import math
from dataclasses import dataclass

from memlm.params import MAX_NEIGHBOURS, MAX_STOP_STRINGS, MAX_STORES, MAX_TOKEN_IDS, MAX_TOP_LOGPROBS


@dataclass(frozen=True, slots=True)
class TokenScore:
    """One token of a given text under model, memory and mixture (natural logarithms)."""

    id: int
    text: str
    logprob: float
    lm_logprob: float
    knn_logprob: float | None = None


@dataclass(frozen=True, slots=True)
class Figures:
    """How well a text is predicted: `nll` in nats, summed; the rest follows from it and the counts."""

    nll: float
    token_perplexity: float
    word_perplexity: float
    bits_per_byte: float

    @classmethod
    def of(cls, nll: float, *, tokens: int, words: int, num_bytes: int) -> Figures:
        """The three rates of a summed negative log-likelihood; a rate over nothing is nan."""
        return cls(
            nll=nll,
            token_perplexity=_exp(nll / tokens) if tokens else math.nan,
            word_perplexity=_exp(nll / words) if words else math.nan,
            bits_per_byte=nll / math.log(2) / num_bytes if num_bytes else math.nan,
        )


@dataclass(frozen=True, slots=True)
class Score:
    """A text's log-probability. `base` is the model alone; `knn` the mixture, None where no store was asked.

    `words` are white-space words plus one for each newline, so that numbers compare across tokenizers.
    """

    tokens: int
    words: int
    bytes: int
    base: Figures
    knn: Figures | None = None
    store: str | None = None
    k: int | None = None
    lam: float | None = None
    knn_temperature: float | None = None
    token_scores: tuple[TokenScore, ...] = ()

    @property
    def figures(self) -> Figures:
        """The mixture's figures where there is one, else the model's."""
        return self.knn or self.base

    @property
    def nll(self) -> float:
        """Nats, summed over the text."""
        return self.figures.nll

    @property
    def token_perplexity(self) -> float:
        """exp(nats per token)."""
        return self.figures.token_perplexity

    @property
    def word_perplexity(self) -> float:
        """exp(nats per word)."""
        return self.figures.word_perplexity

    @property
    def bits_per_byte(self) -> float:
        """Bits per UTF-8 byte of the text."""
        return self.figures.bits_per_byte


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """What is loaded: shape, limits and fingerprints."""

    name: str
    num_parameters: int
    vocab_size: int
    context_length: int
    dim: int
    num_layers: int
    dtype: str
    model_fingerprint: str
    tokenizer_fingerprint: str


@dataclass(frozen=True, slots=True)
class ServerInfo:
    """What a server takes: beyond these, it refuses. `needs_token` says whether it wants to know who calls."""

    version: str
    needs_token: bool
    max_message_bytes: int
    max_append_bytes: int
    max_running: int
    max_queued: int
    max_queued_tokens: int
    max_session_bytes: int
    session_ttl_s: float
    max_neighbors: int = MAX_NEIGHBOURS
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
class StoreInfo:
    """One loaded datastore, and the defaults that a request takes from it. `path` is where it lies: of a server,
    relative to its folder for datastores, or the name of one that it was started with.

    `store_id` identifies the store, whose `manifest` counts its commits. `problem` is why it cannot be used, or empty;
    of a store that could not be opened, the sizes are 0.
    """

    name: str
    path: str
    manifest: int
    num_entries: int
    num_documents: int
    num_deleted_documents: int
    dim: int
    index: str
    bytes_per_entry: float
    k: int
    lam: float
    knn_temperature: float
    tuned_on: str | None
    store_id: str = ""
    problem: str = ""

    @classmethod
    def unusable(cls, name: str, path: str, problem: str) -> StoreInfo:
        """A datastore that could not be opened."""
        return cls(name, path, 0, 0, 0, 0, 0, "", 0.0, 0, 0.0, 0.0, None, problem=problem)


@dataclass(frozen=True, slots=True)
class SessionInfo:
    """One session: how much text it holds, in how many bytes of memory, when it was made and last used, and when it
    goes unless it is used (seconds since 1970). While it is `busy`, `reading_done` of `reading` tokens that were
    appended have been read.
    """

    name: str
    num_tokens: int
    num_bytes: int
    created_s: float
    used_s: float
    expires_s: float
    busy: bool = False
    reading: int = 0
    reading_done: int = 0


@dataclass(frozen=True, slots=True)
class DeleteReport:
    """What a deletion did: how many documents and entries no longer speak, as of which manifest."""

    store: str
    manifest: int
    num_documents: int
    num_entries: int


def _exp(nats: float) -> float:
    return math.exp(nats) if nats < 700 else math.inf
