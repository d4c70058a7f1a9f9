"""Files of a folder that are not its text: hidden ones, environments, dependencies, datastores, and what ignore files
exclude.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from functools import cache
from pathlib import Path

from pathspec import GitIgnoreSpec

from memlm.base.texts import InUtf8
from memlm.errors import InvalidInput
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
        self._is_folder_out = cache(self._find_folder_out)
        self._specs_above = cache(self._find_specs_above)
        self._is_datastore = is_datastore(folder)

    def leaves_out(self, file: str) -> bool:
        """Whether a file is left out, given by its path within the folder, with slashes."""
        folder, _, name = file.rpartition("/")
        return self._is_folder_out(folder) or (not self._hidden and self._is_excluded(folder, name))

    def leaves_out_folder(self, folder: str) -> bool:
        """Whether all files of a folder are left out, given by its path within the folder, with slashes."""
        return self._is_folder_out(folder)

    def _find_folder_out(self, path: str) -> bool:
        if not path:
            return self._is_datastore
        folder, _, name = path.rpartition("/")
        if self._is_folder_out(folder):
            return True
        place = self._folder / path
        if self._hidden:
            return is_datastore(place)
        is_excluded = name in IGNORED_FOLDERS or self._is_excluded(folder, name, "/")
        return is_excluded or os.path.isfile(place / ENVIRONMENT_FILE) or is_datastore(place)

    def _is_excluded(self, folder: str, name: str, sign: str = "") -> bool:
        """Whether a name in a folder is hidden, or excluded by an ignore file there or above. A folder's has a sign."""
        is_out = name.startswith(".")
        for begin, spec in () if is_out else self._specs_above(folder):
            inner = f"{folder}/{name}{sign}"[begin:] if folder else f"{name}{sign}"
            if (match := spec.check_file(inner).include) is not None:
                is_out = match
        return is_out

    def _find_specs_above(self, folder: str) -> tuple[tuple[int, GitIgnoreSpec], ...]:
        """The ignore files above a name in a folder, the last of which decides, and where paths within theirs begin."""
        above = self._specs_above(folder.rpartition("/")[0]) if folder else ()
        begin = len(folder) + 1 if folder else 0
        return *above, *((begin, spec) for spec in self._read_specs(folder))

    def _read_specs(self, folder: str) -> Sequence[GitIgnoreSpec]:
        specs = []
        for name in IGNORE_FILES:
            file = self._folder / folder / name
            if file.is_file() and not file.is_symlink():
                lines = _lines_of(file)
                # Of `a/**`, git leaves the folder `a` itself in, as of `a/*`; pathspec does so of the latter only.
                lines = [line.removesuffix("*") if line.endswith("/**") else line for line in lines]
                specs.append(GitIgnoreSpec.from_lines(lines))
        return specs


def _lines_of(file: Path) -> list[str]:
    """The patterns of an ignore file. Raises InvalidInput where it cannot be read whole: its files may be secret."""
    try:
        with file.open("rb") as stream:
            content = stream.read(MAX_IGNORE_BYTES + 1)
        if len(content) > MAX_IGNORE_BYTES:
            raise OSError(f"more than {MAX_IGNORE_BYTES:,} bytes")
        # Names that are no UTF-8 are compared as the file system gives them. Git ends a line at \n alone.
        lines = InUtf8().feed(content, final=True).decode(errors="surrogateescape").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidInput(
            f"{file} cannot be read ({error}), and what it leaves out is not known; mend it, or read all files"
            " (--hidden)",
            field="corpus",
        ) from error
    return [line.removesuffix("\r") for line in lines]
