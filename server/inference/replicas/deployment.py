"""The deployment of replicas on a Ray cluster by Ray Serve, which places them, replaces them and adds to them.

No proxy of Ray Serve runs, since the front end of the server is the ingress.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import ray
from ray import serve
from ray.exceptions import RayError
from ray.serve.api import RunTarget
from ray.serve.exceptions import RayServeException

from memlm.base.cpu import num_cores
from memlm.distributed.cluster import connect, reason
from memlm.errors import Unavailable
from memlm.generation.sessions.fence import SessionFence
from memlm.server.config import AdapterFolder, ServerConfig
from memlm.server.inference.replicas import applications
from memlm.server.inference.replicas.replica import Replica
from memlm.server.ownership import new_name

log = logging.getLogger("memlm.server")

ROUTER = "memlm.server.inference.replicas.router.Router"
DRAIN_POLL_S = 0.2
TARGET_SHARE = 0.75  # of the requests that a replica runs at a time; where more are open, Ray Serve adds a replica
UPSCALE_DELAY_S, DOWNSCALE_DELAY_S, METRICS_S = 5.0, 300.0, 2.0
HEALTH_CHECK_S = 1.0  # so soon Ray Serve sees a replica that died
SHUTDOWN_S = 10.0  # for this process to leave the cluster
GONE = "its application is gone"
UNBOUNDED = 1 << 20  # requests of one replica: the front end refuses those that are too many


class Deployment:
    """The replicas of one server, and its cluster or its place in one."""

    def __init__(self, config: ServerConfig, fence: SessionFence | None = None) -> None:
        self._config, self._fence, self._is_own, self._is_deployed = config, fence, False, False
        self.name = new_name() if fence is None else fence.name
        self._server_actor: Any = None
        self.per_replica = config  # the settings of each replica, once there are any

    def join(self) -> None:
        """Joins the cluster, or starts one where none is given. Raises as `connect`."""
        cluster, cores = self._config.cluster, num_cores()
        threads = self._config.num_threads or max(1, cores // cluster.most_replicas)
        num_cpus = max(cores, threads * cluster.most_replicas)
        self._is_own = connect(cluster.address, num_cpus=num_cpus, niceness=0)

    def start(self) -> Any:
        """Starts the replicas. Returns Ray Serve's handle on them, without waiting for them. Raises Unavailable as
        `end_abandoned`, for a cluster without processors, and where Ray fails.
        """
        try:
            return self._deploy()
        except (RayError, RayServeException) as error:
            raise Unavailable(f"replicas cannot be deployed on the Ray cluster: {reason(error)}") from error

    def _deploy(self) -> Any:
        logging.getLogger("ray.serve").setLevel(logging.ERROR)  # the server logs what its operator needs
        nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
        self.per_replica = _absolute(settings_of(self._config, nodes))
        serve.start(proxy_location="Disabled")
        applications.end_abandoned(None if self._fence is None else self._fence.earlier)
        self._server_actor = applications.register(self.name)
        needs_gpu = _needs_gpu(self._config, nodes)
        most_together = most_on_one_node(self.per_replica, nodes, needs_gpu=needs_gpu)
        application = deployment_of(self.per_replica, needs_gpu=needs_gpu).bind(
            self.per_replica, most_together, self._fence
        )
        target = RunTarget(application, name=self.name, route_prefix=None)
        self._is_deployed = True
        (handle,) = serve.run_many([target], wait_for_applications_running=False)
        return handle

    def problem(self) -> str | None:
        """Why Ray Serve has given up to start replicas, in one line: `GONE` without an application. None while it has
        not.
        """
        if (status := serve.status().applications.get(self.name)) is None:
            return GONE
        if status.status != "DEPLOY_FAILED":
            return None
        lines = [line for each in status.deployments.values() for line in each.message.splitlines() if line.strip()]
        return lines[-1].strip() if lines else status.message

    def stop(self, timeout_s: float) -> None:
        """Ends the replicas, waits for that up to `timeout_s`, and leaves the cluster. A lost one never answers."""
        if self._is_deployed and not self._is_own and ray.is_initialized() and not _ends_in(timeout_s, self._end):
            self._warn(f"Ray does not answer for {timeout_s:g} s")
        self.leave()

    def leave(self) -> None:
        """Leaves the cluster, which ends with that if it was started for the replicas. Waits up to `SHUTDOWN_S`."""
        if not _ends_in(SHUTDOWN_S, ray.shutdown):
            log.warning("the server ends without Ray, which does not answer for %g s", SHUTDOWN_S)

    def _end(self) -> None:
        try:
            applications.end(self.name)
        except (Unavailable, RayError, RayServeException) as error:
            self._warn(reason(error))

    def _warn(self, why: str) -> None:
        log.warning("the replicas may be left on the Ray cluster, under the name %s: %s", self.name, why)


def _ends_in(timeout_s: float, work: Callable[[], None]) -> bool:
    """Whether some work ends in time. It is done in a daemon thread, which keeps no process from its end."""
    thread = threading.Thread(target=work, name="end of replicas", daemon=True)
    thread.start()
    thread.join(timeout_s)
    return not thread.is_alive()


def deployment_of(config: ServerConfig, *, needs_gpu: bool) -> Any:
    """Ray Serve's deployment of replicas with these settings."""
    cluster = config.cluster
    if cluster.most_replicas > cluster.replicas:
        scale: dict[str, Any] = {
            "autoscaling_config": {
                "min_replicas": cluster.replicas,
                "initial_replicas": cluster.replicas,
                "max_replicas": cluster.most_replicas,
                "target_ongoing_requests": max(1.0, TARGET_SHARE * config.max_running),
                "upscale_delay_s": UPSCALE_DELAY_S,
                "downscale_delay_s": DOWNSCALE_DELAY_S,
                "look_back_period_s": 2 * METRICS_S,
                "metrics_interval_s": METRICS_S,
            }
        }
    else:
        scale = {"num_replicas": cluster.replicas}
    return serve.deployment(
        Replica,
        name=applications.DEPLOYMENT,
        max_ongoing_requests=UNBOUNDED,
        ray_actor_options={"num_cpus": config.num_threads, "num_gpus": int(needs_gpu)},
        health_check_period_s=HEALTH_CHECK_S,
        health_check_timeout_s=config.worker_timeout_s,
        graceful_shutdown_wait_loop_s=DRAIN_POLL_S,
        graceful_shutdown_timeout_s=max(1.0, config.drain_s),
        request_router_config={"request_router_class": ROUTER},
        logging_config={"log_level": "WARNING", "enable_access_log": False},
        **scale,
    )


def settings_of(config: ServerConfig, nodes: Sequence[Mapping[str, Any]]) -> ServerConfig:
    """The settings of each replica: the limits divided among them, as many threads as let all replicas fit the nodes,
    and nothing that the front end alone needs, since all processes of the cluster can read them.
    """
    cpus = [int(node["CPU"]) for node in nodes if node.get("CPU", 0) >= 1]
    if not cpus:
        raise Unavailable("the Ray cluster has no processors; start a node with `ray start --address ...`")
    most = config.cluster.most_replicas
    fitting = [threads for threads in range(1, max(cpus) + 1) if sum(each // threads for each in cpus) >= most]
    threads = config.num_threads or max(fitting, default=1)
    return replace(
        config.per_worker(threads), num_threads=threads, otlp=None, auth_file=None, tls_cert=None, tls_key=None,
        tls_client_ca=None,
    )  # fmt: skip


def most_on_one_node(config: ServerConfig, nodes: Sequence[Mapping[str, Any]], *, needs_gpu: bool) -> int:
    """How many replicas with these settings may run on one node, and so share its RAM."""
    fitting = [int(node.get("CPU", 0)) // config.num_threads for node in nodes]
    if needs_gpu:
        fitting = [min(most, int(node.get("GPU", 0))) for most, node in zip(fitting, nodes, strict=True)]
    return max(1, min(config.cluster.most_replicas, max(fitting)))


def _needs_gpu(config: ServerConfig, nodes: Sequence[Mapping[str, Any]]) -> bool:
    return config.device == "cuda" or (config.device == "auto" and any(node.get("GPU", 0) >= 1 for node in nodes))


def _absolute(config: ServerConfig) -> ServerConfig:
    """The settings with paths and an address that mean the same everywhere. A model and an encoder may be names."""
    return replace(
        config,
        cluster=replace(config.cluster, address=ray.get_runtime_context().gcs_address),
        model=config.model.absolute() if config.model.exists() else config.model,
        stores=tuple(path.absolute() for path in config.stores),
        encoder=str(Path(config.encoder).absolute()) if Path(config.encoder).exists() else config.encoder,
        adapters=tuple(AdapterFolder(each.name, each.path.absolute()) for each in config.adapters),
        session_dir=None if config.session_dir is None else config.session_dir.absolute(),
    )
