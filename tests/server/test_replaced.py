"""A server whose datastores' folders are replaced, rolled back and broken while it runs."""

from __future__ import annotations

import os
import shutil
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import count, takewhile
from pathlib import Path
from threading import Event

import pytest
from running import RunningServer, wait_until
from texts import make_text

from memlm.base import files
from memlm.base.files import checksum_of, read_signed, sign
from memlm.client import Client
from memlm.data.corpus import Corpus
from memlm.errors import Incompatible, MemlmError, NotFound, Unavailable
from memlm.index.store.datastore import Datastore
from memlm.index.store.manifest import read_manifest
from memlm.indexing.build import build_index
from memlm.server.config import ServerConfig
from memlm.server.jobs.records import JobRecords
from memlm.server.ownership import lock_folders
from memlm.server.registry import DatastoreRegistry

PROMPT, OTHERS = make_text(3, 8), {f"other-{number}.txt" for number in range(3)}
ASKED = 16  # often enough that each of two workers has answered
SECOND = 10.0  # generous: a change is taken up within a second on a machine that has time


@pytest.fixture(scope="module")
def other_store(tmp_path_factory: pytest.TempPathFactory, model_folder: Path) -> Path:
    corpus = tmp_path_factory.mktemp("folder") / "other"
    corpus.mkdir()
    for number in range(3):
        (corpus / f"other-{number}.txt").write_text(make_text(100 + number, 60), encoding="utf-8")
    build_index(model_folder, Corpus([corpus]), corpus.with_name("other-store"), check="none")
    return corpus.with_name("other-store")


@pytest.fixture
def live(store_folder: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(store_folder, tmp_path / "live"))


@pytest.fixture
def duo(tmp_path: Path, model_folder: Path, live: Path, store_folder: Path) -> Iterator[RunningServer]:
    """Two workers, with a store whose folder changes and one whose folder stays."""
    options = ("--threads", "1", "--workers", "2")
    with RunningServer(tmp_path / "log", model_folder, live, store_folder, options=options) as server:
        yield server


def put(store: Path, live: Path) -> None:
    """`mv live old; cp -r store live`."""
    live.rename(live.with_name(f"old-{len(list(live.parent.iterdir()))}"))
    shutil.copytree(store, live)


def documents(client: Client, store: str = "live") -> set[str]:
    """What a search finds, whichever worker answers."""
    return {neighbor.document_id for _ in range(ASKED) for neighbor in client.search(store, PROMPT, k=4000)}


def outcome(client: Client, **options: object) -> str:
    """What comes of a generation."""
    try:
        list(client.generate("x", max_tokens=1, **options))
    except MemlmError as error:
        return type(error).__name__
    return "answered"


def outcomes(client: Client, **options: object) -> set[str]:
    return {outcome(client, **options) for _ in range(ASKED)}


def test_a_store_that_is_replaced_is_taken_up_and_changed_as_it_is(
    duo: RunningServer, live: Path, other_store: Path
) -> None:
    assert read_manifest(live).number == read_manifest(other_store).number
    with Client(duo.address) as client:
        put(other_store, live)
        wait_until(lambda: documents(client) == OTHERS, SECOND)
        with pytest.raises(NotFound, match="doc-1"):
            client.datastores.delete_documents("live", ["doc-1.txt"])
        client.datastores.delete_documents("live", ["other-1.txt"])
        assert documents(client) == OTHERS - {"other-1.txt"}
        with Datastore.open(live) as store:
            assert store.snapshot.verify() == []
            assert {document.id for document in store.snapshot.documents()} == OTHERS - {"other-1.txt"}
        assert client.datastores.get("live").store_id == read_manifest(other_store).store_id


def test_a_deletion_that_comes_before_the_replacement_was_noticed_is_from_what_is_there(
    duo: RunningServer, live: Path, other_store: Path
) -> None:
    with Client(duo.address) as client:
        put(other_store, live)
        client.datastores.delete_documents("live", ["other-2.txt"])
        assert documents(client) == OTHERS - {"other-2.txt"}


def test_a_deletion_after_a_roll_back_is_acknowledged_when_no_worker_finds_the_document(
    duo: RunningServer, live: Path
) -> None:
    backup = Path(shutil.copytree(live, live.with_name("backup")))
    with Client(duo.address) as client:
        for number in (1, 2, 3):
            client.datastores.delete_documents("live", [f"doc-{number}.txt"])
        put(backup, live)
        report = client.datastores.delete_documents("live", ["doc-2.txt"])
        assert report.manifest == read_manifest(backup).number + 1
        assert documents(client) == {f"doc-{number}.txt" for number in range(8)} - {"doc-2.txt"}


def test_a_store_that_cannot_be_read_is_named_and_all_else_goes_on(
    duo: RunningServer, live: Path, store_folder: Path
) -> None:
    manifest = read_manifest(live)
    body = {**read_signed((live / manifest.name).read_bytes()), "shards": 4}  # as a newer version would have written it
    (live / manifest.name).write_bytes(sign(body))
    (live / "CURRENT").write_text(f"{manifest.name} {checksum_of(sign(body))} {manifest.store_id}\n")
    with Client(duo.address) as client:
        wait_until(lambda: outcomes(client, store="live") == {"Incompatible"}, SECOND)
        assert outcomes(client, store="store") == outcomes(client, use_store=False) == {"answered"}
        assert outcomes(client) == {"Incompatible"}
        problems = {store.name: store.problem for store in client.datastores.list()}
        assert problems["store"] == ""
        assert "shards" in problems["live"]
        with pytest.raises(Incompatible, match=r"'live'.*shards"):
            client.search("live", PROMPT)

        before = duo.worker_pids
        os.kill(before[0], signal.SIGKILL)
        wait_until(lambda: len(duo.worker_pids) == 2 and duo.worker_pids != before)
        os.kill(before[1], signal.SIGKILL)
        wait_until(lambda: len(duo.worker_pids) == 2 and not set(before) & set(duo.worker_pids))

        def is_back() -> bool:
            try:
                return outcomes(client, store="store") == {"answered"} == outcomes(client, use_store=False)
            except Unavailable:
                return False

        wait_until(is_back)
        assert outcomes(client, store="live") == {"Incompatible"}
        assert client.datastores.get("live").num_entries == 0
        put(store_folder, live)
        wait_until(lambda: outcomes(client, store="live") == {"answered"}, SECOND + 10)
        assert documents(client) == documents(client, "store")
        assert not any(store.problem for store in client.datastores.list())
    warnings = [line for line in duo.output.splitlines() if "memlm.stores" in line and "cannot be used" in line]
    assert len(warnings) == 4  # once in each of the four processes


def test_a_server_does_not_start_with_a_store_that_it_was_given_and_cannot_open(
    tmp_path: Path, model_folder: Path, live: Path
) -> None:
    (live / "CURRENT").unlink()
    with pytest.raises(AssertionError, match="CURRENT is missing"):
        RunningServer(tmp_path / "log", model_folder, live)


def test_a_restart_does_not_forget_a_datastore_whose_folder_is_missing(tmp_path: Path) -> None:
    stores = DatastoreRegistry([], tmp_path)
    (tmp_path / "docs-1").mkdir()
    stores.put("docs", tmp_path / "docs-1")
    (tmp_path / "docs-1").rmdir()
    assert DatastoreRegistry([], tmp_path).paths == {"docs": tmp_path / "docs-1"}


def test_a_datastore_is_removed_while_a_worker_still_writes_to_it(tmp_path: Path) -> None:
    registry, folder = DatastoreRegistry([], tmp_path), tmp_path / "docs-0123456789abcdef"
    folder.mkdir()

    removed = Event()

    def write() -> None:
        for number in takewhile(lambda _: not removed.is_set(), count()):
            (folder / f"manifest-{number}.tmp").touch()

    with ThreadPoolExecutor(1) as worker:
        writing = worker.submit(write)
        wait_until(lambda: len(list(folder.iterdir())) > 200)
        try:
            registry.discard(folder)
            wait_until(writing.done)
        finally:
            removed.set()
    assert list(tmp_path.iterdir()) == []
    assert isinstance(writing.exception(), FileNotFoundError)


def test_the_rest_of_a_removal_that_was_killed_is_removed_by_the_next_start(tmp_path: Path) -> None:
    for name in ("docs-0123456789abcdef.removed", "docs-0123456789abcdef", "mine.removed"):
        (tmp_path / name / "segments").mkdir(parents=True)
    link = tmp_path / "link-0123456789abcdef.removed"  # which cannot be removed so, and hinders no start
    link.symlink_to(tmp_path / "mine.removed")
    DatastoreRegistry([], tmp_path)
    kept = ["docs-0123456789abcdef", "link-0123456789abcdef.removed", "mine.removed"]
    assert sorted(each.name for each in tmp_path.iterdir()) == kept
    assert (tmp_path / "mine.removed" / "segments").is_dir()


def test_the_folders_of_sessions_and_operations_are_on_the_disk_before_anything_is_in_them(
    tmp_path: Path, model_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced, fsync = set[str](), os.fsync

    def watched(descriptor: int) -> None:
        synced.add(os.readlink(f"/proc/self/fd/{descriptor}"))
        fsync(descriptor)

    monkeypatch.setattr(files.os, "fsync", watched)
    folders = {"session_dir": tmp_path / "a" / "sessions", "store_dir": tmp_path / "b" / "stores"}
    with lock_folders(ServerConfig(model_folder, **folders)):
        JobRecords(folders["store_dir"] / "jobs")
    assert {str(tmp_path / each) for each in (".", "a", "b", "b/stores")} <= {str(Path(each)) for each in synced}
