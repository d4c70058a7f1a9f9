"""A LangChain retriever over the datastores of a model in this process, or of a server.

retriever = MemlmRetriever(source=Client("localhost:50051"), store="notes", k=4)
documents = retriever.invoke("Which port does the gateway use?")
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from threading import Lock
from typing import Any

from langchain_core.callbacks import AsyncCallbackManagerForRetrieverRun, CallbackManagerForRetrieverRun
from langchain_core.documents import Document
from langchain_core.retrievers import BaseRetriever
from pydantic import PrivateAttr, SkipValidation

from memlm.api.passages import Passage
from memlm.client import AsyncClient, Client
from memlm.errors import InvalidInput
from memlm.language_model import LanguageModel


class MemlmRetriever(BaseRetriever):  # type: ignore[misc]  # the library is not read here
    """Finds passages by `find_passages`, whose options are the fields.

    `source` is a LanguageModel, a Client or an AsyncClient. The retriever does not close it. The text of a passage is
    that of a document, whose metadata are those of the stored document with `datastore` and the fields of the passage:
    `document_id`, `title`, `headings`, lines and pages, `place`, which names it in words, and `score`.
    """

    source: SkipValidation[Any]
    store: str | None = None
    k: int = 8
    by: str = "auto"
    documents: str | Sequence[str] = ()
    where: Mapping[str, str] | Sequence[str] = ()
    as_of: str | None = None
    _in_use: Lock = PrivateAttr(default_factory=Lock)

    def __init__(self, source: LanguageModel | Client | AsyncClient, **options: Any) -> None:
        """Raises InvalidInput for a source that cannot be searched."""
        if not isinstance(source, LanguageModel | Client | AsyncClient):
            raise InvalidInput(
                f"source is a {type(source).__name__}; give a LanguageModel, a Client or an AsyncClient", field="source"
            )
        super().__init__(source=source, **options)

    def _get_relevant_documents(self, query: str, *, run_manager: CallbackManagerForRetrieverRun) -> list[Document]:
        if isinstance(self.source, AsyncClient):
            raise InvalidInput("source is an AsyncClient; await ainvoke, or give a Client", field="source")
        return self._search(query)

    async def _aget_relevant_documents(
        self, query: str, *, run_manager: AsyncCallbackManagerForRetrieverRun
    ) -> list[Document]:
        if isinstance(self.source, AsyncClient):
            return [document_of(each) for each in await self.source.find_passages(query, **self._options)]
        return await asyncio.to_thread(self._search, query)

    def _search(self, query: str) -> list[Document]:
        with self._in_use:  # a model in this process answers one caller at a time
            found: Sequence[Passage] = self.source.find_passages(query, **self._options)
        return [document_of(each) for each in found]

    @property
    def _options(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in ("store", "k", "by", "documents", "where", "as_of")}


def document_of(passage: Passage) -> Document:
    """A passage as a document of LangChain."""
    names = ("document_id", "title", "headings", "token_offset", "first_line", "last_line", "first_page", "last_page")
    fields = {name: getattr(passage, name) for name in (*names, "also", "place", "score")}
    return Document(
        page_content=passage.text,
        id=f"{passage.store}/{passage.document_id}#{passage.token_offset}",
        metadata={**passage.metadata, "datastore": passage.store, **fields},
    )
