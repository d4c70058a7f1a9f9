"""Servers whose replicas run on a Ray cluster."""

import re
from pathlib import Path
from typing import Any

from running import RunningServer, is_alive

CLUSTER_S = 300.0  # for a cluster and its replicas to start: 20 s on an idle machine


def serve(folder: Path, model: Path, *stores: Path, options: tuple[str, ...] = (), **how: Any) -> RunningServer:
    """A server whose replicas run on a cluster, by default one of its own."""
    log, options = folder / "log", ("--threads", "1", "--engine", "ray", *options)
    return RunningServer(log, model, *stores, options=options, forked=False, patience_s=CLUSTER_S, **how)


def replica_pids(server: RunningServer) -> list[int]:
    """The processes of all replicas that were ready, in that order, of those that are alive."""
    return [pid for pid in map(int, re.findall(r" is ready: process (\d+) on", server.output)) if is_alive(pid)]
