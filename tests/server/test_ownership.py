"""Who owns a folder: one server at a time, for its whole life, and nobody else reads what it keeps there."""

import os
import re
import signal
import stat
from contextlib import suppress
from pathlib import Path

import pytest
from running import PATIENCE_S, RunningServer, family_of, is_alive, refusal_of, wait_until

from memlm.api.datastores import NewDocument
from memlm.client import Client
from memlm.errors import InvalidInput, Locked, Unavailable
from memlm.generation.sessions.fence import FENCE, SessionFence
from memlm.server.config import ServerConfig
from memlm.server.ownership import lock_folders
from memlm.server.registry import DatastoreRegistry


@pytest.mark.parametrize("option", ["session_dir", "store_dir"])
def test_a_folder_is_held_however_it_is_spelled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, option: str) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "link").symlink_to("kept")
    named = f"--{option.replace('_', '-')}"
    with lock_folders(ServerConfig(Path("model"), **{option: Path("kept")})):
        for spelled in (tmp_path / "kept", Path("link"), Path("../x/../", tmp_path.name, "kept")):
            with (
                pytest.raises(
                    Locked, match=rf"{re.escape(str(tmp_path))}/kept \({named}\) is used by another server.*its own"
                ),
                lock_folders(ServerConfig(Path("model"), **{option: spelled})),
            ):
                pass
    with lock_folders(ServerConfig(Path("model"), **{option: tmp_path / "kept"})):
        pass


def test_one_folder_may_be_both_and_is_held_once(tmp_path: Path) -> None:
    with lock_folders(ServerConfig(Path("model"), session_dir=tmp_path, store_dir=tmp_path / "." / "x" / "..")):
        pass


def test_a_refused_server_lets_go_of_what_it_held(tmp_path: Path) -> None:
    sessions, stores = tmp_path / "sessions", tmp_path / "stores"
    with lock_folders(ServerConfig(Path("model"), store_dir=stores)):
        with pytest.raises(Locked), lock_folders(ServerConfig(Path("model"), session_dir=sessions, store_dir=stores)):
            pass
        with lock_folders(ServerConfig(Path("model"), session_dir=sessions)):
            pass


def test_a_folder_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with (
        pytest.raises(InvalidInput, match=r"file/sessions \(--session-dir\) cannot be used") as refused,
        lock_folders(ServerConfig(Path("model"), session_dir=tmp_path / "file" / "sessions")),
    ):
        pass
    assert refused.value.field == "session_dir"


def test_a_second_server_is_refused_and_a_killed_ones_folders_are_free_at_once(
    tmp_path: Path, model_folder: Path
) -> None:
    folders = ("--session-dir", str(tmp_path / "sessions"), "--store-dir", str(tmp_path / "stores"))
    options = ("--threads", "1", *folders)
    with RunningServer(tmp_path / "log", model_folder, options=options) as first:
        with Client(first.address) as client:
            session = client.session().name
            client.append_to_session(session, "some text")
        said = refusal_of(tmp_path / "log-1", "--model", str(model_folder), "--port", "0", *options)
        assert "(--session-dir) is used by another server" in said
        assert "Traceback" not in said
        family = family_of(first.process.pid)
        os.kill(first.worker_pid, signal.SIGSTOP)  # an orphan that outlives its front does not hold the lock
        first.process.kill()
        first.process.wait(PATIENCE_S)
        try:
            with (
                RunningServer(tmp_path / "log-2", model_folder, options=options) as third,
                Client(third.address) as client,
            ):
                assert [info.name for info in client.list_sessions()] == [session]
        finally:
            for pid in filter(is_alive, family):
                os.kill(pid, signal.SIGKILL)
        wait_until(lambda: not any(map(is_alive, family)))


def test_processes_of_a_server_whose_folder_another_one_takes_end(tmp_path: Path, model_folder: Path) -> None:
    """As where a lock is lost. The call that would write gets UNAVAILABLE, and the files are left to the other one."""
    folder = tmp_path / "sessions"
    options = ("--threads", "1", "--session-dir", str(folder))
    with (
        RunningServer(tmp_path / "log", model_folder, options=options) as server,
        Client(server.address) as client,
    ):
        session, worker = client.session(), server.worker_pid
        session.append("some text")
        other = SessionFence.take(folder, "memlm-other-0")
        assert other.earlier is not None
        assert other.earlier.startswith("memlm-")
        before = {path: path.read_bytes() for path in folder.iterdir()}
        with pytest.raises(Unavailable):
            session.append(" and more")
        wait_until(lambda: not is_alive(worker))
        assert f"another server (memlm-other-0) has the session folder {folder} now" in server.output
        wait_until(lambda: "could not be started again: another server (memlm-other-0)" in server.output)
        assert {path: path.read_bytes() for path in folder.iterdir()} == before
        (folder / FENCE).write_text(other.earlier)  # as if it had never been: the server is the same one as before
        wait_until(lambda: is_served(client, session.name))
        assert session.append(" and more").num_tokens


def is_served(client: Client, session: str) -> bool:
    with suppress(Unavailable):
        return client.get_session(session).name == session
    return False


def test_what_a_server_writes_only_its_user_may_read(tmp_path: Path, model_folder: Path, corpus_folder: Path) -> None:
    stores, sessions = tmp_path / "stores", tmp_path / "sessions"
    options = ("--threads", "1", "--session-dir", str(sessions), "--store-dir", str(stores))
    before = os.umask(0o022)
    try:
        with (
            RunningServer(
                tmp_path / "log", model_folder, options=(*options, "--corpus-root", str(corpus_folder))
            ) as server,
            Client(server.address) as client,
        ):
            client.append_to_session(client.session().name, "some text")
            client.datastores.build("docs", str(corpus_folder)).result(PATIENCE_S)
            client.datastores.add("docs", [NewDocument("new", "some text")]).result(PATIENCE_S)
    finally:
        os.umask(before)
    written = [path for folder in (stores, sessions) for path in (folder, *folder.rglob("*"))]
    assert {".session", ".json", ".sqlite", ".lock"} <= {path.suffix for path in written}
    assert [path for path in written if stat.S_IMODE(path.stat().st_mode) & 0o077] == []


def test_a_folder_in_service_under_any_spelling_is_not_discarded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "stores" / "docs-1"
    folder.mkdir(parents=True)
    (tmp_path / "link").symlink_to("stores")
    stores = DatastoreRegistry((), Path("stores"))
    stores.put("keep", folder)
    stores.put("linked", Path("link/docs-1"))
    stores.put("docs", Path("stores/docs-1"))
    stores.remove("docs")
    stores.discard(Path("stores/docs-1"))
    assert folder.is_dir()
    stores.remove("keep")
    stores.discard(folder)
    assert folder.is_dir()
    stores.remove("linked")
    stores.discard(Path("stores/docs-1"))
    assert not folder.exists()


def test_a_datastore_keeps_its_files_while_another_name_has_its_folder(
    tmp_path: Path, model_folder: Path, corpus_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a relative --store-dir and an absolute path, which once were compared as they were spelled."""
    monkeypatch.chdir(tmp_path)
    options = ("--threads", "1", "--store-dir", "stores", "--corpus-root", str(corpus_folder))
    with RunningServer(tmp_path / "log", model_folder, options=options) as server, Client(server.address) as client:
        client.datastores.build("docs", str(corpus_folder)).result(PATIENCE_S)
        folder = tmp_path / "stores" / client.datastores.get("docs").path
        client.datastores.load(str(folder), "keep")
        client.datastores.build("docs", str(corpus_folder), replace=True).result(PATIENCE_S)
        assert client.datastores.get("docs").path != client.datastores.get("keep").path == folder.name
        assert folder.is_dir()
    with RunningServer(tmp_path / "log-2", model_folder, options=options) as server, Client(server.address) as client:
        assert {store.name for store in client.datastores.list()} == {"docs", "keep"}
        assert client.search("keep", "the memory", k=1)
