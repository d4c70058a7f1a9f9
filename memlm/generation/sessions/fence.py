"""The fence of a session folder: a file with the name of the server that has the folder. Loads no torch.

The lock of a folder belongs to one process, and those that work for it may outlive it: workers that stand still,
replicas on a node that a cluster has lost. So each server sets its own name, and every process that works for a server
compares the names before it changes a session file. The order of the steps leaves no gap for a file that is written:

- A writer creates a temporary file, then checks the fence, then moves the file to its name.
- `take` sets the fence, then removes all temporary files.

A writer that passed its check before the fence was set had created its temporary file by then. Either it has moved the
file before `take` returns, so that the next server reads it, or the file is gone and cannot be moved. A removal of a
session file is checked just before, and one removal that has passed its check may come late.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from memlm.base.files import remove, storage, write_atomic
from memlm.errors import NotWritable, Unavailable
from memlm.generation.sessions.names import SUFFIX

FENCE = "server.name"


@dataclass(frozen=True, slots=True)
class SessionFence:
    """What the processes of one server check. `earlier` is the server that had the folder before, if there was one."""

    folder: Path
    name: str
    earlier: str | None = None

    @classmethod
    def take(cls, folder: Path, name: str) -> Self:
        """Sets the fence of a folder, which the caller has locked. Once this returns, processes of earlier servers
        write no session file, also after a crash of the machine.
        """
        path = folder / FENCE
        earlier = _read(path)
        write_atomic(path, name.encode())
        for pattern in (f"*{SUFFIX}.*tmp", f"{FENCE}.*tmp"):
            for left in folder.glob(pattern):
                remove(left)
        return cls(folder, name, earlier)

    def check(self) -> None:
        """Raises Unavailable where another server has the folder, and NotWritable where that cannot be told."""
        path = self.folder / FENCE
        if (holder := _read(path)) == self.name:
            return
        if holder is None:
            raise NotWritable(
                f"{path} is missing, and without it no session is written; mount the folder again, or start the server"
                " again"
            )
        raise Unavailable(
            f"another server ({holder}) has the session folder {self.folder} now, and no process of this one"
            f" ({self.name}) may change it; give each server a folder of its own"
        )


def check_of(fence: SessionFence | None) -> Callable[[], None]:
    """What a process does before each change of a session file. Without a fence it does nothing."""
    return (lambda: None) if fence is None else fence.check


def _read(path: Path) -> str | None:
    try:
        with storage(path):
            return path.read_text("utf-8", "replace")
    except (FileNotFoundError, NotADirectoryError):
        return None
