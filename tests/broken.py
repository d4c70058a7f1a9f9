"""Workers whose engine fails for as long as a file is there: what a server's processes run in place of their own."""

import os
from pathlib import Path
from typing import Any

FAILS = "MEMLM_TEST_FAILS"  # the file, in the environment
BREAK = (
    f"import sys; sys.path.insert(0, {str(Path(__file__).parent)!r})\n"
    "import broken, memlm.server.job_runner as runner, memlm.server.worker_link as link\n"
    "link._run_worker, runner.run_task = broken.run_worker, broken.run_task\n"
)


def run_worker(*arguments: Any) -> None:
    from memlm.server.worker import run_worker as run

    _break()
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
