"""Several inference workers: each does its share, all change together, and one that dies is missed by nobody else."""

import asyncio
import gc
import os
import shutil
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from itertools import chain, repeat
from pathlib import Path
from typing import Any

import pytest
from encoders import save_bert
from random_adapters import SPECS, save_random_adapter
from running import PATIENCE_S, RunningServer, alike, figures_of, wait_until
from safetensors.torch import load_file, save_file
from texts import make_text

from memlm.api.datastores import ListDatastoresRequest, NewDocument
from memlm.base import machine
from memlm.base.machine import ram_bytes
from memlm.client import Client
from memlm.errors import InvalidInput, NotFound, Overloaded, Unavailable
from memlm.language_model import LanguageModel
from memlm.model.files.checkpoint import load_checkpoint
from memlm.model.files.weight_files import WEIGHTS_FILE
from memlm.server.config import ServerConfig, worker_for_session
from memlm.server.inference.handle import WorkerHandle
from memlm.server.inference.pool import run_to_end

PROMPTS = [make_text(number, 6) for number in range(12)]


@pytest.fixture(scope="module")
def trio(tmp_path_factory: pytest.TempPathFactory, model_folder: Path, store_folder: Path) -> Iterator[RunningServer]:
    """Three workers, for tests that change nothing that others see."""
    options = ("--threads", "1", "--workers", "3")
    with RunningServer(tmp_path_factory.mktemp("trio") / "log", model_folder, store_folder, options=options) as server:
        yield server


def in_session(client: Client, name: str) -> list:
    with client.generate("", session=name, temperature=0, max_tokens=3, use_store=False) as stream:
        return list(stream)


def test_all_answer_as_the_library_does(trio: RunningServer, lm: LanguageModel) -> None:
    """One at a time, so that no two stand in one batch: each of the three has its turn, and all give the same bits."""
    with Client(trio.address) as client:
        for prompt in PROMPTS:
            tokens = list(client.generate(prompt, max_tokens=12, temperature=0))
            assert [(token.id, token.logprob) for token in tokens] == [
                (token.id, token.logprob) for token in lm.generate(prompt, max_tokens=12, temperature=0)
            ]


def test_a_text_that_goes_on_from_another_goes_to_the_worker_that_has_read_it(trio: RunningServer) -> None:
    options = {"temperature": 0, "max_tokens": 2, "use_store": False}
    with Client(trio.address) as client:
        for number in range(8):
            ids = [number, *range(20, 55)]
            client.generate(ids, **options).result()
            again = client.generate([*ids, 60, 61], **options).result()
            assert again.finished.usage.cached_tokens == len(ids)


def test_who_stands_still_gets_no_more_to_do(trio: RunningServer) -> None:
    """The first few that came its way wait for it, all others go to those that have less to do."""
    still, ended = trio.worker_pids[1], list[int]()

    def ask() -> None:
        with Client(trio.address) as client:
            ended.append(len(list(client.generate(PROMPTS[0], max_tokens=6, temperature=0))))

    askers = [threading.Thread(target=ask) for _ in range(12)]
    os.kill(still, signal.SIGSTOP)
    try:
        for asker in askers:
            asker.start()
            time.sleep(0.05)
        wait_until(lambda: len(ended) >= 10)
    finally:
        os.kill(still, signal.SIGCONT)
    for asker in askers:
        asker.join(PATIENCE_S)
    assert ended == [6] * 12


def test_a_session_lives_where_its_name_says(trio: RunningServer) -> None:
    with Client(trio.address) as client:
        names = [client.session().name for _ in range(24)]
        assert {worker_for_session(name, 3) for name in names} == {0, 1, 2}
        for name, prompt in zip(names, PROMPTS, strict=False):
            client.append_to_session(name, prompt)
        forks = [client.fork_session(name).name for name in names[: len(PROMPTS)]]
        assert [worker_for_session(name, 3) for name in forks] == [
            worker_for_session(name, 3) for name in names[: len(PROMPTS)]
        ]
        for name, fork in zip(names, forks, strict=False):
            assert alike(in_session(client, name), in_session(client, fork))
        listed = client.list_sessions()
        assert sorted(session.name for session in listed) == sorted([*names, *forks])
        assert [session.used_s for session in listed] == sorted((each.used_s for each in listed), reverse=True)
        for name in (*names, *forks):
            client.delete_session(name)
        assert client.list_sessions() == ()
        with pytest.raises(NotFound):
            client.get_session("no such name, and not hexadecimal")


def test_sessions_survive_a_restart_with_another_number_of_workers(model_folder: Path, tmp_path: Path) -> None:
    drawn = dict[str, list]()
    for count in (3, 2):
        options = ("--threads", "1", "--workers", str(count), "--session-dir", str(tmp_path / "sessions"))
        with RunningServer(tmp_path / "log", model_folder, options=options) as server, Client(server.address) as client:
            if not drawn:
                for prompt in PROMPTS:
                    with client.session() as session:
                        session.append(prompt)
                        drawn[session.fork().name] = []
            assert sorted(session.name for session in client.list_sessions()) == sorted(drawn)
            for name, before in drawn.items():
                with client.session() as _, Client(server.address) as other:
                    twin = other.fork_session(name).name
                    tokens = in_session(other, twin)
                    other.delete_session(twin)
                assert not before or [token.logprob for token in tokens] == [token.logprob for token in before]
                drawn[name] = tokens


def test_what_is_deleted_speaks_on_none_of_them(model_folder: Path, own_store: Path, tmp_path: Path) -> None:
    """From when the call returns: each worker has seen the datastore, and would answer from what it has open."""
    with RunningServer(
        tmp_path / "log", model_folder, own_store, options=("--threads", "1", "--workers", "3")
    ) as server:
        deleted, stop, wrong = set[str](), threading.Event(), list[str]()

        def ask() -> None:
            with Client(server.address) as client:
                while not stop.is_set():
                    gone = set(deleted)
                    found = client.search("store", PROMPTS[0], k=400)
                    wrong.extend(neighbor.document_id for neighbor in found if neighbor.document_id in gone)

        askers = [threading.Thread(target=ask) for _ in range(4)]
        for asker in askers:
            asker.start()
        with Client(server.address) as client:
            for number in range(7):
                client.datastores.delete_documents("store", [f"doc-{number}.txt"])
                deleted.add(f"doc-{number}.txt")
                time.sleep(0.1)
        stop.set()
        for asker in askers:
            asker.join()
        assert not wrong


def test_one_dies_and_the_others_go_on(model_folder: Path, store_folder: Path, tmp_path: Path) -> None:
    options = ("--threads", "1", "--workers", "2")
    with (
        RunningServer(tmp_path / "log", model_folder, store_folder, options=options) as server,
        Client(server.address) as client,
    ):
        names = [client.session().name for _ in range(12)]
        first, second = server.worker_pids
        os.kill(second, signal.SIGKILL)
        gone = place_that_died(server)
        kept = {name for name in names if worker_for_session(name, 2) != gone}
        lost = {*names} - kept
        for prompt in PROMPTS:  # at once, from who is left
            assert len(list(client.generate(prompt, max_tokens=4, temperature=0))) == 4
        assert all(client.get_session(name).name == name for name in kept)
        for name in lost:
            with pytest.raises((Unavailable, NotFound)):  # while it is started again, and after
                client.get_session(name)
        wait_until(lambda: is_back(client, min(lost)))
        assert {session.name for session in client.list_sessions()} == kept
        assert len(server.worker_pids) == 2
        assert first in server.worker_pids


def place_that_died(server: RunningServer) -> int:
    """Which of the workers that was; they start side by side."""
    wait_until(lambda: " died " in server.output)
    return int(server.output.partition(" died ")[0].rpartition("inference worker ")[2])


def is_back(client: Client, lost: str) -> bool:
    """Whether the worker where a session lay is there again, which has forgotten it."""
    try:
        client.get_session(lost)
    except (Unavailable, NotFound) as error:
        return isinstance(error, NotFound)
    return False


def test_who_dies_while_a_datastore_is_loaded_has_it_when_it_is_back(
    model_folder: Path, store_folder: Path, tmp_path: Path
) -> None:
    options = ("--threads", "1", "--workers", "2", "--store-dir", str(tmp_path / "stores"), "+index_workers=1")
    with (
        RunningServer(tmp_path / "log", model_folder, store_folder, options=options) as server,
        Client(server.address) as client,
    ):
        client.datastores.unload("store")
        assert all(client.datastores.list() == () for _ in range(8))
        stopped = server.worker_pids[1]
        os.kill(stopped, signal.SIGSTOP)
        loading = threading.Thread(target=client.datastores.load, args=(str(store_folder),))
        loading.start()
        time.sleep(0.3)
        assert loading.is_alive()  # one has it, the other cannot say so
        os.kill(stopped, signal.SIGKILL)
        loading.join(PATIENCE_S)
        assert not loading.is_alive()
        name = session_at(client, place_that_died(server))
        with client.generate("", session=name, max_tokens=2, store="store", neighbors=1) as stream:
            assert all(token.neighbors for token in stream)


def session_at(client: Client, place: int) -> str:
    """A new session at a worker that may be starting still."""
    deadline_s = time.monotonic() + 60
    while time.monotonic() < deadline_s:
        if worker_for_session(name := client.session().name, 2) == place:
            return name
        client.delete_session(name)
        time.sleep(0.05)
    raise AssertionError(f"no worker came up at place {place}")


def test_what_is_built_speaks_on_all_of_them(model_folder: Path, corpus_folder: Path, tmp_path: Path) -> None:
    options = ("--threads", "1", "--workers", "2", "--store-dir", str(tmp_path / "stores"))
    options += ("--corpus-root", str(corpus_folder))
    with (
        RunningServer(tmp_path / "log", model_folder, options=options) as server,
        Client(server.address) as client,
    ):
        client.datastores.build("docs", str(corpus_folder)).result(PATIENCE_S)
        assert {client.datastores.get("docs").num_documents for _ in range(20)} == {8}
        client.datastores.add("docs", [NewDocument("new", make_text(99, 40))]).result(PATIENCE_S)
        assert {client.datastores.get("docs").num_documents for _ in range(20)} == {9}
        client.datastores.delete_documents("docs", ["new"])
        assert {client.datastores.get("docs").num_deleted_documents for _ in range(20)} == {1}


def test_what_the_server_may_take_on_is_shared_out() -> None:
    config = ServerConfig(Path("model"), num_workers=3, max_running=32, max_queued=0, max_session_bytes=3 << 30)
    share = config.per_worker(num_cores=8)
    assert (share.max_running, share.max_queued, share.max_session_bytes, share.num_threads) == (11, 0, 1 << 30, 2)
    assert config.per_worker(num_cores=2).num_threads == 1
    assert replace(config, max_cache_bytes=9 << 20).per_worker(8).cache_bytes == 3 << 20
    assert config.per_worker(num_cores=1).num_threads == 1
    assert replace(config, max_cache_bytes=2).per_worker(8).cache_bytes == 1
    alone = ServerConfig(Path("model"))
    assert alone.per_worker(8) is alone


@pytest.mark.parametrize(
    ("ram", "limit"),
    [(25_276_510_208, None), (1 << 35, None), (4096 * 9_999_991, 5_000_000_001), (1 << 29, 1 << 40), (1 << 33, 100)],
)
def test_shares_of_the_ram_add_up_to_half_of_what_machine_and_container_give(
    ram: int, limit: int | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "sysconf", {"SC_PAGE_SIZE": 4096, "SC_PHYS_PAGES": ram // 4096}.__getitem__)
    monkeypatch.setattr(machine, "CGROUPS", tmp_path)
    (tmp_path / "memory.max").write_text("max\n" if limit is None else f"{limit}\n")
    half = min(ram, limit or ram) // 2
    for num_workers in (1, 2, 3, 7):
        config = ServerConfig(Path("model"), num_workers=num_workers)
        share = config.per_worker(num_cores=1)
        assert half - num_workers < num_workers * share.cache_bytes <= half
        assert share.num_threads in ((0,) if num_workers == 1 else (1,))


def test_a_request_whose_cache_can_never_fit_is_refused_through_the_server(model_folder: Path, tmp_path: Path) -> None:
    options = ("--threads", "1", "--workers", "2", "--cache-bytes", "20KiB")
    with RunningServer(tmp_path / "log", model_folder, options=options) as server, Client(server.address) as client:
        client.wait_until_ready()
        assert client.get_server_info().max_cache_bytes == 20 << 10
        with pytest.raises(InvalidInput, match=r"0\.01 MiB for those of a worker's running requests"):
            client.generate("the memory", max_tokens=40)
        assert len(list(client.generate("the memory", max_tokens=4, temperature=0))) == 4


def test_the_memory_there_is_ends_at_the_limit_of_a_control_group_or_of_one_above_it(tmp_path: Path) -> None:
    (tmp_path / "slice" / "service").mkdir(parents=True)
    assert machine._limits(tmp_path, "slice/service") == []
    (tmp_path / "slice" / "memory.max").write_text("4096000\n")
    (tmp_path / "slice" / "service" / "memory.max").write_text("max\n")
    assert machine._limits(tmp_path, "slice/service") == [4096000]
    assert 0 < ram_bytes() <= os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def test_who_is_full_still_does_what_all_do(long_model: Path, corpus_folder: Path, tmp_path: Path) -> None:
    """And what it is at goes on."""
    options = ("--threads", "1", "--workers", "2", "--max-running", "2", "--max-queued", "0")
    options += ("--store-dir", str(tmp_path / "stores"), "--corpus-root", str(corpus_folder))
    with (
        RunningServer(tmp_path / "log", long_model, options=options) as server,
        Client(server.address) as client,
    ):
        client.datastores.build("docs", str(corpus_folder)).result(PATIENCE_S)
        pids = server.worker_pids
        busy = session_at(client, 0)
        with client.generate("a", session=busy, temperature=0, use_store=False) as stream:
            next(stream)
            with pytest.raises(Overloaded):
                client.fork_session(busy)
            client.datastores.unload("docs")
            assert client.datastores.list() == ()
            assert len([token for _, token in zip(range(20), stream, strict=False)]) == 20
        assert server.worker_pids == pids


@pytest.mark.parametrize("num_workers", [1, 2])
def test_a_worker_whose_model_file_was_replaced_is_not_started_again(
    model_folder: Path, tmp_path: Path, num_workers: int
) -> None:
    """Two models in one service would answer in turn. Once the file is back, the worker is."""
    model = Path(shutil.copytree(model_folder, tmp_path / "model"))
    weights, kept, others = model / WEIGHTS_FILE, tmp_path / "kept", tmp_path / "others"
    other = load_file(weights)
    save_file({name: -tensor for name, tensor in other.items()}, others)
    options = ("--threads", "1", "--workers", str(num_workers))
    with RunningServer(tmp_path / "log", model, options=options) as server, Client(server.address) as client:
        served = client.get_model().model_fingerprint
        text = client.generate(PROMPTS[0], temperature=0, max_tokens=8).result().text
        shutil.copy(weights, kept)
        others.replace(weights)
        os.kill(server.worker_pids[0], signal.SIGKILL)
        wait_until(lambda: "the files of the model changed since the server started" in server.output)
        for _ in range(10):
            if num_workers == 1:
                with pytest.raises(Unavailable):
                    client.generate(PROMPTS[0], temperature=0, max_tokens=8).result()
            else:
                assert client.generate(PROMPTS[0], temperature=0, max_tokens=8).result().text == text
                assert client.get_model().model_fingerprint == served
        kept.replace(weights)
        wait_until(lambda: len(server.worker_pids) == num_workers)
        client.wait_until_ready(PATIENCE_S)
        assert client.generate(PROMPTS[0], temperature=0, max_tokens=8).result().text == text


@pytest.mark.parametrize("changed", ["adapter 'law'", "encoder"])
def test_a_worker_whose_adapter_or_encoder_was_replaced_is_not_started_again(
    model_folder: Path, tmp_path: Path, changed: str
) -> None:
    checkpoint = load_checkpoint(model_folder)
    for seed in (3, 4):
        save_random_adapter(tmp_path / f"law-{seed}", checkpoint, SPECS["lora"], seed)
        save_bert("no head", tmp_path / f"bert-{seed}", seed)
    options = ("--threads", "1", "--adapter", f"law={tmp_path / 'law-3'}", "--encoder", str(tmp_path / "bert-3"))
    with RunningServer(tmp_path / "log", model_folder, options=options) as server:
        name = "bert" if changed == "encoder" else "law"
        (tmp_path / f"{name}-3").rename(tmp_path / "before")
        (tmp_path / f"{name}-4").rename(tmp_path / f"{name}-3")
        os.kill(server.worker_pid, signal.SIGKILL)
        wait_until(lambda: f"the files of the {changed} changed since the server started" in server.output)


async def test_who_loaded_what_is_no_longer_in_service_is_started_again(model_folder: Path, store_folder: Path) -> None:
    """A datastore that was taken into service while a worker was loading: too late for it to be told so."""
    loads: Iterator[dict[str, Path]] = chain([{}, {}, {}], repeat({"store": store_folder}))
    handle = WorkerHandle(ServerConfig(model_folder, num_threads=1), 0, lambda: next(loads))
    await handle.start()
    try:
        assert await handle.ask(ListDatastoresRequest()) == ()
        handle.restart("so that another loads nothing, once more")
        stores = []
        async with asyncio.timeout(60):
            while not stores:
                await asyncio.sleep(0.05)
                with suppress(Unavailable):
                    stores = [info.name for info in await handle.ask(ListDatastoresRequest())]
        assert stores == ["store"]
    finally:
        await handle.stop(5)


@pytest.fixture
def still(model_folder: Path, own_store: Path, tmp_path: Path) -> Iterator[tuple[RunningServer, int]]:
    """A server of two workers, and the process of one that has been stopped for two seconds."""
    options = ("--threads", "1", "--workers", "2", "+worker_timeout=4", "--http-port", "0")
    with RunningServer(tmp_path / "log", model_folder, own_store, options=options) as server:
        stopped = server.worker_pids[0]
        os.kill(stopped, signal.SIGSTOP)
        wait_until(lambda: figures_of(server)["memlm_heartbeat_age_seconds"] > 2.1)
        yield server, stopped


def test_a_worker_that_stands_still_is_replaced(still: tuple[RunningServer, int]) -> None:
    server, stopped = still
    with Client(server.address) as client:
        wait_until(lambda: stopped not in server.worker_pids and len(server.worker_pids) == 2)
        assert "sent no heartbeat for 4 s" in server.output
        for place in (0, 1):
            session_at(client, place)


def test_a_deletion_ends_though_a_worker_stands_still(still: tuple[RunningServer, int]) -> None:
    """It was killed before, so that it cannot answer from what was deleted."""
    server, stopped = still
    with Client(server.address) as client:
        assert client.datastores.delete_documents("store", ["doc-1.txt"], timeout_s=30).num_documents == 1
        wait_until(lambda: stopped not in server.worker_pids)
        found = [client.search("store", PROMPTS[0], k=400) for _ in range(8)]
        assert "doc-1.txt" not in {neighbor.document_id for each in found for neighbor in each}


def test_listing_sessions_ends_though_a_worker_stands_still(still: tuple[RunningServer, int]) -> None:
    with Client(still[0].address) as client:
        assert client.list_sessions(timeout_s=30) == ()


async def test_a_worker_that_loads_has_no_time_limit(model_folder: Path) -> None:
    """Its loop does not go round yet: silence says nothing."""
    handle = WorkerHandle(ServerConfig(model_folder, num_threads=1, worker_timeout_s=1), 0, dict)
    await handle.start()
    try:
        first = handle._process
        handle.restart("so that another loads")
        async with asyncio.timeout(60):
            while handle._process is first or handle._process is None or handle._process.pid is None:
                await asyncio.sleep(0.005)
            os.kill(loading := handle._process.pid, signal.SIGSTOP)
            assert not handle.is_loaded
            await asyncio.sleep(2.5)
            os.kill(loading, signal.SIGCONT)
            while not handle.is_serving:
                await asyncio.sleep(0.05)
        assert handle._process.pid == loading
    finally:
        await handle.stop(5)


async def test_a_change_whose_caller_has_left_ends_and_fails_in_silence() -> None:
    reported, goes_on, ended = list[Any](), asyncio.Event(), asyncio.Event()
    asyncio.get_running_loop().set_exception_handler(lambda _, context: reported.append(context))

    async def change() -> None:
        await goes_on.wait()
        ended.set()
        raise Unavailable("the worker died")

    caller = asyncio.ensure_future(run_to_end(change()))
    await asyncio.sleep(0)
    caller.cancel()
    with pytest.raises(asyncio.CancelledError):
        await caller
    goes_on.set()
    await ended.wait()
    await asyncio.sleep(0)
    gc.collect()
    await asyncio.sleep(0)
    assert not reported

    with pytest.raises(Unavailable, match="died"):
        await run_to_end(change())
