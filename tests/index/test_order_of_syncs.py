"""What a commit names is on the disk before it is named, byte for byte: the order of syncs and moves is traced."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from random_stores import DIM, IVF, Corpus, add, build

from memlm.base import files
from memlm.index.store.compaction import compact
from memlm.index.store.datastore import Datastore
from memlm.index.store.manifest import CURRENT, read_manifest
from memlm.index.store.small_segments import MERGED_AT_ONCE, NewEntries

DOCS, MORE, NEWER = Corpus(1), Corpus(2, num_documents=3, prefix="more"), Corpus(9, num_documents=3)


class Disk:
    """What a power cut would leave: contents of files and names in folders as of their last sync, by inode."""

    def __init__(self) -> None:
        self.contents = dict[int, str]()
        self.names = dict[int, dict[str, int]]()

    def sync(self, descriptor: int) -> None:
        inode = os.fstat(descriptor).st_ino
        path = Path(os.readlink(f"/proc/self/fd/{descriptor}"))
        if path.is_dir():
            self.names[inode] = {each.name: each.stat().st_ino for each in path.iterdir()}
        else:
            self.contents[inode] = digest(path)

    def check_file(self, path: Path) -> None:
        assert self.contents.get(path.stat().st_ino) == digest(path), f"{path} is not on the disk as it is named"

    def check_name(self, path: Path) -> None:
        synced = self.names.get(path.parent.stat().st_ino, {})
        assert synced.get(path.name) == path.stat().st_ino, f"the folder of {path} was not synced since it is there"


def digest(path: Path) -> str:
    return hashlib.blake2b(path.read_bytes()).hexdigest()


@pytest.fixture
def commits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """Checks every move of CURRENT at the moment it happens; gives the numbers of the manifests that it named."""
    disk, seen = Disk(), list[int]()
    fsync, replace = os.fsync, Path.replace

    def traced_fsync(descriptor: int) -> None:
        fsync(descriptor)
        disk.sync(descriptor)

    def traced_replace(source: Path, target: Path) -> Path:
        if source.is_file():
            disk.check_file(source)
        moved = replace(source, target)
        if target.name == CURRENT:
            manifest = read_manifest(target.parent)
            disk.check_file(target.parent / manifest.name)
            disk.check_name(target.parent / manifest.name)
            for segment in manifest.segments:
                folder = target.parent / segment.folder
                disk.check_name(folder)
                for name in segment.files:
                    disk.check_file(folder / name)
                    disk.check_name(folder / name)
            seen.append(manifest.number)
        return moved

    monkeypatch.setattr(files.os, "fsync", traced_fsync)
    monkeypatch.setattr(Path, "replace", traced_replace)
    yield seen
    disk.check_name(tmp_path / "s" / CURRENT)


@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="needs /proc to see which file is synced")
def test_all_that_a_commit_names_was_synced_before(tmp_path: Path, commits: list[int]) -> None:
    path = tmp_path / "s"
    changes: list[Callable[[], object]] = [
        lambda: build(path, DOCS, IVF).close(),
        lambda: add(path, MORE),
        lambda: delete(path, "doc-0", "more-1"),
        lambda: add(path, NEWER, replace=True),
        lambda: delete(path, "doc-4"),
        lambda: compact(path),
        *[partial(remember, path, f"note-{number}") for number in range(MERGED_AT_ONCE)],
        lambda: merge(path),
    ]
    for number, change in enumerate(changes, start=1):
        change()
        assert commits == list(range(1, number + 1))


def remember(path: Path, name: str) -> None:
    with Datastore.open(path) as store:
        store.remember([NewEntries(name, np.ones((3, DIM), np.float16), np.arange(3))])


def merge(path: Path) -> None:
    with Datastore.open(path) as store:
        assert store.merge_small()


def delete(path: Path, *names: str) -> None:
    with Datastore.open(path) as store:
        store.delete(names)
