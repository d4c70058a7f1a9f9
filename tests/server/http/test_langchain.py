"""LangChain on memlm: a retriever in process and over gRPC, and its own OpenAI models over HTTP."""

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from running import RunningServer

from memlm.client import AsyncClient, Client
from memlm.data.corpus import Corpus, Document
from memlm.errors import InvalidInput, NotFound
from memlm.indexing.build import build_index
from memlm.language_model import LanguageModel, load

pytest.importorskip("langchain_core", reason="langchain-core is not installed: pip install 'memlm[langchain]'")

from memlm.integrations.langchain import MemlmRetriever

pytestmark = pytest.mark.filterwarnings("ignore")  # of the library's own imports
QUERY = "the memory of a model"
GREEDY: dict[str, Any] = {"temperature": 0, "max_tokens": 8}


@pytest.fixture
def client(web: RunningServer) -> Iterator[Client]:
    with Client(web.address) as client:
        yield client


@pytest.mark.parametrize("options", [{"k": 3}, {"store": "store", "by": "words", "k": 2}, {"documents": "doc-3.txt"}])
def test_documents_are_the_passages_that_are_found(client: Client, lm: LanguageModel, options: dict[str, Any]) -> None:
    passages = lm.find_passages(QUERY, **options)
    assert passages
    for source in (lm, client):
        found = MemlmRetriever(source, **options).invoke(QUERY)
        assert [each.page_content for each in found] == [passage.text for passage in passages]
        for each, passage in zip(found, passages, strict=True):
            assert each.metadata["datastore"] == passage.store
            for name in (
                "document_id",
                "title",
                "headings",
                "token_offset",
                "first_line",
                "last_line",
                "place",
                "also",
            ):
                assert each.metadata[name] == getattr(passage, name)
            assert each.metadata["score"] == pytest.approx(passage.score, rel=1e-3)
        assert len({each.id for each in found}) == len(found)


def test_a_passage_has_the_metadata_of_its_document(model_folder: Path, tmp_path: Path) -> None:
    """The names of the place win over a document's own."""
    given = Document("a", "The gateway listens on port 9000.", metadata={"author": "Ada", "first_line": "none"})
    build_index(model_folder, Corpus([given]), tmp_path / "notes", check="none")
    with load(model_folder, [tmp_path / "notes"]) as notes:
        for found in MemlmRetriever(notes, k=2).invoke("The gateway"):
            assert (found.metadata["author"], found.metadata["first_line"]) == ("Ada", 1)


async def test_passages_can_be_awaited_from_every_source(web: RunningServer, client: Client, lm: LanguageModel) -> None:
    wanted = [each.text for each in lm.find_passages(QUERY, k=3)]
    async with AsyncClient(web.address) as awaited:
        for source in (lm, client, awaited):
            retriever = MemlmRetriever(source, k=3)
            answers = await asyncio.gather(*(retriever.ainvoke(QUERY) for _ in range(4)))
            assert [[each.page_content for each in answer] for answer in answers] == [wanted] * 4
        with pytest.raises(InvalidInput, match="await ainvoke"):
            MemlmRetriever(awaited).invoke(QUERY)


def test_what_cannot_be_retrieved_is_refused(lm: LanguageModel) -> None:
    with pytest.raises(InvalidInput, match="source is a str"):
        MemlmRetriever("store")  # type: ignore[arg-type]
    with pytest.raises(NotFound, match="no datastore 'x'"):
        MemlmRetriever(lm, store="x").invoke(QUERY)


def test_the_openai_models_of_langchain_answer_as_our_client_does(web: RunningServer, client: Client) -> None:
    openai = pytest.importorskip("langchain_openai", reason="langchain-openai is not installed")
    shared = {"model": "tiny", "base_url": f"{web.http_url}/v1", "api_key": "none", "max_retries": 0, **GREEDY}
    text = str(client.generate(QUERY, **GREEDY).result())
    answer = str(client.chat(QUERY, **GREEDY).result())
    alone = str(client.chat(QUERY, **GREEDY, use_store=False).result())

    async def awaited() -> Any:
        async with httpx.AsyncClient() as http:
            return await openai.ChatOpenAI(**shared, http_client=sync, http_async_client=http).ainvoke(QUERY)

    with httpx.Client() as sync:
        model = openai.OpenAI(**shared, http_client=sync)
        assert model.invoke(QUERY) == "".join(model.stream(QUERY)) == text
        chat = openai.ChatOpenAI(**shared, http_client=sync)
        assert chat.invoke(QUERY).content == "".join(part.content for part in chat.stream(QUERY)) == answer
        assert asyncio.run(awaited()).content == answer
        without = openai.ChatOpenAI(**shared, http_client=sync, extra_body={"memory": {"stores": []}})
        assert without.invoke(QUERY).content == alone
