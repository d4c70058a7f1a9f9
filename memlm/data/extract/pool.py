"""Files -> their texts, read by children of this process: several at a time, in any order, a new one after a crash.

A reader of a binary format meets files of strangers. It may loop, take all memory, or end its process. So each file is
read within limits by a child that lives as long as it behaves, and the file that ends it is named.
"""

from __future__ import annotations

import json
import os
import queue
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from types import TracebackType

from memlm.base.cpu import num_cores
from memlm.data.extract.outcome import Extracted, Unreadable
from memlm.data.extract.worker import WALL_FACTOR

MAX_FILE_BYTES = 256 << 20
MAX_ANSWER_BYTES = 1 << 30
MAX_DIGITS = 16  # of an answer's size
MAX_CHILDREN = 8
END_S = 1.0  # in which a child that closed its pipe ends
BOOT = "import sys, json; sys.path[:] = json.loads(sys.argv[1]); from memlm.data.extract.worker import main; main()"


@dataclass(frozen=True, slots=True)
class Limits:
    """The price of one file: seconds of processor time, and bytes of memory beyond those of its reader."""

    cpu_s: float = 60.0
    ram_bytes: int = 1 << 30


class Extractor:
    """Reads files in children, which start with the first file and end with `close`."""

    def __init__(self, limits: Limits, children: int | None = None) -> None:
        self._limits = limits
        self.children = children or min(num_cores(), MAX_CHILDREN)
        self._threads: ThreadPoolExecutor | None = None
        self._idle, self._started = queue.SimpleQueue[_Child](), set[_Child]()
        self._lock, self._is_closed = threading.Lock(), False

    def __enter__(self) -> Extractor:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def submit(self, kind: str, read: Callable[[], bytes]) -> Future[Extracted]:
        """Reads the bytes of a file and its text, when a child is free. The future raises Unreadable, and the
        errors of `read`.
        """
        if self._threads is None:
            self._threads = ThreadPoolExecutor(self.children, "extract")
        return self._threads.submit(self._extract, kind, read)

    def extract(self, kind: str, data: bytes) -> Extracted:
        """The text of a file. Raises Unreadable."""
        return self.submit(kind, lambda: data).result()

    def close(self) -> None:
        """Ends all children, also those that read. Does not wait for bytes that a thread still reads."""
        with self._lock:
            self._is_closed, started = True, [*self._started]
        for child in started:
            child.kill()
        if self._threads is not None:
            self._threads.shutdown(wait=False, cancel_futures=True)
        for child in started:
            child.end()

    def _extract(self, kind: str, read: Callable[[], bytes]) -> Extracted:
        data = read()
        if len(data) > MAX_FILE_BYTES:
            raise too_large(len(data))
        child = self._child()
        answer = child.ask(kind, data)
        if child.is_alive:
            self._idle.put(child)
        else:
            with self._lock:
                self._started.discard(child)
        return _outcome(answer)

    def _child(self) -> _Child:
        """An idle child, or a new one. Raises CancelledError after `close`, which knows all that were started."""
        with self._lock:
            if self._is_closed:
                raise CancelledError
            with suppress(queue.Empty):
                return self._idle.get_nowait()
            child = _Child(self._limits)
            self._started.add(child)
            return child


def too_large(num_bytes: int) -> Unreadable:
    """Why a file is not even opened."""
    return Unreadable(f"has {num_bytes:,} bytes; at most {MAX_FILE_BYTES:,} of such a file are read; split it")


def _outcome(answer: dict[str, object]) -> Extracted:
    text, title = answer.get("text"), answer.get("title")
    if not isinstance(text, str) or not isinstance(title, str):
        raise Unreadable(str(answer.get("why")))
    return Extracted(text, title)


class _Child:
    """One process, and the pipes to it."""

    def __init__(self, limits: Limits) -> None:
        self._limits, self.is_alive = limits, True
        command = [sys.executable, "-I", "-c", BOOT, json.dumps([*map(os.path.abspath, sys.path)])]
        self._process = subprocess.Popen(
            [*command, str(limits.cpu_s), str(limits.ram_bytes), str(os.getpid())],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, cwd=os.sep,
        )  # fmt: skip

    def ask(self, kind: str, data: bytes) -> dict[str, object]:
        """Its answer, or why there is none."""
        requests, answers = self._process.stdin, self._process.stdout
        assert requests is not None
        assert answers is not None
        try:
            requests.write(json.dumps({"kind": kind, "bytes": len(data)}).encode() + b"\n")
            requests.write(data)
            requests.flush()
            size = int(answers.readline(MAX_DIGITS))
            answer = json.loads(answers.read(size) if 0 <= size <= MAX_ANSWER_BYTES else b"")
        except (OSError, ValueError):
            answer = {}
        if not isinstance(answer, dict) or not answer:
            self.end()
            return {"why": self._why()}
        if answer.get("is_last"):
            self.end()
        return answer

    def _why(self) -> str:
        ended = -(self._process.returncode or 0)
        if ended == signal.SIGPROF:
            return f"takes more than {self._limits.cpu_s:g} s of processor time to read; split it"
        if ended == signal.SIGALRM:
            return f"takes more than {WALL_FACTOR} times {self._limits.cpu_s:g} s to read; split it"
        name = signal.Signals(ended).name if ended > 0 else f"code {-ended}"
        return f"is damaged, or hostile: its reader ended ({name})"

    def kill(self) -> None:
        """Ends the process, while another thread may wait for its answer."""
        self._process.kill()

    def end(self) -> None:
        """Ends the process if it has not ended, and closes the pipes."""
        self.is_alive = False
        with suppress(subprocess.TimeoutExpired):  # its own end says more than ours
            self._process.wait(END_S)
        self._process.kill()
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            with suppress(OSError):  # bytes that nobody read
                pipe.close()  # type: ignore[union-attr]
