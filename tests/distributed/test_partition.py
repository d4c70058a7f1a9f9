"""Shards on hosts of their own: network namespaces that a bridge joins, and whose links are cut under load.

A cut link is silent, where a killed process resets its connections.
"""

import os
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from running import RunningServer, wait_until
from running_shards import STREAMS, Load, ShardProcess, ask

from memlm.client.client import Client
from memlm.distributed.shards import TIMEOUT_S
from memlm.errors import Unavailable
from memlm.index.store.shards import split

pytestmark = pytest.mark.cluster
NAME = f"mm{os.getpid()}"  # of the bridge. Linux takes names of 15 letters
NET = f"10.{os.getpid() % 200 + 50}.77"
SHARDS = 3


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True, text=True)


@pytest.fixture
def hosts() -> Iterator[list[str]]:
    """The addresses of hosts in namespaces, one for each shard. Skips where they cannot be made."""
    if shutil.which("ip") is None or os.geteuid() != 0:
        pytest.skip("network namespaces need root and the command `ip`")
    with ExitStack() as made:
        try:
            ip("link", "add", NAME, "type", "bridge")
        except subprocess.CalledProcessError as error:
            pytest.skip(f"this system makes no bridge: {error.stderr}")
        made.callback(ip, "link", "del", NAME)
        ip("addr", "add", f"{NET}.1/24", "dev", NAME)
        ip("link", "set", NAME, "up")
        for number in range(1, SHARDS + 1):
            host, outside, inside = (f"{NAME}{kind}{number}" for kind in "hoi")
            ip("netns", "add", host)
            made.callback(ip, "netns", "del", host)
            ip("link", "add", outside, "type", "veth", "peer", "name", inside)
            made.callback(ip, "link", "del", outside)
            ip("link", "set", inside, "netns", host)
            ip("link", "set", outside, "master", NAME, "up")
            ip("-n", host, "addr", "add", f"{NET}.1{number}/24", "dev", inside)
            ip("-n", host, "link", "set", inside, "up")
        yield [f"{NET}.1{number}" for number in range(1, SHARDS + 1)]


@pytest.fixture
def addresses(tmp_path: Path, store_folder: Path, hosts: list[str]) -> Iterator[list[str]]:
    """Shards of `tmp_path / "store"`, each on a host of its own."""
    shutil.copytree(store_folder, tmp_path / "store")
    split(tmp_path / "store", SHARDS)
    with ExitStack() as held:
        shards = []
        for number, host in enumerate(hosts, start=1):
            first = ("ip", "netns", "exec", f"{NAME}h{number}")
            log = tmp_path / f"shard-{number}.log"
            shards.append(ShardProcess(tmp_path / "store", f"{number}/{SHARDS}", f"{host}:0", log, first))
            held.callback(shards[-1].end, signal.SIGTERM)
        yield [shard.address for shard in shards]


def cut(number: int, state: str) -> float:
    """Takes the link of a host down or up. Returns the time."""
    ip("link", "set", f"{NAME}o{number}", state)
    return time.monotonic()


@pytest.mark.parametrize("partial", [False, True])
def test_a_host_that_the_network_loses_is_reported_in_time_and_comes_back(tmp_path, model_folder, addresses, partial):
    store = tmp_path / "store"
    with RunningServer(tmp_path / "alone.log", model_folder, store) as server, Client(server.address) as client:
        expected = ask(client)
    options = tuple(word for address in addresses for word in ("--shard", address))
    with (
        RunningServer(
            tmp_path / "server.log", model_folder, store, options=(*options, *["--partial"] * partial)
        ) as server,
        Client(server.address) as client,
        Load(server, expected) as load,
    ):
        load.wait_for(2 * STREAMS)
        assert not load.failures
        cut_s = cut(2, "down")
        if partial:
            wait_until(lambda: searched_share(client) < 1)
        else:
            wait_until(lambda: len(load.failures) >= STREAMS)
        assert time.monotonic() - cut_s < TIMEOUT_S + 5
        cut(2, "up")
        if partial:
            wait_until(lambda: searched_share(client) == 1)
        load.wait_for(2 * STREAMS)
        failures = len(load.failures)
        load.wait_for(2 * STREAMS)
        assert len(load.failures) == failures
    assert all(isinstance(error, Unavailable) and "shard 2 at" in str(error) for error in load.failures)
    if partial:
        assert load.failures == []
    else:
        assert load.wrong == []  # partial answers are others


def searched_share(client: Client) -> float:
    """The share of the datastore's entries that an answer could reach."""
    share = client.generate("the quick", max_tokens=8, temperature=0).result().finished.usage.searched_share
    assert share is not None
    return share
