"""Replicas on a cluster that outlives their server, and that other programs reach."""

import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from running import is_alive, wait_until
from running_replicas import CLUSTER_S, replica_pids, serve

from memlm.api.generation import TokenizeRequest
from memlm.api.params import GenerateRequest
from memlm.api.request import Request
from memlm.client import Client
from memlm.errors import Unavailable
from memlm.server.inference.messages import Answer, Failed, Result

ray = pytest.importorskip("ray")
ray_serve = pytest.importorskip("ray.serve", reason="Ray Serve is not installed: pip install 'memlm[replicas]'")

pytestmark = pytest.mark.cluster

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
    """Before it reads the sessions. The replica that was left stands still, so that it does not end itself."""
    options = ("--address", address, "--session-dir", str(tmp_path / "sessions"))
    with serve(tmp_path, long_model, options=options) as server, Client(server.address) as client:
        name = client.session().name
        tokens = client.append_to_session(name, "a text").num_tokens
        (left,) = replica_pids(server)
        (application,) = applications()
        os.kill(left, signal.SIGSTOP)
        server.process.kill()
    with serve(tmp_path, long_model, options=options) as server, Client(server.address) as client:
        assert not is_alive(left)
        assert application not in applications()
        assert f"{application} is ended" in server.output
        assert client.get_session(name).num_tokens == tokens


def test_a_signal_while_the_application_is_deployed_leaves_none(address: str, tmp_path: Path, long_model: Path) -> None:
    """It comes just before the application does. The server has ended it when the process ends."""
    command = [sys.executable, "-c", f"{SIGNAL_AT_DEPLOYMENT}\nfrom memlm.cli import main; main()", "serve"]
    arguments = ["--model", str(long_model), "--port", "0", "--engine", "ray", "--address", address]
    ended = subprocess.run([*command, *arguments], capture_output=True, text=True, timeout=CLUSTER_S, check=False)
    assert applications() == []
    assert (ended.returncode, ended.stdout) == (0, f"{DEPLOYED}\n"), ended.stderr
    assert "SIGTERM received" not in ended.stderr  # of Ray's handler, with a stack


def test_a_request_that_arrives_twice_runs_once(address: str, tmp_path: Path, long_model: Path) -> None:
    """While the first of both runs, and after it."""
    with serve(tmp_path, long_model, options=("--address", address)) as server:
        (application,), (replica,) = applications(), re.findall(r"replica (\w+) is ready", server.output)
        calls = ray_serve.get_deployment_handle("replica", application).options(session_id=replica, stream=True)

        def ask(id_: str, request: Request[Any]) -> Iterator[list[Answer]]:
            return iter(calls.answer.remote(replica, id_, request, None, "", ""))

        running = ask("one", GenerateRequest("a", temperature=0, max_tokens=60))
        events = next(running)
        assert_refused(list(ask("one", GenerateRequest("a", temperature=0, max_tokens=60))))
        events += [event for answers in running for event in answers]
        assert not any(isinstance(each, Failed) for each in events)
        ((result,),) = ask("two", TokenizeRequest("a text"))
        assert isinstance(result, Result)
        assert_refused(list(ask("two", TokenizeRequest("a text"))))


def assert_refused(answers: list[list[Answer]]) -> None:
    ((answer,),) = answers
    assert isinstance(answer, Failed)
    assert isinstance(answer.error, Unavailable)
    assert "twice" in str(answer.error)
