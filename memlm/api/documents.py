"""The documents of a datastore: listed by their ids, and read part by part."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

from memlm.api.paging import MAX_PAGE, begin_of, check_page_size, page_of
from memlm.api.request import Request
from memlm.errors import InvalidInput, check_kind, check_range

PART_TOKENS, MAX_PART_TOKENS = 4096, 16_384


@dataclass(frozen=True, slots=True)
class DocumentText:
    """A part of a document as text: `num_tokens` of its `total_tokens`, from `token_offset` on, beginning in its line
    `first_line`, from 1. Parts that follow each other join to the whole text, also where a token ends in a character.
    """

    store: str
    document_id: str
    title: str
    text: str
    token_offset: int
    num_tokens: int
    total_tokens: int
    first_line: int
    metadata: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class ReadDocumentRequest(Request[DocumentText]):
    """Reads at most `num_tokens` of a document, from a token on. `store` may be left out where one is loaded."""

    document_id: str
    store: str | None = None
    token_offset: int = 0
    num_tokens: int = PART_TOKENS

    def __post_init__(self) -> None:
        check_kind("document_id", self.document_id, str, "the id of a document")
        if not self.document_id:
            raise InvalidInput("document_id is empty; give the id of a document", field="document_id")
        check_range("token_offset", self.token_offset, least=0, most=(1 << 62), whole=True)
        check_range("num_tokens", self.num_tokens, least=1, most=MAX_PART_TOKENS, whole=True)


@dataclass(frozen=True, slots=True)
class DocumentInfo:
    """A document of a datastore."""

    id: str
    title: str
    num_tokens: int


@dataclass(frozen=True, slots=True)
class DocumentPage:
    """One page of a datastore's documents, by their ids. `next_page_token` is empty on the last page."""

    documents: tuple[DocumentInfo, ...]
    next_page_token: str = ""


@dataclass(frozen=True, slots=True)
class ListDocumentsRequest(Request[DocumentPage]):
    """Lists the documents of a datastore, at most `page_size` and 1,000 of them (0: 1,000), behind the place of a
    `page_token`. `store` may be left out where one is loaded.
    """

    store: str | None = None
    page_size: int = 0
    page_token: str = ""

    def __post_init__(self) -> None:
        check_page_size(self.page_size)

    def page(self, documents_after: Callable[[str], Iterable[DocumentInfo]]) -> DocumentPage:
        """The page, of the documents behind an id in the order of their ids, of which it takes no more than it needs.
        Raises InvalidInput for a token of another form.
        """
        size = min(self.page_size or MAX_PAGE, MAX_PAGE)
        begin = begin_of(self.page_token)[1] if self.page_token else ""
        found = islice(documents_after(begin), size + 1)
        return DocumentPage(*page_of(found, lambda document: (0.0, document.id), size, self.page_token))
