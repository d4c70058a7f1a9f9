"""Passages and answers of a server are those of the library, over gRPC and HTTP, whole and as a stream."""

import asyncio
import json
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc
import httpx
import pytest
from encoders import save_bert
from running import PATIENCE_S, RunningServer, wait_until
from typer.testing import CliRunner

from memlm.api.answers import Answer, AnswerRequest
from memlm.api.chat import ChatRequest
from memlm.api.datastores import NewDocument
from memlm.api.generation import Accepted, Finished, ResumeGenerationRequest
from memlm.api.params import SamplingParams
from memlm.api.passages import Passage
from memlm.cli.app import app
from memlm.client import AsyncClient, Client
from memlm.errors import DeadlineExceeded, Incompatible, InvalidInput, NotFound, PermissionDenied
from memlm.index.store.manifest import VECTORS
from memlm.language_model import LanguageModel, load
from memlm.model.files.encoder_files import load_encoder
from memlm.server.config import ServerConfig
from memlm.server.frontend.auth import Principal
from memlm.server.frontend.rights import Rights
from memlm.server.http.openai import AnswerForm
from memlm.server.http.questions import _request
from memlm.server.inference.deletions import DeletionFilter, Deletions
from memlm.server.registry import DatastoreRegistry
from memlm.v1.generation_pb2_grpc import GenerationStub
from memlm.wire import codec

QUESTION = "Which page has the memory?"
ALONE: dict[str, Any] = {"seed": 3, "max_tokens": 12, "budget": 500}
ASK = {**ALONE, "num_passages": 8}
WINDOW = ("--attention-window", "44")  # the tiny model's context has no room for passages
FORM = AnswerForm("m", is_chat=False, is_stream=False)
GIVEN = [Passage("s", f"doc-{n}", "", 0, 9, text, 1.0) for n, text in enumerate(["port one", "a", "port two"])]
GIVEN[0] = replace(GIVEN[0], headings=("Ports", "Office"), first_page=3, last_page=4, also=("b.md:1",))


@pytest.fixture(scope="module")
def asked(
    tmp_path_factory: pytest.TempPathFactory, model_folder: Path, store_folder: Path
) -> Iterator[tuple[RunningServer, Client, LanguageModel]]:
    """A server, its client, and the same model in process."""
    options = ("--threads", "1", "--http-port", "0", "+drafts=4", *WINDOW)
    log = tmp_path_factory.mktemp("log") / "log"
    with (
        RunningServer(log, model_folder, store_folder, options=options) as server,
        Client(server.address) as client,
        load(model_folder, [store_folder], attention_window=44) as lm,
    ):
        yield server, client, lm


def parts(answer: Answer) -> tuple:
    ids = [token.id for token in answer.completion.tokens]
    return answer.text, ids, answer.passages, answer.left_out, answer.cited, answer.prompt, answer.num_prompt_tokens


@pytest.mark.parametrize("options", [{}, {"by": "words", "k": 3}, {"by": "auto", "documents": "doc-[1-4].txt"}])
def test_the_passages_are_those_of_the_library(asked: Any, options: dict[str, Any]) -> None:
    server, client, lm = asked
    expected = lm.find_passages(QUESTION, **options)
    assert expected
    found = client.find_passages(QUESTION, **options)
    assert [(each.place, each.token_offset, each.text) for each in found] == [
        (each.place, each.token_offset, each.text) for each in expected
    ]
    assert [each.score for each in found] == pytest.approx([each.score for each in expected], rel=1e-4)
    body = {name: [value] if name == "documents" else value for name, value in options.items()}
    for path in ("datastores/passages", "datastores/store/passages"):
        reply = httpx.post(f"{server.http_url}/v1/{path}", json={"question": QUESTION, **body}, timeout=PATIENCE_S)
        assert [(each["document_id"], each["first_line"], each["last_line"]) for each in reply.json()["data"]] == [
            (each.document_id, each.first_line, each.last_line) for each in expected
        ]


def test_a_search_by_meaning_without_an_encoder_says_what_to_do(asked: Any) -> None:
    server, client, _ = asked
    for call in (client.find_passages, client.answer):
        by = {"by": "meaning"} if call == client.find_passages else {"passages_by": "meaning"}
        with pytest.raises(Incompatible, match=r"models pull minilm`.* where the model runs"):
            call(QUESTION, **by)
    body = {"question": QUESTION, "by": "meaning"}
    reply = httpx.post(f"{server.http_url}/v1/datastores/passages", json=body, timeout=PATIENCE_S)
    assert reply.status_code == 400
    assert "search by words" in reply.text


@pytest.mark.parametrize("options", [{}, {"lam": 0.5, "passages_by": "words"}, {"num_passages": 0}])
def test_an_answer_is_that_of_the_library(asked: Any, options: dict[str, Any]) -> None:
    _, client, lm = asked
    asking = {**ASK, **options}
    expected = lm.answer(QUESTION, **asking)
    assert bool(expected.passages) == bool(expected.left_out) == ("num_passages" not in options)
    assert parts(client.answer(QUESTION, **asking)) == parts(expected)


@pytest.mark.parametrize("given", [GIVEN, GIVEN[:1], []])
def test_given_passages_are_the_only_ones(asked: Any, given: list[Passage]) -> None:
    _, client, lm = asked
    answer = client.answer(QUESTION, given, **ALONE)
    assert [replace(each, sentence=None) for each in answer.passages] == given
    assert parts(answer) == parts(lm.answer(QUESTION, given, **ALONE))


def test_a_mixture_is_that_of_the_library(asked: Any) -> None:
    _, client, lm = asked
    expected, answer = (each.answer(QUESTION, mixture=True, **ASK) for each in (lm, client))
    assert len(expected.passage_shares) == len(expected.passages) > 3
    assert parts(answer) == parts(expected)
    assert answer.passage_shares == pytest.approx(expected.passage_shares, abs=1e-6)
    for one, other in zip(answer.completion.tokens, expected.completion.tokens, strict=True):
        assert one.passage_shares == pytest.approx(other.passage_shares, abs=1e-6)


def test_an_answer_streams_and_begins_with_its_passages(asked: Any) -> None:
    _, client, lm = asked
    expected = lm.answer(QUESTION, **ASK)
    with client.stream_answer(QUESTION, **ASK) as tokens:
        assert tokens.accepted.prompt is not None
        assert tokens.accepted.prompt.passages == expected.passages
        first = next(tokens)
        assert (first.id, parts(Answer.of(tokens.result()))) == (expected.completion.tokens[0].id, parts(expected))

    async def awaited() -> tuple[Answer, list[int], int]:
        async with AsyncClient(client.target) as again:
            whole = await again.answer(QUESTION, **ASK)
            stream = [token.id async for token in await again.stream_answer(QUESTION, **ASK)]
            return whole, stream, len(await again.find_passages(QUESTION, k=2))

    whole, stream, count = asyncio.run(awaited())
    assert (parts(whole), count) == (parts(expected), 2)
    assert stream == [token.id for token in expected.completion.tokens]


@pytest.mark.parametrize("mixture", [False, True])
def test_http_gives_the_same_answer_whole_and_in_events(asked: Any, mixture: bool) -> None:
    server, client, _ = asked
    expected = client.answer(QUESTION, mixture=mixture, **ASK)
    body = {"question": QUESTION, "mixture": mixture, **ASK, "memory": {}}
    whole = httpx.post(f"{server.http_url}/v1/answers", json=body, timeout=PATIENCE_S).json()
    reply = httpx.post(f"{server.http_url}/v1/answers", json={**body, "stream": True}, timeout=PATIENCE_S)
    *events, done = reply.text.strip().split("\n\n")
    pieces = [json.loads(event.removeprefix("data: ")) for event in events]
    assert done == "data: [DONE]"
    assert whole["text"] == "".join(piece.get("text", "") for piece in pieces) == expected.text
    for shown in (whole, pieces[0]):
        assert [each["document_id"] for each in shown["passages"]] == [p.document_id for p in expected.passages]
        assert len(shown["left_out"]) == len(expected.left_out)
        assert (shown["prompt"], shown["num_prompt_tokens"]) == (expected.prompt, expected.num_prompt_tokens)
    for shown in (whole, pieces[-1]):
        assert shown["finish_reason"] == "length"
        assert shown["usage"]["completion_tokens"] == 12
        assert shown["passage_shares"] == pytest.approx(list(expected.passage_shares), abs=1e-6)
    in_pieces = [token for piece in pieces[1:] for token in piece["memory"]["tokens"]]
    for tokens in (whole["memory"]["tokens"], in_pieces):
        assert [token["id"] for token in tokens] == [token.id for token in expected.completion.tokens]
        for token, one in zip(tokens, expected.completion.tokens, strict=True):
            assert token["passage_shares"] == pytest.approx(list(one.passage_shares), abs=1e-6)


def test_the_commands_print_the_answer_and_its_passages(asked: Any, model_folder: Path, store_folder: Path) -> None:
    server, client, _ = asked
    options = ["--seed", "3", "-n", "12", "--budget", "500", "--passages", "8"]
    expected = client.answer(QUESTION, temperature=0.3, **ASK)
    served = ["answer", QUESTION, "--target", server.address, *options]
    local = ["answer", QUESTION, "--model", str(model_folder), "--store", str(store_folder), *options, *WINDOW]
    for command in (served, local):
        shown = CliRunner().invoke(app, [*command, "--json"])
        assert shown.exit_code == 0, shown.output
        found = json.loads(shown.stdout)
        assert (found["text"], found["prompt"]) == (expected.text, expected.prompt)
        printed = CliRunner().invoke(app, command).stdout.splitlines()
        places = [line for line in printed if line.startswith("[")]
        assert [line.split()[1] for line in places] == [each.place for each in expected.passages]
        assert printed[-1] == f"no room in the prompt: {len(expected.left_out)} more"
    mixed = CliRunner().invoke(app, [*served, "--mixture"]).stdout.splitlines()
    shares = [float(share) for line in mixed for share in re.findall(r"^(?:\[\d+\]|   ) +(\d+)%  ", line)]
    assert len(shares) == len(expected.passages) + len(expected.left_out) + 1
    assert sum(shares) == pytest.approx(100, abs=len(shares) / 2)
    assert mixed[-1].endswith("the model alone")
    assert shares[:-1] == sorted(shares[:-1], reverse=True)
    listed = CliRunner().invoke(
        app, ["index", "passages", "store", QUESTION, "--k", "2", "--target", server.address, "--json"]
    )
    ids = [each["document_id"] for each in json.loads(listed.stdout)["passages"]]
    assert ids == [each.document_id for each in client.find_passages(QUESTION, k=2)]


def test_a_wrong_request_is_refused_by_the_name_of_its_field(asked: Any) -> None:
    server, client, _ = asked
    for options, field in (
        ({"num_passages": 257}, "num_passages"),
        ({"budget": 2}, "budget"),
        ({"mixture": True, "lam": 0.5}, "lam"),
        ({"passages_by": "taste"}, "passages_by"),
    ):
        with pytest.raises(InvalidInput) as refused:
            client.answer(QUESTION, **options)
        assert refused.value.field == field
    with pytest.raises(InvalidInput, match="leave out one"):
        client.answer(QUESTION, GIVEN, num_passages=2)
    with pytest.raises(InvalidInput, match="at most 262,144"):
        client.answer(QUESTION, [Passage("s", "d", "", 0, 1, "a" * (1 << 18), 1.0), GIVEN[0]])
    with pytest.raises(NotFound, match="no datastore 'nowhere'"):
        client.answer(QUESTION, passage_stores="nowhere")
    with pytest.raises(DeadlineExceeded):
        client.answer(QUESTION, mixture=True, timeout_s=0.01)
    refusal = httpx.post(f"{server.http_url}/v1/answers", json={"question": " "}, timeout=PATIENCE_S)
    assert (refusal.status_code, refusal.json()["error"]["param"]) == (400, "question")
    for body, name in (
        ({"mixture": True, "memory": {"lam": 0.5}}, "memory.lam"),
        ({"mixture": True, "memory": {"neighbors": 2}}, "memory.neighbors"),
        ({"memory": {"stores": ["a", "a"]}}, "memory.stores"),
        ({"memory": {"knn_temperature": 0}}, "memory.knn_temperature"),
        ({"mixture": True, "model": "tuned"}, "model"),
        ({"passages": [{"text": "a\0", "document_id": "d"}]}, "passages.text"),
        ({"passages": [{"text": "a", "document_id": "d", "headings": ["A", "b\0"]}]}, "passages.headings"),
        ({"passage_stores": ["a", "a"]}, "passage_stores"),
        ({"budget": (1 << 20) + 1}, "budget"),
    ):
        with pytest.raises(InvalidInput) as wrong:
            _request({"question": "a", **body}, replace(FORM, adapter="tuned" if "model" in body else None))
        assert wrong.value.field == name
        if "model" in body:
            continue
        refusal = httpx.post(f"{server.http_url}/v1/answers", json={"question": "a", **body}, timeout=PATIENCE_S)
        assert (refusal.status_code, refusal.json()["error"]["param"]) == (400, name)


def test_an_answer_ends_once_a_document_of_its_prompt_is_deleted(
    tmp_path: Path, model_folder: Path, own_store: Path
) -> None:
    with (
        RunningServer(tmp_path / "log", model_folder, own_store, options=("--threads", "1", *WINDOW)) as server,
        Client(server.address) as client,
        grpc.insecure_channel(server.address) as channel,
    ):
        stub = GenerationStub(channel)

        def events(message: Any, call: Any) -> list[Any]:
            return [codec.event_from_wire(event) for event in call(message)]

        request = AnswerRequest(
            QUESTION, num_passages=8, budget=500, resume_s=60.0, sampling=SamplingParams(max_tokens=12, seed=3)
        )
        accepted, *_, finished = events(codec.to_wire(request), stub.Answer)
        assert isinstance(accepted, Accepted)
        assert isinstance(finished, Finished)
        resume = codec.to_wire(ResumeGenerationRequest(accepted.request_id, 0))
        assert events(resume, stub.ResumeGeneration)[0] == accepted
        assert accepted.prompt is not None
        gone = accepted.prompt.passages[0].document_id
        of_prompt = {each.document_id for each in accepted.prompt.passages}
        left_out = {each.document_id for each in accepted.prompt.left_out} - of_prompt
        client.datastores.delete_documents("store", sorted(left_out)[:1])
        again = events(resume, stub.ResumeGeneration)[0]
        assert again.prompt.passages == accepted.prompt.passages  # none of its own was deleted
        assert {each.document_id for each in again.prompt.left_out} - of_prompt == left_out - {min(left_out)}
        client.datastores.delete_documents("store", [gone])
        with pytest.raises(grpc.RpcError) as ended:
            events(resume, stub.ResumeGeneration)
        assert ended.value.code() is grpc.StatusCode.NOT_FOUND
        assert gone in ended.value.details()
        assert gone not in {each.document_id for each in client.answer(QUESTION, **ASK).passages}


def test_a_chat_is_that_of_the_library_over_grpc_and_http(asked: Any) -> None:
    server, client, lm = asked
    options = {"seed": 3, "max_tokens": 12}
    expected = lm.chat(QUESTION, **options).result()
    assert expected.accepted.prompt is not None
    for number in (None, 2, 0):
        mine, theirs = (each.chat(QUESTION, num_passages=number, **options).result() for each in (lm, client))
        assert (theirs.text, theirs.accepted.prompt) == (mine.text, mine.accepted.prompt)
        assert len(mine.accepted.prompt.passages if mine.accepted.prompt else ()) == (1 if number is None else number)
    url = f"{server.http_url}/v1/chat/completions"
    body = {"model": client.get_model().name, "messages": [{"role": "user", "content": QUESTION}], **options}
    for memory, number in (({}, 1), ({"passages": 2}, 2), ({"passages": 0}, 0), ({"stores": []}, 0)):
        (choice,) = httpx.post(url, json={**body, "memory": memory}, timeout=PATIENCE_S).json()["choices"]
        mine = lm.chat(QUESTION, num_passages=number, use_store=memory != {"stores": []}, **options).result()
        assert choice["message"]["content"] == mine.text
        places = [f"{each['document_id']}:{each['first_line']}" for each in choice["memory"].get("passages", ())]
        found = mine.accepted.prompt.passages if mine.accepted.prompt else ()
        assert places == [f"{each.document_id}:{each.first_line}" for each in found]
        assert len(places) == number
    (choice,) = httpx.post(url, json=body, timeout=PATIENCE_S).json()["choices"]
    assert (choice["message"]["content"], "memory" in choice) == (expected.text, False)
    with httpx.stream("POST", url, json={**body, "memory": {}, "stream": True}, timeout=PATIENCE_S) as reply:
        first = json.loads(next(line for line in reply.iter_lines() if line).removeprefix("data: "))
    assert len(first["choices"][0]["memory"]["passages"]) == 1  # before the first token
    refusal = httpx.post(url, json={**body, "memory": {"passages": 257}}, timeout=PATIENCE_S)
    assert (refusal.status_code, refusal.json()["error"]["param"]) == (400, "memory.passages")


def test_a_deletion_while_the_answer_runs_is_seen_at_its_next_event() -> None:
    deletions = Deletions()
    forgetting = DeletionFilter(deletions.latest)
    deletions.add({"other"}, ["doc-0"])
    forgetting.check_passages(GIVEN)
    deletions.add({"s"}, ["doc-2"])
    with pytest.raises(NotFound, match="'doc-2' was deleted while an answer was made"):
        forgetting.check_passages(GIVEN)
    deletions.add({"t"}, None)
    with pytest.raises(NotFound):
        forgetting.check_passages([Passage("t", "any", "", 0, 1, "a", 1.0)])


def test_prompts_beyond_the_cache_are_refused(tmp_path: Path, model_folder: Path, store_folder: Path) -> None:
    options = ("--threads", "1", "--cache-bytes", "64KiB", *WINDOW)
    with (
        RunningServer(tmp_path / "log", model_folder, store_folder, options=options) as server,
        Client(server.address) as client,
    ):
        assert client.answer(QUESTION, GIVEN, **ALONE).text
        with pytest.raises(InvalidInput, match=r"\d+ prompts of .* fewer passages") as refused:
            client.answer(QUESTION, GIVEN * 20, mixture=True, **ALONE)
        assert refused.value.field == "max_tokens"


def test_an_answer_finds_passages_in_the_callers_datastores_only(store_folder: Path, tmp_path: Path) -> None:
    registry = DatastoreRegistry([tmp_path / "a", tmp_path / "b", tmp_path / "c"], None)
    rights = Rights(ServerConfig(model=Path("m")), registry)
    eve, nix = Principal("eve", stores=frozenset({"a", "b", "d"})), Principal("nix", stores=frozenset())
    for chat in (ChatRequest.of("why?", {}), ChatRequest.of("why?", {"adapter": "tuned"})):
        assert rights.authorize("Chat", eve, chat).retrieval.names == ("a", "b")
        assert not rights.authorize("Chat", nix, chat).retrieval.use_store
    plain = AnswerRequest("why?")
    authorized = rights.authorize("Answer", eve, plain)
    assert authorized.searched_stores == ("a", "b")
    alone = AnswerRequest.of("why?", None, {}, {"use_store": False})
    assert rights.authorize("Answer", eve, alone).searched_stores == ("a", "b")
    assert not rights.authorize("Answer", eve, alone).retrieval.use_store
    named = AnswerRequest.of("why?", None, {}, {"store": "b"})
    assert rights.authorize("Answer", eve, named) == named
    for wrong in ({"passage_stores": ("c",)}, {"passage_stores": ("a", "c"), "num_passages": 0}):
        with pytest.raises(PermissionDenied, match="may not use the datastore 'c'"):
            rights.authorize("Answer", eve, AnswerRequest.of("why?", None, wrong, {}))
    with pytest.raises(PermissionDenied, match="may not use the datastore 'c'"):
        rights.authorize("Answer", eve, AnswerRequest.of("why?", None, {"passage_stores": ("a",)}, {"store": "c"}))
    with pytest.raises(PermissionDenied, match="no loaded datastore to find passages in"):
        rights.authorize("Answer", nix, plain)
    assert not rights.authorize("Answer", nix, AnswerRequest.of("why?", GIVEN, {}, {})).retrieval.use_store
    assert rights.authorize("Answer", Principal("root"), plain) == plain


@pytest.mark.parametrize("by", ["meaning", "auto"])
def test_a_server_with_an_encoder_finds_passages_by_its_vectors(
    tmp_path: Path, model_folder: Path, own_store: Path, store_folder: Path, by: str
) -> None:
    bert = save_bert("no head", tmp_path / "bert")
    options = ("--threads", "1", "--http-port", "0", "--encoder", str(bert), *WINDOW)
    with load(model_folder, [store_folder], attention_window=44) as lm:
        plain = [each.score for each in lm.find_passages(QUESTION)]
        lm.engine.passage_encoder = load_encoder(bert)
        lm.find_passages(QUESTION, by="meaning")  # which makes all vectors
        expected, answer = lm.find_passages(QUESTION, by=by), lm.answer(QUESTION, passages_by=by, **ASK)
    assert [each.score for each in expected] != plain
    with (
        RunningServer(tmp_path / "log", model_folder, own_store, options=options) as server,
        Client(server.address) as client,
    ):
        if by == "auto":  # the server makes them in idle moments
            wait_until(lambda: vectors_of(own_store) == vectors_of(store_folder), PATIENCE_S)
        found = client.find_passages(QUESTION, by=by)
        assert [(each.document_id, each.token_offset) for each in found] == [
            (each.document_id, each.token_offset) for each in expected
        ]
        assert [each.score for each in found] == pytest.approx([each.score for each in expected], abs=1e-5)
        assert parts(client.answer(QUESTION, passages_by=by, **ASK))[0] == answer.text
        url, body = f"{server.http_url}/v1/datastores/passages", {"question": QUESTION, "by": by}
        listed = httpx.post(url, json=body, timeout=PATIENCE_S).json()["data"]
        assert [each["score"] for each in listed] == pytest.approx([each.score for each in expected], abs=1e-5)
    assert vectors_of(own_store) == vectors_of(store_folder)


def vectors_of(store: Path) -> int:
    """Bytes of the vectors of a datastore."""
    return sum(file.stat().st_size for file in store.rglob(VECTORS))


def test_a_server_refuses_a_folder_without_an_encoder(tmp_path: Path, model_folder: Path) -> None:
    result = CliRunner().invoke(app, ["serve", "--model", str(model_folder), "--encoder", str(tmp_path), "--port", "0"])
    assert result.exit_code != 0
    assert isinstance(result.exception, NotFound)
    assert f"no model at {tmp_path}: it has no config.json" in str(result.exception)


def test_what_is_remembered_is_answered_from(tmp_path: Path, model_folder: Path, own_store: Path) -> None:
    with (
        RunningServer(tmp_path / "log", model_folder, own_store, options=("--workers", "2", *WINDOW)) as server,
        Client(server.address) as client,
    ):
        client.datastores.remember("store", [NewDocument("x", "the xylophone has four wheels")])
        for _ in range(4):  # on either worker
            assert client.answer("Who has a xylophone?", **ASK).passages[0].document_id == "x"
