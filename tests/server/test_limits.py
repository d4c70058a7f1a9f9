"""What one connection, or one caller, can take of the server; sent by a client that keeps no manners."""

import json
import resource
import struct
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from raw_http2 import RawConnection
from running import PATIENCE_S, RunningServer, anonymous_bytes, wait_until
from texts import make_text

from memlm.api.datastores import AddDocumentsRequest, NewDocument
from memlm.api.sessions import AppendToSessionRequest
from memlm.client import Client
from memlm.client.uploads import add_document_requests
from memlm.data.corpus import Corpus
from memlm.errors import InvalidInput
from memlm.indexing.build import build_index
from memlm.server.config import ServerConfig
from memlm.v1.datastores_pb2_grpc import DatastoresStub
from memlm.v1.sessions_pb2_grpc import SessionsStub
from memlm.wire import codec
from memlm.wire.limits import DEFAULT_MAX_MESSAGE_BYTES

SECRET = "0123456789abcdefghij"
TOKENS = f'[[token]]\nname = "ann"\nsecret = "{SECRET}"\n'
MIB = 1 << 20
GENERATE = "/memlm.v1.Generation/Generate"
CHECK = "/grpc.health.v1.Health/Check"
BEFORE = dict[str, int]()  # bytes of a server's front once it has started
REFLECT = "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo"


@pytest.fixture(scope="module")
def guarded(tmp_path_factory: pytest.TempPathFactory, model_folder: Path) -> Iterator[RunningServer]:
    """A server that wants a token."""
    folder = tmp_path_factory.mktemp("guarded")
    (folder / "tokens.toml").write_text(TOKENS)
    options = ("--threads", "1", "--auth-file", str(folder / "tokens.toml"))
    with RunningServer(folder / "log", model_folder, options=options) as server:
        BEFORE[server.address] = anonymous_bytes(server.process.pid)
        yield server


def half_sent(connection: RawConnection, path: str, size: int, token: str = "", wait_s: float = 1.0) -> tuple[int, int]:
    """Begins a call and sends its message but for the last byte; gives the stream, and how many bytes went."""
    stream = connection.call(path, token=token)
    return stream, connection.send(stream, b"\0" + struct.pack(">I", size) + b"a" * (size - 1), wait_s=wait_s)


def flood(server: RunningServer, path: str, streams: int, token: str = "") -> float:
    """How many bytes the front's memory has grown once messages of 3 MiB are half sent over one connection."""
    with RawConnection(server.address) as connection:
        senders = [
            threading.Thread(target=half_sent, args=(connection, path, 3 * MIB, token, 3.0)) for _ in range(streams)
        ]
        for sender in senders:
            sender.start()
        for sender in senders:
            sender.join()
        return anonymous_bytes(server.process.pid) - BEFORE[server.address]


@pytest.mark.parametrize("path", [GENERATE, "/memlm.v1.Sessions/AppendToSession", REFLECT])
def test_without_a_token_no_message_is_read(guarded: RunningServer, path: str) -> None:
    with RawConnection(guarded.address) as connection:
        stream, sent = half_sent(connection, path, 3 * MIB)
        assert connection.wait_for_end(stream, 10)
        assert sent < MIB
    assert flood(guarded, path, 60) < 40 * MIB


def test_half_sent_health_checks_are_bounded_and_keep_nobody_out(guarded: RunningServer) -> None:
    with RawConnection(guarded.address) as connection:
        for _ in range(20):
            threading.Thread(target=half_sent, args=(connection, CHECK, 3 * MIB), daemon=True).start()
        with Client(guarded.address, token=SECRET) as client:
            client.wait_until_ready(PATIENCE_S)
    assert flood(guarded, CHECK, 60) < 70 * MIB


def test_messages_under_way_are_bounded_for_a_caller(guarded: RunningServer) -> None:
    """Sixteen of 3 MiB; before, 60 streams were 180 MiB. Others are served meanwhile, and all places come back."""
    assert flood(guarded, GENERATE, 60, SECRET) < 120 * MIB
    with Client(guarded.address, token=SECRET) as client:
        begin_s = time.monotonic()
        assert len(list(client.generate("the", max_tokens=2, temperature=0))) == 2
        assert time.monotonic() - begin_s < 10


def test_a_large_document_is_sent_in_messages_that_a_server_takes() -> None:
    document = NewDocument("large", "text " * MIB, metadata={"a": "b" * MIB})
    messages = list(add_document_requests(AddDocumentsRequest(), [document], DEFAULT_MAX_MESSAGE_BYTES))
    assert max(message.ByteSize() for message in messages) < ServerConfig(Path("model")).max_message_bytes
    parts = [part for message in messages for part in codec.from_wire(message).documents]
    assert "".join(part.text for part in parts) == document.text


def test_memory_that_messages_took_goes_back_to_the_system(guarded: RunningServer) -> None:
    flood(guarded, GENERATE, 40, SECRET)
    wait_until(lambda: anonymous_bytes(guarded.process.pid) - BEFORE[guarded.address] < 15 * MIB)


def test_a_connection_has_so_many_calls(guarded: RunningServer) -> None:
    with RawConnection(guarded.address) as connection:
        assert connection.max_streams == 256


def test_a_message_is_bounded_in_bytes(guarded: RunningServer) -> None:
    with Client(guarded.address, token=SECRET) as client:
        with pytest.raises(InvalidInput, match="max_message_bytes"):
            client.tokenize("a" * (4 * MIB + 1))
        assert client.get_server_info().max_message_bytes == 4 * MIB


@pytest.fixture(scope="module")
def hasty(tmp_path_factory: pytest.TempPathFactory, model_folder: Path, store_folder: Path) -> Iterator[RunningServer]:
    """A server of small limits that waits for nothing for long."""
    folder = tmp_path_factory.mktemp("hasty")
    options = ("--threads", "1", "--store-dir", str(folder / "stores"), "+message_timeout=1", "+max_jobs=8")
    options += ("+upload_documents=100", "+max_caller_calls=12", "+connection_idle=2")
    options += ("+append_bytes='1MiB'", "+unfinished_bytes='20MiB'", "+message_bytes='1MiB'")
    with RunningServer(folder / "log", model_folder, store_folder, options=options) as server:
        yield server


def begun(call: Any, first: Any, stop: threading.Event) -> grpc.Future:
    """A call that has sent its first message and then keeps silent."""

    def messages() -> Iterator[Any]:
        yield codec.to_wire(first)
        stop.wait(30)

    return call.future(messages(), timeout=30)


def test_a_half_sent_message_ends_in_time(hasty: RunningServer) -> None:
    with RawConnection(hasty.address) as connection:
        stream, _ = half_sent(connection, GENERATE, 1000)
        begin_s = time.monotonic()
        assert connection.wait_for_end(stream, 10)
        assert time.monotonic() - begin_s < 5


def test_uploads_are_counted_and_end_when_nothing_comes(hasty: RunningServer, tmp_path: Path) -> None:
    """A fourth of max_jobs for one caller; the file of one that ended is removed."""
    stop = threading.Event()
    with grpc.insecure_channel(hasty.address) as channel:
        add = DatastoresStub(channel).AddDocuments
        calls = [begun(add, AddDocumentsRequest("store"), stop) for _ in range(4)]
        codes = sorted(call.code().name for call in calls)
        stop.set()
    assert codes == ["DEADLINE_EXCEEDED", "DEADLINE_EXCEEDED", "RESOURCE_EXHAUSTED", "RESOURCE_EXHAUSTED"]
    jobs = hasty.log.parent / "stores" / "jobs"
    wait_until(lambda: not list(jobs.glob("*.jsonl")))
    with Client(hasty.address) as client:
        client.datastores.add("store", [NewDocument("later", "a text")]).cancel()


def test_an_upload_has_so_many_documents(hasty: RunningServer) -> None:
    documents = [NewDocument(str(number), "a text") for number in range(101)]
    with Client(hasty.address) as client, pytest.raises(InvalidInput, match="more than 100 documents"):
        client.datastores.add("store", documents)


def test_unfinished_appends_are_bounded_and_end_when_nothing_comes(hasty: RunningServer) -> None:
    """Each holds a message's room: five of 1 MiB are a fourth of what all may hold."""
    stop = threading.Event()
    with grpc.insecure_channel(hasty.address) as channel, Client(hasty.address) as client:
        append, name = SessionsStub(channel).AppendToSession, client.session().name
        calls = [begun(append, AppendToSessionRequest(name, "a"), stop) for _ in range(7)]
        codes = sorted(call.code().name for call in calls)
        stop.set()
        assert codes == ["DEADLINE_EXCEEDED"] * 4 + ["RESOURCE_EXHAUSTED"] * 3
        client.append_to_session(name, "a text")  # all room is free again


def test_a_caller_has_so_many_open_calls(hasty: RunningServer) -> None:
    with RawConnection(hasty.address) as connection:
        streams = [connection.call(GENERATE) for _ in range(14)]
        assert connection.wait_for(lambda: len(connection.ended) >= 2, 10)
        assert connection.ended == set(streams[12:])


def test_a_connection_without_calls_is_closed(hasty: RunningServer) -> None:
    with RawConnection(hasty.address) as connection:
        assert connection.wait_for(lambda: connection.is_closed, 15)


def test_a_client_does_not_notice_that_its_idle_connection_was_closed(hasty: RunningServer) -> None:
    with Client(hasty.address) as client:
        client.get_model()
        time.sleep(3)
        client.get_model()


@pytest.mark.slow
def test_a_connection_that_never_begins_is_closed(guarded: RunningServer) -> None:
    with RawConnection(guarded.address, greets=False) as connection:
        assert connection.wait_for(lambda: connection.is_closed, 20)


def test_so_many_connections_are_open(tmp_path: Path, model_folder: Path) -> None:
    options = ("--threads", "1", "+max_connections=5")
    with RunningServer(tmp_path / "log", model_folder, options=options) as server:
        held = [RawConnection(server.address) for _ in range(5)]
        with RawConnection(server.address) as one_more:
            assert one_more.wait_for(lambda: one_more.is_closed, 10)
        assert not any(connection.is_closed for connection in held)
        held.pop().close()
        with Client(server.address) as client:
            client.wait_until_ready(PATIENCE_S)
        for connection in held:
            connection.close()


def test_the_server_may_open_as_many_files_as_the_system_lets_it(tmp_path: Path, model_folder: Path) -> None:
    """And so may its workers, however low the limit was that it was started with."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    first = f"import resource; resource.setrlimit(resource.RLIMIT_NOFILE, (256, {hard}))"
    with RunningServer(tmp_path / "log", model_folder, options=("--threads", "1"), first=first) as server:
        for pid in (server.process.pid, server.worker_pid):
            assert resource.prlimit(pid, resource.RLIMIT_NOFILE)[0] == hard


def test_a_token_reports_so_many_neighbors(client: Client) -> None:
    assert client.get_server_info().max_neighbors == 64
    assert len(next(client.generate("the", max_tokens=1, temperature=0, k=64, neighbors=64)).neighbors) > 20
    with pytest.raises(InvalidInput, match="at most 64 for each token") as refused:
        list(client.generate("the", max_tokens=1, neighbors=65))
    assert refused.value.field == "neighbors"


@pytest.fixture(scope="module")
def heavy_store(tmp_path_factory: pytest.TempPathFactory, model_folder: Path) -> Path:
    """A datastore of one document whose metadata has 200 kB."""
    folder = tmp_path_factory.mktemp("heavy")
    line = {"id": "heavy", "text": make_text(1, 400), "about": "a" * 200_000}
    (folder / "heavy.jsonl").write_text(json.dumps(line))
    build_index(model_folder, Corpus([folder / "heavy.jsonl"]), folder / "store")
    return folder / "store"


def test_what_is_too_large_for_a_message_is_refused_with_the_reason(
    tmp_path: Path, model_folder: Path, heavy_store: Path
) -> None:
    with (
        RunningServer(tmp_path / "log", model_folder, heavy_store, options=("--threads", "1")) as server,
        Client(server.address) as client,
    ):
        with pytest.raises(InvalidInput, match="ask for fewer neighbors"):
            list(client.generate("the", max_tokens=3, k=64, neighbors=64))
        with pytest.raises(InvalidInput, match="ask for less at once"):
            client.search("store", "the", k=128)
        assert len(list(client.generate("the", max_tokens=3, temperature=0, neighbors=4))) == 3
