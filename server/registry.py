"""Which datastores are in service, and under which names: those the server was started with, and those it built.

What was built is kept in the folder for datastores, a folder each; `stores.json` there says which of them counts under
which name. It is written whole, so that one datastore takes the place of another in one step, and a restart serves the
same.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from memlm.base.files import is_under, read_signed, remove, sign, write_atomic
from memlm.errors import Corrupt, Incompatible, InvalidInput, NotFound, PermissionDenied

NAMES = "stores.json"
BUILT = re.compile(r"-[0-9a-f]{16}$")  # what a job puts behind the name of the datastore that it builds


class DatastoreRegistry:
    """Names and folders. Only the front changes them."""

    def __init__(self, given: Sequence[Path], folder: Path | None) -> None:
        """Raises InvalidInput where two have one name, Corrupt for a damaged list."""
        self.folder = None if folder is None else folder.resolve()
        self._given = {path.resolve().name: path.absolute() for path in given}
        if len(self._given) < len(given):
            raise InvalidInput("two datastores have the same name; rename the folder of one", field="stores")
        self._built = {} if self.folder is None else _read(self.folder / NAMES)
        self._loaded: dict[str, Path] = {}
        if duplicates := sorted(set(self._given) & set(self._built)):
            raise InvalidInput(
                f"{', '.join(duplicates)} was given and is in {folder} too; rename one folder, or leave it out",
                field="stores",
            )
        self._loaded = {**self._given, **self._built}

    @property
    def paths(self) -> dict[str, Path]:
        """What is to be loaded, by name."""
        return dict(self._loaded)

    def path_of(self, name: str | None) -> tuple[str, Path]:
        """The name and folder of one that is in service; of no name, the only one.

        Raises NotFound for a name that is not, InvalidInput where there is not just one to choose.
        """
        names = ", ".join(self._loaded) or "none"
        if name is None and len(self._loaded) != 1:
            raise InvalidInput(
                f"store was left out, but not just one datastore is loaded; loaded: {names}", field="store"
            )
        name = next(iter(self._loaded)) if name is None else name
        if name not in self._loaded:
            raise NotFound(f"no datastore {name!r} is loaded; loaded: {names}", kind="datastore", name=name)
        return name, self._loaded[name]

    def names_of(self, path: Path) -> tuple[str, ...]:
        """The names under which a folder is in service, however its path is spelled."""
        resolved = path.resolve()
        return tuple(name for name, loaded in self._loaded.items() if loaded.resolve() == resolved)

    def resolve(self, text: str) -> Path:
        """The folder that a caller names, by an absolute path or as `display_name` returns it.

        Raises PermissionDenied for a path that is neither a datastore given at start nor under the datastore folder.
        """
        path = self._given.get(text) or (Path(text) if self.folder is None else self.folder / text)
        roots = [*self._given.values(), *([] if self.folder is None else [self.folder])]
        if not path.is_absolute() or not is_under(path, roots):
            raise PermissionDenied(f"{text} is none of the datastores that this server was started with, or built")
        resolved = path.resolve()
        return next((given for given in self._given.values() if given.resolve() == resolved), resolved)

    def display_name(self, path: Path) -> str:
        """A folder as callers see it: relative to the folder for datastores, or a given datastore's name."""
        resolved = path.resolve()
        if self.folder is not None and resolved.is_relative_to(self.folder):
            return resolved.relative_to(self.folder).as_posix()
        return next((name for name, given in self._given.items() if given.resolve() == resolved), path.name)

    def owners_of(self, path: Path) -> frozenset[str]:
        """The names that a folder belongs to: those under which it is in service, else the one that it was started
        with, or built under.
        """
        resolved = path.resolve()
        for folders in (self._loaded, self._given):
            if names := [name for name, folder in folders.items() if resolved.is_relative_to(folder.resolve())]:
                return frozenset(names)
        if self.folder is None or not resolved.is_relative_to(self.folder) or resolved == self.folder:
            return frozenset()
        folder = resolved.relative_to(self.folder).parts[0]
        return frozenset({BUILT.sub("", folder)})

    def put(self, name: str, path: Path) -> None:
        """One more in service, or one in another's place; kept over a restart where it lies in the own folder.

        Raises Incompatible where the server is started with one of that name: which one counted then?
        """
        self.check_put(name, path)
        built = {other: folder for other, folder in self._built.items() if other != name}
        if self.folder is not None and is_under(path, [self.folder]):
            built[name] = path
        self._write(built)
        self._loaded[name] = path

    def check_put(self, name: str, path: Path) -> None:
        """Raises what `put` would raise."""
        if name in self._given and path.resolve() != self._given[name].resolve():
            raise Incompatible(
                f"the server was started with a datastore {name!r} (--store) and cannot replace it; choose another name"
            )

    def remove(self, name: str) -> None:
        """One less in service, also after a restart, unless the server is started with it again."""
        self._write({other: folder for other, folder in self._built.items() if other != name})
        self._loaded.pop(name, None)

    def discard(self, path: Path) -> None:
        """Removes the files of a datastore that was built here and is in service under no name."""
        if self.folder is not None and is_under(path, [self.folder]) and not self.names_of(path):
            remove(path.resolve())

    def _write(self, built: dict[str, Path]) -> None:
        """Records what counts from now on, on the disk first."""
        if built == self._built:
            return
        assert self.folder is not None  # something was built
        folders = {name: path.resolve().relative_to(self.folder).as_posix() for name, path in built.items()}
        write_atomic(self.folder / NAMES, sign({"stores": folders}))
        self._built = built


def _read(path: Path) -> dict[str, Path]:
    if not path.exists():
        return {}
    try:
        built = read_signed(path.read_bytes())["stores"]
    except (OSError, ValueError) as error:
        raise Corrupt(f"{path} {error}; restore it from a backup, or remove it and load the datastores anew") from error
    return {name: path.parent / folder for name, folder in built.items()}  # of a missing one, the workers tell its name
