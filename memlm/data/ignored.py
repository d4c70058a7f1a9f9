"""Files of a folder that are not its text: hidden ones, environments, dependencies, datastores, and what ignore files
exclude.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from pathlib import Path, PurePosixPath

from pathspec import GitIgnoreSpec

from memlm.index.store.journal import is_datastore

IGNORE_FILES = (".gitignore", ".memlmignore")  # the later one decides
IGNORED_FOLDERS = {"node_modules", "__pycache__", "site-packages"}
ENVIRONMENT_FILE = "pyvenv.cfg"  # every Python virtual environment has one
MAX_IGNORE_BYTES = 1 << 20


class IgnoreRules:
    """Which files below a folder are left out, by the rules of git: each folder may have ignore files of its own, a
    deeper one decides, and nothing is brought back from a folder that is out. With `hidden`, only datastores are.
    """

    def __init__(self, folder: Path, *, hidden: bool = False) -> None:
        self._folder, self._hidden = folder, hidden
        self._is_out = cache(self._find_out)
        self._specs = cache(self._read_specs)
        self._is_datastore = is_datastore(folder)

    def leaves_out(self, file: PurePosixPath) -> bool:
        """Whether a file, given by its path within the folder, is left out."""
        if self._is_datastore:
            return True
        return any(self._is_out(parent, True) for parent in file.parents[-2::-1]) or self._is_out(file, False)

    def _find_out(self, path: PurePosixPath, is_folder: bool) -> bool:
        folder = self._folder / path
        if is_folder and is_datastore(folder):
            return True
        if self._hidden:
            return False
        if path.name.startswith("."):
            return True
        if is_folder and (path.name in IGNORED_FOLDERS or (folder / ENVIRONMENT_FILE).is_file()):
            return True
        is_out = False
        for parent in reversed(path.parents):
            inner = path.relative_to(parent).as_posix() + "/" * is_folder
            for spec in self._specs(parent):
                if (match := spec.check_file(inner).include) is not None:
                    is_out = match
        return is_out

    def _read_specs(self, folder: PurePosixPath) -> Sequence[GitIgnoreSpec]:
        specs = []
        for name in IGNORE_FILES:
            file = self._folder / folder / name
            if file.is_file() and not file.is_symlink():
                with file.open("rb") as stream:
                    lines = stream.read(MAX_IGNORE_BYTES).decode(errors="replace").splitlines()
                # Of `a/**`, git leaves the folder `a` itself in, as of `a/*`; pathspec does so of the latter only.
                lines = [line.removesuffix("*") if line.endswith("/**") else line for line in lines]
                specs.append(GitIgnoreSpec.from_lines(lines))
        return specs
