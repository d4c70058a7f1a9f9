"""OpenAI's client gets the vectors of the library, and Cohere's and Jina's forms its ranking. Other calls go on
meanwhile.
"""

import base64
import json
import socket
from collections.abc import Iterator
from pathlib import Path

import httpx
import numpy as np
import openai
import pytest
from encoders import save_bert, save_cross_encoder
from running import RunningServer, figures_of, wait_until

from memlm.api.embeddings import MAX_INPUTS
from memlm.client import Client
from memlm.errors import InvalidInput
from memlm.language_model import LanguageModel, load

TEXTS = ["the memory of the page", "of", "the page of the model and more"]
QUERY = "the page of the memory"
WEB = ("--threads", "1", "--http-port", "0")


@pytest.fixture(scope="module")
def encoders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("encoders")
    save_bert("no head", folder / "small-bert")
    save_cross_encoder("bert", folder / "small-cross")
    return folder


@pytest.fixture(scope="module")
def full(tmp_path_factory: pytest.TempPathFactory, long_model: Path, encoders: Path) -> Iterator[RunningServer]:
    """A server with an encoder and a reranker."""
    options = (*WEB, "--encoder", str(encoders / "small-bert"), "--reranker", str(encoders / "small-cross"))
    with RunningServer(tmp_path_factory.mktemp("log") / "log", long_model, options=options) as server:
        yield server


@pytest.fixture(scope="module")
def same(long_model: Path, encoders: Path) -> Iterator[LanguageModel]:
    """The same in process."""
    with load(long_model, passage_encoder=encoders / "small-bert", reranker=encoders / "small-cross") as lm:
        yield lm


@pytest.fixture
def full_ai(full: RunningServer) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{full.http_url}/v1", api_key="none", max_retries=0) as client:
        yield client


def post(server: RunningServer, path: str, **body: object) -> httpx.Response:
    return httpx.post(f"{server.http_url}{path}", json=body, timeout=120)


@pytest.mark.parametrize("model", ["small-bert", "long"])
def test_http_grpc_and_the_library_give_the_same_vectors(full, full_ai, same: LanguageModel, model: str) -> None:
    """The answer names what made them, whichever name was asked for."""
    expected = same.embed(TEXTS)
    with Client(full.address) as client:
        over_grpc = client.embed(TEXTS)
        assert client.get_model().encoder == "small-bert"
    assert over_grpc == expected
    packed = full_ai.embeddings.create(model=model, input=TEXTS)  # this client asks for base64
    plain = full_ai.embeddings.create(model=model, input=TEXTS, encoding_format="float", user="someone")
    for answer in (packed, plain):
        assert np.array([each.embedding for each in answer.data], np.float32).tobytes() == expected.data
        assert [each.index for each in answer.data] == [0, 1, 2]
        assert answer.model == "small-bert"
        assert answer.usage.prompt_tokens == answer.usage.total_tokens == expected.num_tokens


def test_base64_is_that_of_numpy(full: RunningServer, same: LanguageModel) -> None:
    rows = post(full, "/v1/embeddings", input=TEXTS, encoding_format="base64").json()["data"]
    for row, vector in zip(rows, same.embed(TEXTS).vectors, strict=True):
        assert base64.b64decode(row["embedding"], validate=True) == vector.astype("<f4").tobytes()


def test_all_kinds_of_input_and_fewer_dimensions(full: RunningServer, full_ai, same: LanguageModel) -> None:
    ids = same.engine.passage_encoder.loaded.tokenizer.encode(TEXTS)
    vectors = same.embed(TEXTS).vectors
    for given, expected in ((TEXTS[0], vectors[:1]), (ids[0], vectors[:1]), (ids, vectors), (TEXTS, vectors)):
        answer = full_ai.embeddings.create(model="small-bert", input=given)
        assert np.array([each.embedding for each in answer.data], np.float32).tobytes() == expected.tobytes()
    few = full_ai.embeddings.create(model="small-bert", input=TEXTS, dimensions=7)
    got = np.array([each.embedding for each in few.data], np.float32)
    assert got.tobytes() == same.embed(TEXTS, dimensions=7).data
    long = full_ai.embeddings.create(model="small-bert", input="the page " * 500, extra_body={"truncate": True})
    assert long.usage.prompt_tokens == 64


def test_without_an_encoder_the_model_makes_them_and_is_named(web: RunningServer, ai, lm: LanguageModel) -> None:
    answer, expected = ai.embeddings.create(model="tiny", input=TEXTS), lm.embed(TEXTS)
    got = np.array([each.embedding for each in answer.data], np.float32)
    np.testing.assert_allclose(got, expected.vectors, atol=1e-5)
    assert (answer.model, answer.usage.prompt_tokens) == ("tiny", expected.num_tokens)
    ranking = post(web, "/v1/rerank", query=QUERY, documents=TEXTS).json()
    assert (ranking["by"], ranking["model"]) == ("model", "tiny")
    assert [each["index"] for each in ranking["results"]] == [each.index for each in lm.rerank(QUERY, TEXTS).documents]


def test_rankings_are_those_of_the_library(full: RunningServer, same: LanguageModel) -> None:
    expected = same.rerank(QUERY, TEXTS)
    with Client(full.address) as client:
        assert client.rerank(QUERY, TEXTS) == expected
        assert client.rerank(QUERY, TEXTS, top_n=1).documents == expected.documents[:1]
    scores = {each.index: each.score for each in expected.documents}
    objects = [{"text": text} for text in TEXTS]
    for documents in (TEXTS, objects, [TEXTS[0], *objects[1:]]):
        answer = post(full, "/v1/rerank", query=QUERY, documents=documents, model="small-cross", return_documents=True)
        shown = answer.json()
        assert [each["index"] for each in shown["results"]] == [each.index for each in expected.documents]
        for each in shown["results"]:
            assert each["relevance_score"] == scores[each["index"]]
            assert each["document"] == {"text": TEXTS[each["index"]]}
        assert (shown["model"], shown["by"]) == ("small-cross", "cross_encoder")
        assert shown["usage"]["total_tokens"] == expected.num_tokens
    few = post(full, "/v1/rerank", query=QUERY, documents=TEXTS, top_n=2).json()["results"]
    assert [each["index"] for each in few] == [each.index for each in expected.documents[:2]]
    assert not any("document" in each for each in few)


@pytest.mark.parametrize(
    ("path", "body", "param", "status"),
    [
        ("embeddings", {}, "input", 400),
        ("embeddings", {"input": []}, "input", 400),
        ("embeddings", {"input": ""}, "input", 400),
        ("embeddings", {"input": [""]}, "input", 400),
        ("embeddings", {"input": [[]]}, "input", 400),
        ("embeddings", {"input": ["a", 1]}, "input", 400),
        ("embeddings", {"input": [1, "a"]}, "input", 400),
        ("embeddings", {"input": [[1], "a"]}, "input", 400),
        ("embeddings", {"input": [True]}, "input", 400),
        ("embeddings", {"input": [300]}, "input", 400),
        ("embeddings", {"input": {"text": "a"}}, "input", 400),
        ("embeddings", {"input": ["a"] * (MAX_INPUTS + 1)}, "input", 400),
        ("embeddings", {"input": "the page " * 500}, "input", 400),
        ("embeddings", {"input": "a" * (5 << 20)}, None, 413),
        ("embeddings", {"input": "a", "dimensions": 0}, "dimensions", 400),
        ("embeddings", {"input": "a", "dimensions": 49}, "dimensions", 400),
        ("embeddings", {"input": "a", "encoding_format": "int8"}, "encoding_format", 400),
        ("embeddings", {"input": "a", "input_type": "query"}, "input_type", 400),
        ("embeddings", {"input": "a", "model": "other"}, None, 404),
        ("rerank", {"query": "a"}, "documents", 400),
        ("rerank", {"documents": ["a"]}, "query", 400),
        ("rerank", {"query": " ", "documents": ["a"]}, "query", 400),
        ("rerank", {"query": "a", "documents": []}, "documents", 400),
        ("rerank", {"query": "a", "documents": [{}]}, "documents.text", 400),
        ("rerank", {"query": "a", "documents": [{"text": "a", "title": "b"}]}, "documents.title", 400),
        ("rerank", {"query": "a", "documents": ["a"] * 10_000}, "documents", 400),
        ("rerank", {"query": "a", "documents": ["a"], "top_n": 0}, "top_n", 400),
        ("rerank", {"query": "a", "documents": ["a"], "model": "other"}, None, 404),
    ],
)
def test_what_is_wrong_is_refused_by_its_parameter(full: RunningServer, path, body: dict, param, status: int) -> None:
    answer = post(full, f"/v1/{path}", **body)
    error = answer.json()["error"]
    assert answer.status_code == status, error
    assert param is None or error["param"] == param, error


def test_nan_is_no_json(full: RunningServer) -> None:
    headers = {"content-type": "application/json"}
    answer = httpx.post(
        f"{full.http_url}/v1/embeddings", content='{"input": "a", "dimensions": NaN}', headers=headers, timeout=60
    )
    assert answer.status_code == 400


def test_others_are_answered_while_a_large_request_runs_and_it_ends_with_its_client(full: RunningServer) -> None:
    """Its pieces take turns with a text, and the rest is dropped when the client leaves."""
    body = json.dumps({"input": ["the page of the model and the memory " * 8] * MAX_INPUTS, "truncate": True}).encode()
    host, port = full.http_url.removeprefix("http://").split(":")
    head = (
        f"POST /v1/embeddings HTTP/1.1\r\nHost: [::1]\r\nContent-Type: application/json\r\nContent-Length: {len(body)}"
    )
    with socket.create_connection((host, int(port)), timeout=60) as busy, Client(full.address) as client:
        busy.sendall(head.encode() + b"\r\n\r\n" + body)
        wait_until(lambda: figures_of(full)["memlm_requests_open"] == 1)
        for _ in range(3):
            assert len(list(client.generate("the", max_tokens=5, temperature=0))) == 5
            assert len(client.embed("the page")) == 1
        assert figures_of(full)["memlm_requests_open"] == 1  # it still runs
    wait_until(lambda: figures_of(full)["memlm_requests_open"] == 0)


def test_limits_are_the_same_over_grpc(full: RunningServer) -> None:
    with Client(full.address) as client:
        for ask, field in (
            (lambda: client.embed(["the page " * 500]), "texts"),
            (lambda: client.embed([[300]]), "token_ids"),
            (lambda: client.embed("a", dimensions=49), "dimensions"),
        ):
            with pytest.raises(InvalidInput) as raised:
                ask()
            assert raised.value.field == field
