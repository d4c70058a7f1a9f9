"""Generation parameters: sampling, retrieval and the request that carries them.

The modules of `memlm.api` are shared by the library, the server and the client. They import neither torch, Faiss nor
gRPC. The metadata of a field is its command-line option, and its bounds.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any, cast

from memlm.api.prompts import approximate_tokens, check_num_ids, check_text, split_prompt
from memlm.api.request import Request
from memlm.base.lists import check_list, items_of
from memlm.base.options import RESEARCH, bounds, check_bounds, option
from memlm.errors import InvalidInput, check_range
from memlm.index.store.filters import TODAY, as_of_day

BEGINNING_CHARACTERS, BEGINNING_IDS = 100, 32  # by which texts that are likely to begin alike are told
MAX_NEIGHBORS = 4096
MAX_RESUME_S = 300.0
MAX_TOP_LOGPROBS = 64
MAX_STOP_STRINGS = 16
MAX_STORES = 16
MAX_EXCLUDED = 100  # names in one request
MAX_SEED = 1 << 53  # larger whole numbers are rounded by most readers of JSON

# What other libraries call some options.
OTHER_WORDS = {
    "max_new_tokens": "max_tokens", "max_length": "max_tokens", "num_predict": "max_tokens", "logprobs": "top_logprobs",
    "lambda_": "lam", "stop_sequences": "stop", "num_neighbors": "neighbors", "datastore": "store",
    "num_speculative_tokens": "drafts", "prediction": "draft",
}  # fmt: skip

MAX_TTL_S = 30 * 86_400.0
MAX_DRAFTS = 64  # tokens in one step
MAX_CONTEXT_CACHE = 1 << 24  # positions of one text

SAMPLING, RETRIEVAL, DRAFTS, OUTPUT, SERVER = "Sampling", "Retrieval", "Drafts", "Output", "Server"


def as_of_option(panel: str) -> dict[str, Any]:
    """The option of a field `as_of`."""
    return option(
        "Only documents that held then, by valid_from and supersedes of their metadata.", metavar=f"DATE|{TODAY}",
        default="all documents", panel=panel,
    )  # fmt: skip


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How the next token is sampled from the mixture of p_kNN and p_LM.

    `temperature=0` is greedy. A field that is None takes the model's default (`generation_config.json` of a foreign
    checkpoint that samples), otherwise it has no effect. The filters apply to the mixture after the temperature, in
    the order repetition penalty, temperature, top-k, top-p, min-p. `seed=None` draws a fresh seed, which the result
    reports. `time_limit_s` counts from the start of the request and ends the text early. A call's own deadline is an
    error instead.
    """

    max_tokens: int | None = field(
        default=None,
        metadata=option("Maximum number of tokens.", "--max-tokens", "-n", panel=SAMPLING, least=1, whole=True),
    )
    temperature: float | None = field(
        default=None,
        metadata=option("0 is greedy.", "--temperature", "-t", default="the model's, else 1", panel=SAMPLING, least=0),
    )
    top_k: int | None = field(
        default=None, metadata=option("Sample from the k likeliest tokens.", panel=SAMPLING, least=1, whole=True)
    )
    top_p: float | None = field(
        default=None,
        metadata=option("Sample from the likeliest tokens that hold this mass.", panel=SAMPLING, above=0, most=1),
    )
    min_p: float | None = field(
        default=None,
        metadata=option(
            "Drop tokens below this fraction of the likeliest token's probability.", panel=SAMPLING, least=0, most=1
        ),
    )
    repetition_penalty: float | None = field(
        default=None, metadata=option("Above 1 makes repeated tokens less likely.", panel=SAMPLING, above=0)
    )
    seed: int | None = field(
        default=None,
        metadata=option("Equal seeds give equal texts.", panel=SAMPLING, least=0, most=MAX_SEED, whole=True),
    )
    stop: tuple[str, ...] = field(
        default=(), metadata=option("End before this string. Repeatable.", metavar="TEXT", panel=SAMPLING)
    )
    time_limit_s: float | None = field(
        default=None,
        metadata=option("End the text after this many seconds.", metavar="SECONDS", panel=SAMPLING, above=0),
    )

    def __post_init__(self) -> None:
        """Raises InvalidInput, naming the field."""
        check_bounds(self)
        _require(len(self.stop) <= MAX_STOP_STRINGS, "stop", len(self.stop), f"at most {MAX_STOP_STRINGS} strings")
        _require(not isinstance(self.stop, str), "stop", self.stop, "strings in a tuple")
        _require(all(each and isinstance(each, str) for each in self.stop), "stop", self.stop, "strings, none empty")

    def or_else(self, defaults: SamplingParams) -> SamplingParams:
        """Fills fields that are None from a model's defaults. A greedy request takes no filters over."""
        if self.temperature == 0:
            return self
        names = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")
        return replace(self, **{name: getattr(defaults, name) for name in names if getattr(self, name) is None})


@dataclass(frozen=True, slots=True)
class StoreWeight:
    """One of several datastores that a request mixes, as if each of its entries were stored `weight` times."""

    name: str
    weight: float = 1.0

    def __post_init__(self) -> None:
        check_range("stores", self.weight, above=0)

    @classmethod
    def parse(cls, text: str) -> StoreWeight:
        """Parses NAME or NAME=WEIGHT."""
        name, _, weight = text.partition("=")
        try:
            return cls(name, float(weight or 1))
        except InvalidInput:
            raise
        except ValueError:
            raise InvalidInput(
                f"--store-name is {text!r}; expected NAME or NAME=WEIGHT, as code=0.5", field="stores"
            ) from None


def parse_drafts(text: str | int) -> int | None:
    """Parses auto (None), off (0), or the most tokens of a step. A file of settings may hold a number. Raises
    InvalidInput.
    """
    text = str(text)
    if text in ("auto", "off"):
        return None if text == "auto" else 0
    if not text.isdecimal():
        raise InvalidInput(f"{text!r} is no number of tokens; expected auto, off, or 0 to {MAX_DRAFTS}", field="drafts")
    return int(text)


@dataclass(frozen=True, slots=True)
class RetrievalParams:
    """Which datastores a request searches, and how: p = lam p_kNN + (1 - lam) p_LM (arXiv 1911.00172, eq. 3).

    A field that is None takes the default of the datastore (of several, the first one's) that `memlm tune` set.
    Give `store` or `stores`, not both. Without either, all loaded datastores are searched, each with weight 1.
    `use_store=False` uses the model alone. `spalm` mixes the neighbors by the model's trained gate (arXiv 2102.02557)
    instead of `lam`, or along with `lam` if that is given. `loop_guard` keeps memory from repeating a run of the last
    tokens: None is on in generation. Scoring has none. `exclude_documents` are ids, folders of ids, or globs: the
    answer is that of datastores from which these documents were deleted. `as_of` is a date, a date and a time, or
    `today`: the answer is that of datastores of the documents that held then, by `valid_from` and `supersedes` of their
    metadata. None counts all documents. `context_cache` is how many of the last
    positions of the text itself are searched too. None is all of them, where `memlm tune` found that this helps
    the model. 0 is none.
    """

    store: str | None = None
    use_store: bool = field(default=True, metadata=option("Use the model alone.", " /--no-store", panel=RETRIEVAL))
    k: int | None = field(
        default=None,
        metadata=option(
            "Neighbors to retrieve.", default="as tuned", panel=RETRIEVAL, least=1, most=MAX_NEIGHBORS, whole=True
        ),
    )
    lam: float | None = field(
        default=None,
        metadata=option(
            "Weight of p_kNN in the mixture, 0 to 1.", default="as tuned", panel=RETRIEVAL, least=0, most=1
        ),
    )
    knn_temperature: float | None = field(
        default=None,
        metadata=option("Softmax temperature over squared distances.", default="as tuned", panel=RETRIEVAL, above=0),
    )
    nprobe: int | None = field(
        default=None, metadata=option("Inverted lists to search.", panel=RESEARCH, least=1, whole=True)
    )
    spalm: bool = field(default=False, metadata=option("Mix by the model's trained gate.", panel=RESEARCH))
    stores: tuple[StoreWeight, ...] = field(
        default=(),
        metadata=option(
            "Search this loaded datastore. Repeatable.", "--store-name", metavar="NAME[=WEIGHT]",
            panel=RETRIEVAL, default="all", parse=StoreWeight.parse,
        ),
    )  # fmt: skip
    loop_guard: bool | None = field(
        default=None,
        metadata=option(
            "Let memory continue a loop: repeat a run of the last tokens.", " /--no-loop-guard", panel=RESEARCH
        ),
    )
    exclude_documents: tuple[str, ...] = field(
        default=(),
        metadata=option(
            "Answer as if documents of this id, folder or glob were deleted. Repeatable.", "--exclude-document",
            metavar="ID|FOLDER|GLOB", panel=RETRIEVAL,
        ),
    )  # fmt: skip
    context_cache: int | None = field(
        default=None,
        metadata=option(
            "Positions of the text's own past to search. 0 searches none.",
            default="as tuned",
            panel=RESEARCH,
            least=0,
            most=MAX_CONTEXT_CACHE,
            whole=True,
        ),
    )
    as_of: str | None = field(default=None, metadata=as_of_option(RETRIEVAL))

    def __post_init__(self) -> None:
        """Raises InvalidInput, naming the field."""
        check_bounds(self)
        object.__setattr__(self, "as_of", as_of_day(self.as_of))
        is_name = self.store is None or isinstance(self.store, str)
        _require(is_name, "store", self.store, "one name; give several as stores")
        names = [store.name for store in self.stores]
        _require(len(names) <= MAX_STORES, "stores", len(names), f"at most {MAX_STORES}")
        _require(len(set(names)) == len(names), "stores", ", ".join(names), "each store once")
        _require(not (self.stores and self.store is not None), "stores", ", ".join(names), "either store or stores")
        excluded = self.exclude_documents
        _require(not isinstance(excluded, str), "exclude_documents", excluded, "names of documents in a tuple")
        are_names = all(each and isinstance(each, str) for each in excluded)
        _require(are_names, "exclude_documents", excluded, "names of documents, none empty")
        _require(len(excluded) <= MAX_EXCLUDED, "exclude_documents", len(excluded), f"at most {MAX_EXCLUDED} names")

    @property
    def sets_mixture(self) -> bool:
        """Whether a parameter says how neighbors are found or mixed."""
        given = (self.k, self.lam, self.knn_temperature, self.nprobe, self.loop_guard)
        return self.use_store and (self.spalm or any(each is not None for each in given))

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the datastores, none for all."""
        return tuple(each.name for each in self.stores) or ((self.store,) if self.store else ())

    @classmethod
    def of(cls, **options: Any) -> RetrievalParams:
        """Makes one from keyword arguments. `stores` may be names, or weights by name; `exclude_documents` one name."""
        if "exclude_documents" in options:
            excluded = options["exclude_documents"]
            named = () if excluded is None else excluded
            options["exclude_documents"] = items_of("exclude_documents", named, expected="names of documents", one=True)
        stores = options.get("stores")
        if stores is not None:
            listed = items_of("stores", stores, str | StoreWeight, expected="names")
            pairs = stores.items() if isinstance(stores, Mapping) else ((store, 1.0) for store in listed)
            options["stores"] = tuple(
                name if isinstance(name, StoreWeight) else StoreWeight(name, float(weight)) for name, weight in pairs
            )
        return cls(**options)


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamRequest(Request[Any]):
    """What the requests for a stream of tokens have in common: sampling, retrieval and details of each token.

    `neighbors` and `top_logprobs` are how many of each a token reports. `early_exit` skips later layers by the rule of
    `memlm calibrate`, and excludes a datastore. With a `session`, the prompt continues from its KV cache. With
    `resume_s`, a generation survives a broken connection for that long, and the client resumes it by itself.

    `drafts` is the most tokens that one step drafts ahead: None chooses by measured cost, 0 drafts nothing. `draft` is
    a text that the caller expects the answer to resemble: it is only a source of drafts. The answer is the same with
    and without drafts (speculative decoding, arXiv 2211.17192). `early_exit` drafts nothing, and excludes both.

    `adapter` names a loaded adapter, None the one of the session, or the model alone. Datastores have the keys of the
    model alone, so an adapter searches none, and excludes those that are named. `early_exit` excludes it.
    """

    sampling: SamplingParams = field(default_factory=SamplingParams)
    retrieval: RetrievalParams = field(default_factory=RetrievalParams)
    neighbors: int = field(default=0, metadata=bounds(least=0, most=MAX_NEIGHBORS, whole=True))
    top_logprobs: int = field(default=0, metadata=bounds(least=0, most=MAX_TOP_LOGPROBS, whole=True))
    early_exit: bool = field(
        default=False, metadata=option("Skip later layers by the calibrated rule.", panel=RESEARCH)
    )
    drafts: int | None = field(
        default=None,
        metadata=option(
            "Most tokens to draft ahead in one step. The text stays the same. auto: chosen by cost.",
            metavar="auto|off|N", panel=DRAFTS, parse=parse_drafts, default="auto",
            least=0, most=MAX_DRAFTS, whole=True,
        ),
    )  # fmt: skip
    draft: str = field(
        default="",
        metadata=option("Draft from this text, which the answer may resemble.", metavar="TEXT", panel=DRAFTS),
    )
    session: str | None = field(
        default=None, metadata=option("Continue this session's context.", metavar="NAME", panel=SERVER)
    )
    adapter: str | None = field(
        default=None,
        metadata=option(
            "Answer with this adapter: its name on a server, its folder in this process.", metavar="ADAPTER",
            panel="Model",
        ),
    )  # fmt: skip
    resume_s: float | None = field(
        default=None,
        metadata=option(
            "Resume a broken stream for up to this many seconds.",
            metavar="SECONDS",
            panel=SERVER,
            above=0,
            most=MAX_RESUME_S,
        ),
    )

    def __post_init__(self) -> None:
        """Raises InvalidInput, naming the field."""
        check_bounds(self)
        check_text("draft", self.draft, field="draft")
        if self.early_exit and self.adapter is not None:
            raise InvalidInput(
                "adapter is given with early_exit, whose rule is that of the model alone; leave out one",
                field="adapter",
            )
        if self.early_exit and (self.drafts or self.draft):
            name = "drafts" if self.drafts else "draft"
            raise InvalidInput(f"{name} is given with early_exit, which drafts nothing; leave out one", field=name)

    @property
    def shown_prompt(self) -> str:
        """The prompt, for a log."""
        raise NotImplementedError

    @property
    def beginning(self) -> str:
        """The first characters, which later requests that go on from this one have too."""
        return self.shown_prompt[:BEGINNING_CHARACTERS]

    @property
    def approximate_tokens(self) -> int:
        """About how many tokens the prompt has, before it is encoded."""
        raise NotImplementedError


@dataclass(frozen=True, slots=True)
class GenerateRequest(StreamRequest):
    """One generation: a prompt, and how to continue it.

    `prompt_token_ids` is a prompt that is tokenized already, special tokens included, in place of `prompt`: it is read
    as it is, without a start token.
    """

    prompt: str = field(metadata=option("The text to continue."))
    prompt_token_ids: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        """Raises InvalidInput, naming the field."""
        StreamRequest.__post_init__(self)
        check_num_ids("prompt_token_ids", self.prompt_token_ids)
        if self.prompt and self.prompt_token_ids:
            raise InvalidInput("give either a prompt or prompt_token_ids, not both", field="prompt_token_ids")
        check_text("the prompt", self.prompt, field="prompt")

    @classmethod
    def of(cls, prompt: str | Sequence[int] | GenerateRequest, options: Mapping[str, Any]) -> GenerateRequest:
        """Makes one of keyword arguments (`temperature=0.8, lam=0.3, neighbors=4`), or returns a request as it is.

        The prompt is a text or token ids. Raises InvalidInput, naming the option.
        """
        if isinstance(prompt, GenerateRequest):
            if options:
                raise InvalidInput(f"a GenerateRequest takes no options; got {', '.join(options)}", field="prompt")
            return prompt
        ids = options.get("prompt_token_ids")
        text, token_ids = split_prompt(prompt, ids)
        options = {name: value for name, value in options.items() if name != "prompt_token_ids"}
        return cls(text, token_ids, **stream_fields(options))

    @property
    def shown_prompt(self) -> str:
        return self.prompt or str(list(self.prompt_token_ids))

    @property
    def beginning(self) -> str:
        return self.prompt[:BEGINNING_CHARACTERS] or str(self.prompt_token_ids[:BEGINNING_IDS])

    @property
    def approximate_tokens(self) -> int:
        return len(self.prompt_token_ids) or approximate_tokens(self.prompt)


def stream_fields(options: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of a StreamRequest from keyword arguments. Raises InvalidInput for an unknown one."""
    parts: dict[str, dict[str, Any]] = {"sampling": {}, "retrieval": {}, "request": {}}
    for name, value in options.items():
        parts[_part_of(name)][name] = value
    if "stop" in parts["sampling"]:
        stop = parts["sampling"]["stop"]
        parts["sampling"]["stop"] = () if stop is None else items_of("stop", stop, one=True)
    sampling, retrieval = SamplingParams(**parts["sampling"]), RetrievalParams.of(**parts["retrieval"])
    return {"sampling": sampling, "retrieval": retrieval, **parts["request"]}


_SAMPLING = frozenset(f.name for f in fields(SamplingParams))
_RETRIEVAL = frozenset(f.name for f in fields(RetrievalParams))
_REQUEST = frozenset(f.name for f in fields(StreamRequest)) - {"sampling", "retrieval"}


def batch_requests(prompts: object, options: Mapping[str, Any]) -> list[GenerateRequest]:
    """A request for each of several prompts. Given a seed, prompt n has seed + n.

    Raises InvalidInput for one prompt in place of several, and for a session, which takes one at a time.
    """
    check_list("prompts", prompts, expected="prompts")
    if options.get("session") is not None:
        raise InvalidInput("a session takes one prompt at a time; ask one after the other", field="session")
    seed = options.get("seed")
    return [
        GenerateRequest.of(prompt, options if seed is None else {**options, "seed": seed + number})
        for number, prompt in enumerate(cast("Iterable[Any]", prompts))
    ]


def _part_of(name: str) -> str:
    if name in _SAMPLING:
        return "sampling"
    if name in _RETRIEVAL:
        return "retrieval"
    if name in _REQUEST:
        return "request"
    known = sorted(_SAMPLING | _RETRIEVAL | _REQUEST)
    near = OTHER_WORDS.get(name) or next(iter(difflib.get_close_matches(name, known, n=1)), None)
    hint = f"; did you mean {near}?" if near else ";"
    raise InvalidInput(f"unknown option {name!r}{hint} the options are {', '.join(known)}", field=name)


def _require(holds: bool, name: str, value: object, expected: str) -> None:
    if not holds:
        raise InvalidInput(f"{name} is {value!r}; expected {expected}", field=name)
