"""A server in a child process on a free port, for the demo and the benches."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from memlm.base.interpreter import same_imports
from memlm.errors import Unavailable

STOPPING = (signal.SIGINT, signal.SIGTERM)
SERVING = "serving "  # the beginning of the line with the address


@contextlib.contextmanager
def started_server(model: str | Path, *stores: Path, options: Sequence[str] = ()) -> Iterator[str]:
    """Runs a server while the block lasts, on any free port, and yields its address.

    The server's further output goes to standard error. Raises Unavailable, with the output, if the server ends before
    it serves.
    """
    command = [sys.executable, "-m", "memlm", "serve", "--model", str(model), *options]
    for store in stores:
        command += ["--store", str(store)]
    process, forwarder = None, None
    try:
        with _without_interruption():  # else there would be a server that nobody knows and nobody ends
            process = subprocess.Popen(
                [*command, "--port", "0"],
                env={**os.environ, **same_imports()},
                stderr=subprocess.PIPE,
                text=True,
                start_new_session=True,
            )
        assert process.stderr is not None
        output = list(_until_serving(process.stderr))
        if not output or not output[-1].startswith(SERVING):
            raise Unavailable(f"the server did not start: {''.join(output).strip() or 'it output nothing'}")
        _forward(output[:-1])
        forwarder = threading.Thread(target=_forward, args=(process.stderr,), daemon=True)
        forwarder.start()  # a pipe that is not read fills, and blocks the server
        yield output[-1].rpartition(" at ")[2].strip()
    finally:
        if process is not None:
            _end(process)
            if forwarder is not None:
                forwarder.join()
            if process.stderr is not None:
                process.stderr.close()


def _end(process: subprocess.Popen[str]) -> None:
    """Ends a server and all of its processes, also those of one that ends while it starts them."""
    process.terminate()
    try:
        process.wait(15)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)


@contextlib.contextmanager
def _without_interruption() -> Iterator[None]:
    """Lets Ctrl-C and SIGTERM wait for the end of the block."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    came = list[int]()
    before = {number: signal.signal(number, lambda each, _: came.append(each)) for number in STOPPING}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    for each in came:
        signal.raise_signal(each)


def _until_serving(lines: Iterable[str]) -> Iterator[str]:
    """Yields lines up to the one with the address, included."""
    for line in lines:
        yield line
        if line.startswith(SERVING):
            return


def _forward(lines: Iterable[str]) -> None:
    for line in lines:
        sys.stderr.write(line)
