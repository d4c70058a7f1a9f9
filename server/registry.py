"""The names and folders of the datastores in service: those given at start, and those that the server built.

Built datastores lie in the datastore folder, a folder each. `stores.json` there maps names to folders. It is replaced
atomically, so that a rebuilt datastore replaces the old one in one step, and a restart serves the same ones.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Sequence
from pathlib import Path

from memlm.base.files import is_under, move, read_signed, remove, sign, write_atomic
from memlm.errors import Corrupt, Incompatible, InvalidInput, NotFound, PermissionDenied

NAMES = "stores.json"
BUILT = re.compile(r"-[0-9a-f]{16}$")  # the suffix of folders that jobs build
REMOVED = ".removed"  # the suffix of such a folder while its files are removed

log = logging.getLogger("memlm.server")


class DatastoreRegistry:
    """Names and folders. Only the front end changes them."""

    def __init__(self, given: Sequence[Path], folder: Path | None) -> None:
        """Raises InvalidInput for two datastores of one name, and Corrupt for a damaged `stores.json`."""
        self.folder = None if folder is None else folder.resolve()
        self._given = {path.resolve().name: path.absolute() for path in given}
        if len(self._given) < len(given):
            raise InvalidInput("two datastores have the same name; rename the folder of one", field="stores")
        self._built = {} if self.folder is None else built_in(self.folder)
        self._loaded: dict[str, Path] = {}
        self._remove_rest()
        if duplicates := sorted(set(self._given) & set(self._built)):
            raise InvalidInput(
                f"{', '.join(duplicates)} was given and is in {folder} too; rename one folder, or leave it out",
                field="stores",
            )
        self._loaded = {**self._given, **self._built}

    @property
    def paths(self) -> dict[str, Path]:
        """The folders to load, by name."""
        return dict(self._loaded)

    def path_of(self, name: str | None) -> tuple[str, Path]:
        """The name and folder of a datastore in service. Without a name, the only one.

        Raises NotFound for an unknown name, and InvalidInput without a name unless exactly one is in service.
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
        """A folder as callers see it: relative to the datastore folder, or the name of a datastore given at start."""
        resolved = path.resolve()
        if self.folder is not None and resolved.is_relative_to(self.folder):
            return resolved.relative_to(self.folder).as_posix()
        return next((name for name, given in self._given.items() if given.resolve() == resolved), path.name)

    def owners_of(self, path: Path) -> frozenset[str]:
        """The names that a folder belongs to: those in service, else the name it was given or built under."""
        resolved = path.resolve()
        for folders in (self._loaded, self._given):
            if names := [name for name, folder in folders.items() if resolved.is_relative_to(folder.resolve())]:
                return frozenset(names)
        if self.folder is None or not resolved.is_relative_to(self.folder) or resolved == self.folder:
            return frozenset()
        folder = resolved.relative_to(self.folder).parts[0]
        return frozenset({BUILT.sub("", folder)})

    def put(self, name: str, path: Path) -> None:
        """Puts a datastore in service, in place of another of its name. Survives a restart in the datastore folder.

        Raises Incompatible for the name of a datastore given at start, since a restart could not tell which to serve.
        """
        self.check_put(name, path)
        built = {other: folder for other, folder in self._built.items() if other != name}
        if self.folder is not None and is_under(path, [self.folder]):
            built[name] = path
        self._write(built)
        self._loaded[name] = path

    def check_put(self, name: str, path: Path) -> None:
        """Raises as `put` does."""
        if name in self._given and path.resolve() != self._given[name].resolve():
            raise Incompatible(
                f"the server was started with a datastore {name!r} (--store) and cannot replace it; choose another name"
            )

    def remove(self, name: str) -> None:
        """Takes a datastore out of service. One given at start is in service again after a restart."""
        self._write({other: folder for other, folder in self._built.items() if other != name})
        self._loaded.pop(name, None)

    def discard(self, path: Path) -> None:
        """Removes the files of a built datastore that is in service under no name. They leave their path first: a
        worker that merges segments there meanwhile finds no folder to write to. What a kill or an error leaves then,
        the next start removes.
        """
        path = path.resolve()
        if self.folder is None or not is_under(path, [self.folder]) or self.names_of(path) or not path.exists():
            return
        removed = path.with_name(path.name + REMOVED)
        try:
            move(path, removed)
            remove(removed)
        except OSError as trouble:
            log.error("%s could not be removed: %s", path, trouble)

    def _remove_rest(self) -> None:
        """Removes what is left of datastores that were being removed. What cannot be, is logged."""
        for folder in [] if self.folder is None else self.folder.glob(f"*{REMOVED}"):
            try:
                if BUILT.search(folder.name.removesuffix(REMOVED)):
                    remove(folder)
            except OSError as trouble:
                log.error("%s could not be removed: %s", folder, trouble)

    def _write(self, built: dict[str, Path]) -> None:
        if built == self._built:
            return
        assert self.folder is not None  # something was built
        folders = {name: path.resolve().relative_to(self.folder).as_posix() for name, path in built.items()}
        write_atomic(self.folder / NAMES, sign({"stores": folders}))
        self._built = built


def built_in(folder: Path) -> dict[str, Path]:
    """The names and folders of the datastores in service that lie in a datastore folder. Raises Corrupt."""
    path = folder / NAMES
    if not path.exists():
        return {}
    try:
        built = read_signed(path.read_bytes())["stores"]
    except (OSError, ValueError) as error:
        raise Corrupt(f"{path} {error}; restore it from a backup, or remove it and load the datastores anew") from error
    return {name: path.parent / folder for name, folder in built.items()}  # of a missing one, the workers tell its name
