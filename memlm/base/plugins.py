"""Entry points: what this package and others register under a name, as `module:attribute`."""

import tomllib
from functools import cache
from importlib import import_module
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from typing import Any

_NAME = "memlm"
_PACKAGE = Path(__file__).parents[1]


@cache
def registered(group: str) -> dict[str, str]:
    """Returns the entry points of a group by name: this package's own, and those of others under names that it lacks.

    A checkout may run without an installation, or beside an editable one that was made of an earlier commit and has
    its list. So the own list of a checkout is that of its pyproject.toml.
    """
    installed = entry_points(group=group)
    others = {point.name: point.value for point in installed if not _is_own(point)}
    own = _points_of_checkout(group)
    return others | ({point.name: point.value for point in installed if _is_own(point)} if own is None else own)


def _is_own(point: EntryPoint) -> bool:
    return point.dist is not None and point.dist.name == _NAME


def _points_of_checkout(group: str) -> dict[str, str] | None:
    """The list in the project file beside the package. None where there is none of this project."""
    if (_PACKAGE / "index").is_dir():  # installed, as in memlm/__init__.py
        return None
    try:
        project = tomllib.loads((_PACKAGE.parent / "pyproject.toml").read_text(encoding="utf-8")).get("project", {})
    except (OSError, ValueError):
        return None
    return project.get("entry-points", {}).get(group, {}) if project.get("name") == _NAME else None


def load(path: str) -> Any:
    """Returns the attribute of a `module:attribute`."""
    module, _, name = path.partition(":")
    return getattr(import_module(module), name)
