"""Every call of the contract wants a token, shows nobody what is another caller's, and logs no secret and no text."""

from __future__ import annotations

import hmac
import json
import random
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from google.protobuf.message_factory import GetMessageClass
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc
from hostile import METHODS, filled
from running import PATIENCE_S, RunningServer, wait_until

from memlm.api.datastores import NewDocument
from memlm.api.generation import CancelGenerationRequest, ResumeGenerationRequest
from memlm.api.operations import WaitOperationRequest
from memlm.api.sessions import AppendToSessionRequest
from memlm.client import Client
from memlm.errors import MemlmError, NotFound, PermissionDenied
from memlm.server.frontend.auth import Authenticator
from memlm.wire import codec

ANN, BEN, NIX = "ann's own secret 0", "ben's own secret 0", "nix' own secret 00"
WRITTEN = "zyxwvut"


@pytest.fixture(scope="module")
def guarded(
    tmp_path_factory: pytest.TempPathFactory, model_folder: Path, store_folder: Path, corpus_folder: Path
) -> Iterator[RunningServer]:
    folder = tmp_path_factory.mktemp("rights")
    callers = (("ann", ANN, None), ("ben", BEN, None), ("nix", NIX, []))
    (folder / "tokens.toml").write_text(
        "".join(
            f"[[token]]\nname = {json.dumps(name)}\nsecret = {json.dumps(secret)}\n"
            + ("" if stores is None else f"stores = {json.dumps(stores)}\n")
            for name, secret, stores in callers
        )
    )
    options = ("--threads", "1", "--auth-file", str(folder / "tokens.toml"), "--log-level", "debug")
    options += ("--store-dir", str(folder / "stores"), "--corpus-root", str(corpus_folder))
    store = Path(shutil.copytree(store_folder, folder / "store"))  # random messages may write to it
    with RunningServer(folder / "log", model_folder, store, options=options) as server:
        yield server


@pytest.fixture
def ann(guarded: RunningServer) -> Iterator[Client]:
    with Client(guarded.address, token=ANN) as client:
        client.wait_until_ready()
        yield client


@pytest.fixture
def ben(guarded: RunningServer) -> Iterator[Client]:
    with Client(guarded.address, token=BEN) as client:
        yield client


def sent(channel: grpc.Channel, method: Any, data: bytes, metadata: tuple[tuple[str, str], ...]) -> grpc.StatusCode:
    """How a call with these bytes ends."""
    path, options = f"/{method.containing_service.full_name}/{method.name}", {"timeout": 20, "metadata": metadata}
    try:
        if method.client_streaming:
            channel.stream_unary(path)(iter([data]), **options)
        elif method.server_streaming:
            list(channel.unary_stream(path)(data, **options))
        else:
            channel.unary_unary(path)(data, **options)
    except grpc.RpcError as error:
        return error.code()
    return grpc.StatusCode.OK


def call(address: str, token: str, request: Any) -> None:
    """One question of a dataclass to the call that takes it; raises RpcError."""
    message = codec.to_wire(request)
    (method,) = [each for each in METHODS if each.input_type is type(message).DESCRIPTOR]
    with grpc.insecure_channel(address) as channel:
        metadata = (("authorization", f"Bearer {token}"),)
        code = sent(channel, method, message.SerializeToString(), metadata)
    assert code is grpc.StatusCode.NOT_FOUND, f"{method.name}: {code}"


def test_the_contract_is_all_that_the_server_offers(guarded: RunningServer) -> None:
    """So that the calls below are all there are: what reflection lists is the contract, health and reflection."""
    with grpc.insecure_channel(guarded.address) as channel:
        stub = reflection_pb2_grpc.ServerReflectionStub(channel)
        request = iter([reflection_pb2.ServerReflectionRequest(list_services="")])
        (answer,) = stub.ServerReflectionInfo(request, metadata=(("authorization", f"Bearer {ANN}"),))
    listed = {service.name for service in answer.list_services_response.service}
    contract = {service.full_name for service in codec.SERVICES}
    assert listed - contract == {"grpc.health.v1.Health", "grpc.reflection.v1alpha.ServerReflection"}
    assert len(METHODS) >= 29


@pytest.mark.parametrize(
    "metadata",
    [
        (),
        (("authorization", f"Bearer {ANN[:-1]}"),),
        (("authorization", ANN),),
        (("authorization", f"Basic {ANN}"),),
        (("authorization", "Bearer "),),
        (("authorization", f"Bearer {BEN} "), ("authorization", f"Bearer {ANN}")),
        (("x-authorization", f"Bearer {ANN}"),),
    ],
    ids=["none", "another", "bare", "basic", "empty", "two", "elsewhere"],
)
def test_no_call_is_answered_without_a_token(guarded: RunningServer, metadata: tuple) -> None:
    rng = random.Random(0)
    with grpc.insecure_channel(guarded.address) as channel:
        for method in METHODS:
            kind = GetMessageClass(method.input_type)
            for data in (b"", filled(kind, rng).SerializeToString(), b"\xff" * 9):
                assert sent(channel, method, data, metadata) is grpc.StatusCode.UNAUTHENTICATED, method.name
        request = iter([reflection_pb2.ServerReflectionRequest(list_services="")])
        with pytest.raises(grpc.RpcError) as refused:
            list(reflection_pb2_grpc.ServerReflectionStub(channel).ServerReflectionInfo(request, metadata=metadata))
        assert refused.value.code() is grpc.StatusCode.UNAUTHENTICATED
        health = health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=20)
        assert health.status == health_pb2.HealthCheckResponse.SERVING


def test_anothers_session_is_not_found_whatever_is_asked_of_it(ann: Client, ben: Client) -> None:
    session = ann.session()
    ann.append_to_session(session.name, "the memory of ")
    ways: list[Callable[[], object]] = [
        lambda: ben.get_session(session.name),
        lambda: ben.append_to_session(session.name, "a"),
        lambda: ben.append_to_session(session.name, token_ids=[1]),
        lambda: list(ben.generate("a", session=session.name, use_store=False)),
        lambda: list(ben.chat("a", session=session.name, use_store=False)),
        lambda: ben.forget_in_session(session.name, 0, 1),
        lambda: ben.fork_session(session.name),
        lambda: ben.delete_session(session.name),
    ]
    for way in ways:
        with pytest.raises(NotFound, match="no session"):
            way()
    assert ben.list_sessions() == ()
    assert ann.get_session(session.name).num_tokens == len(ann.tokenize("the memory of "))
    session.delete()


def test_anothers_operation_is_not_found_whatever_is_asked_of_it(
    guarded: RunningServer, ann: Client, ben: Client, corpus_folder: Path
) -> None:
    job = ann.datastores.build("anns", str(corpus_folder), request_id="the same")
    for way in (ben.operations.get, ben.operations.cancel, ben.operations.delete):
        with pytest.raises(NotFound, match="no operation"):
            way(job.name)
    call(guarded.address, BEN, WaitOperationRequest(job.name, 1.0))
    assert ben.operations.list() == ()
    assert job.result(PATIENCE_S).num_documents == 8
    ann.datastores.unload("anns")


def test_anothers_generation_can_be_neither_resumed_nor_cancelled(
    guarded: RunningServer, ann: Client, ben: Client
) -> None:
    with ann.generate("the memory", resume_s=60, max_tokens=5, temperature=0, use_store=False) as stream:
        next(stream)
        request_id = stream.accepted.request_id
        for request in (ResumeGenerationRequest(request_id), CancelGenerationRequest(request_id)):
            call(guarded.address, BEN, request)
        assert len(list(stream)) == 4
    assert len(request_id) >= 16  # 64 bits, so that it cannot be guessed
    assert len(ann.session().name.rpartition("/")[2]) >= 22  # 128 bits


def test_a_token_for_no_store_uses_none(guarded: RunningServer, corpus_folder: Path, store_folder: Path) -> None:
    with Client(guarded.address, token=NIX) as nix:
        stores = nix.datastores
        ways: list[Callable[[], object]] = [
            lambda: nix.search("store", "a"),
            lambda: nix.search(None, "a"),
            lambda: list(nix.generate("a", store="store")),
            lambda: list(nix.chat("a", store="store")),
            lambda: nix.score("a", store="store"),
            lambda: stores.get("store"),
            lambda: stores.get(),
            lambda: stores.delete_documents("store", ["doc-0.txt"]),
            lambda: stores.delete_documents(None, ["doc-0.txt"]),
            lambda: stores.add("store", [NewDocument("x", "text")]),
            lambda: stores.compact("store"),
            lambda: stores.build("own", str(corpus_folder)),
            lambda: stores.load(str(store_folder)),
            lambda: stores.load(str(store_folder), "own"),
            lambda: stores.unload("store"),
        ]
        for way in ways:
            with pytest.raises(PermissionDenied):
                way()
        assert stores.list() == ()
        assert next(nix.generate("a", seed=1)).knn_logprob is None
        assert next(nix.chat("a", seed=1)).knn_logprob is None
        assert nix.score("a").knn is None


def test_tokens_are_compared_as_digests_all_of_them_and_kept_as_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "tokens.toml"
    path.write_text(
        "".join(f'[[token]]\nname = "{name}"\nsecret = "{name} has a long secret"\n' for name in ("a", "b", "c"))
    )
    guard, compared, compare = Authenticator(path), list[tuple[bytes, bytes]](), hmac.compare_digest

    def counted(one: Any, other: Any) -> bool:
        compared.append((one, other))
        return compare(one, other)

    monkeypatch.setattr(hmac, "compare_digest", counted)
    for name in ("a", "b", "c"):
        compared.clear()
        assert guard.authenticate((("authorization", f"Bearer {name} has a long secret"),)).name == name
        assert [(len(one), len(other)) for one, other in compared] == [(32, 32)] * 3
        assert len({other for _, other in compared}) == 1
    assert "has a long secret" not in repr(vars(guard))


def test_no_secret_and_no_text_is_logged_at_the_most_talkative_level(
    guarded: RunningServer, ann: Client, corpus_folder: Path
) -> None:
    session = ann.session()
    session.append(f"{WRITTEN} a")
    list(session.generate(f"{WRITTEN} p", max_tokens=2, use_store=False, stop=[f"{WRITTEN} stop"]))
    list(ann.generate(f"{WRITTEN} prompt", max_tokens=2, neighbors=2))
    list(ann.chat(f"{WRITTEN} message", max_tokens=2, neighbors=2))
    list(session.chat(f"{WRITTEN} m", max_tokens=2, use_store=False))
    ann.score(f"{WRITTEN} scored", token_scores=True)
    ann.search("store", f"{WRITTEN} searched")
    ann.detokenize(ann.tokenize(f"{WRITTEN} tokenized"))
    ann.datastores.build("logged", str(corpus_folder)).result(PATIENCE_S)
    document = NewDocument("doc", f"{WRITTEN} added", f"{WRITTEN} title", {"note": f"{WRITTEN} metadata"})
    ann.datastores.add("logged", [document]).result(PATIENCE_S)
    ann.datastores.unload("logged")
    with pytest.raises(NotFound):
        ann.search("nowhere", f"{WRITTEN} not searched")
    wait_until(lambda: "call=UnloadDatastore" in guarded.output and "nowhere" in guarded.output)
    assert "DEBUG" in guarded.output
    for never in (WRITTEN, ANN, BEN, NIX, ANN.replace(" ", "%20")):
        assert never not in guarded.output


def test_no_name_that_a_caller_chooses_makes_a_line_of_its_own_in_the_log(guarded: RunningServer, ann: Client) -> None:
    forged = "x\n2026-01-01 00:00:00,000 memlm.server ERROR forged\r\nforged"
    ways: list[Callable[[], object]] = [
        lambda: ann.search(forged, "a"),
        lambda: ann.get_session(forged),
        lambda: ann.operations.get(forged),
        lambda: ann.datastores.load(forged),
        lambda: ann.datastores.build(forged, forged),
        lambda: ann.datastores.delete_documents("store", [forged]),
        lambda: asked_at(guarded.address, forged),
    ]
    for way in ways:
        with pytest.raises((MemlmError, grpc.RpcError)):
            way()
    assert ann.get_model()
    wait_until(lambda: "call=GetModel" in guarded.output)
    assert not [line for line in guarded.output.splitlines() if line.startswith(("2026-01-01", "forged"))]


def asked_at(address: str, name: str) -> None:
    """A raw append to a session of any name."""
    data = codec.to_wire(AppendToSessionRequest(name, "a")).SerializeToString()
    with grpc.insecure_channel(address) as channel:
        path = "/memlm.v1.Sessions/AppendToSession"
        channel.stream_unary(path)(iter([data]), timeout=20, metadata=(("authorization", f"Bearer {ANN}"),))
