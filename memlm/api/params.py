"""What is asked of a generation: how tokens are drawn, which datastores speak, and the rest.

Pure Python, as `memlm.api.generation` and `memlm.api.scoring`, which the library, the server and the client share:
importing them loads no torch, no Faiss, no gRPC.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any

from memlm.errors import InvalidInput

MAX_NEIGHBORS = 4096
MAX_RESUME_S = 300.0
MAX_TOP_LOGPROBS = 64
MAX_STOP_STRINGS = 16
MAX_STORES = 16
MAX_TOKEN_IDS = 1 << 20  # in one request

MAX_TTL_S = 30 * 86_400.0


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
class RetrievalParams:
    """Which datastores speak, and how loudly: p = lam p_kNN + (1 - lam) p_LM (arXiv 1911.00172, eq. 3).

    What is None takes the store's own default (of several, the first one's), as `memlm index tune` left it. Of `store`
    and `stores` at most one is given; neither takes all that are loaded, each with weight 1. `use_store=False` is the
    model alone. `spalm` puts the neighbors through the model's trained gate (arXiv 2102.02557), in place of the
    mixture unless `lam` is given too. `min_pointers` is how many pointers from the last neighbors
    replace a search (arXiv 2201.12431); 0 always searches.
    """

    store: str | None = None
    use_store: bool = True
    k: int | None = None
    lam: float | None = None
    knn_temperature: float | None = None
    nprobe: int | None = None
    spalm: bool = False
    stores: tuple[StoreWeight, ...] = ()
    min_pointers: int | None = None

    def __post_init__(self) -> None:
        """Refuses values that mean nothing, naming the field."""
        _require(self.k is None or 1 <= self.k <= MAX_NEIGHBORS, "k", self.k, f"between 1 and {MAX_NEIGHBORS}")
        _require(self.lam is None or 0 <= self.lam <= 1, "lam", self.lam, "between 0 and 1")
        heat = self.knn_temperature
        _require(heat is None or (_finite(heat) and heat > 0), "knn_temperature", heat, "above 0")
        _require(self.nprobe is None or self.nprobe >= 1, "nprobe", self.nprobe, "at least 1")
        _require(self.min_pointers is None or self.min_pointers >= 0, "min_pointers", self.min_pointers, "at least 0")
        names = [each.name for each in self.stores]
        _require(len(names) <= MAX_STORES, "stores", len(names), f"at most {MAX_STORES}")
        _require(len(set(names)) == len(names), "stores", ", ".join(names), "each store once")
        _require(not (self.stores and self.store is not None), "stores", ", ".join(names), "either store or stores")

    @classmethod
    def of(cls, **options: Any) -> RetrievalParams:
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
    retrieval: RetrievalParams = field(default_factory=RetrievalParams)
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
        _require(0 <= self.neighbors <= MAX_NEIGHBORS, "neighbors", self.neighbors, f"between 0 and {MAX_NEIGHBORS}")
        most = MAX_TOP_LOGPROBS
        _require(0 <= self.top_logprobs <= most, "top_logprobs", self.top_logprobs, f"between 0 and {most}")
        longest, kept_s = MAX_RESUME_S, self.resume_s
        _require(kept_s is None or 0 < kept_s <= longest, "resume_s", kept_s, f"above 0 and at most {longest:g}")

    @classmethod
    def of(cls, prompt: str, options: Mapping[str, Any]) -> GenerateRequest:
        """Sorts keyword arguments (`temperature=0.8, lam=0.3, neighbors=4`) into the parts they belong to."""
        parts: dict[str, dict[str, Any]] = {"sampling": {}, "retrieval": {}, "request": {}}
        for name, value in options.items():
            parts[_home_of(name)][name] = value
        if "stop" in parts["sampling"]:
            stop = parts["sampling"]["stop"]
            parts["sampling"]["stop"] = (stop,) if isinstance(stop, str) else tuple(stop)
        sampling, retrieval = SamplingParams(**parts["sampling"]), RetrievalParams.of(**parts["retrieval"])
        return cls(prompt, sampling, retrieval, **parts["request"])


_SAMPLING = frozenset(f.name for f in fields(SamplingParams))
_RETRIEVAL = frozenset(f.name for f in fields(RetrievalParams))
_REQUEST = frozenset({"neighbors", "top_logprobs", "early_exit", "session", "resume_s"})


def _home_of(name: str) -> str:
    if name in _SAMPLING:
        return "sampling"
    if name in _RETRIEVAL:
        return "retrieval"
    if name in _REQUEST:
        return "request"
    known = ", ".join(sorted(_SAMPLING | _RETRIEVAL | _REQUEST))
    raise InvalidInput(f"unknown option {name!r}; the options are {known}", field=name)


def _require(holds: bool, name: str, value: object, expected: str) -> None:
    if not holds:
        raise InvalidInput(f"{name} is {value!r}; expected {expected}", field=name)


def _finite(value: float) -> bool:
    return math.isfinite(value)


# What is asked of one thing, or of all, in several ways: making a dataclass takes a millisecond, a class none.


@dataclass(frozen=True, slots=True)
class _PlainRequest:
    """A question that needs no more than its name."""
