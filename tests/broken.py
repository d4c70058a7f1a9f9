"""What a server's processes run in place of their own: workers whose engine fails for as long as a file is there, and
workers that give back what they have freed when they are told to.
"""

import ctypes
import os
import signal
from pathlib import Path
from typing import Any

FAILS = "MEMLM_TEST_FAILS"  # the file, in the environment
HERE = f"import sys; sys.path.insert(0, {str(Path(__file__).parent)!r})\n"
BREAK = (
    f"{HERE}import broken, memlm.server.job_runner as runner, memlm.server.worker_link as link\n"
    "link._run_worker, runner.run_task = broken.run_worker, broken.run_task\n"
)
TRIM = f"{HERE}import broken, memlm.server.worker_link as link; link._run_worker = broken.run_trimming_worker\n"


def run_worker(*arguments: Any) -> None:
    from memlm.server.worker import run_worker as run

    _break()
    run(*arguments)


def run_trimming_worker(*arguments: Any) -> None:
    """On SIGUSR1 it gives back what the allocator keeps, so that what its memory holds is what it uses."""
    from memlm.server.worker import run_worker as run

    trim = ctypes.CDLL(None).malloc_trim
    signal.signal(signal.SIGUSR1, lambda *_: trim(0))
    run(*arguments)


def run_task(*arguments: Any) -> None:
    from memlm.server.index_worker import run_task as run

    _break()
    run(*arguments)


def _break() -> None:
    from memlm.model import Decoder

    read = Decoder._read

    def failing(*arguments: Any, **options: Any) -> Any:
        if Path(os.environ[FAILS]).exists():
            raise RuntimeError("the engine failed")
        return read(*arguments, **options)

    Decoder._read = failing
