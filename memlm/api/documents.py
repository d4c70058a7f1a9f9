"""Reading a document of a datastore: its text, part by part."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

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
