"""`memlm` as a shell command that is a fork of a process with torch loaded: a command then starts in 0.1 s, not in 3 s.

A script called `memlm` stands in the `PATH` of a shell. It passes its words, its folder, its environment and its three
streams to the process that forks, and returns the exit code. In all else the fork is a command that was typed: of
`python -c CODE` and `python FILE` too, which a script called `python` passes on.
"""

from __future__ import annotations

import atexit
import gc
import io
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from multiprocessing import util
from pathlib import Path
from typing import Any

from server_forkserver import LOADED, _fork_the_forkserver

MESSAGE_BYTES = 1 << 18
LOADED_FOR_COMMANDS = (
    *LOADED,
    "memlm.language_model",
    "memlm.cli.app",
    "memlm.client.client",
    "numpy.random",
    "pydantic",
)
# The shell reads the first lines too: the path of a virtual environment may have spaces.
SCRIPT = """#!/bin/sh
'''exec' "{python}" -SE "$0" "$@"
' '''
import json, os, signal, socket, sys
link = socket.socket(socket.AF_UNIX)
link.connect({address!r})
call = {{"argv": [{name!r}, *sys.argv[1:]], "cwd": os.getcwd(), "environment": dict(os.environ)}}
socket.send_fds(link, [json.dumps(call).encode()], [0, 1, 2])
replies = link.makefile()
pid = int(replies.readline())
signal.signal(signal.SIGTERM, lambda *_: os.kill(pid, signal.SIGTERM))
sys.exit(int(replies.readline() or 134))
"""


class CommandForker:
    """The process that forks, and a folder with the scripts. It ends with the tests."""

    def __init__(self, folder: Path) -> None:
        self._sockets = tempfile.TemporaryDirectory(dir="/tmp")  # TMPDIR may be too long for a socket
        address = f"{self._sockets.name}/socket"
        code = f"import sys; sys.path.insert(0, {str(Path(__file__).parent)!r}); import command_forkserver as forker;"
        self._process = subprocess.Popen(
            [sys.executable, "-c", f"{code} forker.run({address!r})"], stdin=subprocess.PIPE
        )
        atexit.register(self.close)
        for name in ("memlm", "python"):
            (folder / name).write_text(SCRIPT.format(python=sys.executable, address=address, name=name))
            (folder / name).chmod(0o755)
        self.path = f"{folder}:{os.environ['PATH']}"
        while not os.path.exists(address):
            assert self._process.poll() is None
            time.sleep(0.02)

    def close(self) -> None:
        self._process.terminate()
        self._process.wait()
        self._sockets.cleanup()


def run(address: str) -> None:
    """The process that forks, and each command that it forks."""
    for module in LOADED_FOR_COMMANDS:
        __import__(module)
    gc.freeze()
    link, call, streams = _fork_commands(address)
    for number, stream in enumerate(streams):
        os.dup2(stream, number)
        os.close(stream)
    sys.stdin = io.TextIOWrapper(io.BufferedReader(io.FileIO(0, closefd=False)), encoding="utf-8")
    sys.stdout = io.TextIOWrapper(io.BufferedWriter(io.FileIO(1, "w", closefd=False)), encoding="utf-8")
    sys.stderr = io.TextIOWrapper(
        io.BufferedWriter(io.FileIO(2, "w", closefd=False)), "utf-8", "backslashreplace", line_buffering=True
    )
    os.chdir(call["cwd"])
    os.environ.clear()
    os.environ.update(call["environment"])
    util.spawnv_passfds = _fork_the_forkserver
    code: Any = 0
    try:
        _run(call["argv"])
    except SystemExit as end:
        code = end.code
    except BaseException:
        sys.excepthook(*sys.exc_info())
        code = 1
    finally:
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
    link.sendall(f"{code if isinstance(code, int) else int(code is not None)}\n".encode())
    os._exit(0)


def _run(argv: list[str]) -> None:
    sys.argv = argv
    if argv[0] == "python":
        code = argv[2] if argv[1] == "-c" else Path(argv[1]).read_text(encoding="utf-8")
        exec(compile(code, "<block>", "exec"), {"__name__": "__main__"})
    else:
        from memlm.cli import main

        main()


def _fork_commands(address: str) -> tuple[socket.socket, dict[str, Any], list[int]]:
    """Returns, in each command, the connection to its script, the call and its streams."""
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nothing waits for commands
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(f"{address}.new")
    listener.listen()
    os.rename(f"{address}.new", address)
    while True:
        link, _ = listener.accept()
        data, streams, _, _ = socket.recv_fds(link, MESSAGE_BYTES, 3)
        if os.fork() == 0:
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            listener.close()
            link.sendall(f"{os.getpid()}\n".encode())
            return link, json.loads(data), streams
        for stream in streams:
            os.close(stream)
        link.close()
