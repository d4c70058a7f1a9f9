"""A folder -> its files that a glob chooses, without those that are left out. A folder that cannot be read is told."""

from __future__ import annotations

import errno
import os
import re
import reprlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from fnmatch import translate
from pathlib import Path, PurePath

from memlm.data.ignored import IGNORE_FILES, IgnoreRules
from memlm.errors import InvalidInput

MAX_GLOB_PARTS, MAX_GLOB_FOLDERS = 64, 4  # each ** multiplies how often a folder is listed
ANY_FOLDERS = "**"


def check_glob(glob: str) -> None:
    """Raises InvalidInput for a pattern that could leave its folder, or that no file name can match."""
    if not isinstance(glob, str):
        raise InvalidInput(f"glob is {reprlib.repr(glob)}; expected one pattern, as '**/*.txt'", field="glob")
    parts = PurePath(glob).parts
    if not parts or "\0" in glob or glob.startswith("/") or ".." in parts:
        problem = "expected a pattern within the folder, without '..' and not from '/'"
    elif len(parts) > MAX_GLOB_PARTS or parts.count(ANY_FOLDERS) > MAX_GLOB_FOLDERS:
        problem = f"expected at most {MAX_GLOB_PARTS} parts, and '**' {MAX_GLOB_FOLDERS} times"
    elif any(ANY_FOLDERS in part and part != ANY_FOLDERS for part in parts):
        problem = "expected '**' to stand for folders alone, as in **/*.txt"
    else:
        return
    raise InvalidInput(f"glob is {glob[:200]!r}; {problem}", field="glob")


class Folder:
    """The files below a folder that match a glob, as `Path.glob` matches them, and that no rule leaves out.

    `Path.glob` itself says nothing about a folder that it may not list.
    """

    def __init__(
        self, path: Path, glob: str, rules: IgnoreRules, on_unreadable: Callable[[Path, OSError], None]
    ) -> None:
        self._path, self._rules, self._on_unreadable = path, rules, on_unreadable
        self._parts = [None if part == ANY_FOLDERS else re.compile(translate(part)) for part in PurePath(glob).parts]
        self._told = set[str]()

    def files(self) -> list[tuple[str, Path]]:
        """Each file once with its path within the folder, in the order of their paths."""
        found = {self._name_of(file): file for file in self._below(self._path, self._parts)}
        names = sorted(found, key=lambda name: name.split("/"))
        return [(name, Path(found[name])) for name in names if not self._rules.leaves_out(name)]

    def _below(self, folder: str | Path, parts: Sequence[re.Pattern[str] | None]) -> Iterator[str]:
        """Yields the files of a folder that match some parts. Folders wait in a list: there may be more levels of them
        than calls of Python.
        """
        waiting = [(folder, parts)]
        while waiting:
            folder, parts = waiting.pop()
            part, rest = parts[0], parts[1:]
            if part is None and rest:
                waiting.append((folder, rest))
            for entry in self._entries(folder):
                if part is None:
                    if not entry.is_symlink() and self._is_folder(entry):
                        waiting.append((entry.path, parts))
                elif part.match(entry.name):
                    if rest and self._is_folder(entry):
                        waiting.append((entry.path, rest))
                    elif not rest and self._is(entry.is_file, entry.path):
                        yield entry.path

    def _entries(self, folder: str | Path) -> list[os.DirEntry[str]]:
        try:
            # A folder may show its names and let nobody in, or lie too deep for the names of its ignore files.
            with suppress(FileNotFoundError):
                os.lstat(os.path.join(folder, max(IGNORE_FILES, key=len)))
            with os.scandir(folder) as entries:
                return list(entries)
        except OSError as error:
            self._tell(str(folder), error)
            return []

    def _is_folder(self, entry: os.DirEntry[str]) -> bool:
        return self._is(entry.is_dir, entry.path) and not self._rules.leaves_out_folder(self._name_of(entry.path))

    def _name_of(self, path: str) -> str:
        return path[len(os.path.join(self._path, "")) :]

    def _is(self, kind: Callable[[], bool], path: str) -> bool:
        try:
            return kind()
        except OSError as error:
            if error.errno != errno.ELOOP:
                self._tell(path, error)
            return False

    def _tell(self, path: str, error: OSError) -> None:
        if path not in self._told:
            self._told.add(path)
            self._on_unreadable(Path(path), error)
