"""The `memlm` command.

Each command's work is imported when it runs, so that help is quick. Exit codes: 0 done, 1 failed (with one line of
reason and advice), 2 wrong use, 130 interrupted.
"""

from __future__ import annotations

import re
import sys


def main() -> None:
    """Runs the command line."""
    try:
        _run()
    except KeyboardInterrupt:  # while modules are imported
        print("memlm: interrupted; nothing was done", file=sys.stderr)
        sys.exit(130)


def _run() -> None:
    from memlm.base.printable import one_line
    from memlm.cli.app import app
    from memlm.cli.console import err
    from memlm.cli.interruption import Interrupted
    from memlm.errors import MemlmError

    try:
        app(standalone_mode=True)
    except MemlmError as error:
        # The clients speak of their own argument.
        message = re.sub(r"\btimeout_s\b", "--timeout", one_line(str(error)))
        err.print(f"memlm: {message}", markup=False)
        sys.exit(1)
    except Interrupted as stopped:
        err.print(f"\nmemlm: {one_line(str(stopped))}", markup=False)
        sys.exit(130)
    except BrokenPipeError:
        sys.exit(1)
