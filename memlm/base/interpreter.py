"""Python processes that import what this process imports, wherever they start."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager


def same_imports() -> dict[str, str]:
    """The variables that make a new Python process search for modules in the folders of this one, in the same order.

    Python puts the current folder (`-c`, `-m`) before all others. In a checkout that is another memlm than the
    installed one that started the process.
    """
    folders = [os.path.abspath(folder) for folder in sys.path]  # the empty name is the current folder
    return {"PYTHONSAFEPATH": "1", "PYTHONPATH": os.pathsep.join(dict.fromkeys(folders))}


@contextmanager
def importing_the_same() -> Iterator[None]:
    """Gives `same_imports()` to all processes that start while the block lasts."""
    before = {name: os.environ.get(name) for name in same_imports()}
    os.environ.update(same_imports())
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
