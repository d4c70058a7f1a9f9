"""Copies of a datastore at one commit, made while others read and write it.

    report = copy_store("store", "backups/monday")

The files of a commit never change, so hard links share them where the file system has them. A copy counts once it has
its name: until then it lies in a temporary folder without `CURRENT`. It is a datastore as any other.
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path

from memlm.base.files import (
    TEMPORARY,
    checksum,
    checksum_of,
    copy,
    link,
    make_folder,
    move,
    remove,
    storage,
    sync_folder,
    temporary_beside,
    write_atomic,
)
from memlm.base.progress import Progress, silent
from memlm.errors import AlreadyExists, Corrupt, InvalidInput
from memlm.index.store.manifest import CURRENT, RESTORE, SEGMENTS, FileRecord, Manifest, read_manifest, read_pointer
from memlm.index.store.snapshot import Snapshot


@dataclass(frozen=True, slots=True)
class CopyReport:
    """A copy: its folder, the manifest whose state it has, and its size. `num_linked` of its files are hard links.
    `deleted_documents` have been deleted, and their data is in the copy.
    """

    path: str
    manifest: int
    entries: int
    documents: int
    deleted_documents: int
    num_files: int
    num_linked: int
    bytes: int
    copied_bytes: int
    verified: bool


class _OvertakenError(Exception):
    """A later commit has removed a file before it was copied."""


def copy_store(
    path: str | Path,
    destination: str | Path,
    progress: Progress = silent,
    *,
    hard_links: bool = True,
    verify: bool = True,
) -> CopyReport:
    """Copies the newest commit of a store to a new folder. Without `hard_links` all bytes are copied.

    With `verify`, the checksum of each file of the copy is compared with the manifest. A kill leaves no folder at
    `destination`, and the next call for it removes the rest.

    Raises NotFound if there is no store, AlreadyExists if there is anything at `destination`, InvalidInput for one
    inside the store, and Corrupt if a file differs from the manifest.
    """
    path, destination = Path(path), Path(destination)
    manifest = read_manifest(path)
    _check_destination(path, destination)
    with _temporary_folder(destination) as folder:
        copied = _Copied(path, folder, hard_links, verify, progress)
        while True:
            try:
                copied.take(manifest)
                break
            except _OvertakenError:
                manifest = read_manifest(path)
        write_atomic(folder / CURRENT, manifest.pointer.encode())
        with closing(Snapshot(folder, manifest)) as snapshot:
            report = copied.report(snapshot, destination)
        _check_destination(path, destination)
        with storage(destination):
            move(folder, destination)
    return report


class _Copied:
    """The files of a copy. Those that a commit shares with the one before are kept when the copy begins again."""

    def __init__(self, store: Path, folder: Path, hard_links: bool, verify: bool, progress: Progress) -> None:
        self._store, self._folder, self._links, self._verify, self._progress = (
            store, folder, hard_links, verify, progress,
        )  # fmt: skip
        self._files: dict[str, tuple[FileRecord, bool]] = {}  # by path: the record, and whether it is linked
        self._done = self._total = 0
        make_folder(folder / SEGMENTS)

    def take(self, manifest: Manifest) -> None:
        """Copies the files that the manifest names, and removes those that only an earlier one named. Raises
        _OvertakenError if a later commit has removed a file.
        """
        wanted = {
            f"{record.folder}/{name}": file for record in manifest.segments for name, file in record.files.items()
        }
        for name in [name for name, (file, _) in self._files.items() if wanted.get(name) != file]:
            remove(self._folder / name)
            del self._files[name]
        self._done, self._total = 0, sum(file.bytes for file in wanted.values())
        for name, file in wanted.items():
            if name in self._files:
                self._advance(file.bytes)
            else:
                self._files[name] = (file, self._take(name, file, manifest))
        self._take_manifest(manifest)
        folders = {(self._folder / name).parent for name in wanted}
        for folder in (self._folder / SEGMENTS).iterdir():
            if folder in folders:
                sync_folder(folder)
            else:
                remove(folder)
        sync_folder(self._folder / SEGMENTS)

    def report(self, snapshot: Snapshot, destination: Path) -> CopyReport:
        copied = [file.bytes for file, is_linked in self._files.values() if not is_linked]
        return CopyReport(
            path=str(destination),
            manifest=snapshot.manifest.number,
            entries=snapshot.num_entries,
            documents=snapshot.num_documents,
            deleted_documents=snapshot.num_deleted_documents,
            num_files=len(self._files),
            num_linked=len(self._files) - len(copied),
            bytes=snapshot.bytes_on_disk,
            copied_bytes=sum(copied),
            verified=self._verify,
        )

    def _take(self, name: str, file: FileRecord, manifest: Manifest) -> bool:
        """Links or copies a file, and compares it with its record. Returns whether it is linked."""
        source, target, before = self._store / name, self._folder / name, self._done
        make_folder(target.parent)
        found = file.checksum
        try:
            is_linked = self._links and link(source, target)
            if not is_linked:
                found = copy(source, target, self._advance)
            elif self._verify:
                found = checksum(target, self._advance)
        except FileNotFoundError:
            raise self._problem(source, "is missing", manifest) from None
        if target.stat().st_size != file.bytes or found != file.checksum:
            remove(target)
            raise self._problem(source, "was changed", manifest)
        self._advance(before + file.bytes - self._done)
        return is_linked

    def _advance(self, num_bytes: int) -> None:
        self._done += num_bytes
        self._progress("copy files", self._done, self._total)

    def _take_manifest(self, manifest: Manifest) -> None:
        """Copies the manifest's bytes, also where an earlier format wrote them."""
        source = self._store / manifest.name
        try:
            content = source.read_bytes()
        except FileNotFoundError:
            raise self._problem(source, "is missing", manifest) from None
        if checksum_of(content) != manifest.checksum:
            raise self._problem(source, "was changed", manifest)
        for other in self._folder.glob("manifest-*"):
            remove(other)
        write_atomic(self._folder / manifest.name, content)

    def _problem(self, source: Path, problem: str, manifest: Manifest) -> Exception:
        """The error of a file that is not as the manifest says: the copy begins again if there is a later commit."""
        if read_pointer(self._store) != manifest.pointer:
            return _OvertakenError()
        return Corrupt(f"{source} {problem}; {RESTORE}")


def _check_destination(path: Path, destination: Path) -> None:
    if os.path.lexists(destination):
        raise AlreadyExists(f"{destination} is there already; choose a new folder for the copy")
    if destination.resolve().is_relative_to(path.resolve()):
        raise InvalidInput(
            f"{destination} is inside the datastore {path}, which removes foreign files; choose a folder outside",
            field="destination",
        )


@contextmanager
def _temporary_folder(destination: Path) -> Iterator[Path]:
    """A locked folder beside the destination, removed at the end if it is still there. Those of killed copies to the
    same destination are removed first.
    """
    with storage(destination.parent):
        make_folder(destination.parent)
    for left in destination.parent.iterdir():
        if left.name[: -len(".00000000.tmp")] == destination.name and TEMPORARY.fullmatch(left.name) and left.is_dir():
            with _locked(left) as is_ours:
                if is_ours:
                    remove(left)
    folder = temporary_beside(destination)
    try:
        with storage(destination.parent):
            make_folder(folder)
        with _locked(folder):
            yield folder
    finally:
        remove(folder)


@contextmanager
def _locked(folder: Path) -> Iterator[bool]:
    """Locks a folder. Yields False if another process holds its lock."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            is_ours = True
        except OSError:
            is_ours = False
        yield is_ours
    finally:
        os.close(descriptor)
