"""Applications of Ray Serve on a cluster that several servers may share: which are memlm's, and whose server is gone.

A server registers as an actor that its own process owns. Ray ends that actor with the process, whatever ends that one.
Without its server an application ends itself, and the next server ends what is left of it: both would work in the same
folders.
"""

from __future__ import annotations

import logging
import os
import re
import time
from contextlib import suppress
from typing import Any

import ray
from ray import serve
from ray.exceptions import RayError
from ray.serve.exceptions import RayServeException
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from memlm.distributed.cluster import reason
from memlm.errors import Unavailable

OURS = re.compile(r"memlm-.+-[0-9a-f]{16}")  # names of servers and their applications; others may begin with memlm
DEPLOYMENT = "replica"  # the only one of each
NAMESPACE = "serve"  # of Ray Serve's actors
SERVERS = "memlm-servers"  # the namespace of the actors of servers
POLL_S, WATCH_S = 0.1, 1.0
LOOKS = 3  # WATCH_S apart, until it is believed that a server is gone
END_S = 60.0  # for an application to end after its replicas were killed: less than a second on an idle machine

log = logging.getLogger("memlm.server")


class ServerActor:
    """An actor that lives as long as the process that registered it."""


def register(name: str) -> Any:
    """Registers this process as the server of an application, for as long as the caller holds the returned handle. The
    actor is on this node: another one may have no memlm, and may be lost while this server lives.
    """
    here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
    actor = ray.remote(num_cpus=0, max_restarts=-1)(ServerActor)
    return actor.options(name=name, namespace=SERVERS, scheduling_strategy=here).remote()


def exists(actor: str, namespace: str = NAMESPACE) -> bool:
    """Whether the cluster has an actor. Asks it, which may take a moment."""
    try:
        ray.get_actor(actor, namespace=namespace)
    except ValueError:
        return False
    except RayError:  # which says nothing of the actor
        return True
    return True


def is_gone(name: str) -> bool:
    """Whether the server of an application is gone. One look may be wrong: a cluster that starts again lacks actors."""
    for look in range(LOOKS):
        if look:
            time.sleep(WATCH_S)
        if exists(name, SERVERS):
            return False
    return True


def end(name: str) -> None:
    """Ends an application at once. Its replicas are killed, which their files survive at any point.

    Raises Unavailable if it does not end within a minute.
    """
    deadline_s = time.monotonic() + END_S
    serve.delete(name, _blocking=False)
    while name in serve.status().applications or _replicas_of(name):
        if time.monotonic() > deadline_s:
            raise Unavailable(f"the application {name} does not end; `serve shutdown` on a node ends all applications")
        for actor in _replicas_of(name):
            with suppress(ValueError, RayError):  # it is gone
                ray.kill(ray.get_actor(actor, namespace=NAMESPACE))
        time.sleep(POLL_S)


def end_abandoned(earlier: str | None = None) -> None:
    """Ends the applications of servers that were killed, and that of an `earlier` server, which has given its folder
    away. Raises as `end`.
    """
    for name, application in serve.status().applications.items():
        if not OURS.fullmatch(name) or not {*application.deployments} <= {DEPLOYMENT}:
            continue
        if name == earlier or is_gone(name):
            log.warning("the application %s is ended: its server is gone", name)
            end(name)


def end_with_server(name: str) -> None:
    """Thread of a replica: ends its application, and its process at the latest then, once the server is gone."""
    while not _is_gone_for_sure(name):
        time.sleep(WATCH_S)
    log.error("the server of this replica is gone, and so the replica ends")
    try:
        end(name)
    except (Unavailable, RayError, RayServeException) as error:  # a replica that replaces this one tries again
        log.error("the application %s is left: %s", name, reason(error))
    finally:
        os._exit(1)  # as an inference worker


def _is_gone_for_sure(name: str) -> bool:
    """As `is_gone`. An error says nothing, and must not end the thread that looks."""
    try:
        return is_gone(name)
    except Exception:
        log.exception("it cannot be told whether the server of this replica is there")
        return False


def _replicas_of(name: str) -> list[str]:
    """The actors of an application's replicas."""
    named: list[dict[str, str]] = ray.util.list_named_actors(all_namespaces=True)
    return [each["name"] for each in named if each["namespace"] == NAMESPACE and f"::{name}#" in each["name"]]
