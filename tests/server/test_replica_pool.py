"""The pool of replicas by itself: what it does while Ray fails, hangs, or has lost the application."""

import asyncio
import logging
import subprocess
import sys
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from running import start_child

from memlm.errors import Unavailable
from memlm.server.cluster_config import ClusterConfig
from memlm.server.config import ServerConfig

ray_exceptions = pytest.importorskip("ray.exceptions")
pytest.importorskip("ray.serve", reason="Ray Serve is not installed: pip install 'memlm[replicas]'")
replicas = pytest.importorskip("memlm.server.inference.replicas.replicas")
deployment = pytest.importorskip("memlm.server.inference.replicas.deployment")

PATIENCE_S = 60.0
RUNNING = SimpleNamespace(status="RUNNING")


class Ended(BaseException):
    """Of the process."""


def raise_ended(code: int) -> None:
    raise Ended


@pytest.fixture
def pool(monkeypatch: pytest.MonkeyPatch) -> Any:
    """One that asks often, and waits for nothing long."""
    for name, value in (("STATUS_POLL_S", 0.01), ("POLL_S", 0.01), ("STOP_S", 0.5), ("STOP_AT_ONCE_S", 0.2)):
        monkeypatch.setattr(replicas, name, value)
    return replicas.ReplicaPool(ServerConfig(Path("model"), cluster=ClusterConfig("ray")), dict)


def tell(monkeypatch: pytest.MonkeyPatch, *answers: Any) -> list[Any]:
    """Lets Ray Serve tell its applications, or fail, one answer after the other. Returns those that are left."""
    left = list(answers)

    def status() -> Any:
        if callable(answer := left.pop(0)):
            answer()
        if isinstance(answer, Exception):
            raise answer
        return SimpleNamespace(applications=answer)

    monkeypatch.setattr(deployment.serve, "status", status)
    return left


async def test_a_server_ends_once_its_application_is_gone(pool, monkeypatch, caplog) -> None:
    """An error of Ray says nothing, and one look may be wrong."""
    there, start = {pool._deployment.name: RUNNING}, asyncio.get_running_loop().create_future()
    start.set_result(None)
    failed, ended = ray_exceptions.RpcError("of the cluster's head"), list[int]()
    left = tell(monkeypatch, failed, failed, there, {}, {}, there, {}, {"another": RUNNING}, {})

    def end(code: int) -> None:
        ended.append(code)
        raise Ended

    monkeypatch.setattr(replicas.os, "_exit", end)
    with pytest.raises(Ended):
        async with asyncio.timeout(PATIENCE_S):
            await pool._watch_deployment(start)
    assert ended == [1]
    assert left == []
    assert [each.levelno for each in caplog.records] == [logging.WARNING, logging.ERROR]


async def test_a_status_that_never_comes_is_logged_once_and_asked_for_again(pool, monkeypatch, caplog) -> None:
    there, start = {pool._deployment.name: RUNNING}, asyncio.get_running_loop().create_future()
    never = threading.Event()
    start.set_result(None)
    monkeypatch.setattr(replicas, "STATUS_LIMIT_S", 1.0)
    left = tell(monkeypatch, never.wait, never.wait, there, {}, {}, {})
    monkeypatch.setattr(replicas.os, "_exit", raise_ended)
    try:
        with pytest.raises(Ended):
            async with asyncio.timeout(PATIENCE_S):
                await pool._watch_deployment(start)
    finally:
        never.set()
    assert left == []
    silent, ended = caplog.records
    assert "Ray Serve does not tell how the replicas are: no answer within 1 s" in silent.getMessage()
    assert ended.levelno == logging.ERROR


async def test_a_start_without_an_application_fails(pool, monkeypatch) -> None:
    pool._start = asyncio.get_running_loop().create_future()
    tell(monkeypatch, ray_exceptions.RpcError("busy"), {}, {}, {}, {})
    async with asyncio.timeout(PATIENCE_S):
        await pool._watch_deployment(pool._start)
    with pytest.raises(Unavailable, match="its application is gone"):
        await pool._start


@pytest.mark.parametrize("timeout_s", [0, 5])
async def test_a_stop_does_not_wait_for_a_cluster_that_never_answers(pool, monkeypatch, timeout_s) -> None:
    """While the server joins it, in a thread that ends with the process."""
    joining, answers = threading.Event(), threading.Event()
    monkeypatch.setattr(deployment, "connect", lambda *rest, **how: (joining.set(), answers.wait())[1])
    starting = asyncio.create_task(pool.start())
    try:
        async with asyncio.timeout(PATIENCE_S):
            await asyncio.to_thread(joining.wait)
            assert all(thread.daemon for thread in threading.enumerate() if thread.name == "ray")
            starting.cancel()
            await pool.stop(timeout_s)
            answers.set()
            with pytest.raises(asyncio.CancelledError):  # nothing is deployed once it has joined
                await pool._deploying
    finally:
        pool._deploying.cancel()
        answers.set()


async def test_a_stop_does_not_wait_for_a_serve_that_never_answers(pool, monkeypatch, caplog) -> None:
    answers = threading.Event()
    monkeypatch.setattr(deployment.ray, "is_initialized", lambda: True)

    def delete(name: str, **how: Any) -> None:
        answers.wait()
        raise ray_exceptions.RpcError("of the cluster's head")

    monkeypatch.setattr(deployment.serve, "delete", delete)
    try:
        async with asyncio.timeout(PATIENCE_S):
            await pool.stop(0)  # none was deployed, so that none is left
            assert caplog.text == ""
            pool._deployment._is_deployed = True
            await pool.stop(0)
    finally:
        answers.set()
        for thread in [each for each in threading.enumerate() if each.name == "end of replicas"]:
            thread.join()
    assert f"may be left on the Ray cluster, under the name {pool._deployment.name}" in caplog.text


def test_errors_of_ray_at_the_start_are_ours(pool, monkeypatch) -> None:
    def fail() -> Any:
        raise ray_exceptions.RpcError("a stack\n  of lines\nthe reason")

    monkeypatch.setattr(deployment.ray, "nodes", fail)
    with pytest.raises(Unavailable, match="cannot be deployed on the Ray cluster: the reason"):
        pool._deployment.start()


class Reader(replicas.ReplicaHandle):  # type: ignore[misc,name-defined]
    """A replica that dies of one file. Another one takes its place."""

    def __init__(self, pool: Any, number: int, deadly: str) -> None:
        calls = SimpleNamespace(options=lambda **how: None)
        super().__init__(pool._config, str(number), "", calls, dict, pool.event_bytes, lambda *_: None, lambda *_: None)
        self._pool, self._number, self._deadly, self.is_loaded = pool, number, deadly, True

    async def answer(self, request: Any, time_left_s: float | None = None, **origin: Any) -> Any:
        await asyncio.sleep(0.01)
        if request.session_name == self._deadly:
            self.is_loaded = False
            self._pool._handles = {"": Reader(self._pool, self._number + 1, self._deadly)}
        if not self.is_loaded:
            raise Unavailable("the replica died")


async def test_a_session_that_kills_its_replicas_is_given_up(pool, caplog) -> None:
    """Its file stays, and the others are read."""
    pool._handles = {"": Reader(pool, 0, "deadly")}
    names = ["deadly", *(f"session-{number}" for number in range(40))]
    at_once = asyncio.Semaphore(replicas.RESTORED_AT_ONCE)
    async with asyncio.timeout(PATIENCE_S):
        await asyncio.gather(*(pool._restore_session(name, at_once) for name in names))
    assert set(pool._homes) == set(names[1:])
    (warning,) = caplog.records
    assert "the session deadly stays in its file: 4 replicas died" in warning.getMessage()


@pytest.mark.parametrize(
    "looks", [(False, False), (True, False, True, False, False), (False, True, True, False, True, False, False)]
)
async def test_a_replica_is_gone_that_two_looks_in_a_row_do_not_find(pool, monkeypatch, looks) -> None:
    """Until then its requests and sessions stay with it."""
    monkeypatch.setattr(replicas, "WATCH_S", 0.0)
    monkeypatch.setattr(replicas, "DEATH_POLL_S", 0.0)
    handle, left, ended = Reader(pool, 0, ""), list(looks), list[int]()
    monkeypatch.setattr(handle, "is_alive", lambda: left.pop(0))
    monkeypatch.setattr(handle, "end", lambda: ended.append(len(left)))
    pool._leaving[handle.id] = handle
    async with asyncio.timeout(PATIENCE_S):
        await pool._retire(handle)
    assert ended == [0]
    assert pool._leaving == {}


@pytest.mark.skipif(sys.platform != "linux", reason="asks Linux to end a process with a thread")
async def test_a_cluster_outlives_the_join_that_started_it(pool, monkeypatch) -> None:
    """Ray asks Linux to end the processes of a cluster with the thread that started them."""
    started = list[subprocess.Popen[bytes]]()
    monkeypatch.setattr(pool._deployment, "join", lambda: started.append(start_child()))
    monkeypatch.setattr(pool._deployment, "start", lambda: SimpleNamespace(options=lambda **how: None))
    try:
        async with asyncio.timeout(PATIENCE_S):
            await pool._deploy()
        with pytest.raises(subprocess.TimeoutExpired):
            started[0].wait(1)
    finally:
        started[0].kill()
        started[0].wait(PATIENCE_S)
