"""Passages of documents, the units of text that are put into prompts, and the request that finds them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from memlm.api.datastores import DOCUMENTS_OPTION, WHERE_OPTION, as_filters, document_filter
from memlm.api.params import RetrievalParams
from memlm.api.request import Request
from memlm.base.options import option
from memlm.errors import InvalidInput, check_choice
from memlm.index.store.filters import DocumentFilter

MAX_QUESTION_CHARACTERS = 1 << 16


class PassagesBy(StrEnum):
    """What a search for passages compares with the question."""

    WORDS = "words"  # BM25
    MEANING = "meaning"  # the mean state of the model
    BOTH = "both"  # the ranks of these two


@dataclass(frozen=True, slots=True)
class Passage:
    """A passage of a document, and the score that it was found with.

    `token_offset` counts tokens from the start of the document, and `num_tokens` are its length. `text` lacks the words
    that its ends cut. By words, `score` is BM25. By meaning, it is a cosine. By both, it is a sum of reciprocal ranks.
    """

    store: str
    document_id: str
    title: str
    token_offset: int
    num_tokens: int
    text: str
    score: float
    metadata: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class PassagesRequest(Request[tuple[Passage, ...]]):
    """Finds the `k` passages of datastores that are likeliest to answer a question, the best first.

    `store=None` searches all loaded datastores as if they were one. `documents` and `where` choose documents, as in a
    `SearchRequest`. `exclude_documents` are left out as if they were deleted.
    """

    question: str = field(metadata=option("The question, or other text."))
    store: str | None = field(
        default=None, metadata=option("Search this loaded datastore.", "--store-name", metavar="NAME", default="all")
    )
    k: int = field(default=8, metadata=option("Passages to show."))
    by: PassagesBy = field(
        default=PassagesBy.WORDS,
        metadata=option(
            "words: BM25. meaning: the model's mean state. both: their ranks.", metavar="words|meaning|both"
        ),
    )
    documents: tuple[str, ...] = field(default=(), metadata=DOCUMENTS_OPTION)
    where: tuple[str, ...] = field(default=(), metadata=WHERE_OPTION)
    exclude_documents: tuple[str, ...] = field(
        default=(),
        metadata=option(
            "Leave out documents with this id, in this folder, or matching this glob. Repeatable.",
            "--exclude-document", metavar="ID|FOLDER|GLOB", panel="Filters",
        ),
    )  # fmt: skip

    def __post_init__(self) -> None:
        """Raises InvalidInput, naming the field."""
        RetrievalParams(store=self.store, k=self.k, exclude_documents=self.exclude_documents)
        check_choice("by", self.by, PassagesBy)
        object.__setattr__(self, "by", PassagesBy(self.by))
        if not self.question.strip():
            raise InvalidInput("question is empty; give some text", field="question")
        if len(self.question) > MAX_QUESTION_CHARACTERS:
            raise InvalidInput(
                f"question has {len(self.question):,} characters; at most {MAX_QUESTION_CHARACTERS:,}: give a part of"
                " it",
                field="question",
            )
        self.only  # noqa: B018 - raises for a wrong one

    @property
    def only(self) -> DocumentFilter:
        """The documents to look at."""
        return document_filter(self.documents, self.where)

    @classmethod
    def of(cls, question: str, **options: Any) -> PassagesRequest:
        """Makes one of keyword arguments, in which `documents` and `exclude_documents` may be one string, and `where`
        values by field.
        """
        excluded = options.pop("exclude_documents", ())
        excluded = (excluded,) if isinstance(excluded, str) else tuple(excluded)
        return cls(question, exclude_documents=excluded, **as_filters(options))
