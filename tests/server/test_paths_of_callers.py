"""Paths and names that callers send: nothing outside the server's own folders is read, loaded or named."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from running import PATIENCE_S, RunningServer

from memlm.client import Client
from memlm.errors import Incompatible, InvalidInput, MemlmError, NotFound, PermissionDenied
from memlm.index.store.datastore import Datastore

SECRET = "nobody may read this here\n" * 20


class Place:
    """A server with a folder for datastores and a root of texts; beside them, what it must not touch."""

    def __init__(self, folder: Path, model: Path, store: Path, corpus: Path) -> None:
        self.folder, self.stores, self.texts = folder, folder / "stores", folder / "texts"
        shutil.copytree(corpus, self.texts)
        self.other = Path(shutil.copytree(store, folder / "outside" / "other"))  # a sound store that is not offered
        (folder / "outside" / "secret.txt").write_text(SECRET)
        (folder / "texts-beside").mkdir()
        (folder / "texts-beside" / "secret.txt").write_text(SECRET)
        options = ("--threads", "1", "--store-dir", str(self.stores), "--corpus-root", str(self.texts))
        self.server = RunningServer(folder / "log", model, options=options)


@pytest.fixture(scope="module")
def place(
    tmp_path_factory: pytest.TempPathFactory, model_folder: Path, store_folder: Path, corpus_folder: Path
) -> Iterator[Place]:
    place = Place(tmp_path_factory.mktemp("paths"), model_folder, store_folder, corpus_folder)
    with place.server:
        yield place


@pytest.fixture
def client(place: Place) -> Iterator[Client]:
    with Client(place.server.address) as client:
        yield client
        assert client.datastores.list() == ()


def test_no_path_leads_a_load_out_of_the_servers_folders(place: Place, client: Client) -> None:
    links = {"link": place.other, "folder-link": place.other.parent, "root-link": Path("/")}
    for name, target in links.items():
        (place.stores / name).symlink_to(target)
    paths = [
        place.other,
        f"{place.stores}/../outside/other",
        f"{place.stores}/./.././outside/other/",
        f"{place.stores}/link",
        f"{place.stores}/folder-link/other",
        f"{place.stores}/root-link{place.other}",
        os.path.relpath(place.other),
        f"{place.stores}-beside/other",
        "/etc",
        "/",
        "\0",
        f"{place.stores}/link\0",
    ]
    try:
        for path in paths:
            with pytest.raises(PermissionDenied):
                client.datastores.load(str(path))
        # Relative to the folder for datastores, where there is nothing of the kind.
        for path in (
            "",
            ".",
            "~",
            f"file://{place.other}",
            "not-there",
            f"{place.stores}/not-there",
            f"{place.stores}/{'a' * 300}",
        ):
            with pytest.raises((PermissionDenied, NotFound, InvalidInput, Incompatible)):
                client.datastores.load(path)
    finally:
        for name in links:
            (place.stores / name).unlink()
    with Datastore.open(place.other) as store:
        assert store.snapshot.verify() == []


@pytest.mark.parametrize(
    "name",
    [
        "",
        ".",
        "..",
        "../docs",
        ".hidden",
        "a/b",
        "/docs",
        "a\\b",
        "a\0b",
        "a\nb",
        "-docs",
        "x" * 101,
        "é/",
        "jobs/x",
        " ",
    ],
)
def test_a_name_that_is_no_name_builds_nothing(place: Place, client: Client, name: str) -> None:
    before, operations = sorted(place.folder.rglob("*")), client.operations.list()
    with pytest.raises(InvalidInput, match="store"):
        client.datastores.build(name, str(place.texts))
    assert sorted(place.folder.rglob("*")) == before
    assert client.operations.list() == operations


def test_no_corpus_outside_the_roots_is_read(place: Place, client: Client) -> None:
    (place.texts / "out").symlink_to(place.folder / "outside")
    corpora = [
        place.folder / "outside",
        place.folder / "outside" / "secret.txt",
        f"{place.texts}/../outside/secret.txt",
        f"{place.texts}/out/secret.txt",
        f"{place.texts}/out",
        f"{place.texts}-beside",
        "/etc/passwd",
        os.path.relpath(place.folder / "outside"),
        "~/.ssh",
        "-",
        "\0",
        "",
    ]
    try:
        for corpus in corpora:
            with pytest.raises((PermissionDenied, NotFound, InvalidInput)):
                client.datastores.build("docs", str(corpus)).result(PATIENCE_S)
            with pytest.raises((PermissionDenied, NotFound, InvalidInput)):
                client.datastores.build("docs", [str(place.texts), str(corpus)]).result(PATIENCE_S)
    finally:
        (place.texts / "out").unlink()


def test_links_that_lead_out_of_a_root_are_left_out(place: Place, client: Client) -> None:
    links = {
        "file.txt": place.folder / "outside" / "secret.txt",
        "folder": place.folder / "outside",
        "etc": Path("/etc"),
    }
    for name, target in links.items():
        (place.texts / name).symlink_to(target)
    (place.texts / "inside.txt").symlink_to(place.texts / "doc-0.txt")
    try:
        report = client.datastores.build("docs", str(place.texts)).result(PATIENCE_S)
        path = place.stores / client.datastores.get("docs").path
        with Datastore.open(path) as store:
            names = {document.id for document in store.snapshot.documents()}
        assert names == {f"doc-{number}.txt" for number in range(8)} | {"inside.txt"}
        assert report.num_documents == 9
        for file in path.rglob("*"):
            assert not file.is_file() or b"nobody may read" not in file.read_bytes()
        client.datastores.unload("docs")
    finally:
        for name in (*links, "inside.txt"):
            (place.texts / name).unlink()


def test_an_error_about_a_path_does_not_say_whether_it_is_there(place: Place, client: Client) -> None:
    message = []
    for name in ("other", "nothing"):
        path = str(place.folder / "outside" / name)
        with pytest.raises(MemlmError) as refused:
            client.datastores.load(path)
        message.append(str(refused.value).replace(path, "PATH"))
    assert message[0] == message[1]
