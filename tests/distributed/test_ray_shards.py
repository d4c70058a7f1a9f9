"""Shards that Ray places, restarts and finds: the results of one process, whatever dies meanwhile."""

import os
import shutil
import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest
from random_stores import DIM
from running import RunningServer, is_alive, wait_until
from running_shards import STREAMS, Load, ask, assert_same, cut_store
from typer.testing import CliRunner

from memlm.base.options import check_shard
from memlm.cli.app import app
from memlm.client.client import Client
from memlm.distributed import shard_finder
from memlm.distributed import shards as shards_module
from memlm.distributed.shard_finder import ShardFinder, find_folder
from memlm.distributed.shards import Shards
from memlm.errors import AlreadyExists, InvalidInput, NotFound, Unavailable
from memlm.index.neighbors import Neighbors
from memlm.index.store.datastore import Datastore
from memlm.index.store.exclusion import search_views
from memlm.index.store.shards import split

ray = pytest.importorskip("ray")
ray_shards = pytest.importorskip("memlm.distributed.ray_shards")

QUERIES_QD = np.random.default_rng(5).normal(size=(5, DIM)).astype(np.float32) * 3


@pytest.fixture(scope="module")
def cluster():
    """One node in this machine, which this process and its children find."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_USAGE_STATS_ENABLED", "0")
        patch.setenv("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
        patch.setenv("RAY_worker_niceness", "0")  # else 15, with which a busy machine leaves no time for it
        patch.delenv("RAY_ADDRESS", raising=False)
        ray.init("local", num_cpus=2, include_dashboard=False, log_to_driver=False, object_store_memory=100_000_000)
        patch.setenv("RAY_ADDRESS", ray.get_runtime_context().gcs_address)
        yield
        ray.shutdown()


@pytest.fixture
def name(cluster, request):
    """A name for shards, which are ended after the test."""
    yield (chosen := request.node.name[:40].replace("[", "-").rstrip("]"))
    if ray_shards.find(chosen):
        ray_shards.stop(chosen)


def memlm(*words: str) -> str:
    """What the command prints."""
    result = CliRunner().invoke(app, words)
    if isinstance(result.exception, Exception):
        raise result.exception
    return result.output


def placed(name: str) -> dict[tuple[int, int], ray_shards.PlacedShard]:
    """The processes that answer, by shard and replica."""
    return {(each.shard, each.replica): each for each in ray_shards.find(name, wait_s=60).values() if each}


def pid_of(name: str, shard: int, replica: int = 0) -> int | None:
    """The process of a shard, while it answers."""
    return found.pid if (found := placed(name).get((shard, replica))) else None


def patiently(shards: Shards, views_Q: list) -> Neighbors:
    """The result of a search once the shards answer again."""
    found = list[Neighbors]()

    def answers() -> bool:
        with suppress(Unavailable):
            found.append(shards.search(views_Q, QUERIES_QD, 8))
        return bool(found)

    wait_until(answers)
    return found[0]


def test_a_shard_on_ray_is_found_again_at_its_new_address(tmp_path, name, monkeypatch):
    """Once Ray is asked. Until then a search fails, and at once: here its limit is an hour."""
    may_ask, ask_ray = threading.Event(), ShardFinder.ask
    may_ask.set()
    monkeypatch.setattr(ShardFinder, "ask", lambda finder: (may_ask.wait(), ask_ray(finder)))
    path = cut_store(tmp_path, num_shards=2)
    shown = memlm("shard", str(path), "--engine", "ray", "--name", name, "--shards", "2")
    assert f"memlm serve --model MODEL --store ray://{name}" in shown
    with Datastore.open(path) as store, Shards([f"ray://{name}"], timeout_s=3600) as shards:
        views_Q = [store.snapshot] * 5
        expected = search_views(views_Q, QUERIES_QD, 8)
        assert_same(patiently(shards, views_Q), expected)
        before = {replica.address for replica in shards._replicas}
        assert len(before) == 2
        may_ask.clear()
        try:
            os.kill(killed := pid_of(name, 2), signal.SIGKILL)
            wait_until(lambda: not is_alive(killed))
            with pytest.raises(Unavailable, match="shard 2 at"):
                shards.search(views_Q, QUERIES_QD, 8)
        finally:
            may_ask.set()
        assert_same(patiently(shards, views_Q), expected)
        after = {replica.address for replica in shards._replicas}
        assert len(after) == 2
        assert len(before & after) == 1
    assert f"{name}" not in memlm("shard", f"ray://{name}")  # which shows addresses
    assert "2 processes were ended" in memlm("shard", f"ray://{name}", "--stop")
    for words in ((), ("--stop",)):
        with pytest.raises(NotFound, match="no shards of the name"):
            memlm("shard", f"ray://{name}", *words)


def test_a_name_is_taken_once_and_replicas_are_started(tmp_path, name):
    path = cut_store(tmp_path, num_shards=2)
    placed = ray_shards.place(path, name, num_shards=2, replicas=2)
    assert [(each.shard, each.replica) for each in placed] == [(1, 0), (2, 0), (1, 1), (2, 1)]
    assert len({each.address for each in placed} | {each.pid for each in placed}) == 8
    with pytest.raises(AlreadyExists, match="stop"):
        ray_shards.place(path, name, num_shards=2)
    assert find_folder(f"ray://{name}") == str(path)
    with pytest.raises(NotFound, match=f"'{name[:-1]}'"):
        find_folder(f"ray://{name[:-1]}")  # of which the other is no part


def test_what_cannot_be_a_shard_is_refused_and_leaves_nothing(tmp_path, name):
    path = cut_store(tmp_path, num_shards=2)
    with pytest.raises(Unavailable, match="cannot start"):
        ray_shards.place(tmp_path / "nowhere", name, num_shards=2)
    assert ray_shards.find(name) == {}
    with pytest.raises(NotFound):
        memlm("shard", str(tmp_path / "nowhere"), "--engine", "ray", "--name", name, "--shards", "2")
    for words in (
        ("shard", str(path)),
        ("shard", str(path), "--engine", "ray"),
        ("shard", str(path), "--engine", "ray", "--name", name),
        ("shard", str(path), "--engine", "ray", "--name", name, "--shards", "2", "--shard", "1/2"),
        ("shard", str(path), "--shard", "1/2", "--name", name),
        ("shard", str(path), "--stop"),
        ("shard", str(path), "--engine", "ray", "--name", "a/b", "--shards", "2"),
        ("shard", str(path), "--engine", "ray", "--name", name, "--shards", "0"),
        ("shard", str(path), "--engine", "slurm", "--shard", "1/2"),
    ):
        with pytest.raises(InvalidInput):
            memlm(*words)
    for wrong in ("ray://", "ray://a/b", "ray://a b"):
        with pytest.raises(InvalidInput, match="ray://NAME"):
            check_shard(wrong)


def test_an_error_of_ray_is_one_line(tmp_path, name):
    """Ray's has the stack of the actor."""
    with pytest.raises(Unavailable, match=r"a shard cannot start .*null byte") as error:
        ray_shards.place(f"{tmp_path}/\0", name, num_shards=1)
    assert "\n" not in str(error.value)
    assert "File " not in str(error.value)


def test_a_finder_keeps_what_it_knows_while_ray_does_not_answer(tmp_path, name, monkeypatch):
    path = cut_store(tmp_path, num_shards=2)
    ray_shards.place(path, name, num_shards=2)
    finder = ShardFinder(f"ray://{name}")
    try:
        finder.ask()
        known = finder.addresses
        assert len(known) == 2
        finder._process.kill()
        finder._process.wait()
        monkeypatch.setenv("RAY_ADDRESS", "127.0.0.1:1")  # a head node that is gone
        with pytest.raises(Unavailable, match="no Ray cluster"):
            finder.ask()
        assert finder.addresses == known
        monkeypatch.undo()
        finder.ask()
        assert finder.addresses == known
        ray_shards.stop(name)
        finder.ask()
        assert finder.addresses == {}
    finally:
        finder.close()


def test_a_folder_is_found_as_soon_as_a_busy_shard_answers(tmp_path, name, monkeypatch):
    path, asked, ask_ray = cut_store(tmp_path, num_shards=1), list[ShardFinder](), ShardFinder.ask
    (shard,) = ray_shards.place(path, name, num_shards=1)
    monkeypatch.setattr(ShardFinder, "ask", lambda finder: (ask_ray(finder), asked.append(finder)))
    with ThreadPoolExecutor(1) as pool:
        os.kill(shard.pid, signal.SIGSTOP)
        try:
            found = pool.submit(find_folder, f"ray://{name}")
            wait_until(lambda: found.done() or len(asked) == 2)
        finally:
            os.kill(shard.pid, signal.SIGCONT)
        assert found.result(60) == str(path)


def test_shards_that_run_and_do_not_answer_are_not_called_missing(tmp_path, name, monkeypatch):
    monkeypatch.setattr(shard_finder, "FOLDER_S", 0.0)
    (shard,) = ray_shards.place(cut_store(tmp_path, num_shards=1), name, num_shards=1)
    os.kill(shard.pid, signal.SIGSTOP)
    try:
        with pytest.raises(Unavailable, match=f"1 shards of ray://{name} run, and none answers"):
            find_folder(f"ray://{name}")
    finally:
        os.kill(shard.pid, signal.SIGCONT)


def test_shards_are_found_on_the_cluster_that_is_given(tmp_path, name, monkeypatch, model_folder, store_folder):
    """In the server and in its workers, whatever cluster is that of the environment."""
    ray_shards.place(store_folder, name, num_shards=1)
    address = os.environ["RAY_ADDRESS"]
    monkeypatch.setenv("RAY_ADDRESS", "127.0.0.1:1")
    options = ("--store", f"ray://{name}", "--address", address)
    with (
        RunningServer(tmp_path / "server.log", model_folder, options=options, forked=False) as server,
        Client(server.address) as client,
    ):
        found = client.generate("the quick", max_tokens=4, temperature=0).result()
        assert found.finished.usage.searched_share == 1


def test_a_finder_without_a_cluster_says_so(monkeypatch):
    monkeypatch.setenv("RAY_ADDRESS", "127.0.0.1:1")
    with pytest.raises(Unavailable, match=r"no Ray cluster answers at 127\.0\.0\.1:1"):
        find_folder("ray://notes")
    monkeypatch.setattr(shard_finder.sys, "executable", "/bin/false")
    with pytest.raises(Unavailable, match="ray://notes"):
        find_folder("ray://notes")


def test_a_finder_ends_a_process_that_ray_does_not_answer(tmp_path, monkeypatch):
    child = tmp_path / "child"
    child.write_text(f"#!/bin/sh\necho $$ > {tmp_path}/pid\nexec sleep 3600\n", encoding="utf-8")
    child.chmod(0o755)
    monkeypatch.setattr(shard_finder.sys, "executable", str(child))
    monkeypatch.setattr(shard_finder, "ASK_S", 3.0)
    with pytest.raises(Unavailable, match="Ray does not tell where the shards of ray://notes are"):
        find_folder("ray://notes")
    assert not is_alive(int((tmp_path / "pid").read_text()))


@pytest.mark.parametrize(
    ("address", "of_environment"), [("local", None), (None, "local"), ("auto", "local"), (None, None)]
)
def test_shards_are_looked_for_on_a_running_cluster(monkeypatch, address, of_environment):
    """One that is called local would be a new one, without shards."""
    joined = list[tuple[object, str | None]]()
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    if of_environment is not None:
        monkeypatch.setenv("RAY_ADDRESS", of_environment)
    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    monkeypatch.setattr(ray, "init", lambda address, **how: joined.append((address, os.environ.get("RAY_ADDRESS"))))
    monkeypatch.setattr(ray, "shutdown", lambda: None)
    with ray_shards.joined(address):
        assert joined == [("auto", None)]


def test_an_unknown_name_is_no_search_of_the_server_itself(tmp_path, name, monkeypatch):
    monkeypatch.setattr("memlm.distributed.shards.FIRST_GREETING_S", 1.0)
    path = cut_store(tmp_path, num_shards=2)
    with (
        Datastore.open(path) as store,
        Shards([f"ray://{name}"]) as shards,
        pytest.raises(Unavailable, match=f"no shard answers at ray://{name}"),
    ):
        shards.search([store.snapshot], QUERIES_QD[:1], 8)


def test_shards_that_are_found_and_not_connected_yet_are_no_search_of_the_server_itself(tmp_path, name, monkeypatch):
    monkeypatch.setattr(shards_module, "FIRST_GREETING_S", 1.0)
    may_connect, connected = threading.Event(), shards_module._connected
    monkeypatch.setattr(shards_module, "_connected", lambda address: (may_connect.wait(600), connected(address))[1])
    path = cut_store(tmp_path, num_shards=2)
    ray_shards.place(path, name, num_shards=2)
    with Datastore.open(path) as store, Shards([f"ray://{name}"]) as shards:
        wait_until(lambda: shards._finders[0].addresses)
        with pytest.raises(Unavailable, match=f"no shard answers at ray://{name}"):
            shards.search([store.snapshot] * 5, QUERIES_QD, 8)
        may_connect.set()
        assert_same(patiently(shards, [store.snapshot] * 5), search_views([store.snapshot] * 5, QUERIES_QD, 8))


def test_a_server_finds_its_folder_and_shards_by_name(tmp_path, name, model_folder, store_folder):
    ray_shards.place(store_folder, name, num_shards=1)
    options = ("--store", f"ray://{name}")
    with (
        RunningServer(tmp_path / "server.log", model_folder, options=options) as server,
        Client(server.address) as client,
    ):
        assert f"{store_folder.name} ({store_folder})" in server.output
        found = client.generate("the quick", max_tokens=4, temperature=0).result()
        assert found.finished.usage.searched_share == 1
        ray_shards.stop(name)
        with pytest.raises(Unavailable, match="shard"):  # it is the shards that are searched
            client.generate("the quick", max_tokens=4, temperature=0).result()


@pytest.fixture
def halves(tmp_path: Path, store_folder: Path) -> Path:
    path = Path(shutil.copytree(store_folder, tmp_path / "store"))
    split(path, 2)
    return path


@pytest.mark.cluster
def test_killed_shards_under_load_are_reported_and_come_back(tmp_path, name, model_folder, halves, record_property):
    with RunningServer(tmp_path / "alone.log", model_folder, halves) as server, Client(server.address) as client:
        expected = ask(client)
    ray_shards.place(halves, name, num_shards=2)
    with RunningServer(tmp_path / "server.log", model_folder, options=("--store", f"ray://{name}")) as server:
        with Load(server, expected) as load:
            for shard in (1, 2):
                load.wait_for(2 * STREAMS)
                assert not load.failures
                pid, killed_s = pid_of(name, shard), time.monotonic()
                os.kill(pid, signal.SIGKILL)
                wait_until(lambda: len(load.failures) >= STREAMS)
                reported_s = time.monotonic() - killed_s
                load.wait_for(1)
                back_s = time.monotonic() - killed_s
                record_property(f"shard {shard}", f"{reported_s:.1f} s until reported, {back_s:.1f} s until back")
                load.wait_for(2 * STREAMS)
                assert {type(error) for error in load.failures} == {Unavailable}
                load.failures.clear()
        assert load.wrong == []


@pytest.mark.cluster
def test_killed_replicas_under_load_fail_no_request(tmp_path, name, model_folder, halves):
    with RunningServer(tmp_path / "alone.log", model_folder, halves) as server, Client(server.address) as client:
        expected = ask(client)
    ray_shards.place(halves, name, num_shards=2, replicas=2)
    with RunningServer(tmp_path / "server.log", model_folder, options=("--store", f"ray://{name}")) as server:
        with Load(server, expected) as load:
            for shard, replica in ((1, 0), (2, 1), (1, 1), (2, 0)):
                load.wait_for(STREAMS)
                os.kill(killed := pid_of(name, shard, replica), signal.SIGKILL)
                load.wait_for(STREAMS)
                wait_until(lambda killed=killed, one=(shard, replica): pid_of(name, *one) not in (killed, None))
                address = placed(name)[shard, replica].address
                wait_until(lambda address=address: f"the shard at {address} answers" in server.output)
        assert load.failures == []
        assert load.wrong == []
