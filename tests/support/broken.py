"""What a server's processes run in place of their own: workers whose engine fails, or processes whose disk is full, for
as long as a file is there; jobs that stand still in their midst; and processes that tell how much they hold when they
are asked.
"""

import ctypes
import errno
import gc
import os
import signal
from contextlib import suppress
from pathlib import Path
from typing import Any

FAILS = "MEMLM_TEST_FAILS"  # the file, in the environment
HERE = f"import sys; sys.path.insert(0, {str(Path(__file__).parent)!r})\n"
BREAK = (
    f"{HERE}import broken, memlm.server.jobs.process as process, memlm.server.inference.handle as link\n"
    "link._run_worker, process.run_index_worker = broken.run_worker, broken.run_index_worker\n"
)
FULL = "MEMLM_TEST_FULL"  # the file, in the environment: while it is there, the disk of every process is full
FILL = (
    f"{HERE}import broken, memlm.server.jobs.process as process, memlm.server.inference.handle as link\n"
    "broken.fill_disk()\n"
    "link._run_worker = broken.run_worker_on_full_disk\n"
    "process.run_index_worker = broken.run_index_worker_on_full_disk\n"
)
HALTS = "MEMLM_TEST_HALTS"  # the file, in the environment: while it is there, the process of a job stops itself
HALT = (
    f"{HERE}import broken, memlm.server.jobs.process as process\n"
    "process.run_index_worker = broken.run_halting_index_worker\n"
)
HOLDING = "MEMLM_TEST_HOLDING"  # the folder, in the environment
REPORT_HELD = (
    f"{HERE}import broken, memlm.server.inference.handle as link\n"
    "broken.report_held_bytes()\n"
    "link._run_worker = broken.run_reporting_worker\n"
)


class Mallinfo(ctypes.Structure):
    """What glibc's allocator tells of itself (malloc.h)."""

    NAMES = "arena ordblks smblks hblks hblkhd usmblks fsmblks uordblks fordblks keepcost"
    _fields_ = tuple((name, ctypes.c_size_t) for name in NAMES.split(" "))


def run_worker(*arguments: Any) -> None:
    from memlm.server.inference.startup import run_worker as run

    _break()
    run(*arguments)


def run_reporting_worker(*arguments: Any) -> None:
    from memlm.server.inference.startup import run_worker as run

    report_held_bytes()
    run(*arguments)


def report_held_bytes() -> None:
    """On SIGUSR1 this process writes how many bytes it has allocated and not freed, garbage left aside."""
    allocator = ctypes.CDLL(None)
    allocator.mallinfo2.restype = Mallinfo
    report = Path(os.environ[HOLDING]) / str(os.getpid())

    def write_report(*_: Any) -> None:
        gc.collect()  # a call that is broken off leaves cycles of an error and its frames, which hold its message
        now = allocator.mallinfo2()
        report.write_text(str(now.uordblks + now.hblkhd))

    signal.signal(signal.SIGUSR1, write_report)


def run_index_worker(*arguments: Any) -> None:
    from memlm.server.jobs.worker import run_index_worker as run

    _break()
    run(*arguments)


def run_worker_on_full_disk(*arguments: Any) -> None:
    from memlm.server.inference.startup import run_worker as run

    fill_disk()
    run(*arguments)


def run_index_worker_on_full_disk(*arguments: Any) -> None:
    from memlm.server.jobs.worker import run_index_worker as run

    fill_disk()
    run(*arguments)


def run_halting_index_worker(*arguments: Any) -> None:
    """Its jobs stop themselves once they have read or copied something, and before they commit it, or in the midst of
    the phase that the file names, or where that is "committed" once they have committed, before they tell, or where it
    is "delete" before they delete from a replacement.
    """
    from memlm.server.jobs import worker
    from memlm.server.jobs.worker import ProgressReporter
    from memlm.server.jobs.worker import run_index_worker as run

    report, tell, delete = ProgressReporter.progress, ProgressReporter.committed, worker._delete

    def delete_later(task: Any) -> None:
        if _halting_phase() == "delete":
            os.kill(os.getpid(), signal.SIGSTOP)
        delete(task)

    def committed(self: Any) -> None:
        if _halting_phase() == "committed":
            os.kill(os.getpid(), signal.SIGSTOP)
        tell(self)

    def progress(self: Any, phase: str, done: int, total: int | None, note: str = "") -> None:
        report(self, phase, done, total, note)
        halting = _halting_phase() if done else None
        if halting is None or note.startswith("0 entries"):
            return
        if phase in (halting or "read", halting or "copy"):
            os.kill(os.getpid(), signal.SIGSTOP)

    ProgressReporter.progress = progress  # type: ignore[method-assign]
    ProgressReporter.committed = committed  # type: ignore[method-assign]
    worker._delete = delete_later
    run(*arguments)


def _halting_phase() -> str | None:
    with suppress(FileNotFoundError):
        return Path(os.environ[HALTS]).read_text()
    return None


def fill_disk() -> None:
    """While the file is there, nothing of this process can be synced: the error is that of a full disk."""
    sync = os.fsync

    def fsync(descriptor: int) -> None:
        if Path(os.environ[FULL]).exists():
            raise OSError(errno.ENOSPC, "No space left on device")
        sync(descriptor)

    os.fsync = fsync


def _break() -> None:
    from memlm.model import Decoder

    read = Decoder._read

    def failing(*arguments: Any, **options: Any) -> Any:
        if Path(os.environ[FAILS]).exists():
            raise RuntimeError("the engine failed")
        return read(*arguments, **options)

    Decoder._read = failing
