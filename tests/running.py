"""A server in a process of its own, as people run it, and a look at the processes it leaves."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from types import TracebackType
from typing import Self

import pytest

from memlm.api import Token

START_S, STOP_S = 60.0, 20.0


class RunningServer:
    """`memlm serve` on a free port; leaving the block ends it, and fails where a process of it is left.

    `first` is Python that the server's front runs before anything else.
    """

    def __init__(
        self, log: Path, model: Path, *stores: Path, options: tuple[str, ...] = (), first: str = "pass"
    ) -> None:
        self.log = log
        command = [sys.executable, "-c", f"{first}; from memlm.cli import main; main()", "serve"]
        command += ["--model", str(model), "--port", "0", "--log-level", "info"]
        for store in stores:
            command += ["--store", str(store)]
        with log.open("w") as file:
            self.process = subprocess.Popen([*command, *options], stdout=file, stderr=file)
        wait_until(lambda: "serving" in self.said or self.process.poll() is not None, START_S)
        assert self.process.poll() is None, self.said
        self.address = self.said.split("serving", 1)[1].splitlines()[0].split()[-1]

    @property
    def said(self) -> str:
        return self.log.read_text()

    @property
    def worker_pid(self) -> int:
        (pid,) = [pid for pid in children_of(self.process.pid) if "spawn_main" in command_of(pid)]
        return pid

    def stop(self, number: signal.Signals = signal.SIGTERM) -> int:
        self.process.send_signal(number)
        return self.process.wait(STOP_S)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        family = [self.process.pid, *children_of(self.process.pid)]
        if self.process.poll() is None:
            self.stop()
        wait_until(lambda: not any(map(is_alive, family)), 5.0)
        assert "Traceback" not in self.said, self.said


def wait_until(holds: Callable[[], object], timeout_s: float) -> None:
    """Fails where it does not come to hold in time."""
    deadline_s = time.monotonic() + timeout_s
    while not holds():
        assert time.monotonic() < deadline_s, f"did not come to hold within {timeout_s} s"
        time.sleep(0.01)


def children_of(pid: int) -> list[int]:
    try:
        return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except (FileNotFoundError, ProcessLookupError):
        return []


def command_of(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode()
    except (FileNotFoundError, ProcessLookupError):
        return ""


def is_alive(pid: int) -> bool:
    """Whether a process runs; one that only waits to be reaped does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def cpu_seconds(pid: int) -> float:
    """Processor time that a process has used."""
    fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


LOGPROB_TOLERANCE = 1e-4  # float32: products of a batch add in another order than those of one row


def alike(tokens: Iterable[Token], others: Iterable[Token]) -> bool:
    """Whether tokens are the same, with numbers up to what neighbours in a batch may change."""
    pairs = list(zip(tokens, others, strict=True))
    return all(
        (one.id, one.text, one.bytes, [n.document_id for n in one.neighbors])
        == (other.id, other.text, other.bytes, [n.document_id for n in other.neighbors])
        and one.logprob == pytest.approx(other.logprob, abs=LOGPROB_TOLERANCE)
        and one.lm_logprob == pytest.approx(other.lm_logprob, abs=LOGPROB_TOLERANCE)
        for one, other in pairs
    )
