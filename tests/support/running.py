"""A server in a process of its own, and the processes that it leaves behind."""

from __future__ import annotations

import ctypes
import os
import re
import select
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from functools import cache, cached_property
from pathlib import Path
from types import TracebackType
from typing import Self

import pytest
from server_forkserver import ForkedServer, ServerForker

from memlm.api.generation import Token
from memlm.model.kernels.native import library

# The limit of every wait for an event that has to come: at least ten times what it takes on an idle machine, so that
# no test fails beside busy processes.
PATIENCE_S = 60.0


@cache
def server_forker() -> ServerForker:
    """The process that forks servers, one for all tests of this process."""
    return ServerForker()


def refusal_of(log: Path, *arguments: str, first: str = "pass") -> str:
    """What `memlm serve` says before it ends with the exit code 1. It is forked, as a `RunningServer` is."""
    process = server_forker().start(["serve", *arguments], log, first)
    assert process.wait(PATIENCE_S) == 1
    return log.read_text()


class RunningServer:
    """`memlm serve` on a free port; leaving the block ends it, and fails where a process of it is left.

    Of the `options`, those such as `+max_jobs=8` are settings of its file. `first` is Python that the front end runs
    before anything else. A traceback may be in the log only where the server `fails` on purpose. A server is `forked`
    from a process that has loaded torch, or runs the command itself.
    """

    def __init__(
        self,
        log: Path,
        model: Path,
        *stores: Path,
        options: tuple[str, ...] = (),
        first: str = "pass",
        fails: bool = False,
        forked: bool = True,
        patience_s: float = PATIENCE_S,
    ) -> None:
        self.log, self.fails = log, fails
        arguments = ["serve", "--model", str(model), "--port", "0", "--log-level", "info"]
        # Hardly below the others: at the default of 10, jobs starve beside the machine's other work.
        settings = {"index_nice": "1"}
        settings |= dict(each[1:].split("=", 1) for each in options if each.startswith("+"))
        file = log.with_suffix(".toml")
        file.write_text("".join(f"{name} = {value}\n" for name, value in settings.items()))
        arguments += ["--config", str(file), "--device", "cpu"]
        arguments += [] if "--dtype" in options else ["--dtype", "float32"]  # as tests/conftest.py has it
        arguments += [] if "--encoder" in options else ["--encoder", "none"]  # whatever is installed here
        for store in stores:
            arguments += ["--store", str(store)]
        arguments += [each for each in options if not each.startswith("+")]
        self.process: subprocess.Popen[bytes] | ForkedServer
        if forked and "PYTHONMALLOC" not in os.environ:  # Python reads that one as it starts
            log.write_bytes(b"")  # of a server before it, the address would be read
            self.process = server_forker().start(arguments, log, first)
        else:
            command = [sys.executable, "-c", f"{first}\nfrom memlm.cli import main; main()"]
            with log.open("w") as file:
                self.process = subprocess.Popen([*command, *arguments], stdout=file, stderr=file)
        wait_until(lambda: "serving" in self.output or self.process.poll() is not None, patience_s)
        assert self.process.poll() is None, self.output
        self.address = re.search(r'serving .*? at ([^\s",]+)', self.output)[1]

    @property
    def output(self) -> str:
        return self.log.read_text()

    @cached_property
    def http_url(self) -> str:
        """The URL of the HTTP port, which is announced after the address. The log may be long when it is asked for."""
        wait_until(lambda: "/docs" in self.output)
        return self.output.split("  HTTP ", 1)[1].split()[0].removesuffix("/v1")

    @property
    def worker_pids(self) -> list[int]:
        """The inference workers, oldest first. Index workers have a higher niceness."""
        return [pid for pid in forked_by(self.process.pid) if gives_way(pid) is False]

    @property
    def index_worker_pids(self) -> list[int]:
        """The oldest first."""
        return [pid for pid in forked_by(self.process.pid) if gives_way(pid) is True]

    @property
    def job_pids(self) -> list[int]:
        """The processes that do jobs or will: children of index workers, and those that have none."""
        return [pid for worker in self.index_worker_pids for pid in children_of(worker) or [worker]]

    @property
    def worker_pid(self) -> int:
        """The only inference worker."""
        (pid,) = self.worker_pids
        return pid

    def stop(self, number: signal.Signals = signal.SIGTERM) -> int:
        self.process.send_signal(number)
        return self.process.wait(PATIENCE_S)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        family = [self.process.pid, *family_of(self.process.pid)]
        if self.process.poll() is None:
            self.stop()
        wait_until(lambda: not any(map(is_alive, family)))
        before, found, after = self.output.partition("Traceback")
        assert self.fails or not found, f"{before[-2000:]}{found}{after[:6000]}"  # a whole log is cut in a report


class Wire:
    """A proxy to a server that can drop its connections."""

    def __init__(self, target: str) -> None:
        host, port = target.split(":")
        self._target, self._open = (host, int(port)), list[socket.socket]()
        self._carriers = list[threading.Thread]()
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.is_cut = False
        threading.Thread(target=self._accept, daemon=True).start()

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self._listener.getsockname()[1]}"

    def cut(self) -> None:
        """Breaks open connections. New ones are refused until `mend`."""
        self.is_cut = True
        for connection in self._open:
            with suppress(OSError):  # gone already
                connection.shutdown(socket.SHUT_RDWR)
        for thread in self._carriers:
            thread.join()
        self._open.clear()

    def mend(self) -> None:
        self.is_cut = False

    def close(self) -> None:
        self.cut()
        self._listener.close()

    def _accept(self) -> None:
        while True:
            try:
                near, _ = self._listener.accept()
            except OSError:
                return
            if self.is_cut:
                near.close()
                continue
            far = socket.create_connection(self._target)
            self._open += [near, far]
            self._carriers.append(threading.Thread(target=self._carry, args=(near, far), daemon=True))
            self._carriers[-1].start()

    def _carry(self, near: socket.socket, far: socket.socket) -> None:
        with near, far, suppress(OSError, ValueError):
            while True:
                for ready in select.select([near, far], [], [])[0]:
                    if not (data := ready.recv(1 << 16)):
                        return
                    (far if ready is near else near).sendall(data)


def free_port() -> int:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        return int(taken.getsockname()[1])


def figures_of(server: RunningServer) -> dict[str, float]:
    """The metrics of a server with an HTTP port."""
    with urllib.request.urlopen(f"{server.http_url}/metrics") as reply:
        text = reply.read().decode()
    lines = [line.rpartition(" ") for line in text.splitlines() if line.startswith("memlm")]
    return {name: float(value) for name, _, value in lines}


def start_child() -> subprocess.Popen[bytes]:
    """Starts a process that Linux kills with the thread that started it, as those of a Ray cluster are."""
    libc, set_death_signal = ctypes.CDLL(None), 1  # PR_SET_PDEATHSIG of prctl(2)
    return subprocess.Popen(["sleep", "1000"], preexec_fn=lambda: libc.prctl(set_death_signal, signal.SIGKILL, 0, 0, 0))


def wait_until(holds: Callable[[], object], timeout_s: float = PATIENCE_S) -> None:
    """Fails if a condition does not become true in time."""
    deadline_s = time.monotonic() + timeout_s
    while not holds():
        assert time.monotonic() < deadline_s, f"not true within {timeout_s} s"
        time.sleep(0.01)


def children_of(pid: int) -> list[int]:
    """In the order in which they were started; each belongs to the thread that started it."""
    found = list[int]()
    with suppress(FileNotFoundError, ProcessLookupError):
        for thread in list(Path(f"/proc/{pid}/task").iterdir()):
            with suppress(FileNotFoundError, ProcessLookupError):  # a thread that has ended
                found += map(int, (thread / "children").read_text().split())
    return sorted(found)


def family_of(pid: int) -> list[int]:
    """The children of a process, and theirs."""
    return [each for child in children_of(pid) for each in (child, *family_of(child))]


def forker_of(server: int) -> int:
    """The one child of a server that has loaded torch, and forks its workers."""
    (pid,) = [child for child in children_of(server) if "forkserver" in command_of(child)]
    return pid


def forked_by(server: int) -> list[int]:
    """The workers of a server."""
    return children_of(forker_of(server))


def gives_way(pid: int) -> bool | None:
    """Whether a process has a lower priority than this one. None of one that is gone."""
    try:
        return niceness_of(pid) > niceness_of(0) or os.sched_getscheduler(pid) == os.SCHED_IDLE
    except ProcessLookupError:
        return None


def niceness_of(pid: int) -> int:
    return os.getpriority(os.PRIO_PROCESS, pid)


def command_of(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode()
    except (FileNotFoundError, ProcessLookupError):
        return ""


def is_alive(pid: int) -> bool:
    """Whether a process runs. A zombie does not."""
    return state_of(pid) not in ("Z", None)


def is_stopped(pid: int) -> bool:
    """Whether a process stands still until it gets SIGCONT."""
    return state_of(pid) == "T"


def state_of(pid: int) -> str | None:
    """The letter of proc(5) for what a process does. None of one that is gone."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return None


def anonymous_bytes(pid: int) -> int:
    """Anonymous RAM of a process."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("RssAnon:"))


def cpu_seconds(pid: int) -> float:
    """Processor time that a process has used."""
    fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def wait_until_idle(pid: int, timeout_s: float = PATIENCE_S) -> None:
    """Waits until a process has used next to no processor time for a while."""
    deadline_s, used_s = time.monotonic() + timeout_s, -1.0
    while cpu_seconds(pid) - used_s > 0.02:
        assert time.monotonic() < deadline_s, f"{pid} was not idle within {timeout_s} s"
        used_s = cpu_seconds(pid)
        time.sleep(0.3)


LOGPROB_TOLERANCE = 1e-4  # float32: products of a batch add in another order than those of one row


def is_same_with_drafts(found: Sequence[Token], expected: Sequence[Token]) -> bool:
    """Whether drafts have changed nothing: no bit with the native kernels, and no token without them, since torch
    rounds passes of other lengths in other ways.
    """
    if library() is not None:
        return list(found) == list(expected)
    return [each.id for each in found] == [each.id for each in expected]


def alike(tokens: Iterable[Token], others: Iterable[Token]) -> bool:
    """Whether tokens are equal, up to the rounding that other rows of a batch cause."""
    pairs = list(zip(tokens, others, strict=True))
    return all(
        (one.id, one.text, one.bytes, [n.document_id for n in one.neighbors])
        == (other.id, other.text, other.bytes, [n.document_id for n in other.neighbors])
        and one.logprob == pytest.approx(other.logprob, abs=LOGPROB_TOLERANCE)
        and one.lm_logprob == pytest.approx(other.lm_logprob, abs=LOGPROB_TOLERANCE)
        for one, other in pairs
    )
