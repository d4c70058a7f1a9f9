"""Options of inference on a Ray cluster, and what is said where it cannot run. No cluster starts."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from memlm.cli.app import app
from memlm.distributed import cluster
from memlm.errors import InvalidInput
from memlm.server.cluster_config import ClusterConfig
from memlm.server.config import ServerConfig
from memlm.server.main import _engines

RAY = ClusterConfig("ray", 2)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--replicas", "2"], "--replicas is 2, and the engine local has none"),
        (["--address", "auto"], "--address is auto, and neither the engine nor a datastore is on a cluster"),
        (["--engine", "ray", "--store", "ray://notes"], "a store or shard is ray://NAME"),
        (["--engine", "ray", "--store", "notes", "--shard", "ray://notes"], "a store or shard is ray://NAME"),
        (["--engine", "spark"], "engine"),
        (["--engine", "ray", "--replicas", "0"], "--replicas is 0"),
        (["--engine", "ray", "--replicas", "3", "--max-replicas", "2"], "--max-replicas is 2"),
        (["--engine", "ray", "--workers", "2"], "--workers is 2, and the engine ray has replicas"),
        (["--engine", "ray", "--device", "cuda:1"], "--device is cuda:1, and Ray gives each replica a GPU; give cuda"),
    ],
)
def test_options_that_do_not_fit_are_refused(options: list[str], message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    result = CliRunner().invoke(app, ["serve", "--model", "model", "--print-config", *options])
    assert isinstance(result.exception, InvalidInput), result.output
    assert message in str(result.exception)


def test_the_options_reach_the_settings() -> None:
    options = ["--engine", "ray", "--replicas", "2", "--max-replicas", "5", "--address", "auto"]
    result = CliRunner().invoke(app, ["serve", "--model", "model", "--print-config", *options])
    assert result.exit_code == 0, result.output
    assert '"max_replicas": 5' in result.output
    assert ClusterConfig("ray").replicas == ClusterConfig("ray").most_replicas == 1
    assert ClusterConfig("ray", 3).most_replicas == 3


def test_an_address_goes_with_shards_on_a_cluster() -> None:
    for options in (["--store", "ray://notes"], ["--shard", "ray://notes", "--engine", "ray"]):
        shown = ["serve", "--model", "model", "--print-config", "--address", "host:6379", *options]
        result = CliRunner().invoke(app, shown)
        assert result.exit_code == 0, result.output
        assert '"address": "host:6379"' in result.output


def test_limits_are_shared_by_the_replicas_that_there_are_at_the_start() -> None:
    config = ServerConfig(Path("model"), cluster=ClusterConfig("ray", 4, 8), max_running=32, num_threads=1)
    assert config.per_worker(16).max_running == 8
    assert config.per_worker(16).max_sessions == config.max_sessions // 4


def test_a_missing_library_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    for name in [name for name in sys.modules if name.startswith(("ray.", "memlm.server.inference.repl"))]:
        monkeypatch.delitem(sys.modules, name)
    for name in ("deployment", "replica", "replicas", "replica_handle"):
        monkeypatch.delitem(sys.modules, f"memlm.server.inference.{name}", raising=False)
    with pytest.raises(InvalidInput, match=r"pip install 'memlm\[replicas\]'"):
        _engines(ServerConfig(Path("model"), cluster=RAY))


@pytest.mark.parametrize(
    ("address", "set_", "gives_token"),
    [
        (None, {}, True),
        ("auto", {}, False),
        (None, {"RAY_ADDRESS": "10.0.0.1:6379"}, False),
        (None, {"RAY_AUTH_MODE": "disabled"}, False),
    ],
)
def test_a_cluster_of_its_own_has_a_token(
    monkeypatch: pytest.MonkeyPatch, address: str | None, set_: dict[str, str], gives_token: bool
) -> None:
    for name in ("RAY_ADDRESS", "RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_USAGE_STATS_ENABLED"):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    for name, value in set_.items():
        monkeypatch.setenv(name, value)
    for name in [name for name in sys.modules if name == "ray" or name.startswith("ray.")]:
        monkeypatch.delitem(sys.modules, name)
    cluster.prepare(address)
    assert ("RAY_AUTH_TOKEN" in os.environ) is gives_token
    assert len(os.environ.get("RAY_AUTH_TOKEN", "")) == (64 if gives_token else 0)
    assert os.environ.get("RAY_AUTH_MODE") == ("token" if gives_token else set_.get("RAY_AUTH_MODE"))


def test_a_front_end_with_replicas_loads_no_torch() -> None:
    pytest.importorskip("ray.serve", reason="Ray Serve is not installed: pip install 'memlm[replicas]'")
    modules = "memlm.server.inference.replicas.replicas, memlm.server.inference.replicas.router"
    code = f"import sys, {modules}; print('torch' in sys.modules)"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "False"
