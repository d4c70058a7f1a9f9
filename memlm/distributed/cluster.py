"""The Ray cluster of this process: one that this machine is a node of, or this machine alone.

Ray is imported late, since it reads its settings from the environment as it is imported.
"""

from __future__ import annotations

import logging
import os
import socket
import sys
import threading
from secrets import token_hex

from memlm.errors import InvalidInput, Unavailable

CONNECT_S = 10.0


def prepare(address: str | None) -> None:
    """Gives a cluster of this machine alone, if there will be one, a token that only its own processes know. Without
    one, whoever reaches its ports runs code here, and Ray opens them to the network.

    Must come before the first import of Ray, and does nothing after it. Ray's own RAY_AUTH_MODE takes precedence.
    """
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    is_own = given(address) is None
    if is_own and "ray" not in sys.modules and "RAY_AUTH_MODE" not in os.environ:
        os.environ["RAY_AUTH_MODE"], os.environ["RAY_AUTH_TOKEN"] = "token", token_hex(32)


def connect(address: str | None, *, num_cpus: int | None = None, niceness: int | None = None) -> bool:
    """Joins the cluster at `address`, HOST:PORT or auto. Without one, RAY_ADDRESS counts, and without that this machine
    becomes a cluster of its own with `num_cpus` processors, its own number by default, whose workers add `niceness` to
    that of this process, 15 by default. `ray.shutdown` ends that one. Returns whether it is one of its own.

    Raises InvalidInput for an address of Ray's client, and Unavailable if there is no cluster at the address.
    """
    prepare(address)
    import ray
    from ray.exceptions import RayError

    if threading.current_thread() is not threading.main_thread():  # Ray warns that it handles no signals there
        logging.getLogger("ray._private.worker").setLevel(logging.ERROR)
    address = given(address)
    if address is not None and "://" in address:
        raise InvalidInput(
            f"address is {address!r}, of Ray's client; run this on a node of the cluster, with HOST:PORT or auto",
            field="address",
        )
    try:
        if address is None:
            if niceness is not None:
                os.environ.setdefault("RAY_worker_niceness", str(niceness))
            # Without "local", Ray would join whatever cluster was last started here, which another program may end.
            ray.init(
                "local", num_cpus=num_cpus, log_to_driver=False, logging_level=logging.WARNING, include_dashboard=False
            )
            return True
        if address == "auto" and given(None) is None:
            os.environ.pop("RAY_ADDRESS", None)  # local, which would take precedence
        host, _, port = address.rpartition(":")
        if host and port.isdecimal():  # Ray itself tries for minutes
            socket.create_connection((host.strip("[]"), int(port)), timeout=CONNECT_S).close()
        ray.init(address, log_to_driver=False, logging_level=logging.WARNING)
        return False
    except (OSError, ValueError, RayError) as error:
        raise Unavailable(
            f"no Ray cluster answers at {address} ({reason(error)}); `ray status` tells of one"
        ) from error


def reason(error: BaseException) -> str:
    """The last line of an error. Those of Ray may be a stack trace of another process, with the problem at its end."""
    return str(error).strip().rpartition("\n")[2].strip() or type(error).__name__


def given(address: str | None) -> str | None:
    """The address of the cluster to join, None for one of this machine alone, which Ray calls local."""
    address = address or os.environ.get("RAY_ADDRESS") or None
    return None if address == "local" else address
