"""The names of sessions where several processes share a folder. Loads no torch: a front end reads names, too."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

SUFFIX = ".session"  # of a session's file


class SessionNames(NamedTuple):
    """The names of one process: which of those in the folder, and how new ones end. `check` raises where the process
    may not change the files of the folder any more.
    """

    are_ours: Callable[[str], bool] = lambda name: True
    suffix: str = ""
    check: Callable[[], None] = lambda: None


def suffix_of(home: str) -> str:
    """The end of the names that a process gives, from an id of it without a hyphen."""
    return f"-{home}"


def home_of(name: str) -> str:
    """The id of the process that gave a name."""
    return name.rpartition("-")[2]


def names_in(folder: Path) -> list[str]:
    """The names of the sessions that have a file."""
    return [path.stem for path in folder.glob(f"*{SUFFIX}")]
