"""The `memlm` command.

Each command's work is imported when it runs, so that help is quick. Exit codes: 0 done, 1 failed (with one line of
reason and advice), 2 wrong use, 130 interrupted.
"""

from __future__ import annotations

import errno
import io
import os
import re
import sys
from collections.abc import Callable

from memlm.base.machine import raise_file_limit

_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO)


def main() -> None:
    """Runs the command line."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")  # an emoji on a terminal of latin-1 is shown as \U0001f600
    raise_file_limit()
    os.environ.setdefault("GRPC_VERBOSITY", "ERROR")  # else gRPC writes a line of its own for each failed handshake
    try:
        from memlm.cli.app import app

        run(app)
    except KeyboardInterrupt:  # while modules are imported
        print("memlm: interrupted; nothing was done", file=sys.stderr)
        sys.exit(130)


def run(app: Callable[..., object]) -> None:
    """Runs a command line, and ends the process where it fails: one line of reason, and the exit code."""
    from memlm.base.printable import one_line
    from memlm.cli.terminal.console import err
    from memlm.cli.terminal.interruption import Interrupted
    from memlm.errors import MemlmError

    try:
        try:
            app(standalone_mode=True)
        finally:
            if sys.stdout is not None:
                sys.stdout.flush()  # Python's own flush at the end would print a traceback
    except BrokenPipeError:
        _discard_output()
        sys.exit(1)
    except MemlmError as error:
        err.print(f"memlm: {one_line(_with_flags(error))}", markup=False)
        sys.exit(1)
    except OSError as error:
        if error.filename is None and error.errno not in _FULL:
            raise
        if error.filename is None:
            _discard_output()
            reason = f"standard output, or a file, cannot be written ({error.strerror}); make room, or write elsewhere"
            err.print(f"memlm: {reason}", markup=False)
            sys.exit(1)
        err.print(
            one_line(f"memlm: {error.filename} cannot be used ({error.strerror}); give another path"), markup=False
        )
        sys.exit(1)
    except Interrupted as stopped:
        err.print(f"\nmemlm: {one_line(str(stopped))}", markup=False)
        sys.exit(130)


def _discard_output() -> None:
    """Drops the rest of standard output, so that the end of the process does not fail on it again."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _with_flags(error: Exception) -> str:
    """The message, with the flags of this command in place of the names of Python."""
    message = re.sub(r"\btimeout_s\b", "--timeout", str(error))  # the clients speak of their own argument
    flag = "--" + getattr(error, "field", "").replace("_", "-")
    if any(word == flag or word.startswith(f"{flag}=") for word in sys.argv):
        message = re.sub(rf"\A{re.escape(flag[2:].replace('-', '_'))} is\b", f"{flag} is", message)
    return message
