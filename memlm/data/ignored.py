"""Files of a folder that are not its text: hidden ones, environments, dependencies, datastores, and what ignore files
exclude.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from functools import cache
from pathlib import Path, PurePosixPath

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
        self._is_out = cache(self._find_out)
        self._specs = cache(self._read_specs)
        self._is_datastore = is_datastore(folder)

    def leaves_out(self, file: PurePosixPath) -> bool:
        """Whether a file, given by its path within the folder, is left out."""
        return self.leaves_out_folder(file.parent) or self._is_out(file, False)

    def leaves_out_folder(self, folder: PurePosixPath) -> bool:
        """Whether all files of a folder, given by its path within the folder, are left out."""
        way = [folder, *folder.parents][-2::-1]  # from the first folder on
        return self._is_datastore or any(self._is_out(each, True) for each in way)

    def _find_out(self, path: PurePosixPath, is_folder: bool) -> bool:
        if not self._hidden and (path.name.startswith(".") or self._is_excluded(path, is_folder)):
            return True
        folder = self._folder / path
        is_environment = not self._hidden and os.path.isfile(folder / ENVIRONMENT_FILE)  # raises for no folder
        return is_folder and (is_environment or is_datastore(folder))

    def _is_excluded(self, path: PurePosixPath, is_folder: bool) -> bool:
        if is_folder and path.name in IGNORED_FOLDERS:
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
