"""One process that has loaded torch, Faiss and gRPC, and forks servers: a test's server then starts in half a second.

`memlm serve` loads Python's side of gRPC, and starts a fork server that loads torch: three seconds of processor time a
server. Here both are forks. In all else a forked server is one that was started by hand: its own environment, log,
processes and exit code. Tests of how a server is started run the command itself (`RunningServer(..., forked=False)`).
"""

from __future__ import annotations

import atexit
import gc
import json
import os
import select
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from multiprocessing import util
from pathlib import Path
from typing import Any

MESSAGE_BYTES = 1 << 18
LOADED = (
    "memlm.cli.app",
    "memlm.cli.serve",
    "memlm.server.main",
    "memlm.indexing.build",
    "memlm.server.inference.startup",
    "memlm.server.jobs.worker",
)


class ServerForker:
    """The process that forks, as tests see it. It ends with them."""

    def __init__(self) -> None:
        from memlm.base.cpu import OPENMP_SPIN_COUNT

        self._connection, other_end = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.exit_codes: dict[int, int] = {}
        code = f"import sys; sys.path.insert(0, {str(Path(__file__).parent)!r}); import server_forkserver as forker;"
        environment = {"GOMP_SPINCOUNT": str(OPENMP_SPIN_COUNT), **os.environ}  # read when OpenMP is loaded
        with other_end:
            self._process = subprocess.Popen(
                [sys.executable, "-c", f"{code} forker.run({other_end.fileno()})"],
                stdin=subprocess.DEVNULL,
                pass_fds=[other_end.fileno()],
                env=environment,
            )
        atexit.register(self._process.wait)
        atexit.register(self._connection.close)

    def start(self, arguments: Sequence[str], log: Path, first: str) -> ForkedServer:
        """Forks a server that runs the code `first` and then `memlm` with these arguments."""
        start = {"argv": list(arguments), "log": str(log.absolute()), "first": first}
        self._connection.send(json.dumps({**start, "cwd": os.getcwd(), "environment": dict(os.environ)}).encode())
        while "started" not in (reply := self._receive()):
            pass
        return ForkedServer(self, reply["started"])

    def collect(self) -> None:
        """Notes the exit codes of servers that have ended."""
        while select.select([self._connection], [], [], 0)[0]:
            self._receive()

    def _receive(self) -> dict[str, int]:
        data = self._connection.recv(MESSAGE_BYTES)
        assert data, "the process that forks servers is gone"
        reply: dict[str, int] = json.loads(data)
        if "ended" in reply:
            self.exit_codes[reply["ended"]] = reply["code"]
        return reply


class ForkedServer:
    """A forked server's process, with the methods of `subprocess.Popen` that tests use."""

    def __init__(self, forker: ServerForker, pid: int) -> None:
        self._forker, self.pid = forker, pid

    def poll(self) -> int | None:
        self._forker.collect()
        return self._forker.exit_codes.get(self.pid)

    def wait(self, timeout: float | None = None) -> int:
        deadline_s = None if timeout is None else time.monotonic() + timeout
        while (code := self.poll()) is None:
            if deadline_s is not None and time.monotonic() > deadline_s:
                assert timeout is not None
                raise subprocess.TimeoutExpired(f"server {self.pid}", timeout)
            time.sleep(0.01)
        return code

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def terminate(self) -> None:
        self.send_signal(15)

    def kill(self) -> None:
        self.send_signal(9)


def run(connection_fd: int) -> None:
    """The process that forks, and each server that it forks."""
    for module in LOADED:
        __import__(module)
    gc.freeze()
    server = _fork_servers(socket.socket(fileno=connection_fd))
    if server is None:
        return
    os.chdir(server["cwd"])
    os.environ.clear()
    os.environ.update(server["environment"])
    log = os.open(server["log"], os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o666)
    for stream in (1, 2):
        os.dup2(log, stream)
    os.close(log)
    util.spawnv_passfds = _fork_the_forkserver
    sys.argv = ["memlm", *server["argv"]]
    exec(compile(server["first"], "<first>", "exec"), {"__name__": "__main__"})
    from memlm.cli import main

    code: Any = 0
    try:
        main()
    except SystemExit as end:
        code = end.code
    finally:  # an interpreter that has loaded torch takes a second to end, which a front end does not
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(code or 0)


def _fork_servers(connection: socket.socket) -> dict[str, Any] | None:
    """Returns what to run in each server, and None in the forking process, once the tests have gone."""
    pids = dict[int, int]()  # by their file descriptors
    with connection:
        while True:
            for ready in select.select([connection, *pids], [], [])[0]:
                if ready is not connection:
                    pid = pids.pop(ready)
                    os.close(ready)
                    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
                    connection.send(json.dumps({"ended": pid, "code": code}).encode())
                elif not (data := connection.recv(MESSAGE_BYTES)):
                    return None
                elif (pid := os.fork()) == 0:
                    for other in pids:
                        os.close(other)
                    server: dict[str, Any] = json.loads(data)
                    return server
                else:
                    pids[os.pidfd_open(pid)] = pid
                    connection.send(json.dumps({"started": pid}).encode())


_spawn = util.spawnv_passfds


def _fork_the_forkserver(path: str, arguments: list[str], descriptors: Sequence[int]) -> int:
    """In place of `util.spawnv_passfds`: forks the server's first fork server, in which torch is loaded already. A
    later one is started as usual, since then the server has threads, which do not survive a fork.
    """
    if "multiprocessing.forkserver" not in arguments[-1]:
        return _spawn(path, arguments, descriptors)
    util.spawnv_passfds = _spawn
    if pid := os.fork():
        return pid
    for descriptor in {int(name) for name in os.listdir("/proc/self/fd")} - {0, 1, 2, *descriptors}:
        with suppress(OSError):  # the one that listed them
            os.close(descriptor)
    try:
        exec(compile(arguments[-1], "<forkserver>", "exec"), {"__name__": "__main__"})
    finally:
        os._exit(0)
