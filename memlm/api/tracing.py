"""Tracing a text to the documents in which parts of it stand word for word."""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from enum import StrEnum
from typing import Any

from memlm.api.datastores import AS_OF_OPTION, DOCUMENTS_OPTION, WHERE_OPTION, as_filters, document_filter
from memlm.api.generation import Neighbor
from memlm.api.request import Request
from memlm.base.options import check_bounds, option
from memlm.errors import InvalidInput, check_choice, check_kind
from memlm.index.store.filters import DocumentFilter, as_of_day

MAX_SPAN_DOCUMENTS, MAX_MIN_TOKENS = 20, 10_000
MAX_SPANS = 200  # of one answer


class RankBy(StrEnum):
    """Which spans come first, where a text has more than are shown."""

    RARITY = "rarity"  # the least probable ones, token by token
    LENGTH = "length"


@dataclass(frozen=True, slots=True)
class TracedSpan:
    """A passage of the text, from character `begin` to `end`, that stands word for word in documents.

    `rarity` is the sum over its `tokens` of -log p in nats, where p is the token's share of the datastores. `count` is
    how often it stands there, at most 1,000. `places` has one place a document, with distance and weight 0.
    """

    begin: int
    end: int
    tokens: int
    text: str
    rarity: float
    count: int
    places: tuple[Neighbor, ...] = ()


@dataclass(frozen=True, slots=True)
class Trace:
    """The spans of a text in their order, how many `tokens` it has, and how many lie in a span."""

    tokens: int
    traced_tokens: int
    spans: tuple[TracedSpan, ...] = ()

    @property
    def share(self) -> float:
        """The share of the text's tokens that lie in a span."""
        return self.traced_tokens / self.tokens if self.tokens else 0.0


@dataclass(frozen=True, slots=True)
class TraceRequest(Request[Trace]):
    """Finds the longest passages of a text that stand word for word in datastores.

    `store=None` looks into all loaded datastores. A span has at least `min_tokens` tokens, and none lies in another
    one. At most `spans_per_token` for each token of the text are kept, but one at least and 200 at most, ranked by
    `rank_by`, each with at most `max_documents` documents. `documents` are ids, folders of ids, or globs, of which one
    must match, and `where` are FIELD=VALUE of the metadata, which must all hold. `as_of` is a time, as in
    `RetrievalParams`.
    """

    text: str
    store: str | None = field(
        default=None, metadata=option("Look into this loaded datastore.", "--store-name", metavar="NAME", default="all")
    )
    min_tokens: int = field(
        default=6, metadata=option("Tokens that a span has at least.", least=2, most=MAX_MIN_TOKENS, whole=True)
    )
    spans_per_token: float = field(
        default=0.05, metadata=option("Spans to show for each token of the text.", metavar="<float>", above=0, most=1)
    )
    max_documents: int = field(
        default=10, metadata=option("Documents to show for each span.", least=1, most=MAX_SPAN_DOCUMENTS, whole=True)
    )
    rank_by: RankBy = field(
        default=RankBy.RARITY,
        metadata=option("Which spans to show, if there are more than that.", metavar="rarity|length"),
    )
    documents: tuple[str, ...] = field(default=(), metadata=DOCUMENTS_OPTION)
    where: tuple[str, ...] = field(default=(), metadata=WHERE_OPTION)
    as_of: str | None = field(default=None, metadata=AS_OF_OPTION)

    def __post_init__(self) -> None:
        """Raises InvalidInput, naming the field."""
        check_kind("text", self.text, str, "a text")
        check_bounds(self)
        check_choice("rank_by", self.rank_by, RankBy)
        object.__setattr__(self, "rank_by", RankBy(self.rank_by))
        object.__setattr__(self, "as_of", as_of_day(self.as_of))
        self.only  # noqa: B018 - raises for a wrong one

    @property
    def only(self) -> DocumentFilter:
        """The documents to look at."""
        return document_filter(self.documents, self.where)

    @classmethod
    def of(cls, text: str, store: str | None, **options: Any) -> TraceRequest:
        """Makes one of keyword arguments, in which `documents` may be one string, and `where` values by field."""
        known = [each.name for each in fields(cls) if each.name not in ("text", "store")]
        if unknown := next((name for name in options if name not in known), None):
            raise InvalidInput(f"unknown option {unknown!r}; the options are {', '.join(known)}", field=unknown)
        return cls(text, store, **as_filters(options))
