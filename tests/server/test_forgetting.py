"""Forgetting: once a deletion is acknowledged, nothing answers with the document, and a purge leaves no byte of it."""

import shutil
from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest
from running import PATIENCE_S, RunningServer, wait_until
from texts import make_text
from typer.testing import CliRunner

from memlm.api.datastores import NewDocument
from memlm.api.generation import Accepted, Finished, Neighbor, ResumeGenerationRequest, Token
from memlm.api.params import GenerateRequest
from memlm.cli.app import app
from memlm.client import Client
from memlm.errors import AlreadyExists
from memlm.index.store.compaction import compact
from memlm.index.store.datastore import Datastore
from memlm.server.inference.deletions import DeletionFilter, Deletions
from memlm.v1.generation_pb2_grpc import GenerationStub
from memlm.wire import codec

OPTIONS = {"temperature": 0, "max_tokens": 30, "neighbors": 64, "k": 64, "seed": 1, "resume_s": 60.0}


@pytest.fixture
def changing(tmp_path: Path, model_folder: Path, own_store: Path) -> Iterator[RunningServer]:
    """A server whose store may be changed, with two workers: one deletes, the other follows."""
    options = ("--threads", "1", "--workers", "2", "--store-dir", str(tmp_path / "stores"))
    with RunningServer(tmp_path / "log", model_folder, own_store, options=options) as server:
        yield server


def documents_in(events: list) -> set[str]:
    """The documents that the tokens of some events name."""
    tokens = [token for tokens in events if isinstance(tokens, tuple) for token in tokens]
    return {neighbor.document_id for token in tokens for neighbor in token.neighbors}


def generated(stub: GenerationStub) -> list[Accepted | tuple[Token, ...] | Finished]:
    request = codec.to_wire(GenerateRequest.of("the memory", dict(OPTIONS)))
    return [codec.event_from_wire(event) for event in stub.Generate(request)]


def resumed(stub: GenerationStub, events: list) -> list[Accepted | tuple[Token, ...] | Finished]:
    request = codec.to_wire(ResumeGenerationRequest(events[0].request_id, 0))
    return [codec.event_from_wire(event) for event in stub.ResumeGeneration(request)]


def texts_of(events: list) -> list[str]:
    return [token.text for tokens in events if isinstance(tokens, tuple) for token in tokens]


def test_a_resumed_generation_does_not_name_what_was_deleted_since(changing: RunningServer) -> None:
    with grpc.insecure_channel(changing.address) as channel, Client(changing.address) as client:
        stub = GenerationStub(channel)
        events = generated(stub)
        named = documents_in(events)
        assert len(named) > 4
        gone = sorted(named)[:2]
        client.datastores.delete_documents("store", gone)
        again = resumed(stub, events)
        assert documents_in(again) == named - set(gone)
        assert texts_of(again) == texts_of(events)
        assert again[-1] == events[-1]


def test_a_resumed_generation_does_not_name_what_another_process_deleted_since(
    changing: RunningServer, tmp_path: Path
) -> None:
    with grpc.insecure_channel(changing.address) as channel, Client(changing.address) as client:
        stub = GenerationStub(channel)
        events = generated(stub)
        (gone, *others) = sorted(documents_in(events))
        with Datastore.open(tmp_path / "store") as store:
            store.delete([gone])
        wait_until(lambda: documents_in(resumed(stub, events)) == set(others))
        with Datastore.open(tmp_path / "store") as store:
            store.delete([others[0]])
        compact(tmp_path / "store")
        wait_until(lambda: others[0] not in documents_in(resumed(stub, events)))
        wait_until(lambda: client.datastores.get("store").num_documents == 6)


def test_a_resumed_generation_does_not_name_what_was_replaced_since(changing: RunningServer) -> None:
    with grpc.insecure_channel(changing.address) as channel, Client(changing.address) as client:
        stub = GenerationStub(channel)
        events = generated(stub)
        (gone, *_) = sorted(documents_in(events))
        new = NewDocument(gone, make_text(900, 60))
        client.datastores.add("store", [new], replace=True).result()
        assert gone not in documents_in(resumed(stub, events))
        assert gone in documents_in(generated(stub))


def test_a_resumed_generation_does_not_name_what_a_synchronization_removed_since(
    changing: RunningServer, tmp_path: Path, corpus_folder: Path
) -> None:
    docs = Path(shutil.copytree(corpus_folder, tmp_path / "docs"))
    with grpc.insecure_channel(changing.address) as channel, Client(changing.address) as client:
        assert client.datastores.sync("store", docs).result(PATIENCE_S).sync.num_unchanged == 8
        stub = GenerationStub(channel)
        events = generated(stub)
        (gone, replaced, *others) = sorted(documents_in(events))
        (docs / gone).unlink()
        (docs / replaced).write_text(make_text(900, 60))
        outcome = client.datastores.sync("store", docs).result(PATIENCE_S).sync
        assert (outcome.deleted, outcome.replaced) == ((gone,), (replaced,))
        assert documents_in(resumed(stub, events)) == set(others)
        assert replaced in documents_in(generated(stub))


def named(*document_ids: str, store: str = "s") -> bytes:
    """An encoded token with neighbors of these documents."""
    neighbors = tuple(Neighbor(store, id_, "", 0, 0, 1, 5, "x", 0.5, 0.5, "x") for id_ in document_ids)
    return codec.token_to_wire(Token(5, "x", b"x", -1.0, -1.0, neighbors=neighbors))


def test_deletions_concern_the_streams_that_began_before_them() -> None:
    deletions = Deletions()
    early = deletions.latest
    deletions.add(["s", "other"], ["a"])
    late = deletions.latest
    assert DeletionFilter(early).apply((named("a", "b"),)) == (named("b"),)
    assert DeletionFilter(early).apply((named("a", store="third"),)) == (named("a", store="third"),)
    assert not DeletionFilter(late).is_needed
    assert DeletionFilter(late).apply((named("a", "b"),)) == (named("a", "b"),)
    running = DeletionFilter(late)
    deletions.add(["s"], None)
    assert running.apply((named("b"), named("b", store="other"))) == (named(), named("b", store="other"))


def test_a_replacement_that_is_being_built_does_not_bring_back_what_is_deleted_meanwhile(
    tmp_path: Path, model_folder: Path, corpus_folder: Path
) -> None:
    stores = tmp_path / "stores"
    options = ("--threads", "1", "--store-dir", str(stores), "--corpus-root", str(corpus_folder))
    with RunningServer(tmp_path / "log", model_folder, options=options) as server, Client(server.address) as client:
        client.datastores.build("docs", str(corpus_folder)).result(PATIENCE_S)
        job = client.datastores.build("docs", str(corpus_folder), replace=True)
        client.datastores.delete_documents("docs", ["doc-1.txt", "doc-2.txt"])
        assert job.result(PATIENCE_S).store == "docs"
        assert client.datastores.get("docs").num_documents == 6
        found = {neighbor.document_id for neighbor in client.search("docs", "the memory", k=4096)}
        assert len(found) == 6
        assert not found & {"doc-1.txt", "doc-2.txt"}
        for record in (stores / "jobs").iterdir():
            assert b"doc-1.txt" not in record.read_bytes()


def test_the_records_of_operations_do_not_keep_the_ids_of_deleted_documents(changing: RunningServer, tmp_path) -> None:
    with Client(changing.address) as client:
        job = client.datastores.add("store", [NewDocument("doc-1.txt", make_text(900, 60))])
        with pytest.raises(AlreadyExists, match=r"'doc-1\.txt'"):
            job.result()
        client.datastores.delete_documents("store", ["doc-1.txt"])
        with pytest.raises(AlreadyExists, match=r"a document '\(deleted\)' already"):
            job.result()
        (record,) = (tmp_path / "stores" / "jobs").iterdir()
        assert b"doc-1.txt" not in record.read_bytes()

        job = client.datastores.add("store", [NewDocument("doc-2.txt", make_text(900, 60))])
        with pytest.raises(AlreadyExists, match=r"'doc-2\.txt'"):
            job.result()
        with Datastore.open(tmp_path / "store") as store:
            store.delete(["doc-2.txt"])
        client.datastores.compact("store", purge=True).result()
        assert not any(b"doc-2.txt" in record.read_bytes() for record in (tmp_path / "stores" / "jobs").iterdir())


def test_a_purge_over_grpc_leaves_no_byte_also_where_every_document_is_deleted(
    changing: RunningServer, tmp_path: Path
) -> None:
    store = tmp_path / "store"
    with Client(changing.address) as client:
        client.datastores.add("store", [NewDocument("secret-id", make_text(900, 60), "secret-title")]).result()
        assert any(b"secret-id" in file.read_bytes() for file in store.rglob("*.sqlite"))
        client.datastores.delete_documents("store", ["secret-id"])
        assert client.datastores.compact("store", purge=True).result().num_documents == 8
        assert not any(b"secret-" in file.read_bytes() for file in store.rglob("*") if file.is_file())
        client.datastores.delete_documents("store", [f"doc-{number}.txt" for number in range(8)])
        command = ["index", "compact", "store", "--purge", "--target", changing.address]
        assert CliRunner().invoke(app, command).exit_code == 0
        assert not list((store / "segments").iterdir())
        assert client.search("store", "the memory", k=4) == ()
        assert len(list(client.generate("the memory", max_tokens=3, temperature=0))) == 3
        assert client.datastores.add("store", [NewDocument("new", make_text(901, 60))]).result().num_documents == 1
        assert {neighbor.document_id for neighbor in client.search("store", "the memory", k=4)} == {"new"}
