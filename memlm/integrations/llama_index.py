"""A LlamaIndex retriever over the datastores of a model in this process, or of a server.

retriever = MemlmRetriever(source=Client("localhost:50051"), store="notes", k=4)
nodes = retriever.retrieve("Which port does the gateway use?")
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from threading import Lock
from typing import Any

from llama_index.core.retrievers import BaseRetriever
from llama_index.core.schema import NodeWithScore, QueryBundle, TextNode

from memlm.api.passages import Passage
from memlm.client import AsyncClient, Client
from memlm.errors import InvalidInput
from memlm.language_model import LanguageModel

OF_PLACE = (
    "document_id", "title", "headings", "token_offset", "first_line", "last_line", "first_page", "last_page", "also",
    "place",
)  # fmt: skip
SHOWN = ("title", "place")  # to a model, and in the text of an embedding


class MemlmRetriever(BaseRetriever):  # type: ignore[misc]  # the library is not read here
    """Finds passages by `find_passages`, which takes the options.

    `source` is a LanguageModel, a Client or an AsyncClient. The retriever does not close it. The text of a passage is
    that of a node, whose metadata are those of the stored document with `datastore` and the fields of the passage:
    `document_id`, `title`, `headings`, lines and pages, and `place`, which names it in words. A model is shown the
    title and the place.
    """

    def __init__(
        self,
        source: LanguageModel | Client | AsyncClient,
        *,
        store: str | None = None,
        k: int = 8,
        by: str = "auto",
        documents: str | Sequence[str] = (),
        where: Mapping[str, str] | Sequence[str] = (),
        as_of: str | None = None,
    ) -> None:
        """Raises InvalidInput for a source that cannot be searched."""
        if not isinstance(source, LanguageModel | Client | AsyncClient):
            raise InvalidInput(
                f"source is a {type(source).__name__}; give a LanguageModel, a Client or an AsyncClient", field="source"
            )
        super().__init__()
        self._source: Any = source
        self._options: dict[str, Any] = {
            "store": store, "k": k, "by": by, "documents": documents, "where": where, "as_of": as_of
        }  # fmt: skip
        self._in_use = Lock()

    def _retrieve(self, query_bundle: QueryBundle) -> list[NodeWithScore]:
        if isinstance(self._source, AsyncClient):
            raise InvalidInput("source is an AsyncClient; await aretrieve, or give a Client", field="source")
        return self._search(query_bundle.query_str)

    async def _aretrieve(self, query_bundle: QueryBundle) -> list[NodeWithScore]:
        query = query_bundle.query_str
        if isinstance(self._source, AsyncClient):
            return [node_of(each) for each in await self._source.find_passages(query, **self._options)]
        return await asyncio.to_thread(self._search, query)

    def _search(self, query: str) -> list[NodeWithScore]:
        with self._in_use:  # a model in this process answers one caller at a time
            found: Sequence[Passage] = self._source.find_passages(query, **self._options)
        return [node_of(each) for each in found]


def node_of(passage: Passage) -> NodeWithScore:
    """A passage as a node of LlamaIndex, with its score."""
    place = {name: getattr(passage, name) for name in OF_PLACE}
    metadata = {**passage.metadata, "datastore": passage.store, **place}
    hidden = [name for name in metadata if name not in SHOWN]
    node = TextNode(
        text=passage.text,
        id_=f"{passage.store}/{passage.document_id}#{passage.token_offset}",
        metadata=metadata,
        excluded_llm_metadata_keys=hidden,
        excluded_embed_metadata_keys=hidden,
    )
    return NodeWithScore(node=node, score=passage.score)
