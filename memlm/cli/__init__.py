"""The `memlm` command.

Each command's work is imported when it runs, so that help is quick. Exit codes: 0 done, 1 failed (with one line of
reason and advice), 2 wrong use, 130 interrupted.
"""

from __future__ import annotations

import sys

from memlm.base.printable import one_line
from memlm.cli.console import err
from memlm.errors import MemlmError


def main() -> None:
    """Runs the command line."""
    from memlm.cli.app import app

    try:
        app(standalone_mode=True)
    except MemlmError as error:
        err.print(f"memlm: {one_line(str(error))}", markup=False)
        sys.exit(1)
    except KeyboardInterrupt:
        err.print("memlm: interrupted; committed work is kept", markup=False)
        sys.exit(130)
    except BrokenPipeError:
        sys.exit(1)
