"""The client by itself: light to load, the same face twice, clear about a server that is not there."""

import inspect
import re
import socket
import subprocess
import sys
import time
from concurrent import futures
from typing import Any

import grpc
import pytest
from running import Wire

from memlm.api import answers, chat, datastores, generation, operations, params, scoring, sessions, tracing
from memlm.api import server as api_server
from memlm.api.generation import Accepted, Finished, FinishReason, Usage
from memlm.api.handles import Operation, Session
from memlm.client import AsyncClient, Client
from memlm.client.aio_client import AsyncSession
from memlm.client.aio_datastores import AsyncDatastores, AsyncOperation, AsyncOperations
from memlm.client.channel import RETRIED, rpcs_by_request
from memlm.client.datastores import Datastores, Operations
from memlm.errors import InvalidInput, Unavailable
from memlm.language_model import LanguageModel
from memlm.v1 import generation_pb2, generation_pb2_grpc
from memlm.wire import codec

METHOD_OF = {
    "Generate": "generate",
    "Chat": "chat",
    "Answer": "stream_answer",
    "ResumeGeneration": "generate",  # by itself, where a stream breaks
    "CancelGeneration": "generate",  # by closing its stream
    "Score": "score",
    "Trace": "trace",
    "Tokenize": "tokenize",
    "Detokenize": "detokenize",
    "GetModel": "get_model",
    "GetServerInfo": "get_server_info",
    "ListDatastores": "list",
    "Search": "search",
    "FindPassages": "find_passages",
    "DeleteDocuments": "delete_documents",
    "CreateSession": "session",
    "AppendToSession": "append_to_session",
    "GetSession": "get_session",
    "ListSessions": "list_sessions",
    "ForgetInSession": "forget_in_session",
    "ForkSession": "fork_session",
    "DeleteSession": "delete_session",
    "GetDatastore": "get",
    "BuildDatastore": "build",
    "AddDocuments": "add",
    "Remember": "remember",
    "CompactDatastore": "compact",
    "LoadDatastore": "load",
    "UnloadDatastore": "unload",
    "GetOperation": "get",
    "ListOperations": "list",
    "WaitOperation": "wait",
    "CancelOperation": "cancel",
    "DeleteOperation": "delete",
}
NEVER_TWICE = {
    *(
        "Generate",
        "Chat",
        "Answer",
        "ResumeGeneration",
        "CancelGeneration",
        "DeleteDocuments",
        "Remember",
        "CreateSession",
        "AppendToSession",
        "ForgetInSession",
        "ForkSession",
        "DeleteSession",
    ),
    *("BuildDatastore", "AddDocuments", "CompactDatastore", "LoadDatastore", "UnloadDatastore"),
    *("CancelOperation", "DeleteOperation"),
}
FACES = {"Datastores": Datastores, "Operations": Operations}


def methods_of(face: type) -> dict[str, Any]:
    public = {name: value for name, value in vars(face).items() if not name.startswith("_") and callable(value)}
    return {name: inspect.signature(value) for name, value in public.items()}


def test_importing_the_client_loads_nothing_heavy() -> None:
    code = "import sys, memlm.client, memlm.client.aio_client; print(*sys.modules)"
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    assert not {"torch", "faiss", "numpy", "tokenizers", "jaxtyping", "memlm.data.corpus"} & set(loaded)
    assert not {"grpc", "google.protobuf", "asyncio", "memlm.client.transport", "memlm.client.aio_transport"} & set(
        loaded
    )


@pytest.mark.parametrize(
    ("face", "awaited"),
    [
        (Client, AsyncClient),
        (Datastores, AsyncDatastores),
        (Operations, AsyncOperations),
        (Operation, AsyncOperation),
        (Session, AsyncSession),
    ],
)
def test_both_clients_have_the_same_methods(face: type, awaited: type) -> None:
    """Name for name and parameter for parameter; what they return differs only by being awaited."""
    sync_methods, async_methods = methods_of(face), methods_of(awaited)
    assert sync_methods.keys() == async_methods.keys()
    for name in sync_methods:
        assert sync_methods[name].parameters.keys() == async_methods[name].parameters.keys(), name
        for mine, other in zip(
            sync_methods[name].parameters.values(), async_methods[name].parameters.values(), strict=True
        ):
            assert (mine.kind, mine.default, mine.annotation) == (other.kind, other.default, other.annotation), name
        returned = sync_methods[name].return_annotation
        expected = re.sub(r"\b(TokenStream|Session|Operation)\b", r"Async\1", returned)
        assert async_methods[name].return_annotation == expected, name


def test_a_model_in_process_is_asked_as_a_client_is() -> None:
    """What both can be asked takes the same; only what travels has a time limit."""
    sync_methods, async_methods = methods_of(LanguageModel), methods_of(Client)
    both = sync_methods.keys() & async_methods.keys()
    assert {"generate", "chat", "score", "search", "tokenize", "detokenize", "session"} <= both
    for name in both:
        wanted = {key: value for key, value in async_methods[name].parameters.items() if key != "timeout_s"}
        assert list(sync_methods[name].parameters.items()) == list(wanted.items()), name
        assert sync_methods[name].return_annotation == async_methods[name].return_annotation, name


def test_every_call_has_a_method_with_a_time_limit() -> None:
    for service in codec.SERVICES:
        methods = methods_of(Client) | methods_of(FACES.get(service.name, Client))
        for rpc in service.methods:
            assert "timeout_s" in methods[METHOD_OF[rpc.name]].parameters


def test_every_call_is_asked_by_a_question_of_its_name() -> None:
    modules = (params, chat, answers, generation, scoring, tracing, datastores, sessions, operations, api_server)
    members = {name: kind for module in modules for name, kind in vars(module).items()}
    request_names = {name for name, kind in members.items() if name.endswith("Request") and isinstance(kind, type)}
    request_names -= {"Request", "StreamRequest", "GetTokenizerRequest"}  # the last is the server's own
    with grpc.insecure_channel("localhost:1") as channel:
        assert set(rpcs_by_request(channel)) == request_names


def test_only_calls_that_change_nothing_are_tried_again() -> None:
    retried = {name for names in RETRIED.values() for name in names}
    assert retried == set(METHOD_OF) - NEVER_TWICE


@pytest.fixture
def nobody() -> str:
    """An address where nobody listens."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        return f"127.0.0.1:{taken.getsockname()[1]}"


def test_a_server_that_is_not_there_is_named(nobody: str) -> None:
    with Client(nobody) as client:
        for ask in (
            client.get_model,
            lambda: client.generate("a"),
            lambda: client.datastores.delete_documents("a", ["b"]),
        ):
            with pytest.raises(Unavailable, match=f"{nobody}.*memlm serve"):
                ask()


async def test_a_server_that_is_not_there_is_named_when_awaited(nobody: str) -> None:
    async with AsyncClient(nobody) as client:
        with pytest.raises(Unavailable, match=f"{nobody}.*memlm serve"):
            await client.get_model()
        with pytest.raises(Unavailable, match=f"{nobody}.*memlm serve"):
            await client.generate("a")
        with pytest.raises(Unavailable, match="not ready within"):
            await client.wait_until_ready(0.2)


async def test_a_closed_client_says_so(nobody: str) -> None:
    client, awaited = Client(nobody), AsyncClient(nobody)
    client.close()
    await awaited.close()
    for ask in (client.get_model, lambda: client.generate("a")):
        with pytest.raises(InvalidInput, match="closed"):
            ask()
    for ask_awaited in (awaited.get_model, lambda: awaited.generate("a")):
        with pytest.raises(InvalidInput, match="closed"):
            await ask_awaited()


class Slow(generation_pb2_grpc.GenerationServicer):
    """A server that takes its time between the last event and the status, and sees who does not wait for it."""

    def __init__(self) -> None:
        self.waited: list[bool] = []

    def Generate(self, request, context):
        for event in (Accepted("id", 1, None, 8, 0.25, 1.0), Finished(FinishReason.LENGTH, None, Usage())):
            yield generation_pb2.GenerateEvent.FromString(codec.event_to_wire(event))
        time.sleep(0.2)
        self.waited.append(context.is_active())


async def test_a_stream_that_was_heard_to_its_end_is_not_cancelled() -> None:
    server, slow = grpc.server(futures.ThreadPoolExecutor(1)), Slow()
    generation_pb2_grpc.add_GenerationServicer_to_server(slow, server)
    address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    server.start()
    with Client(address) as client, client.generate("a") as stream:
        assert list(stream) == []
    async with AsyncClient(address) as awaited, await awaited.generate("a") as tokens:
        assert [token async for token in tokens] == []
    server.stop(None).wait()
    assert slow.waited == [True, True]


class SlowToAnswer(Wire):
    def _accept(self) -> None:
        time.sleep(0.5)
        super()._accept()


def test_a_server_may_take_half_a_second_to_answer_a_connection() -> None:
    server = grpc.server(futures.ThreadPoolExecutor(1))
    generation_pb2_grpc.add_GenerationServicer_to_server(Slow(), server)
    way = SlowToAnswer(f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}")
    server.start()
    with Client(way.address) as client, client.generate("a") as stream:
        assert list(stream) == []
    way.close()
    server.stop(None).wait()


def test_waiting_for_a_server_ends_in_time(nobody: str) -> None:
    begin_s = time.monotonic()
    with Client(nobody) as client, pytest.raises(Unavailable, match=r"not ready within 0\.3 s"):
        client.wait_until_ready(0.3)
    assert time.monotonic() - begin_s < 10
