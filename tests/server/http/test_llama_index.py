"""LlamaIndex on memlm: a retriever in process and over gRPC, and its own model of OpenAI's kind over HTTP."""

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from running import RunningServer

from memlm.client import AsyncClient, Client
from memlm.data.corpus import Corpus, Document
from memlm.errors import InvalidInput, NotFound
from memlm.indexing.build import build_index
from memlm.language_model import LanguageModel, load

pytest.importorskip("llama_index.core", reason="llama-index-core is not installed: pip install 'memlm[llama-index]'")

from memlm.integrations.llama_index import OF_PLACE, MemlmRetriever

pytestmark = pytest.mark.filterwarnings("ignore")  # of the library's own imports
QUERY = "the memory of a model"


@pytest.fixture
def client(web: RunningServer) -> Iterator[Client]:
    with Client(web.address) as client:
        yield client


@pytest.mark.parametrize("options", [{"k": 3}, {"store": "store", "by": "words", "k": 2}, {"documents": "doc-3.txt"}])
def test_nodes_are_the_passages_that_are_found(client: Client, lm: LanguageModel, options: dict[str, Any]) -> None:
    passages = lm.find_passages(QUERY, **options)
    assert passages
    for source in (lm, client):
        found = MemlmRetriever(source, **options).retrieve(QUERY)
        assert [each.node.text for each in found] == [passage.text for passage in passages]
        for each, passage in zip(found, passages, strict=True):
            assert each.score == pytest.approx(passage.score, rel=1e-3)
            assert each.metadata["datastore"] == passage.store
            assert {name: each.metadata[name] for name in OF_PLACE} == {
                name: getattr(passage, name) for name in OF_PLACE
            }
        assert len({each.node_id for each in found}) == len(found)


def test_a_model_is_shown_the_text_with_its_place(model_folder: Path, tmp_path: Path) -> None:
    """The names of the place win over a document's own."""
    given = Document("a.md", "The gateway listens on port 9000.", metadata={"author": "Ada", "first_line": "none"})
    build_index(model_folder, Corpus([given]), tmp_path / "notes", check="none")
    with load(model_folder, [tmp_path / "notes"]) as notes:
        (found,) = MemlmRetriever(notes, k=1).retrieve("The gateway")
    assert (found.metadata["author"], found.metadata["first_line"]) == ("Ada", 1)
    shown = found.node.get_content(metadata_mode="llm")
    assert "The gateway listens on port 9000." in shown
    assert "place: a.md:1" in shown
    assert "Ada" not in shown


async def test_passages_can_be_awaited_from_every_source(web: RunningServer, client: Client, lm: LanguageModel) -> None:
    wanted = [each.text for each in lm.find_passages(QUERY, k=3)]
    async with AsyncClient(web.address) as awaited:
        for source in (lm, client, awaited):
            retriever = MemlmRetriever(source, k=3)
            answers = await asyncio.gather(*(retriever.aretrieve(QUERY) for _ in range(4)))
            assert [[each.node.text for each in answer] for answer in answers] == [wanted] * 4
        with pytest.raises(InvalidInput, match="await aretrieve"):
            MemlmRetriever(awaited).retrieve(QUERY)


def test_what_cannot_be_retrieved_is_refused(lm: LanguageModel) -> None:
    with pytest.raises(InvalidInput, match="source is a str"):
        MemlmRetriever("store")  # type: ignore[arg-type]
    with pytest.raises(NotFound, match="no datastore 'x'"):
        MemlmRetriever(lm, store="x").retrieve(QUERY)


def test_the_model_of_llama_index_answers_as_our_client_does(web: RunningServer, client: Client) -> None:
    reason = "llama-index-llms-openai-like is not installed"
    like = pytest.importorskip("llama_index.llms.openai_like", reason=reason)
    shared = {"model": "tiny", "api_base": f"{web.http_url}/v1", "api_key": "none", "max_retries": 0}
    model = like.OpenAILike(**shared, is_chat_model=True, temperature=0, max_tokens=8)
    message = [like.base.ChatMessage(role="user", content=QUERY)]
    answer = str(client.chat(QUERY, temperature=0, max_tokens=8).result())
    assert model.chat(message).message.content == answer
    assert "".join(part.delta or "" for part in model.stream_chat(message)) == answer
