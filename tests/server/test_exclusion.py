"""A server answers without some documents, for one request, as it does for all once they are deleted."""

import asyncio
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
import httpx
import pytest
from running import PATIENCE_S, RunningServer, alike

from memlm.api.generation import ResumeGenerationRequest, Token
from memlm.api.params import GenerateRequest
from memlm.client import AsyncClient, Client
from memlm.errors import NotFound
from memlm.v1.generation_pb2_grpc import GenerationStub
from memlm.wire import codec

PROMPT, GONE = "the memory of", ["doc-6.txt", "doc-7.txt"]
ASK = {"temperature": 0, "max_tokens": 16, "k": 16, "lam": 0.7, "knn_temperature": 3.0, "neighbors": 4}


@pytest.fixture
def forgetful(tmp_path: Path, model_folder: Path, own_store: Path) -> Iterator[RunningServer]:
    """A server whose documents are deleted at the end."""
    options = ("--threads", "1", "--http-port", "0")
    with RunningServer(tmp_path / "log", model_folder, own_store, options=options) as server:
        yield server


def tokens_of(client: Client, **options: Any) -> list[Token]:
    return list(client.generate(PROMPT, **{**ASK, **options}))


def over_http(server: RunningServer, **memory: Any) -> list[dict[str, Any]]:
    names = ("k", "lam", "knn_temperature", "neighbors")
    body = {"prompt": PROMPT, "model": "tiny", "max_tokens": ASK["max_tokens"], "temperature": 0}
    body["memory"] = {**{name: ASK[name] for name in names}, **memory}
    reply = httpx.post(f"{server.http_url}/v1/completions", json=body, timeout=PATIENCE_S)
    assert reply.status_code == 200, reply.text
    return reply.json()["choices"][0]["memory"]["tokens"]


async def asynchronously(address: str) -> list[Token]:
    async with AsyncClient(address) as client:
        return [token async for token in await client.generate(PROMPT, exclude_documents=GONE, **ASK)]


def resumed(address: str) -> list[Token]:
    """A stream with an exclusion, once more from its beginning."""
    request = GenerateRequest.of(PROMPT, {**ASK, "exclude_documents": GONE, "resume_s": 60.0})
    with grpc.insecure_channel(address) as channel:
        stub = GenerationStub(channel)
        accepted, *_ = map(codec.event_from_wire, stub.Generate(codec.to_wire(request)))
        events = stub.ResumeGeneration(codec.to_wire(ResumeGenerationRequest(accepted.request_id, 0)))
        return [token for event in map(codec.event_from_wire, events) if isinstance(event, tuple) for token in event]


def in_session(client: Client, excluded: list[str]) -> list[Token]:
    with client.session() as session:
        list(session.generate("the memory", exclude_documents=excluded, **ASK))
        return list(session.generate(" of a page", exclude_documents=excluded, **ASK))


def sources(tokens: list[Token]) -> list[list[tuple[str, int]]]:
    return [[(near.document_id, near.token_offset) for near in token.neighbors] for token in tokens]


def test_every_way_to_ask_answers_as_if_the_documents_were_deleted(forgetful: RunningServer) -> None:
    with Client(forgetful.address) as client:
        whole = tokens_of(client)
        assert {id_ for token in sources(whole) for id_, _ in token} & {*GONE}
        # Beside others, which exclude nothing or all: they decode in one batch.
        asked = [{}, {"exclude_documents": GONE}, {"exclude_documents": "*"}] * 4
        with ThreadPoolExecutor(len(asked)) as pool:
            together = list(pool.map(lambda options: tokens_of(client, **options), asked))
        alone = tokens_of(client, exclude_documents=GONE)
        score = client.score(PROMPT, token_scores=True, exclude_documents=GONE, k=16, lam=0.7)
        session, shown = in_session(client, GONE), over_http(forgetful, exclude_documents=GONE)
        with pytest.raises(NotFound, match="no document 'nobody' to exclude"):
            tokens_of(client, exclude_documents=[GONE[0], "nobody"])
        unknown = httpx.post(
            f"{forgetful.http_url}/v1/completions",
            json={"model": "tiny", "prompt": PROMPT, "memory": {"exclude_documents": ["nobody"]}},
        )
        assert (unknown.status_code, unknown.json()["error"]["code"]) == (404, "NotFound")
        others = asyncio.run(asynchronously(forgetful.address)), resumed(forgetful.address)
        none = tokens_of(client, exclude_documents="*")

        client.datastores.delete_documents("store", GONE)
        deleted = tokens_of(client)
        for tokens in (alone, *others, *together[1::3]):
            assert alike(tokens, deleted)
            assert sources(tokens) == sources(deleted)
        assert all(alike(tokens, whole) and sources(tokens) == sources(whole) for tokens in together[::3])
        assert all(alike(tokens, none) and not any(sources(tokens)) for tokens in together[2::3])
        assert sources(session) == sources(in_session(client, []))
        assert [each["id"] for each in shown] == [token.id for token in deleted]
        assert score == client.score(PROMPT, token_scores=True, k=16, lam=0.7)
