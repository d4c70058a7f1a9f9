"""Replicas on a cluster that outlives their server, and that other programs reach."""

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from running import is_alive, wait_until
from running_replicas import replica_pids, serve

from memlm.client import Client

ray = pytest.importorskip("ray")
ray_serve = pytest.importorskip("ray.serve", reason="Ray Serve is not installed: pip install 'memlm[replicas]'")

pytestmark = pytest.mark.cluster


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
