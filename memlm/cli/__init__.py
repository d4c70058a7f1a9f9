"""The `memlm` command.

Each command's work is imported when it runs, so that help is quick. Exit codes: 0 done, 1 failed (with one line of
reason and advice), 2 wrong use, 130 interrupted.
"""

from __future__ import annotations

import re
import sys

from memlm.base.printable import one_line
from memlm.cli.console import err
from memlm.errors import MemlmError

INTERRUPTED = 130


def main() -> None:
    """Runs the command line."""
    from memlm.cli.app import app

    try:
        app(standalone_mode=True)
    except MemlmError as error:
        # The clients speak of their own argument.
        message = re.sub(r"\btimeout_s\b", "--timeout", one_line(str(error)))
        err.print(f"memlm: {message}", markup=False)
        sys.exit(1)
    except SystemExit as end:
        if end.code == INTERRUPTED:  # Typer has turned the KeyboardInterrupt into its exit code
            err.print("memlm: interrupted; committed work is kept", markup=False)
        raise
    except BrokenPipeError:
        sys.exit(1)
