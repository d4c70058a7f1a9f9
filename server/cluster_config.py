"""The settings of inference on a Ray cluster."""

from __future__ import annotations

from dataclasses import dataclass, field

from memlm.base.options import RAY, option
from memlm.distributed.cluster import given
from memlm.errors import InvalidInput, check_choice, check_range

PANEL = "Ray cluster"
ENGINES = ("local", "ray")
MAX_REPLICAS = 256


@dataclass(frozen=True, slots=True)
class ClusterConfig:
    """Where inference runs: in worker processes of the server, or in replicas that Ray Serve places on a cluster. There
    are `num_replicas`, and up to `max_replicas` while requests queue up. Raises InvalidInput for a bad value.
    """

    engine: str = field(
        default="local",
        metadata=option(
            "Where inference runs: in --workers processes here, or in --replicas on a Ray cluster.",
            metavar="local|ray", panel=PANEL,
        ),
    )  # fmt: skip
    num_replicas: int | None = field(
        default=None, metadata=option("Processes on the cluster, each with its own model.", default="1", panel=PANEL)
    )
    max_replicas: int | None = field(
        default=None,
        metadata=option("Replicas while requests queue up.", default="those of --replicas", panel=PANEL),
    )
    address: str | None = field(
        default=None,
        metadata=option(
            "Cluster that this machine is a node of, for replicas and for ray://NAME. $RAY_ADDRESS counts, too.",
            metavar="HOST:PORT|auto", default="one of this machine alone", panel=PANEL,
        ),
    )  # fmt: skip

    def __post_init__(self) -> None:
        check_choice("engine", self.engine, ENGINES)
        if not self.is_ray:
            for name in ("num_replicas", "max_replicas"):
                if (value := getattr(self, name)) is not None:
                    raise InvalidInput(f"{name} is {value}, and the engine local has none; give engine ray", field=name)
            return
        if self.num_replicas is not None:
            check_range("num_replicas", self.num_replicas, least=1, most=MAX_REPLICAS)
        if self.max_replicas is not None:
            check_range("max_replicas", self.max_replicas, least=self.replicas, most=MAX_REPLICAS)

    @property
    def is_ray(self) -> bool:
        """Whether inference runs on a Ray cluster."""
        return self.engine == "ray"

    @property
    def replicas(self) -> int:
        """`num_replicas`, or 1."""
        return self.num_replicas or 1

    @property
    def most_replicas(self) -> int:
        """`max_replicas`, or `replicas`."""
        return self.max_replicas or self.replicas

    def check_beside(self, num_workers: int, device: str, *, finds_shards: bool) -> None:
        """Raises InvalidInput for other settings that do not go with these. Whether the server `finds_shards` on a
        cluster counts, since that is the same one.
        """
        if self.address is not None and not (self.is_ray or finds_shards):
            raise InvalidInput(
                f"address is {self.address}, and neither the engine nor a datastore is on a cluster; give engine ray,"
                f" or a store {RAY}NAME",
                field="address",
            )
        if not self.is_ray:
            return
        if finds_shards and given(self.address) is None:
            raise InvalidInput(
                f"a store or shard is {RAY}NAME, and the engine ray would start a cluster of its own; give the address"
                " of the cluster with the shards",
                field="address",
            )
        if num_workers != 1:
            raise InvalidInput(
                f"num_workers is {num_workers}, and the engine ray has replicas instead; give num_replicas",
                field="num_workers",
            )
        if ":" in device:
            raise InvalidInput(
                f"device is {device}, and Ray gives each replica a GPU; give {device.partition(':')[0]}", field="device"
            )
