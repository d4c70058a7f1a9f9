"""Vectors of texts, and documents in the order of their relevance to a query."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING

from memlm.api.prompts import check_text, token_ids_of
from memlm.api.request import Request
from memlm.base.lists import items_of
from memlm.base.storable import is_utf8
from memlm.errors import InvalidInput, check_kind, check_range

if TYPE_CHECKING:  # the client works without them
    import numpy as np
    from jaxtyping import Float32

MAX_INPUTS = 2048  # texts in one call, as OpenAI has it
MAX_CHARACTERS = 1 << 22  # of all texts of a call
MAX_READ_TOKENS = 300_000  # of all texts of a call, as OpenAI has it
MAX_NUMBERS = 1 << 23  # of all vectors of an answer


@dataclass(frozen=True, slots=True)
class TokenIds:
    """A text as token ids."""

    ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Embeddings:
    """A vector of length 1 for each text, of `dim` numbers, from the encoder or the model of the name `model`.

    `data` has them one behind the other, as float32 with the lowest byte first. `num_tokens` counts the tokens of all
    texts as they were read.
    """

    data: bytes
    dim: int
    model: str
    num_tokens: int

    def __len__(self) -> int:
        return len(self.data) // (4 * self.dim)

    @property
    def vectors(self) -> Float32[np.ndarray, "N D"]:
        """The vectors as an array, a row for each text in the order of the texts."""
        import numpy as np  # here, since a client may need none

        return np.frombuffer(self.data, "<f4").reshape(-1, self.dim)


@dataclass(frozen=True, slots=True)
class EmbedRequest(Request[Embeddings]):
    """Makes a vector of each of the `texts`, or of texts as `token_ids`: of the encoder where there is one, else of the
    model.

    `dimensions` is how many numbers of each vector count, the first ones, which are brought back to length 1 (None:
    all). An encoder's ids are read as they are, with the special tokens that they have. A text that is too long to be
    read at once is refused, or cut with `truncate`.
    """

    texts: tuple[str, ...] = ()
    token_ids: tuple[TokenIds, ...] = ()
    dimensions: int | None = None
    truncate: bool = False

    def __post_init__(self) -> None:
        """Raises InvalidInput, naming the field."""
        check_range("dimensions", self.dimensions, least=1, whole=True)
        if bool(self.texts) == bool(self.token_ids):
            raise InvalidInput("give texts or token_ids, at least one and at most one of the two", field="texts")
        check_texts("texts", self.texts)
        if (empty := next((place for place, text in enumerate(self.texts) if not text), None)) is not None:
            raise InvalidInput(f"text {empty} of texts is empty; leave it out", field="texts")
        check_num_inputs("token_ids", len(self.token_ids))
        check_num_tokens("token_ids", sum(len(each.ids) for each in self.token_ids))
        if not all(each.ids for each in self.token_ids):
            raise InvalidInput("a text of token_ids has no ids; leave it out", field="token_ids")

    @classmethod
    def of(
        cls, texts: str | Sequence[str] | Sequence[Sequence[int]], *, dimensions: int | None, truncate: bool
    ) -> EmbedRequest:
        """Makes one of a text, of texts, or of texts as token ids."""
        if isinstance(texts, str):
            texts = [texts]
        given = items_of("texts", texts, (str, list, tuple), expected="texts, or token ids in lists")  # type: ignore[arg-type]
        if all(isinstance(each, str) for each in given):
            return cls(given, (), dimensions, truncate)
        ids = tuple(TokenIds(token_ids_of("texts", each)) for each in given)
        return cls((), ids, dimensions, truncate)


class RelevanceBy(StrEnum):
    """How documents are compared with a query."""

    CROSS_ENCODER = "cross_encoder"  # which reads both together
    ENCODER = "encoder"  # the cosine of their vectors
    MODEL = "model"  # how likely the query is behind the document


@dataclass(frozen=True, slots=True)
class RankedDocument:
    """The place of a document in the request, and its relevance to the query: the larger, the closer."""

    index: int
    score: float


@dataclass(frozen=True, slots=True)
class Ranking:
    """Documents, the most relevant first, by the cross-encoder, the encoder or the model of the name `model`.

    Scores of a cross-encoder and of a model are from 0 to 1, and cosines of an encoder from -1 to 1. `num_tokens`
    counts the tokens as they were read.
    """

    documents: tuple[RankedDocument, ...]
    by: RelevanceBy
    model: str
    num_tokens: int


@dataclass(frozen=True, slots=True)
class RerankRequest(Request[Ranking]):
    """Orders documents by their relevance to a query, and returns the first `top_n` (None: all). Of a document that is
    too long to be read at once, the begin counts.
    """

    query: str
    documents: tuple[str, ...]
    top_n: int | None = None

    def __post_init__(self) -> None:
        """Raises InvalidInput, naming the field."""
        check_readable("query", self.query, "query")
        if not self.query.strip():
            raise InvalidInput("query is empty; give some text", field="query")
        check_range("top_n", self.top_n, least=1, whole=True)
        check_texts("documents", self.documents, more=len(self.query))
        if not self.documents:
            raise InvalidInput("documents are empty; give at least one", field="documents")

    @classmethod
    def of(cls, query: str, documents: Sequence[str], *, top_n: int | None) -> RerankRequest:
        """Makes one of a list of documents."""
        return cls(query, items_of("documents", documents), top_n)


def check_readable(what: str, text: object, field: str) -> None:
    """Raises InvalidInput for other things than text of Unicode, and for a text with a NUL."""
    check_text(what, text, field=field)
    if not is_utf8(str(text)):
        raise InvalidInput(f"{what} has half a surrogate pair, which is no Unicode text; send text", field=field)


def check_num_inputs(name: str, number: int) -> None:
    """Raises InvalidInput for more than MAX_INPUTS."""
    if number > MAX_INPUTS:
        raise InvalidInput(f"{name} are {number:,}; at most {MAX_INPUTS:,} in one call", field=name)


def check_num_tokens(name: str, number: int) -> None:
    """Raises InvalidInput for more than MAX_READ_TOKENS."""
    if number > MAX_READ_TOKENS:
        raise InvalidInput(
            f"{name} have {number:,} tokens; at most {MAX_READ_TOKENS:,} in one call: send them in several", field=name
        )


def check_texts(name: str, texts: tuple[str, ...], *, more: int = 0) -> None:
    """Raises InvalidInput for other things than texts, for too many, and for too long ones. `more` characters count
    too.
    """
    check_kind(name, texts, tuple, "texts in a tuple")
    check_num_inputs(name, len(texts))
    for place, text in enumerate(texts):
        check_readable(f"text {place} of {name}", text, name)
    if (size := more + sum(map(len, texts))) > MAX_CHARACTERS:
        raise InvalidInput(
            f"{name} have {size:,} characters; at most {MAX_CHARACTERS:,} in one call: send them in several", field=name
        )
