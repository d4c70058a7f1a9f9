"""Whatever happens to whatever call, afterwards places, queue, locks, files, threads and memory are what they were."""

import itertools
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from broken import BREAK, FAILS, HOLDING, REPORT_HELD
from running import (
    PATIENCE_S,
    RunningServer,
    Wire,
    family_of,
    figures_of,
    forked_by,
    forker_of,
    is_alive,
    wait_until,
    wait_until_idle,
)
from texts import make_text

from memlm.api.datastores import NewDocument
from memlm.client import Client
from memlm.errors import Cancelled, DeadlineExceeded, InternalError, MemlmError, Unavailable
from memlm.index.store.lock import write_lock

LONG_TEXT = make_text(1, 20_000)
BROKEN_OFF = MemlmError, RuntimeError, ValueError  # of a call whose client is closed
SPARE_FILES, SPARE_THREADS = 3, 8
ROUNDS, LEAKED_BYTES = 7, 4 << 20  # less than half of one of the long model's caches


class Ground:
    """A server with every kind of thing to lose, and how to see whether it lost any."""

    def __init__(self, folder: Path, model: Path, corpus: Path, **how: Any) -> None:
        self.folder, self.corpus, self.stores = folder, corpus, folder / "stores"
        options = ("--threads", "1", "--http-port", "0", "--store-dir", str(self.stores), "--drain", "30")
        options += ("+index_idle=1",)  # each check waits for the end of idle index workers
        self.server = RunningServer(folder / "log", model, options=(*options, "--corpus-root", str(corpus)), **how)
        with Client(self.server.address) as client:
            client.datastores.build("docs", str(corpus)).result(PATIENCE_S)
            self.path = self.stores / client.datastores.get("docs").path
            session = client.session().name
            for call in CALLS.values():  # allocators and pools grow to their size, once
                with Client(self.server.address, timeout_s=1.0) as hasty, suppress(*BROKEN_OFF):
                    timer = threading.Timer(2.0, hasty.close)  # some ask 40 times
                    timer.start()
                    call(hasty, self, session)
                timer.cancel()
            clean(client)
            client.delete_session(session)

    def used(self) -> dict[str, list[int]]:
        """Open files and threads of front and worker."""
        pids = [self.server.process.pid, self.server.worker_pid]
        return {
            "files": [len(os.listdir(f"/proc/{pid}/fd")) for pid in pids],
            "threads": [len(os.listdir(f"/proc/{pid}/task")) for pid in pids],
        }

    def is_settled(self, before: dict[str, list[int]]) -> bool:
        """Whether nothing goes on any more, and nothing is held that was not held before."""
        figures = figures_of(self.server)
        if any(figures[f"memlm_{name}"] for name in ("requests_open", "running", "waiting", "waiting_tokens")):
            return False
        working = forked_by(self.server.process.pid)
        if len(working) != 1 or list((self.stores / "jobs").glob("*.jsonl")):
            return False
        now, spare = self.used(), {"files": SPARE_FILES, "threads": SPARE_THREADS}
        return all(
            now_count <= before_count + spare[kind]
            for kind in now
            for now_count, before_count in zip(now[kind], before[kind], strict=True)
        )

    def check(self, before: dict[str, list[int]], session: str) -> None:
        """Fails where something is not what it was."""
        try:
            wait_until(lambda: self.is_settled(before))
        except AssertionError:
            figures = {name: value for name, value in figures_of(self.server).items() if "{" not in name}
            raise AssertionError(f"before {before}, now {self.used()}, told {figures}") from None
        with write_lock(self.path), Client(self.server.address) as client:
            assert client.get_session(session).num_tokens == 0
            assert not client.get_session(session).busy
            assert {store.name: store.num_documents for store in client.datastores.list()} == {"docs": 8}
            assert len(list(client.generate("a", max_tokens=3, temperature=0))) == 3


@pytest.fixture(scope="module")
def ground(tmp_path_factory: pytest.TempPathFactory, long_model: Path, corpus_folder: Path) -> Iterator[Ground]:
    """One whose processes tell, to the byte, what they hold: Python's own objects, too, are had from the allocator."""
    folder = tmp_path_factory.mktemp("ground")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(HOLDING, str(folder))
        patch.setenv("PYTHONMALLOC", "malloc")
        ground = Ground(folder, long_model, corpus_folder, first=REPORT_HELD)
    with ground.server:
        yield ground


ENOUGH = threading.Event()


def slow_documents() -> Iterator[NewDocument]:
    """They never come to a good end."""
    for number in itertools.count():
        if ENOUGH.wait(0.02):
            raise Cancelled("enough")
        yield NewDocument(f"slow-{number}", "text " * 10_000)


def built_and_stopped(client: Client, ground: Ground) -> None:
    """A caller that waits for what it has begun; the operation itself goes on without it."""
    job = client.datastores.build("more", str(ground.corpus), replace=True)
    job.wait(60.0)


CALLS: dict[str, Callable[[Client, Ground, str], Any]] = {
    "Generate": lambda client, ground, session: list(client.generate("a", temperature=0, session=session)),
    "Chat": lambda client, ground, session: list(client.chat("a", temperature=0, session=session)),
    "Answer": lambda client, ground, session: client.answer("memory", temperature=0, store="docs", mixture=True),
    "FindPassages": lambda client, ground, session: [client.find_passages(LONG_TEXT[:9000]) for _ in range(40)],
    "Score": lambda client, ground, session: client.score(LONG_TEXT * 20),
    "AppendToSession": lambda client, ground, session: client.append_to_session(session, LONG_TEXT[:60_000]),
    "AddDocuments": lambda client, ground, session: client.datastores.add("docs", slow_documents()),
    "Search": lambda client, ground, session: [client.search("docs", LONG_TEXT, k=64) for _ in range(40)],
    "Trace": lambda client, ground, session: [client.trace(LONG_TEXT, "docs") for _ in range(10)],
    "BuildDatastore": lambda client, ground, session: built_and_stopped(client, ground),
}


OF_THE_WORKER = {"Generate", "Chat", "Answer", "Score", "AppendToSession", "Search", "Trace"}


def cancel(client: Client, way: Wire) -> None:
    """The call is cancelled; the connection is closed in good order."""
    client.close()


def cut(client: Client, way: Wire) -> None:
    """As if the client had been killed."""
    way.cut()


def wait(client: Client, way: Wire) -> None:
    """Nothing happens, until the call's time is over."""


def clean(client: Client) -> None:
    """Stops the operations that outlive their callers, and takes out of service what they built. What was just going
    into service is not stopped by a cancel, but waited for.
    """
    for info in client.operations.list():
        client.operations.cancel(info.name)
        client.operations.open(info.name).wait(30)
    for store in client.datastores.list():
        if store.name == "more":
            client.datastores.unload("more")


# Every kind of call and every event; the other cells of the product run with the exhaustive tier.
SAMPLED = {
    ("Generate", cancel),
    ("Generate", cut),
    ("Generate", wait),
    ("Chat", cut),
    ("Answer", cut),
    ("Answer", wait),
    ("FindPassages", cancel),
    ("Score", wait),
    ("AppendToSession", cut),
    ("AddDocuments", cancel),
    ("Search", wait),
    ("Trace", wait),
    ("BuildDatastore", cut),
}


@pytest.mark.parametrize(
    ("call", "event"),
    [
        pytest.param(call, event, id=f"{call}-{event.__name__}", marks=[] if sampled else [pytest.mark.exhaustive])
        for call in CALLS
        for event in (cancel, cut, wait)
        for sampled in [(call, event) in SAMPLED]
    ],
)
def test_what_is_broken_off_leaves_nothing(ground: Ground, call: str, event: Callable[[Client, Wire], None]) -> None:
    way, ended, before = Wire(ground.server.address), list[BaseException](), ground.used()
    with Client(ground.server.address) as steady:
        session = steady.session().name
        client = Client(way.address, timeout_s=1.0 if event is wait else 60.0)

        def ask() -> None:
            try:
                CALLS[call](client, ground, session)
            except BROKEN_OFF as error:
                ended.append(error)

        asking = threading.Thread(target=ask)
        asking.start()
        wait_until(lambda: ended or figures_of(ground.server)["memlm_requests_open"])
        time.sleep(0.1)  # so that the call is in its midst
        event(client, way)
        asking.join(PATIENCE_S)
        assert not asking.is_alive()
        if event is wait:
            assert not ended or isinstance(ended[0], DeadlineExceeded), ended
        client.close()
        way.close()
        clean(steady)
        ground.check(before, session)
        steady.delete_session(session)


@pytest.mark.parametrize(
    "call",
    [
        "Generate",
        "AddDocuments",
        *(pytest.param(call, marks=pytest.mark.exhaustive) for call in ("Score", "AppendToSession", "Search")),
    ],
)
def test_what_is_broken_off_again_and_again_leaks_nothing(ground: Ground, call: str) -> None:
    """What leaks grows with every round. The memory of a process would not tell, since freed memory stays its own."""
    seen, pids = list[list[int]](), (ground.server.process.pid, ground.server.worker_pid)
    with Client(ground.server.address) as steady:
        session = steady.session().name
        for _ in range(ROUNDS):
            with Client(ground.server.address, timeout_s=0.4) as hasty, suppress(MemlmError):
                CALLS[call](hasty, ground, session)
            assert len(list(steady.generate("a", max_tokens=3, temperature=0))) == 3
            for pid in pids:
                wait_until_idle(pid)  # a text that a thread encodes is encoded to its end
                os.kill(pid, signal.SIGUSR1)
            steady.tokenize("a")  # by its answer the loops have gone round
            seen.append([int((ground.folder / str(pid)).read_text()) for pid in pids])
        steady.delete_session(session)
    early, late = seen[:3], seen[-2:]  # at least three rounds apart: one of these caches a round is found
    for place in range(len(pids)):
        assert min(each[place] for each in late) < max(each[place] for each in early) + LEAKED_BYTES, seen


def added(client: Client, document: NewDocument) -> None:
    client.datastores.add("docs", [document]).result(PATIENCE_S)


def build(client: Client, ground: Ground) -> None:
    client.datastores.build("more", str(ground.corpus)).result(PATIENCE_S)


def forget_new_text(client: Client) -> None:
    for store in client.datastores.list():
        if store.name != "docs":
            client.datastores.unload(store.name)
        elif store.num_documents > 8:
            client.datastores.delete_documents("docs", ["x"])


ENGINE_CALLS: dict[str, Callable[[Client, Ground, str], Any]] = {
    # Those two read no model, and so break nothing.
    **{call: ask for call, ask in CALLS.items() if call not in ("Trace", "FindPassages")},
    "AddDocuments": lambda client, ground, session: added(client, NewDocument("x", "text")),
    "BuildDatastore": lambda client, ground, session: build(client, ground),
}


@pytest.fixture(scope="module")
def breaking_ground(
    tmp_path_factory: pytest.TempPathFactory, long_model: Path, corpus_folder: Path
) -> Iterator[tuple[Ground, Path]]:
    """One whose engine fails while a file is there."""
    folder = tmp_path_factory.mktemp("breaking")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(FAILS, str(folder / "fails"))
        ground = Ground(folder, long_model, corpus_folder, first=BREAK, fails=True)
    with ground.server:
        yield ground, folder / "fails"


@pytest.mark.parametrize("call", ENGINE_CALLS)
def test_an_engine_that_fails_fails_who_asked_and_nobody_else(breaking_ground: tuple[Ground, Path], call: str) -> None:
    ground, fails = breaking_ground
    before, worker, log_before = ground.used(), ground.server.worker_pid, ground.server.output
    with Client(ground.server.address) as client:
        session = client.session().name
        fails.touch()
        with pytest.raises(InternalError, match="its log has the details"):
            ENGINE_CALLS[call](client, ground, session)
        fails.unlink()
        forget_new_text(client)  # which was in service before the engine failed at its keys
        ground.check(before, session)
        client.delete_session(session)
    assert ground.server.worker_pid == worker
    assert "the engine failed" in ground.server.output.removeprefix(log_before)


def all_at_once(ground: Ground, address: str) -> tuple[list[threading.Thread], dict[str, BaseException | None]]:
    """Every kind of call, going on."""
    ended = dict[str, BaseException | None]()

    def ask(call: str) -> None:
        with Client(address, timeout_s=60) as client:
            try:
                session = client.session().name
                CALLS[call](client, ground, session)
                ended[call] = None
            except MemlmError as error:
                ended[call] = error

    threads = [threading.Thread(target=ask, args=(call,)) for call in CALLS]
    for thread in threads:
        thread.start()
    time.sleep(1.0)
    return threads, ended


def test_a_worker_that_is_killed_amid_all_calls(ground: Ground) -> None:
    before, address = ground.used(), ground.server.address
    threads, ended = all_at_once(ground, address)
    os.kill(forker_of(ground.server.process.pid), signal.SIGSTOP)  # else another is there before they have tried twice
    os.kill(ground.server.worker_pid, signal.SIGKILL)
    wait_until(lambda: set(ended) >= OF_THE_WORKER)
    os.kill(forker_of(ground.server.process.pid), signal.SIGCONT)
    assert all(isinstance(ended[call], Unavailable) for call in OF_THE_WORKER), ended
    with Client(address) as client:
        wait_until(lambda: "starting another" in ground.server.output)
        client.wait_until_ready(PATIENCE_S)
        for info in client.operations.list():
            if not info.has_ended:
                assert client.operations.open(info.name).result(PATIENCE_S).num_documents == 8
        clean(client)
        ENOUGH.set()
        for thread in threads:
            thread.join(PATIENCE_S)
        ENOUGH.clear()
        session = client.session().name
    ground.check({kind: [max(each)] * 2 for kind, each in before.items()}, session)


def test_a_server_that_stops_amid_all_calls_answers_each(tmp_path: Path, long_model: Path, corpus_folder: Path) -> None:
    ground = Ground(tmp_path, long_model, corpus_folder)
    with ground.server as server:
        family = [server.process.pid, *family_of(server.process.pid)]
        threads, ended = all_at_once(ground, server.address)
        family += family_of(server.process.pid)
        server.process.send_signal(signal.SIGTERM)
        time.sleep(0.5)
        server.process.send_signal(signal.SIGTERM)
        assert server.process.wait(PATIENCE_S) == 1
        ENOUGH.set()
        for thread in threads:
            thread.join(PATIENCE_S)
        ENOUGH.clear()
        assert set(ended) == set(CALLS)
        wait_until(lambda: not any(map(is_alive, family)))
    with write_lock(ground.path):
        pass
