"""Shards of a datastore as named actors of a Ray cluster. Ray places, restarts and finds them, and no search passes it.

An actor is detached, so that it outlives the command that placed it. It runs the server of a shard on a free port of
its node, and tells its address to whoever asks (`shard_finder`). After a restart the port is another one.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import ray
from ray.exceptions import RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from memlm.base.cpu import spin_briefly
from memlm.base.options import RAY
from memlm.distributed.cluster import connect, given, reason
from memlm.distributed.shard_finder import no_shards
from memlm.errors import AlreadyExists, InvalidInput, MemlmError, Unavailable, check_range

if TYPE_CHECKING:
    from memlm.distributed.shard_server import ShardServer

NAMESPACE = "memlm-shards"
ANSWER_S, START_S = 1.0, 600.0


class PlacedShard(NamedTuple):
    """A process of a shard. Its address is empty while it has none, and `problem` the reason if it cannot start."""

    path: str
    shard: int
    num_shards: int
    replica: int
    address: str = ""
    node: str = ""
    pid: int = 0
    problem: str = ""


class ShardActor:
    """A shard in a process of the cluster. One that cannot open its folder tries again whenever it is asked."""

    def __init__(self, path: str, shard: int, num_shards: int, replica: int) -> None:
        spin_briefly()  # before Faiss loads
        self._placed = PlacedShard(path, shard, num_shards, replica)
        self._server: ShardServer | None = None
        self.describe()

    def describe(self) -> PlacedShard:
        """Where it is, and how it is."""
        from memlm.distributed.shard_server import ShardSegments, ShardServer
        from memlm.index.store.shards import ShardNumber

        if self._server is None:
            number, host = ShardNumber(self._placed.shard, self._placed.num_shards), ray.util.get_node_ip_address()
            try:
                self._server = ShardServer(ShardSegments(self._placed.path, number), f"{host}:0")
            except (MemlmError, OSError) as error:
                return self._placed._replace(problem=str(error))
            node = ray.get_runtime_context().get_node_id()
            self._placed = self._placed._replace(address=self._server.address, node=node, pid=os.getpid())
        return self._placed


@contextmanager
def joined(address: str | None) -> Iterator[None]:
    """Joins a running cluster, unless this process has: that at an address, by default at RAY_ADDRESS, or else the one
    that this machine is a node of, also where either is local: a new cluster has no shards. Raises Unavailable if there
    is none.
    """
    if ray.is_initialized():
        yield
        return
    connect(given(address) or "auto")
    try:
        yield
    finally:
        ray.shutdown()


def place(path: str | Path, name: str, *, num_shards: int, replicas: int = 1) -> list[PlacedShard]:
    """Starts the shards of a datastore on the nodes of the cluster that this process has joined. Each node must have
    the folder under the same path. The shards, and the replicas of one, are spread over the nodes.

    Raises AlreadyExists for a name that is taken, and Unavailable if a shard cannot start. None runs then.
    """
    check_range("shards", num_shards, least=1, most=10_000, whole=True)
    check_range("replicas", replicas, least=1, most=64, whole=True)
    if not re.fullmatch(r"[\w.-]+", name):
        raise InvalidInput(f"name is {name!r}; expected letters, digits, dots and dashes", field="name")
    if _members(name):
        raise AlreadyExists(f"shards of the name {name!r} run already; stop them: memlm shard {RAY}{name} --stop")
    path, actor = str(Path(path).absolute()), ray.remote(num_cpus=0, max_restarts=-1)(ShardActor)
    nodes, started = sorted(node["NodeID"] for node in ray.nodes() if node["Alive"]), list[Any]()
    try:
        for replica in range(replicas):
            for shard in range(1, num_shards + 1):
                node = NodeAffinitySchedulingStrategy(nodes[(shard - 1 + replica) % len(nodes)], soft=True)
                placed = actor.options(
                    name=f"{name}/{shard}/{num_shards}/{replica}", namespace=NAMESPACE, lifetime="detached",
                    scheduling_strategy=node,
                )  # fmt: skip
                started.append(placed.remote(path, shard, num_shards, replica))
        found: list[PlacedShard] = ray.get([each.describe.remote() for each in started], timeout=START_S)
        if problems := [each.problem for each in found if each.problem]:
            raise Unavailable(f"a shard cannot start: {problems[0]}")
    except BaseException as error:
        for each in started:
            ray.kill(each)
        if isinstance(error, RayError):
            raise Unavailable(
                f"a shard cannot start ({reason(error)}); install memlm, of this version, on every node"
            ) from error
        raise
    return found


def find(name: str, *, wait_s: float = ANSWER_S) -> dict[str, PlacedShard | None]:
    """The shards of a name by the names of their actors. None for one that does not answer within `wait_s`."""
    asked = dict[Any, str]()
    found: dict[str, PlacedShard | None] = {}
    for member in _members(name):
        found[member] = None
        try:
            asked[ray.get_actor(member, namespace=NAMESPACE).describe.remote()] = member
        except (ValueError, RayError):
            continue  # gone, or about to be restarted
    done, _ = ray.wait([*asked], num_returns=len(asked), timeout=wait_s) if asked else ([], [])
    for ref in done:
        try:
            found[asked[ref]] = ray.get(ref)
        except RayError:
            continue
    return found


def stop(name: str) -> int:
    """Ends the shards of a name, and returns how many there were. Raises NotFound for none."""
    members = _members(name)
    for member in members:
        try:
            ray.kill(ray.get_actor(member, namespace=NAMESPACE))
        except (ValueError, RayError):
            continue  # it is gone
    if not members:
        raise no_shards(RAY + name)
    deadline_s = time.monotonic() + ANSWER_S * 10
    while _members(name) and time.monotonic() < deadline_s:  # until the names are free
        time.sleep(0.05)
    return len(members)


def _members(name: str) -> Sequence[str]:
    """The names of the actors of a name."""
    named: list[dict[str, str]] = ray.util.list_named_actors(all_namespaces=True)
    return sorted(
        each["name"] for each in named if each["namespace"] == NAMESPACE and each["name"].startswith(f"{name}/")
    )
