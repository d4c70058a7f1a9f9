"""What a token that is restricted to some datastores can do: nothing with any other, by whatever name or path."""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from google.protobuf.message_factory import GetMessageClass
from hostile import METHODS
from running import PATIENCE_S, RunningServer, wait_until

from memlm.api.datastores import AddDocumentsRequest, LoadDatastoreRequest, NewDocument, SearchRequest, StoreInfo
from memlm.api.params import GenerateRequest, RetrievalParams, StoreWeight
from memlm.api.scoring import ScoreRequest
from memlm.client import Client
from memlm.errors import Corrupt, InvalidInput, MemlmError, NotFound, Overloaded, PermissionDenied
from memlm.server.config import ServerConfig
from memlm.server.frontend.auth import Principal
from memlm.server.frontend.rights import RULES, Rights, _no_store, _own_resource
from memlm.server.registry import DatastoreRegistry
from memlm.v1.datastores_pb2_grpc import DatastoresStub
from memlm.wire import codec

ROOT, EVE, BOB = "the operator's secret", "eve's own secret 00", "bob's own secret 00"
SECRET = ("payroll", "hidden", "gone", "given", "salar")  # of names, folders and texts of others


def rights_of(folder: Path, *names: str) -> Rights:
    """Of a server whose folder has these datastores in service."""
    stores = DatastoreRegistry((), folder)
    for name in names:
        (folder / f"{name}-{'0' * 16}").mkdir(parents=True)
        stores.put(name, folder / f"{name}-{'0' * 16}")
    return Rights(ServerConfig(Path("model"), store_dir=folder), stores)


def test_every_rpc_of_the_contract_has_a_rule() -> None:
    assert {method.name for method in METHODS} == set(RULES)
    assert len({method.name for method in METHODS}) == len(METHODS)


def test_an_rpc_that_names_a_datastore_or_a_path_has_a_rule_that_looks_at_it() -> None:
    naming = {"store", "stores", "retrieval", "path"}
    for method in METHODS:
        fields = {field.name for field in GetMessageClass(method.input_type).DESCRIPTOR.fields}
        assert not (fields & naming and RULES[method.name] in (_no_store, _own_resource)), method.name


def test_what_a_question_leaves_open_is_filled_with_the_callers_own(tmp_path: Path) -> None:
    rights, ann = rights_of(tmp_path, "a", "b", "z"), Principal("ann", stores=frozenset({"b", "a", "not-there"}))
    authorized = rights.authorize("Generate", ann, GenerateRequest("x"))
    assert authorized.retrieval.stores == (StoreWeight("a"), StoreWeight("b"))
    alone = rights.authorize("Generate", Principal("ben", stores=frozenset({"not-there"})), GenerateRequest("x"))
    assert not alone.retrieval.use_store
    scored = rights.authorize("Score", ann, ScoreRequest("x", RetrievalParams(use_store=False)))
    assert scored.retrieval.stores == ()
    assert rights.authorize("Generate", ann, GenerateRequest("x", adapter="law")).retrieval.stores == ()
    with pytest.raises(PermissionDenied):
        rights.authorize("Score", ann, ScoreRequest("x", RetrievalParams(stores=(StoreWeight("a"), StoreWeight("c")))))
    with pytest.raises(PermissionDenied, match="has to name a datastore; it may use a, b, not-there"):
        rights.authorize("Search", ann, SearchRequest("x"))
    assert rights.authorize("Search", Principal("ben", stores=frozenset({"a"})), SearchRequest("x")).store == "a"
    assert rights.authorize("Search", Principal("root"), SearchRequest("x")).store is None


def test_a_folder_belongs_to_the_names_it_is_in_service_under_else_to_the_one_it_was_built_under(
    tmp_path: Path,
) -> None:
    rights, eve = rights_of(tmp_path, "mine", "payroll"), Principal("eve", stores=frozenset({"mine"}))

    def load(path: str, name: str | None = "mine") -> str:
        return rights.authorize("LoadDatastore", eve, LoadDatastoreRequest(path, name, replace=True)).path

    own_folder, payroll = (f"{name}-{'0' * 16}" for name in ("mine", "payroll"))
    assert load(own_folder) == load(own_folder, None) == load(str(tmp_path / own_folder)) == str(tmp_path / own_folder)
    (tmp_path / "link").symlink_to(payroll)
    others = [
        payroll,
        str(tmp_path / payroll),
        f"{own_folder}/../{payroll}",
        "link",
        f"./{payroll}/",
        f"{payroll}/segments",
    ]
    others += ["", ".", "jobs", "..", "/", "payroll", str(tmp_path), f"not-there-{'0' * 16}"]
    for path in others:
        with pytest.raises(PermissionDenied):
            load(path)
    rights.stores.remove("payroll")
    for path in others:
        with pytest.raises(PermissionDenied):
            load(path)
    rights.stores.put("payroll", tmp_path / own_folder)  # the operator gave it another name
    rights.stores.remove("mine")
    with pytest.raises(PermissionDenied):
        load(own_folder)
    rights.stores.remove("payroll")
    assert load(own_folder) == str(tmp_path / own_folder)


@pytest.mark.parametrize("stores", [None, frozenset({"a"})])
def test_an_error_tells_no_path_of_the_server(tmp_path: Path, stores: frozenset[str] | None) -> None:
    given, sessions = tmp_path / "elsewhere" / "given", tmp_path / "sessions"
    given.mkdir(parents=True)
    config = ServerConfig(tmp_path / "models" / "m", (given,), store_dir=tmp_path / "stores", session_dir=sessions)
    rights = Rights(config, DatastoreRegistry(config.stores, config.store_dir))
    for text, display_name in (
        (f"{tmp_path}/stores/a-1/CURRENT is damaged", "a-1/CURRENT is damaged"),
        (f"the disk of {tmp_path}/stores is full", "the disk of stores is full"),
        (f"{given}/segments/000001 is damaged", "given/segments/000001 is damaged"),
        (f"({given}); {given}, {given}.", "(given); given, given."),
        (f"{sessions}/abc.session was changed", "abc.session was changed"),
        (f"{tmp_path}/models/m is no model", "m is no model"),
        (f"/x{given} and {given}s stay", f"/x{given} and {given}s stay"),
    ):
        error = rights.redact_error(stores, Corrupt(text))
        assert (type(error), str(error)) == (Corrupt, display_name)
    bad = rights.redact_error(stores, InvalidInput(f"{given} is bad", field="path"))
    assert isinstance(bad, InvalidInput)
    assert (str(bad), bad.field) == ("given is bad", "path")
    late = rights.redact_error(stores, Overloaded("later", retry_after_s=3.0))
    assert isinstance(late, Overloaded)
    assert late.retry_after_s == 3.0
    missing = rights.redact_error(stores, NotFound(f"no {given}", kind="file", name=str(given)))
    assert isinstance(missing, NotFound)
    assert (str(missing), missing.kind, missing.name) == ("no given", "file", "given")


@dataclasses.dataclass(frozen=True)
class House:
    """A server with datastores of its operator's, and eve, who may use her own alone."""

    server: RunningServer
    folder: Path
    root: Client
    eve: Client

    def paths_of_others(self) -> list[str]:
        """Every way to spell where the others' datastores lie."""
        stores = self.folder / "stores"
        folders = [next(stores.glob(f"{name}-*")).name for name in ("payroll", "gone")]
        places = [str(stores / name) for name in folders] + [str(self.folder / "given")]
        relative = [*folders, *(f"x/../{name}" for name in folders), "given", "link", "payroll"]
        return [*places, *relative, *(os.path.relpath(place) for place in places), str(self.folder / "outside-link")]


@pytest.fixture(scope="module")
def house(
    tmp_path_factory: pytest.TempPathFactory, model_folder: Path, corpus_folder: Path, store_folder: Path
) -> Iterator[House]:
    folder = tmp_path_factory.mktemp("house")
    shutil.copytree(store_folder, folder / "given")
    (folder / "tokens.toml").write_text(
        f"[[token]]\nname = 'root'\nsecret = {json.dumps(ROOT)}\n"
        f"[[token]]\nname = 'eve'\nsecret = {json.dumps(EVE)}\nstores = ['mine', 'mine-too']\n"
        f"[[token]]\nname = 'bob'\nsecret = {json.dumps(BOB)}\ncalls = ['AddDocuments', 'DeleteDocuments']\n"
    )
    (folder / "tokens.toml").chmod(0o600)
    options = ("--threads", "1", "--auth-file", str(folder / "tokens.toml"), "--store-dir", str(folder / "stores"))
    options += ("--corpus-root", str(corpus_folder))
    with (
        RunningServer(folder / "log", model_folder, folder / "given", options=options) as server,
        Client(server.address, token=ROOT) as root,
        Client(server.address, token=EVE) as eve,
    ):
        for name in ("payroll", "gone"):
            root.datastores.build(name, str(corpus_folder)).result(PATIENCE_S)
        secret = NewDocument("salaries", "the salary of ann is 1234567", "salaries")
        for name in ("payroll", "gone", "given"):
            root.datastores.add(name, [secret]).result(PATIENCE_S)
        root.datastores.unload("gone")
        eve.datastores.build("mine", str(corpus_folder)).result(PATIENCE_S)
        (folder / "stores" / "link").symlink_to(next((folder / "stores").glob("payroll-*")).name)
        (folder / "outside-link").symlink_to(folder / "given")
        yield House(server, folder, root, eve)


# Every call that takes a datastore, with one of somebody else's.
WAYS: dict[str, Callable[[Client, str, Path], Any]] = {
    "Generate": lambda eve, name, corpus: list(eve.generate("the salary", store=name, max_tokens=2)),
    "Generate of several": lambda eve, name, corpus: list(eve.generate("a", stores={"mine": 1.0, name: 1.0})),
    "Chat": lambda eve, name, corpus: list(eve.chat("the salary", store=name, max_tokens=2)),
    "Score": lambda eve, name, corpus: eve.score("the salary", store=name),
    "Score of several": lambda eve, name, corpus: eve.score("the salary", stores={name: 1.0}),
    "Answer": lambda eve, name, corpus: list(eve.stream_answer("the salary", store=name, max_tokens=2)),
    "Answer from passages": lambda eve, name, corpus: eve.answer("the salary", passage_stores=name, use_store=False),
    "FindPassages": lambda eve, name, corpus: eve.find_passages("the salary", store=name),
    "Search": lambda eve, name, corpus: eve.search(name, "the salary"),
    "Trace": lambda eve, name, corpus: eve.trace("the salary of ann is 1234567", name),
    "GetDatastore": lambda eve, name, corpus: eve.datastores.get(name),
    "Remember": lambda eve, name, corpus: eve.datastores.remember(name, "eve was here"),
    "DeleteDocuments": lambda eve, name, corpus: eve.datastores.delete_documents(name, ["salaries"]),
    "BuildDatastore": lambda eve, name, corpus: eve.datastores.build(name, str(corpus), replace=True),
    "AddDocuments": lambda eve, name, corpus: eve.datastores.add(name, [NewDocument("new", "text")]),
    "CompactDatastore": lambda eve, name, corpus: eve.datastores.compact(name),
    "UnloadDatastore": lambda eve, name, corpus: eve.datastores.unload(name),
    "LoadDatastore": lambda eve, name, corpus: eve.datastores.load("mine", name, replace=True),
}


def message_of(error: BaseException) -> str:
    return f"{error} {getattr(error, 'name', '')}"


def without(text: str, echoed: str) -> str:
    """An error's text without what the caller wrote, as it was written or as paths are shown."""
    return text.replace(echoed, "").replace(Path(echoed).name, "")


@pytest.mark.parametrize("way", WAYS)
def test_no_call_reads_changes_or_learns_of_anothers_datastore(house: House, way: str, corpus_folder: Path) -> None:
    covered = {call for call, rule in RULES.items() if rule not in (_no_store, _own_resource)} - {"ListDatastores"}
    assert covered <= set(WAYS)
    before = house.root.datastores.list()
    for name in ("payroll", "gone", "given", "never-there", *house.paths_of_others()):
        with pytest.raises((PermissionDenied, InvalidInput)) as refused:
            WAYS[way](house.eve, name, corpus_folder)
        message = without(message_of(refused.value), name)
        assert not [secret for secret in (*SECRET, str(house.folder)) if secret in message], message
    assert house.root.datastores.list() == before


def test_no_path_takes_anothers_datastore_into_service(house: House) -> None:
    before, files = house.root.datastores.list(), sorted(map(str, (house.folder / "stores").rglob("*")))
    for path in house.paths_of_others():
        for name in ("mine", "mine-too", None):
            with pytest.raises(PermissionDenied) as refused:
                house.eve.datastores.load(path, name, replace=True)
            message = without(message_of(refused.value), path)
            assert not [secret for secret in (*SECRET, str(house.folder)) if secret in message], message
    assert house.root.datastores.list() == before
    assert sorted(map(str, (house.folder / "stores").rglob("*"))) == files


def test_what_is_left_open_and_what_is_listed_is_the_callers_own(house: House) -> None:
    assert [store.name for store in house.eve.datastores.list()] == ["mine"]
    (found,) = {neighbor.store for neighbor in house.eve.search("mine", "the salary of ann", k=8)}
    assert found == "mine"
    for token in house.eve.generate("the salary", max_tokens=3, neighbors=8):
        assert {neighbor.store for neighbor in token.neighbors} == {"mine"}
    assert house.eve.score("the salary").store == "mine"
    with pytest.raises(NotFound, match=r"no datastore 'mine-too' is loaded.*; loaded: mine$"):
        house.eve.search("mine-too", "a")
    for call in (
        house.eve.datastores.get,
        lambda: house.eve.search(None, "a"),
        lambda: house.eve.datastores.add(None, []),
    ):
        with pytest.raises((PermissionDenied, InvalidInput)) as refused:
            call()
        assert not [secret for secret in SECRET if secret in message_of(refused.value)]


def test_a_callers_own_datastore_comes_and_goes_by_the_path_it_is_shown(house: House) -> None:
    display_name = house.eve.datastores.get("mine").path
    assert (house.folder / "stores" / display_name).is_dir()
    assert house.eve.datastores.unload("mine").path == display_name
    assert house.eve.datastores.list() == ()
    assert house.eve.datastores.load(display_name, "mine-too").name == "mine-too"
    assert house.eve.datastores.load(str(house.folder / "stores" / display_name), "mine").path == display_name
    house.eve.datastores.unload("mine-too")


def test_the_problem_of_a_datastore_tells_no_path(tmp_path: Path) -> None:
    rights, folder = rights_of(tmp_path, "mine"), tmp_path / f"mine-{'0' * 16}"
    info = StoreInfo.unusable("mine", str(folder), f"{folder}/CURRENT was changed")
    (display_name,) = rights.redact(Principal("eve", stores=frozenset({"mine"})), (info,))
    assert (display_name.path, display_name.problem) == (folder.name, f"{folder.name}/CURRENT was changed")


def test_callers_see_no_absolute_path_and_the_log_has_it(house: House) -> None:
    assert {store.path for store in house.root.datastores.list() if store.name == "given"} == {"given"}
    damaged = house.folder / "stores" / "broken"
    damaged.mkdir()
    (damaged / "CURRENT").write_text("manifest-000001.json 00")
    with pytest.raises(MemlmError) as refused:
        house.root.datastores.load("broken")
    assert "broken/CURRENT" in str(refused.value)
    assert str(house.folder) not in message_of(refused.value)
    assert str(damaged / "CURRENT") in house.server.output


def test_who_may_not_build_makes_no_datastore_in_place_of_one_that_goes_during_the_upload(
    house: House, corpus_folder: Path
) -> None:
    """The right was not needed when the upload began, and is looked at again at its end."""
    stores = house.folder / "stores"
    house.root.datastores.build("shared", str(corpus_folder), keys="none", check="none").result(PATIENCE_S)
    before = set(stores.glob("shared-*"))

    def messages() -> Iterator[object]:
        yield codec.to_wire(AddDocumentsRequest("shared", sync="notes", check="none"))
        wait_until(lambda: list((stores / "jobs").glob("*.ways")))
        house.root.datastores.unload("shared")
        yield codec.to_wire(AddDocumentsRequest(documents=(NewDocument("new", "text"),), num_documents=1))

    with grpc.insecure_channel(house.server.address) as channel, pytest.raises(grpc.RpcError) as refused:
        DatastoresStub(channel).AddDocuments(
            messages(), timeout=PATIENCE_S, metadata=[("authorization", f"Bearer {BOB}")]
        )
    assert refused.value.code() == grpc.StatusCode.NOT_FOUND
    assert "no datastore 'shared' is loaded" in refused.value.details()
    assert set(stores.glob("shared-*")) == before
    assert not list((stores / "jobs").glob("*.ways"))
