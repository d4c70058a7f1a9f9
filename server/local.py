"""A server in a child process on a free port, for the demo and the benches."""

from __future__ import annotations

import contextlib
import subprocess
import sys
import threading
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from memlm.errors import Unavailable

SERVING = "serving "  # how the line begins that tells where a server is


@contextlib.contextmanager
def started_server(model: Path, *stores: Path, options: Sequence[str] = ()) -> Iterator[str]:
    """A server in a process of its own, on any free port; gives its address, and ends it whatever happens. What else it
    says is passed on to standard error. Raises Unavailable where it ends before it serves, with what it said.
    """
    command = [sys.executable, "-m", "memlm", "serve", "--model", str(model.resolve()), *options]
    for store in stores:
        command += ["--store", str(store.resolve())]
    process = subprocess.Popen(
        [*command, "--port", "0"], stderr=subprocess.PIPE, text=True, start_new_session=True, cwd=model.resolve()
    )
    listening: threading.Thread | None = None
    try:
        assert process.stderr is not None
        said = list(_until_it_serves(process.stderr))
        if not said or not said[-1].startswith(SERVING):
            raise Unavailable(f"the server did not start: {''.join(said).strip() or 'it said nothing'}")
        _pass_on(said[:-1])
        listening = threading.Thread(target=_pass_on, args=(process.stderr,), daemon=True)
        listening.start()  # a pipe that nobody reads fills, and then the server stands still
        yield said[-1].rpartition(" at ")[2].strip()
    finally:
        process.terminate()
        try:
            process.wait(15)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        if listening is not None:
            listening.join()
        if process.stderr is not None:
            process.stderr.close()


def _until_it_serves(lines: Iterable[str]) -> Iterator[str]:
    """What a server says up to the line that tells where it serves, that one included."""
    for line in lines:
        yield line
        if line.startswith(SERVING):
            return


def _pass_on(lines: Iterable[str]) -> None:
    for line in lines:
        sys.stderr.write(line)
