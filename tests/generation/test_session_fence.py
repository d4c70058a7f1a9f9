"""Processes of an earlier server change no session file once another server has the folder."""

import threading
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from itertools import product
from pathlib import Path

import pytest
from crashes import calling_at, is_killed_at

from memlm.base.steps import run_steps
from memlm.errors import MemlmError, NotWritable, Unavailable
from memlm.generation.sessions.fence import FENCE, SessionFence
from memlm.generation.sessions.files import SessionFiles
from memlm.generation.sessions.names import SessionNames
from memlm.generation.sessions.sessions import Sessions
from memlm.model.files.checkpoint import Checkpoint

TEXT = "the memory of a model can be read and edited"
TAKEN = r"another server \(second\) has the session folder"


def sessions_of(checkpoint: Checkpoint, fence: SessionFence, **options: float) -> Sessions:
    return Sessions(checkpoint, folder=fence.folder, names=SessionNames(check=fence.check), **options)


def content_of(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


CHANGES: dict[str, Callable[[Sessions, str], object]] = {
    "create": lambda sessions, name: run_steps(sessions.create()),
    "append": lambda sessions, name: run_steps(sessions.append(name, TEXT)),
    "forget": lambda sessions, name: run_steps(sessions.forget(name, 1, 3)),
    "fork": lambda sessions, name: run_steps(sessions.fork(name)),
    "delete": lambda sessions, name: run_steps(sessions.delete(name)),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_nothing_is_changed_once_another_server_has_the_folder(checkpoint, tmp_path: Path, change) -> None:
    sessions = sessions_of(checkpoint, SessionFence.take(tmp_path, "first"))
    name = run_steps(sessions.create()).name
    tokens = run_steps(sessions.append(name, TEXT)).num_tokens
    second = SessionFence.take(tmp_path, "second")
    assert second.earlier == "first"
    before = content_of(tmp_path)
    with pytest.raises(Unavailable, match=TAKEN):
        change(sessions, name)
    assert content_of(tmp_path) == before
    assert sessions_of(checkpoint, second).get(name).num_tokens == tokens


def test_a_session_that_expires_keeps_its_file_for_the_other_server(checkpoint, tmp_path: Path) -> None:
    sessions = sessions_of(checkpoint, SessionFence.take(tmp_path, "first"), ttl_s=0.001)
    run_steps(sessions.create())
    SessionFence.take(tmp_path, "second")
    before = content_of(tmp_path)
    time.sleep(0.05)
    with pytest.raises(Unavailable, match=TAKEN):
        sessions.expire()
    assert content_of(tmp_path) == before


WRITES = {name: change for name, change in CHANGES.items() if name != "delete"}


@pytest.mark.parametrize("change", WRITES.values(), ids=WRITES)
def test_a_write_that_is_overtaken_at_any_point_counts_before_or_never(checkpoint, tmp_path: Path, change) -> None:
    """The other server takes the folder before each sync, move and removal of a write, also between check and move.
    What it finds then is what stays.
    """
    outcomes = set()
    for step in range(1, 20):
        folder = tmp_path / str(step)
        folder.mkdir()
        sessions = sessions_of(checkpoint, SessionFence.take(folder, "first"))
        name = run_steps(sessions.create()).name
        run_steps(sessions.append(name, TEXT))
        before, found = content_of(folder), list[dict[str, bytes]]()

        def take(folder: Path = folder, found: list[dict[str, bytes]] = found) -> None:
            if not found:
                found.append({})  # its own operations are counted, too
                SessionFence.take(folder, "second")
                found[0] |= content_of(folder)

        with calling_at(step, take), suppress(Unavailable):
            change(sessions, name)
        if not found:
            break
        assert content_of(folder) == found[0]
        assert found[0][FENCE] == b"second"
        outcomes.add({**found[0], FENCE: b"first"} == before)
    assert not found
    assert outcomes == {True, False}


class Turns:
    """Threads that do their durable operations by turns."""

    def __init__(self, **works: Callable[[], object]) -> None:
        self._may_go, self._waits = ({name: threading.Semaphore(0) for name in works} for _ in range(2))
        self._rest, self.errors = set(works), list[MemlmError]()
        self._threads = [threading.Thread(target=self._run, args=each, name=each[0]) for each in works.items()]

    def start(self) -> None:
        """Up to the first operation of each."""
        for thread in self._threads:
            thread.start()
            self._waits[thread.name].acquire()

    def wait(self) -> None:
        """Is called in a thread before each of its operations."""
        name = threading.current_thread().name
        self._waits[name].release()
        self._may_go[name].acquire()

    def go(self, name: str, count: int = 100) -> None:
        """Lets a thread do so many operations, or those that are left."""
        while count and name in self._rest:
            count -= 1
            self._may_go[name].release()
            self._waits[name].acquire()

    def _run(self, name: str, work: Callable[[], object]) -> None:
        try:
            work()
        except MemlmError as error:
            self.errors.append(error)
        finally:
            self._rest.remove(name)
            self._waits[name].release()


def test_a_write_and_the_taking_of_a_folder_in_any_order_of_their_steps(checkpoint, tmp_path: Path) -> None:
    """The writer does some operations, the other server does some, the writer does more, the other server ends, and
    then the writer does. What is there once the folder is taken is what stays.
    """
    made = sessions_of(checkpoint, SessionFence.take(tmp_path, "first"))
    record = made.read_file(run_steps(made.create()).name)
    assert record is not None
    outcomes = set()
    for before, taking, between in product(range(6), range(7), range(6)):
        folder = tmp_path / f"{before}-{taking}-{between}"
        folder.mkdir()
        files = SessionFiles(folder, checkpoint, SessionFence.take(folder, "first").check)
        (folder / "left.session.01234567.tmp").touch()  # so that there is one to be removed, whatever the writer does
        turns = Turns(write=partial(files.write, record), take=partial(SessionFence.take, folder, "second"))
        with calling_at(1, turns.wait):
            turns.start()
            turns.go("write", before)
            turns.go("take", taking)
            turns.go("write", between)
            turns.go("take")
            found = [path.name for path in folder.glob("*.session")]
            turns.go("write")
        assert [path.name for path in folder.glob("*.session")] == found
        assert len(found) + len(turns.errors) == 1
        outcomes.add(len(found))
    assert outcomes == {0, 1}


def test_a_removal_may_be_late_by_the_one_that_was_checked(checkpoint, tmp_path: Path) -> None:
    """The window that is documented: between the check and the removal of one file."""
    sessions = sessions_of(checkpoint, SessionFence.take(tmp_path, "first"))
    names = [run_steps(sessions.create()).name for _ in range(2)]
    done = list[int]()

    def take() -> None:
        if not done:
            done.append(1)
            SessionFence.take(tmp_path, "second")

    with calling_at(1, take):
        run_steps(sessions.delete(names[0]))
    with pytest.raises(Unavailable, match=TAKEN):
        run_steps(sessions.delete(names[1]))
    assert [path.stem for path in tmp_path.glob("*.session")] == [names[1]]


def test_a_read_removes_no_file_that_the_other_server_writes(checkpoint, tmp_path: Path) -> None:
    first = SessionFence.take(tmp_path, "first")
    sessions = sessions_of(checkpoint, first)
    name = run_steps(sessions.create()).name
    SessionFence.take(tmp_path, "second")
    written = tmp_path / f"{name}.session.01234567.tmp"
    written.touch()
    with pytest.raises(Unavailable, match=TAKEN):
        sessions.read_file(name)
    with pytest.raises(Unavailable, match=TAKEN):
        sessions_of(checkpoint, first)
    assert written.exists()
    third = SessionFence.take(tmp_path, "third")  # until it is the other one's turn
    assert not written.exists()
    sessions_of(checkpoint, third).get(name)


def test_without_its_file_the_fence_refuses_and_loses_no_session(checkpoint, tmp_path: Path) -> None:
    """The folder may be away for a while. A session that is dropped then keeps its file."""
    fence = SessionFence.take(tmp_path, "first")
    sessions = sessions_of(checkpoint, fence)
    name, other = (run_steps(sessions.create()).name for _ in range(2))
    run_steps(sessions.append(name, TEXT))
    (tmp_path / FENCE).rename(tmp_path / "away")
    for change in CHANGES.values():
        with pytest.raises(NotWritable, match=r"server\.name is missing"):
            change(sessions, name)
    sessions._drop(sessions._find(other, ""), "was dropped")
    (tmp_path / "away").rename(tmp_path / FENCE)
    assert run_steps(sessions.append(name, TEXT)).num_tokens
    assert {info.name for info in sessions_of(checkpoint, fence).list()} == {name, other}


def test_a_kill_while_a_folder_is_taken_leaves_one_name(tmp_path: Path) -> None:
    seen, was_killed, step = set(), True, 0
    SessionFence.take(tmp_path, "first")
    left = tmp_path / "a.session.01234567.tmp"
    while was_killed:
        step += 1
        left.touch()
        (tmp_path / FENCE).write_text("first")
        was_killed = is_killed_at(step, lambda: SessionFence.take(tmp_path, "second"))
        seen.add((tmp_path / FENCE).read_text())
    assert seen == {"first", "second"}
    assert {path.name for path in tmp_path.iterdir()} == {FENCE}
    for name in ("first", "second"):  # only one of both may write
        with suppress(MemlmError):
            SessionFence(tmp_path, name).check()
            assert name == "second"
