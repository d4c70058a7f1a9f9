"""Replicas on a cluster that outlives their server, and that other programs reach."""

import asyncio
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from running import RunningServer, is_alive, wait_until
from running_replicas import CLUSTER_S, replica_pids, serve

from memlm.api.datastores import DeleteDocumentsRequest, LoadDatastoreRequest
from memlm.api.generation import TokenizeRequest
from memlm.api.params import GenerateRequest, SamplingParams
from memlm.api.request import Request
from memlm.api.sessions import CreateSessionRequest, DeleteSessionRequest
from memlm.client import Client
from memlm.data.corpus import Corpus
from memlm.errors import Unavailable
from memlm.generation.sessions.fence import FENCE, SessionFence
from memlm.indexing.build import build_index
from memlm.model.files.checkpoint import load_checkpoint
from memlm.server.cluster_config import ClusterConfig
from memlm.server.config import ServerConfig
from memlm.server.inference.messages import Adopt, Answer, Events, Failed, Result
from memlm.server.inference.requests import PendingRequest, is_last

ray = pytest.importorskip("ray")
ray_serve = pytest.importorskip("ray.serve", reason="Ray Serve is not installed: pip install 'memlm[replicas]'")
replicas = pytest.importorskip("memlm.server.inference.replicas.replicas")

pytestmark = pytest.mark.cluster

LONG = GenerateRequest("a", sampling=SamplingParams(temperature=0, max_tokens=30_000))
DEPLOYED = "deployed"
SIGNAL_AT_DEPLOYMENT = f"""
import os, signal, time
from ray import serve
run_many = serve.run_many
def run_after_signal(*targets, **how):
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(3)  # of which the front end could make use to end before
    handles = run_many(*targets, **how)
    print("{DEPLOYED}", flush=True)
    return handles
serve.run_many = run_after_signal
"""


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    """One node with room for three replicas, which this process has joined, too."""
    from ray.cluster_utils import Cluster

    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("RAY_USAGE_STATS_ENABLED", "0")
        patched.setenv("RAY_worker_niceness", "0")
        cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 3, "include_dashboard": False})
        try:
            ray.init(cluster.address, log_to_driver=False)
            yield cluster.address
        finally:
            ray.shutdown()
            cluster.shutdown()


def applications() -> list[str]:
    return list(ray_serve.status().applications)


def test_replicas_end_with_a_server_that_is_killed(address: str, tmp_path: Path, long_model: Path) -> None:
    """Also one that generates. Nothing of them is left on the cluster."""
    options = ("--address", address, "--replicas", "2", "--session-dir", str(tmp_path / "sessions"))
    with serve(tmp_path, long_model, options=options) as server, Client(server.address) as client:
        pids = replica_pids(server)
        next(client.generate("a", temperature=0, max_tokens=30_000))
        assert len(pids) == 2
        assert len(applications()) == 1
        server.process.kill()
        wait_until(lambda: not any(map(is_alive, pids)))
        wait_until(lambda: applications() == [])


def test_a_server_ends_what_a_killed_one_left(address: str, tmp_path: Path, long_model: Path) -> None:
    """Before it reads the sessions. The replica that was left stands still, so that it does not end itself. An
    application of another program stays.
    """

    class Other:  # is defined here, so that Ray sends it and does not import this module
        pass

    other = ray_serve.deployment(Other, ray_actor_options={"num_cpus": 0})
    ray_serve.run(other.bind(), name="memlm-gateway", route_prefix=None)
    options = ("--address", address, "--session-dir", str(tmp_path / "sessions"))
    with serve(tmp_path, long_model, options=options) as server, Client(server.address) as client:
        name = client.session().name
        tokens = client.append_to_session(name, "a text").num_tokens
        (left,) = replica_pids(server)
        (application,) = {*applications()} - {"memlm-gateway"}
        os.kill(left, signal.SIGSTOP)
        server.process.kill()
    with serve(tmp_path, long_model, options=options) as server, Client(server.address) as client:
        wait_until(lambda: not is_alive(left))  # Ray kills one that stands still some seconds after its name is free
        assert application not in applications()
        assert "memlm-gateway" in applications()
        assert f"{application} is ended" in server.output
        assert client.get_session(name).num_tokens == tokens
    ray_serve.delete("memlm-gateway")


def test_replicas_whose_session_folder_another_server_takes_end(address: str, tmp_path: Path, long_model: Path) -> None:
    """As those of a lost node do. Their requests get UNAVAILABLE, and nothing of them is written. Then a server without
    replicas has the sessions.
    """
    folder = tmp_path / "sessions"
    options = ("--address", address, "--session-dir", str(folder))
    with serve(tmp_path, long_model, options=options) as server, Client(server.address) as client:
        name = client.session().name
        tokens = client.append_to_session(name, "a text").num_tokens
        (replica,), (application,) = replica_pids(server), applications()
        assert (folder / FENCE).read_text() == application
        running = client.generate("a", temperature=0, max_tokens=30_000)
        next(running)
        other = SessionFence.take(folder, "memlm-other-0")
        before = {path: path.read_bytes() for path in folder.iterdir()}
        assert other.earlier == application
        with pytest.raises(Unavailable):
            client.append_to_session(name, " and more")
        with pytest.raises(Unavailable):
            list(running)
        wait_until(lambda: not is_alive(replica))
        wait_until(lambda: "could not be started: another server (memlm-other-0) has" in server.output)
        assert {path: path.read_bytes() for path in folder.iterdir()} == before
    plain = ("--threads", "1", "--session-dir", str(folder))
    with RunningServer(tmp_path / "plain", long_model, options=plain) as server, Client(server.address) as client:
        assert client.get_session(name).num_tokens == tokens


def test_a_signal_while_the_application_is_deployed_leaves_none(address: str, tmp_path: Path, long_model: Path) -> None:
    """It comes just before the application does. The server has ended it when the process ends."""
    command = [sys.executable, "-c", f"{SIGNAL_AT_DEPLOYMENT}\nfrom memlm.cli import main; main()", "serve"]
    arguments = ["--model", str(long_model), "--port", "0", "--engine", "ray", "--address", address]
    ended = subprocess.run([*command, *arguments], capture_output=True, text=True, timeout=CLUSTER_S, check=False)
    assert applications() == []
    assert (ended.returncode, ended.stdout) == (0, f"{DEPLOYED}\n"), ended.stderr
    assert "SIGTERM received" not in ended.stderr  # of Ray's handler, with a stack


def test_a_request_that_arrives_twice_is_refused(address: str, tmp_path: Path, long_model: Path) -> None:
    """While the first of both runs, which ends then, and after it."""
    with serve(tmp_path, long_model, options=("--address", address, "--drain", "3600")) as server:
        (application,), (replica,) = applications(), re.findall(r"replica (\w+) is ready", server.output)
        calls = ray_serve.get_deployment_handle("replica", application).options(session_id=replica, stream=True)

        def ask(id_: str, request: Request[Any]) -> Iterator[list[Answer]]:
            return iter(calls.answer.remote(replica, id_, request, None, "", ""))

        running = ask("one", LONG)
        assert isinstance(next(running)[0], Events)
        assert_refused(next(ask("one", LONG)))
        *_, last = running
        assert_refused(last[-1:])
        ((result,),) = ask("two", TokenizeRequest("a text"))
        assert isinstance(result, Result)
        assert_refused(next(ask("two", TokenizeRequest("a text"))))
        left = ask("three", LONG)
        assert isinstance(next(left)[0], Events)
    assert applications() == []  # though the last one still runs, for which Ray Serve would wait an hour


def assert_refused(answers: list[Answer]) -> None:
    (answer,) = answers
    assert isinstance(answer, Failed)
    assert isinstance(answer.error, Unavailable)
    assert "twice" in str(answer.error)


def test_a_second_signal_ends_at_once_and_leaves_nothing(address: str, tmp_path: Path, long_model: Path) -> None:
    """With a request that may take another hour."""
    options = ("--address", address, "--drain", "3600")
    with serve(tmp_path, long_model, options=options) as server, Client(server.address) as client:
        pids = replica_pids(server)
        stream = client.generate("a", temperature=0, max_tokens=30_000)
        next(stream)
        server.process.send_signal(signal.SIGTERM)
        wait_until(lambda: "draining: 1 request" in server.output)
        assert server.stop() == 1
        assert applications() == []
        assert not any(map(is_alive, pids))


def test_a_server_whose_application_is_ended_ends_with_an_error(address: str, tmp_path: Path, long_model: Path) -> None:
    """Without an application no replica comes back, and the next server finds the session folder free."""
    options = ("--address", address, "--session-dir", str(tmp_path / "sessions"))
    with serve(tmp_path, long_model, options=options) as server, Client(server.address) as client:
        name = client.session().name
        tokens = client.append_to_session(name, "a text").num_tokens
        ray_serve.delete(applications()[0])
        assert server.process.wait(CLUSTER_S) == 1
        assert server.output.count("is gone, and so the server ends") == 1
    with serve(tmp_path, long_model, options=options) as server, Client(server.address) as client:
        assert client.get_session(name).num_tokens == tokens


@pytest.fixture
def left(address: str) -> Iterator[str]:
    """The cluster, while this process has not joined it: a pool does."""
    ray.shutdown()
    yield address
    ray.shutdown()
    ray.init(address, log_to_driver=False)


async def test_deletions_while_a_replica_leaves(
    left: str, tmp_path: Path, long_model: Path, corpus_folder: Path
) -> None:
    """Ray Serve no longer names a replica, which still generates. A deletion of documents ends its requests, since they
    do not follow it. A deletion of a session waits until another replica has read its file.
    """
    store, sessions = tmp_path / "store", tmp_path / "sessions"
    build_index(load_checkpoint(long_model), Corpus([corpus_folder]), store, check="none")
    config = ServerConfig(
        long_model, (), dtype="float32", device="cpu", num_threads=1, session_dir=sessions,
        cluster=ClusterConfig("ray", 2, address=left),
    )  # fmt: skip
    pool = replicas.ReplicaPool(config, dict)
    await pool.start()
    try:
        await pool.broadcast(LoadDatastoreRequest(str(store)), lambda info: None)
        leaving, staying = pool._handles.values()
        names = [(await leaving.ask(CreateSessionRequest())).name for _ in range(8)]
        with leaving.submit(LONG, None) as pending:
            assert isinstance((await pending.take())[0], Events)
            pool._on_replicas({staying.id: staying.actor})
            with pytest.raises(Unavailable, match="on its way to another replica"):
                await pool.ask(DeleteSessionRequest(names[0]))
            report = await pool.ask(DeleteDocumentsRequest(("doc-1.txt",), "store"))
            assert report.num_documents == 1
            *_, last = await taken_to_the_end(pending)
            assert isinstance(last, Failed)
            assert isinstance(last.error, Unavailable)
        adopted = Together(staying)
        leaving.restart("a test ends it")
        await until(lambda: leaving.id not in pool._leaving)
        assert adopted.most > 1
        for name in names:
            assert (await pool.ask(DeleteSessionRequest(name))).name == name
        assert not list(sessions.glob("*.session"))
    finally:
        await pool.stop(5)


class Together:
    """Counts the most sessions that a replica is asked to read at a time."""

    def __init__(self, handle: Any) -> None:
        self.most, self._now, self._answer = 0, 0, handle.answer
        handle.answer = self.answer

    async def answer(self, request: Request[Any], *rest: Any, **how: Any) -> Any:
        self._now += isinstance(request, Adopt)
        self.most = max(self.most, self._now)
        try:
            return await self._answer(request, *rest, **how)
        finally:
            self._now -= isinstance(request, Adopt)


async def taken_to_the_end(pending: PendingRequest) -> list[Answer]:
    taken = await pending.take()
    while not is_last(taken[-1]):
        taken += await pending.take()
    return taken


async def until(holds: Callable[[], bool]) -> None:
    async with asyncio.timeout(CLUSTER_S):
        while not holds():
            await asyncio.sleep(0.05)
