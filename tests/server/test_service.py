"""What the service answers: the same as the library in process, and a status with details for what it cannot."""

import asyncio
import math
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import grpc
import pytest
from google.rpc.error_details_pb2 import BadRequest, ErrorInfo, ResourceInfo
from google.rpc.status_pb2 import Status
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc
from running import PATIENCE_S, RunningServer, alike

from memlm.api.answers import AnswerRequest, FindPassagesRequest
from memlm.api.chat import ChatRequest
from memlm.api.datastores import AddDocumentsRequest, ListDatastoresRequest, SearchRequest, StoreInfo
from memlm.api.generation import Accepted, Finished, ResumeGenerationRequest, Token, TokenizeRequest
from memlm.api.handles import TokenStream
from memlm.api.params import GenerateRequest, SamplingParams, StreamRequest
from memlm.api.request import Request
from memlm.api.scoring import ScoreRequest
from memlm.api.server import GetModelRequest
from memlm.api.sessions import ListSessionsRequest
from memlm.api.tracing import TraceRequest
from memlm.client import AsyncClient, Client
from memlm.errors import InvalidInput, MemlmError, NotFound
from memlm.language_model import LanguageModel
from memlm.v1 import datastores_pb2, generation_pb2, generation_pb2_grpc

PROMPT = "the memory of a model can"
MEMORY = {"store": "store", "k": 8, "lam": 0.4, "knn_temperature": 3.0}


@pytest.fixture
def channel(server: RunningServer) -> Iterator[grpc.Channel]:
    with grpc.insecure_channel(server.address) as channel:
        yield channel


def refused(channel: grpc.Channel, method: str, data: bytes) -> tuple[grpc.StatusCode, Status]:
    """How a call with these bytes ends, read the way any gRPC client can."""
    with pytest.raises(grpc.RpcError) as raised:
        list(channel.unary_stream(f"/memlm.v1.{method}")(data, timeout=10))
    details = dict(raised.value.trailing_metadata())["grpc-status-details-bin"]
    return raised.value.code(), Status.FromString(details)


def detail(status: Status, kind: Any) -> Any:
    found = kind()
    assert any(packed.Unpack(found) for packed in status.details), f"no {kind.__name__} in {status}"
    return found


@pytest.mark.parametrize(
    "options",
    [
        {"temperature": 0},
        {"seed": 7},
        {"seed": 7, "top_k": 20, "top_p": 0.9, "min_p": 0.01, "repetition_penalty": 1.3, "temperature": 0.7},
        {"seed": 7, "use_store": False},
        {"seed": 7, "neighbors": 3, "top_logprobs": 4, **MEMORY},
        {"seed": 7, "max_tokens": 3},
        {"seed": 3, "stop": ("e", "it")},
    ],
    ids=str,
)
def test_generation_equals_in_process(client: Client, lm: LanguageModel, options: dict[str, Any]) -> None:
    """Token for token: ids, bytes, text, every probability, alternatives, neighbors, and how it ended."""
    local_stream, remote_stream = lm.generate(PROMPT, **options), client.generate(PROMPT, **options)
    assert list(remote_stream) == list(local_stream)
    assert remote_stream.accepted.seed == local_stream.accepted.seed or options.get("seed") is None
    assert (
        remote_stream.accepted.store,
        remote_stream.accepted.k,
        remote_stream.accepted.lam,
        remote_stream.accepted.knn_temperature,
    ) == (
        (
            local_stream.accepted.store,
            local_stream.accepted.k,
            local_stream.accepted.lam,
            local_stream.accepted.knn_temperature,
        )
    )
    assert remote_stream.finished is not None
    assert local_stream.finished is not None
    assert (remote_stream.finished.reason, remote_stream.finished.stop_string) == (
        local_stream.finished.reason,
        local_stream.finished.stop_string,
    )
    assert remote_stream.finished.usage.generated_tokens == local_stream.finished.usage.generated_tokens


def test_token_ids_mean_the_same_to_server_and_library(client: Client, lm: LanguageModel) -> None:
    ids = [lm.checkpoint.tokenizer.start_id, *lm.tokenize(PROMPT)]
    assert list(client.generate(ids, seed=7)) == list(lm.generate(PROMPT, seed=7))
    assert list(client.generate(prompt_token_ids=ids, seed=7)) == list(lm.generate(ids, seed=7))
    assert client.score(ids, token_scores=True) == lm.score(PROMPT, token_scores=True)
    likely = {"token_scores": True, "top_logprobs": 3}
    assert client.score(ids, **likely) == lm.score(PROMPT, **likely)
    for call in (client.generate, client.score):
        with pytest.raises(InvalidInput, match="outside the vocabulary"):
            call([5, 10**6])


def test_lists_mean_the_same_to_server_and_library(client: Client, lm: LanguageModel) -> None:
    prompts = [PROMPT[:end] for end in range(1, 12)]  # more than run side by side
    expected = lm.generate_batch(prompts, seed=7, max_tokens=4)
    for completions in (client.generate(prompts, seed=7, max_tokens=4), lm.generate(prompts, seed=7, max_tokens=4)):
        assert [completion.text for completion in completions] == [completion.text for completion in expected]
        for ours, theirs in zip(completions, expected, strict=True):
            assert alike(ours.tokens, theirs.tokens)
    assert client.score(prompts) == lm.score(prompts)
    with pytest.raises(InvalidInput, match="expected prompts in a list"):
        client.generate_batch(PROMPT)


async def test_lists_are_answered_when_awaited(server: RunningServer, client: Client) -> None:
    prompts = [PROMPT, "the"]
    async with AsyncClient(server.address) as awaited:
        completions = await awaited.generate(prompts, temperature=0, max_tokens=4)
        assert [each.text for each in completions] == [
            each.text for each in client.generate(prompts, temperature=0, max_tokens=4)
        ]
        result = await (await awaited.generate(PROMPT, temperature=0, max_tokens=4)).result()
        assert result.text == completions[0].text


CONVERSATION = [{"role": "user", "content": "the memory"}]


@pytest.mark.parametrize("options", [{"temperature": 0}, {"seed": 7, "neighbors": 3, **MEMORY}], ids=str)
def test_chat_equals_in_process(client: Client, lm: LanguageModel, options: dict[str, Any]) -> None:
    local_stream = lm.chat(CONVERSATION, max_tokens=9, **options)
    remote_stream = client.chat(CONVERSATION, max_tokens=9, **options)
    assert list(remote_stream) == list(local_stream)
    assert remote_stream.finished is not None
    assert local_stream.finished is not None
    assert remote_stream.finished.reason == local_stream.finished.reason
    assert remote_stream.finished.usage.prompt_tokens == local_stream.finished.usage.prompt_tokens
    with client.session() as remote, lm.session() as local:
        for message in ("a", "the"):
            more = {"max_tokens": 4, **options}
            assert alike(remote.chat(message, **more), local.chat(message, **more))


async def test_a_conversation_is_answered_when_awaited(server: RunningServer, lm: LanguageModel) -> None:
    async with AsyncClient(server.address) as client:
        tokens = [token async for token in await client.chat(CONVERSATION, seed=3, max_tokens=5)]
        assert tokens == list(lm.chat(CONVERSATION, seed=3, max_tokens=5))
        async with await client.session() as session:
            assert [token async for token in await session.chat("a", max_tokens=2)]


def test_a_broken_stream_of_a_conversation_goes_on(client: Client, lm: LanguageModel) -> None:
    with client.chat(CONVERSATION, seed=3, max_tokens=8, resume_s=10.0) as stream:
        assert alike(stream, lm.chat(CONVERSATION, seed=3, max_tokens=8))


def test_a_stream_is_accepted_then_tokens_then_finished_once(channel: grpc.Channel) -> None:
    stub = generation_pb2_grpc.GenerationStub(channel)
    kinds = [event.WhichOneof("event") for event in stub.Generate(generation_pb2.GenerateRequest(prompt=PROMPT))]
    assert kinds[0] == "accepted"
    assert kinds[-1] == "finished"
    assert set(kinds[1:-1]) == {"tokens"}


def test_a_stream_tells_only_what_is_new(client: Client) -> None:
    stream = client.generate(PROMPT, seed=1)
    tokens = list(stream)
    assert stream.finished is not None
    assert len(tokens) == stream.finished.usage.generated_tokens
    assert stream.finished.usage.queue_ms >= 0


def test_a_fresh_seed_is_told_and_gives_the_same_again(client: Client) -> None:
    first = client.generate(PROMPT)
    tokens = list(first)  # alone: beside another stream the last bit of a sum may differ, and with it a draw
    assert alike(client.generate(PROMPT, seed=first.accepted.seed), tokens)


@pytest.mark.parametrize("retrieval", [{}, MEMORY, {"use_store": False}], ids=str)
def test_score_equals_in_process(client: Client, lm: LanguageModel, retrieval: dict[str, Any]) -> None:
    text = "the memory of a model can be read\nand 猫 edited, " * 10
    assert client.score(text, token_scores=True, **retrieval) == lm.score(text, token_scores=True, **retrieval)


def as_shown(stores: tuple[StoreInfo, ...]) -> tuple[StoreInfo, ...]:
    """As a client sees them: a store that the server was started with goes by its name alone."""
    return tuple(replace(store, path=store.name) for store in stores)


def test_the_rest_equals_in_process(client: Client, lm: LanguageModel) -> None:
    text = "delete a page, and it is silent: é猫🙂"
    assert client.tokenize(text) == lm.tokenize(text)
    assert client.detokenize(lm.tokenize(text)) == text
    assert client.get_model() == lm.info
    assert client.datastores.list() == as_shown(lm.stores)
    assert client.search("store", text, k=5) == lm.search("store", text, k=5)
    assert client.search(None, text) == lm.search(None, text)
    traced = client.trace(f"they say {text}", min_tokens=2, documents=["doc-*"])
    assert traced == lm.trace(f"they say {text}", min_tokens=2, documents=["doc-*"])
    assert traced.spans
    chosen = {"by": "words", "documents": ["doc-1.txt", "doc-6*"], "where": {"title": "doc-6.txt"}, "k": 3}
    assert client.search(None, "the", **chosen) == lm.search(None, "the", **chosen)
    assert {place.document_id for place in client.search(None, "the", **chosen)} == {"doc-6.txt"}


async def test_the_async_client_gives_the_same(server: RunningServer, lm: LanguageModel) -> None:
    text = "a model can be read"
    async with AsyncClient(server.address) as client:
        await client.wait_until_ready(PATIENCE_S)
        async with await client.generate(PROMPT, seed=5, neighbors=2) as stream:
            assert isinstance(stream.accepted, Accepted)
            tokens = [token async for token in stream]
        assert tokens == list(lm.generate(PROMPT, seed=5, neighbors=2))
        assert isinstance(stream.finished, Finished)
        assert await client.score(text, token_scores=True) == lm.score(text, token_scores=True)
        assert await client.tokenize(text) == lm.tokenize(text)
        assert await client.detokenize(lm.tokenize(text)) == text
        assert await client.get_model() == lm.info
        assert await client.datastores.list() == as_shown(lm.stores)
        assert await client.search(None, text, k=3) == lm.search(None, text, k=3)
        assert await client.trace(text, min_tokens=2) == lm.trace(text, min_tokens=2)
        with pytest.raises(NotFound, match="nowhere"):
            await client.generate(PROMPT, store="nowhere")
        with pytest.raises(NotFound, match="doc-nope"):
            await client.datastores.delete_documents("store", ["doc-nope"])


async def test_many_at_once_each_get_their_own(server: RunningServer, lm: LanguageModel) -> None:
    async with AsyncClient(server.address) as client:

        async def ask(seed: int) -> list[Token]:
            return [token async for token in await client.generate(PROMPT, seed=seed, max_tokens=15)]

        answers = await asyncio.gather(*map(ask, range(8)))
    for seed, answer in enumerate(answers):
        assert alike(answer, lm.generate(PROMPT, seed=seed, max_tokens=15))


@pytest.mark.parametrize(
    ("ask", "error", "field"),
    [
        (lambda client: client.generate("a\0b"), InvalidInput, "prompt"),
        (lambda client: client.generate(PROMPT * 100), InvalidInput, "prompt"),
        (lambda client: client.generate(PROMPT, max_tokens=1000), InvalidInput, "max_tokens"),
        (lambda client: client.generate(PROMPT, top_k=-1), InvalidInput, "top_k"),
        (lambda client: client.generate(PROMPT, temperature=math.nan), InvalidInput, "temperature"),
        (lambda client: client.generate(PROMPT, warmth=1), InvalidInput, "warmth"),
        (lambda client: client.generate("\ud800"), InvalidInput, "prompt"),
        (lambda client: client.score(""), InvalidInput, "text"),
        (lambda client: client.search("store", "a", k=0), InvalidInput, "k"),
        (lambda client: client.detokenize([10**6]), InvalidInput, "token_ids"),
        (lambda client: client.datastores.delete_documents("store", []), InvalidInput, "document_ids"),
        (lambda client: client.datastores.delete_documents("store", "doc"), InvalidInput, "document_ids"),
    ],
)
def test_what_cannot_be_used_is_refused_by_name(client: Client, ask: Any, error: type[MemlmError], field: str) -> None:
    with pytest.raises(error) as raised:
        ask(client)
    assert vars(raised.value)["field"] == field


@pytest.mark.parametrize(
    ("message", "field"),
    [
        (generation_pb2.GenerateRequest(prompt="a\0b"), "prompt"),
        (generation_pb2.GenerateRequest(prompt="a" * 1000), "prompt"),
        (generation_pb2.GenerateRequest(prompt="a", prompt_token_ids=[1]), "prompt_token_ids"),
        (generation_pb2.GenerateRequest(prompt_token_ids=[-1]), "prompt_token_ids"),
        (generation_pb2.GenerateRequest(prompt="a", neighbors=-1), "neighbors"),
        (generation_pb2.GenerateRequest(sampling=generation_pb2.SamplingParams(top_k=-3)), "top_k"),
        (generation_pb2.GenerateRequest(sampling=generation_pb2.SamplingParams(top_k=0)), "top_k"),
        (generation_pb2.GenerateRequest(sampling=generation_pb2.SamplingParams(temperature=math.nan)), "temperature"),
        (generation_pb2.GenerateRequest(sampling=generation_pb2.SamplingParams(temperature=math.inf)), "temperature"),
        (generation_pb2.GenerateRequest(retrieval=generation_pb2.RetrievalParams(lam=math.nan)), "lam"),
        (generation_pb2.GenerateRequest(retrieval=generation_pb2.RetrievalParams(k=10**6)), "k"),
    ],
    ids=lambda value: str(value).replace("\n", " ")[:50],
)
def test_another_client_is_refused_by_name_too(channel: grpc.Channel, message: Any, field: str) -> None:
    code, status = refused(channel, "Generation/Generate", message.SerializeToString())
    assert code is grpc.StatusCode.INVALID_ARGUMENT
    assert detail(status, BadRequest).field_violations[0].field == field
    assert detail(status, ErrorInfo).reason == "InvalidInput"


@pytest.mark.parametrize(
    ("method", "data", "field"),
    [
        ("Generation/Generate", b"\x0a\x02\xff\xfe", "prompt"),
        ("Generation/Generate", b"\x12\x04\x42\x02\xff\xfe", "sampling.stop"),
        ("Generation/Score", b"\x0a\x01\xc3", "text"),
        ("Datastores/DeleteDocuments", b"\x12\x02\xff\xfe", "document_ids"),
    ],
)
def test_text_that_is_not_utf8_is_an_invalid_argument(
    channel: grpc.Channel, method: str, data: bytes, field: str
) -> None:
    code, status = refused(channel, method, data)
    assert code is grpc.StatusCode.INVALID_ARGUMENT
    assert detail(status, BadRequest).field_violations[0].field == field


@pytest.mark.parametrize("data", [b"\xff\xff\xff\xff", b"\x0a\xff", b"\xa8\x06\x01"])
def test_bytes_that_are_no_request_are_an_invalid_argument(channel: grpc.Channel, data: bytes) -> None:
    assert refused(channel, "Generation/Tokenize", data)[0] is grpc.StatusCode.INVALID_ARGUMENT


def test_an_unknown_store_is_not_found_by_name(channel: grpc.Channel, client: Client) -> None:
    request = datastores_pb2.SearchRequest(text="a", store="nowhere")
    code, status = refused(channel, "Datastores/Search", request.SerializeToString())
    assert code is grpc.StatusCode.NOT_FOUND
    assert detail(status, ResourceInfo).resource_name == "nowhere"
    with pytest.raises(NotFound, match=r"nowhere.*loaded: store") as raised:
        client.generate(PROMPT, store="nowhere")
    assert (raised.value.kind, raised.value.name) == ("datastore", "nowhere")


def test_too_large_a_message_is_refused_on_either_side(server: RunningServer) -> None:
    text = "a" * (17 << 20)
    for limit in (1 << 20, 64 << 20):  # the client's own, the server's
        with Client(server.address, max_message_bytes=limit) as client:
            with pytest.raises(InvalidInput, match="max_message_bytes"):
                client.tokenize(text)
            assert client.tokenize("a")


def test_a_text_of_many_windows_does_not_stop_the_others(server: RunningServer, client: Client) -> None:
    """A long score is done in steps, between those of the rest."""

    async def both() -> tuple[float, float]:
        async with AsyncClient(server.address) as other:
            loop = asyncio.get_running_loop()
            begin_s = loop.time()
            scoring = asyncio.create_task(other.score("the memory of a model " * 2000))
            await asyncio.sleep(0.1)
            assert [token async for token in await other.generate(PROMPT, max_tokens=5, temperature=0)]
            generated_s = loop.time() - begin_s
            await scoring
            return generated_s, loop.time() - begin_s

    generated_s, scored_s = asyncio.run(both())
    assert generated_s < scored_s


@pytest.mark.parametrize(
    "request_of",
    [
        lambda: GetModelRequest(),
        lambda: TokenizeRequest(PROMPT),
        lambda: ScoreRequest.of(PROMPT, {"store": "store"}),
        lambda: SearchRequest.of(PROMPT, "store", k=3),
        lambda: FindPassagesRequest.of(PROMPT, k=2),
        lambda: TraceRequest.of(PROMPT, None),
    ],
)
async def test_any_request_is_asked_alike(
    server: RunningServer, client: Client, lm: LanguageModel, request_of: Callable[[], Request[Any]]
) -> None:
    expected = lm.ask(request_of())
    assert client.ask(request_of()) == expected
    async with AsyncClient(server.address) as awaited:
        assert await awaited.ask(request_of()) == expected


@pytest.mark.parametrize(
    "asked", [GenerateRequest(PROMPT), ChatRequest.of("Who?", {}), AnswerRequest.of("Who?", None, {}, {})]
)
async def test_any_request_for_a_text_is_streamed_alike(
    server: RunningServer, client: Client, lm: LanguageModel, asked: StreamRequest
) -> None:
    asked = replace(asked, sampling=SamplingParams(temperature=0, max_tokens=4))
    expected = lm.stream(asked).result()
    assert alike(client.stream(asked).result().tokens, expected.tokens)
    async with AsyncClient(server.address) as awaited:
        assert alike((await (await awaited.stream(asked)).result()).tokens, expected.tokens)


def test_a_list_is_asked_in_pages_by_the_library_too(lm: LanguageModel) -> None:
    page = lm.ask(ListDatastoresRequest(page_size=1))
    assert page.datastores == lm.stores[:1]
    names = [lm.session().name for _ in range(2)]
    first = lm.ask(ListSessionsRequest(page_size=1))
    assert first.sessions[0].name == names[1]
    assert lm.ask(ListSessionsRequest(1, first.next_page_token)).sessions[0].name == names[0]


def test_a_request_without_one_answer_is_refused(client: Client, lm: LanguageModel) -> None:
    for ask in (client.ask, lm.ask):
        with pytest.raises(InvalidInput, match="GenerateRequest"):
            ask(GenerateRequest(PROMPT))
        with pytest.raises(InvalidInput, match="AddDocumentsRequest"):
            ask(AddDocumentsRequest("store"))
        for wrong in ("text", ResumeGenerationRequest("a"), None):
            with pytest.raises(InvalidInput):
                ask(wrong)
    for stream in (client.stream, lm.stream):
        for wrong in ("text", GetModelRequest(), None):
            with pytest.raises(InvalidInput, match="GenerateRequest"):
                stream(wrong)


def test_health_says_serving(channel: grpc.Channel) -> None:
    health = health_pb2_grpc.HealthStub(channel)
    for service in ("", "memlm.v1.Generation", "memlm.v1.Datastores"):
        answer = health.Check(health_pb2.HealthCheckRequest(service=service), timeout=10)
        assert answer.status == health_pb2.HealthCheckResponse.SERVING
    with pytest.raises(grpc.RpcError) as raised:
        health.Check(health_pb2.HealthCheckRequest(service="nothing"), timeout=10)
    assert raised.value.code() is grpc.StatusCode.NOT_FOUND


def test_reflection_lists_the_services(channel: grpc.Channel) -> None:
    request = reflection_pb2.ServerReflectionRequest(list_services="")
    stub = reflection_pb2_grpc.ServerReflectionStub(channel)
    (answer,) = stub.ServerReflectionInfo(iter([request]), timeout=10)
    names = {service.name for service in answer.list_services_response.service}
    assert {"memlm.v1.Generation", "memlm.v1.Datastores", "grpc.health.v1.Health"} <= names


def test_the_stream_is_the_librarys_own(client: Client) -> None:
    assert type(client.generate(PROMPT, max_tokens=1)) is TokenStream


def test_a_client_goes_on_after_a_fork(server: RunningServer) -> None:
    """In the child and in the parent, each over its own connection."""
    code = f"""
import multiprocessing as mp
from memlm import Client
def ask(client, queue):
    queue.put((client.tokenize("the memory"), len(list(client.generate("a", max_tokens=3, temperature=0)))))
with Client({server.address!r}, timeout_s=20) as client:
    client.tokenize("the memory")
    fork = mp.get_context("fork")
    queue = fork.Queue()
    children = [fork.Process(target=ask, args=(client, queue)) for _ in range(2)]
    for child in children:
        child.start()
    answers = [queue.get(timeout=30) for _ in children]
    for child in children:
        child.join(30)
    ask(client, queue)
    answers.append(queue.get(timeout=10))
    assert answers == [answers[0]] * 3, answers
    assert [child.exitcode for child in children] == [0, 0]
"""
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", code], capture_output=True, text=True, timeout=90)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(("default", "drafted_by"), [("4", {"open", "asks"}), ("off", {"asks"})])
def test_the_servers_drafts_are_those_of_requests_that_leave_them_open(model_folder, tmp_path, default, drafted_by):
    options = ("--threads", "1", "--dtype", "int8", f"+drafts={default!r}")
    with RunningServer(tmp_path / "log", model_folder, options=options) as server, Client(server.address) as client:
        greedy: dict[str, Any] = {"temperature": 0, "max_tokens": 12}
        plain = client.generate(PROMPT, drafts=0, **greedy).result()
        assert not plain.finished.usage.drafts
        asked = {"open": {}, "asks": {"drafts": 2}}
        found = {
            name: client.generate(PROMPT, draft=plain.text, **given, **greedy).result() for name, given in asked.items()
        }
        assert {completion.text for completion in found.values()} == {plain.text}
        assert {name for name, each in found.items() if each.finished.usage.drafts} == drafted_by
        with pytest.raises(MemlmError) as raised:  # an early exit, for which this model has no rule, drafts nothing
            client.generate(PROMPT, early_exit=True, **greedy).result()
        assert "drafts" not in str(raised.value)
