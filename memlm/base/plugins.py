"""Entry points: what this package and others register under a name, as `module:attribute`."""

import tomllib
from functools import cache
from importlib import import_module
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

_PACKAGE = Path(__file__).parents[1]


@cache
def registered(group: str) -> dict[str, str]:
    """Returns the entry points of a group by name: those of all installed packages, and in a checkout its own.

    A checkout may run without an installation, or beside an editable one that was made of an earlier commit and has
    its list. So the list of a checkout is that of its pyproject.toml.
    """
    found = {point.name: point.value for point in entry_points(group=group)}
    is_checkout = not (_PACKAGE / "index").is_dir()  # as in memlm/__init__.py
    if is_checkout and (project := _PACKAGE.parent / "pyproject.toml").is_file():
        found |= tomllib.loads(project.read_text(encoding="utf-8"))["project"]["entry-points"].get(group, {})
    return found


def load(path: str) -> Any:
    """Returns the attribute of a `module:attribute`."""
    module, _, name = path.partition(":")
    return getattr(import_module(module), name)
