"""Repairs a store with a lost or damaged `CURRENT`, for example after an interrupted copy."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path

from memlm.base.files import write_atomic
from memlm.errors import Corrupt
from memlm.index.store.lock import commit_lock, write_lock
from memlm.index.store.manifest import CURRENT, RESTORE, Manifest, newest_manifest, read_manifest, read_pointer
from memlm.index.store.snapshot import Snapshot


def repair(path: str | Path) -> tuple[Manifest, bool]:
    """Rewrites an unusable `CURRENT` for the manifest of the highest number, after a check of every file of that
    manifest. Returns the newest manifest, and whether `CURRENT` was rewritten.

    A store that can be opened is left unchanged. Raises NotFound if there is no manifest, Corrupt if the store cannot
    be repaired, and Locked while another process writes.
    """
    path = Path(path)
    with write_lock(path), commit_lock(path):
        try:
            return read_manifest(path), False
        except Corrupt as problem:
            manifest = newest_manifest(path)
            if (named := _named(path)) and named != manifest.name:
                raise Corrupt(
                    f"{path / CURRENT} names {named}, and the newest there is {manifest.name}; {RESTORE}"
                ) from problem
        with closing(Snapshot(path, manifest)) as snapshot:
            if problems := snapshot.verify():
                raise Corrupt(problems[0])
        write_atomic(path / CURRENT, manifest.pointer.encode())
        return manifest, True


def _named(path: Path) -> str | None:
    """The manifest that `CURRENT` names, if it can be read."""
    try:
        return read_pointer(path).manifest
    except Corrupt:
        return None
