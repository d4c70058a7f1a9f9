"""What is asked and what is answered: the dataclasses that the library, the server and the client share.

Pure Python: importing this loads no torch, no Faiss, no gRPC. Probabilities are natural logarithms; offsets count
tokens or characters of the document as their names say; distances are squared L2.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Generator, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, fields, replace
from enum import StrEnum
from typing import Any, TypeAlias

from memlm.errors import InternalError, InvalidInput

MAX_NEIGHBOURS = 4096
MAX_RESUME_S = 300.0
MAX_TOP_LOGPROBS = 64
MAX_STOP_STRINGS = 16
MAX_STORES = 16


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How the next token is drawn from the mixture of model and memory.

    `temperature=0` is greedy. What is None takes the model's own default (a foreign checkpoint's
    `generation_config.json`, where it samples), and else has no effect. The filters are applied after mixing and after
    the temperature, in the order repetition penalty, temperature, top-k, top-p, min-p. `seed=None` draws a fresh seed,
    which the result reports. After `time_limit_s` from when the request was taken up the text ends as far as it got; a
    call's own deadline is an error instead.
    """

    max_tokens: int | None = None
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    seed: int | None = None
    stop: tuple[str, ...] = ()
    time_limit_s: float | None = None

    def __post_init__(self) -> None:
        """Refuses values that mean nothing, naming the field."""
        _require(self.max_tokens is None or self.max_tokens >= 1, "max_tokens", self.max_tokens, "at least 1")
        heat = self.temperature
        _require(heat is None or (_finite(heat) and heat >= 0), "temperature", heat, "0 (greedy) or more")
        _require(self.top_k is None or self.top_k >= 1, "top_k", self.top_k, "at least 1")
        _require(self.top_p is None or 0 < self.top_p <= 1, "top_p", self.top_p, "above 0 and at most 1")
        _require(self.min_p is None or 0 <= self.min_p <= 1, "min_p", self.min_p, "between 0 and 1")
        penalty = self.repetition_penalty
        _require(
            penalty is None or (_finite(penalty) and penalty > 0), "repetition_penalty", penalty, "above 0 (1 is none)"
        )
        _require(self.seed is None or 0 <= self.seed < 2**63, "seed", self.seed, "between 0 and 2^63 - 1")
        limit = self.time_limit_s
        _require(limit is None or (_finite(limit) and limit > 0), "time_limit_s", limit, "above 0")
        _require(len(self.stop) <= MAX_STOP_STRINGS, "stop", len(self.stop), f"at most {MAX_STOP_STRINGS} strings")
        _require(all(self.stop), "stop", self.stop, "strings that are not empty")

    def or_else(self, own: SamplingParams) -> SamplingParams:
        """These, with a model's own where nothing was asked for. A greedy request takes no filters over."""
        if self.temperature == 0:
            return self
        names = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")
        return replace(self, **{name: getattr(own, name) for name in names if getattr(self, name) is None})


@dataclass(frozen=True, slots=True)
class StoreWeight:
    """One of several datastores that speak together: as if each of its entries stood there `weight` times."""

    name: str
    weight: float = 1.0

    def __post_init__(self) -> None:
        """Refuses values that mean nothing."""
        _require(_finite(self.weight) and self.weight > 0, "stores", self.weight, "weights above 0")


@dataclass(frozen=True, slots=True)
class MemoryParams:
    """Which datastores speak, and how loudly: p = lam p_kNN + (1 - lam) p_LM (arXiv 1911.00172, eq. 3).

    What is None takes the store's own default (of several, the first one's), as `memlm index tune` left it. Of `store`
    and `stores` at most one is given; neither takes all that are loaded, each with weight 1. `use_store=False` is the
    model alone. `spalm` puts the neighbours through the model's trained gate (arXiv 2102.02557), in place of the
    mixture unless `lam` is given too. `follow` is how many pointers from the last neighbours do in place of a search
    (arXiv 2201.12431); 0 always searches.
    """

    store: str | None = None
    use_store: bool = True
    k: int | None = None
    lam: float | None = None
    knn_temperature: float | None = None
    nprobe: int | None = None
    spalm: bool = False
    stores: tuple[StoreWeight, ...] = ()
    follow: int | None = None

    def __post_init__(self) -> None:
        """Refuses values that mean nothing, naming the field."""
        _require(self.k is None or 1 <= self.k <= MAX_NEIGHBOURS, "k", self.k, f"between 1 and {MAX_NEIGHBOURS}")
        _require(self.lam is None or 0 <= self.lam <= 1, "lam", self.lam, "between 0 and 1")
        heat = self.knn_temperature
        _require(heat is None or (_finite(heat) and heat > 0), "knn_temperature", heat, "above 0")
        _require(self.nprobe is None or self.nprobe >= 1, "nprobe", self.nprobe, "at least 1")
        _require(self.follow is None or self.follow >= 0, "follow", self.follow, "at least 0")
        names = [each.name for each in self.stores]
        _require(len(names) <= MAX_STORES, "stores", len(names), f"at most {MAX_STORES}")
        _require(len(set(names)) == len(names), "stores", ", ".join(names), "each store once")
        _require(not (self.stores and self.store is not None), "stores", ", ".join(names), "either store or stores")

    @classmethod
    def of(cls, **options: Any) -> MemoryParams:
        """Takes `stores` also as names, or as weights by name."""
        stores = options.get("stores")
        if isinstance(stores, str):
            raise InvalidInput(f"stores is the text {stores!r}; expected a list, or weights by name", field="stores")
        if stores is not None:
            pairs = stores.items() if isinstance(stores, Mapping) else ((each, 1.0) for each in stores)
            options["stores"] = tuple(
                name if isinstance(name, StoreWeight) else StoreWeight(name, float(weight)) for name, weight in pairs
            )
        return cls(**options)


@dataclass(frozen=True, slots=True)
class GenerateRequest:
    """One generation: the prompt, the sampling, the memory, and what each token should tell of itself.

    `early_exit` leaves out the later layers of tokens that an earlier one is sure of, by the rule that `memlm
    calibrate` found; it goes without a datastore. With a `session`, the prompt goes on from what that has read. With
    `resume_s`, a generation whose connection breaks goes on for so long, in which the client takes it up by itself.
    """

    prompt: str
    sampling: SamplingParams = field(default_factory=SamplingParams)
    memory: MemoryParams = field(default_factory=MemoryParams)
    neighbors: int = 0
    top_logprobs: int = 0
    early_exit: bool = False
    session: str | None = None
    resume_s: float | None = None

    def __post_init__(self) -> None:
        """Refuses values that mean nothing, naming the field."""
        if "\0" in self.prompt:
            place = self.prompt.index("\0")
            raise InvalidInput(f"the prompt has a NUL at character {place}; send text", field="prompt")
        _require(0 <= self.neighbors <= MAX_NEIGHBOURS, "neighbors", self.neighbors, f"between 0 and {MAX_NEIGHBOURS}")
        most = MAX_TOP_LOGPROBS
        _require(0 <= self.top_logprobs <= most, "top_logprobs", self.top_logprobs, f"between 0 and {most}")
        longest, kept_s = MAX_RESUME_S, self.resume_s
        _require(kept_s is None or 0 < kept_s <= longest, "resume_s", kept_s, f"above 0 and at most {longest:g}")

    @classmethod
    def of(cls, prompt: str, options: Mapping[str, Any]) -> GenerateRequest:
        """Sorts keyword arguments (`temperature=0.8, lam=0.3, neighbors=4`) into the parts they belong to."""
        parts: dict[str, dict[str, Any]] = {"sampling": {}, "memory": {}, "request": {}}
        for name, value in options.items():
            parts[_home_of(name)][name] = value
        if "stop" in parts["sampling"]:
            stop = parts["sampling"]["stop"]
            parts["sampling"]["stop"] = (stop,) if isinstance(stop, str) else tuple(stop)
        sampling, memory = SamplingParams(**parts["sampling"]), MemoryParams.of(**parts["memory"])
        return cls(prompt, sampling, memory, **parts["request"])


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
    def memory_share(self) -> float:
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
    """What a request cost. `searches` are tokens for which an index was searched, and nothing took a search's place.
    Times are milliseconds of wall clock, and overlap with nothing.
    """

    prompt_tokens: int = 0
    generated_tokens: int = 0
    retrieved_neighbors: int = 0
    searches: int = 0
    queue_ms: float = 0.0
    prefill_ms: float = 0.0
    decode_ms: float = 0.0


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


@dataclass(frozen=True, slots=True)
class StoreInfo:
    """One loaded datastore, and the defaults that a request takes from it. `path` is where it lies on the server."""

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


_SAMPLING = frozenset(f.name for f in fields(SamplingParams))
_MEMORY = frozenset(f.name for f in fields(MemoryParams))
_REQUEST = frozenset({"neighbors", "top_logprobs", "early_exit", "session", "resume_s"})


def _home_of(name: str) -> str:
    if name in _SAMPLING:
        return "sampling"
    if name in _MEMORY:
        return "memory"
    if name in _REQUEST:
        return "request"
    known = ", ".join(sorted(_SAMPLING | _MEMORY | _REQUEST))
    raise InvalidInput(f"unknown option {name!r}; the options are {known}", field=name)


def _require(holds: bool, name: str, value: object, expected: str) -> None:
    if not holds:
        raise InvalidInput(f"{name} is {value!r}; expected {expected}", field=name)


def _finite(value: float) -> bool:
    return math.isfinite(value)


def _exp(nats: float) -> float:
    return math.exp(nats) if nats < 700 else math.inf
