"""Files that survive a kill or a full disk, checksums and signatures of them, and paths that stay within folders.

Everything that a store puts on disk goes through the four verbs of this file: write, sync, move, remove. A file is
written under a temporary name, synced, moved to its own name, and the folder that names it is synced; only then
does it count.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import re
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from secrets import token_hex
from typing import Any, BinaryIO

from memlm.errors import NotWritable, StorageFull

TEMPORARY = re.compile(r".+\.[0-9a-f]{8}\.tmp")
_FULL = {errno.ENOSPC, errno.EDQUOT}
_REFUSED = {errno.EROFS, errno.EACCES, errno.EPERM}


@contextmanager
def storage(path: Path) -> Iterator[None]:
    """Turns the system's errors of a full or read-only disk into StorageFull and NotWritable, which name the path."""
    try:
        yield
    except OSError as error:
        if error.errno in _REFUSED:
            raise NotWritable(
                f"{path} cannot be written ({error.strerror}); mount its file system for writing, give this user the"
                " right to write there, or copy the folder to a place that can be written"
            ) from error
        if error.errno not in _FULL:
            raise
        free = shutil.disk_usage(path if path.is_dir() else path.parent).free
        raise StorageFull(
            f"the disk of {path} is full ({free:,} bytes are free); make room and run the same command again:"
            " what was committed stands, and it goes on from there"
        ) from error


def write_atomic(path: Path, *pieces: bytes | memoryview) -> None:
    """Replaces a file in one step, by some pieces: afterwards they are there, synced, or the old content still is."""
    temporary = temporary_beside(path)
    with storage(path):
        try:
            with create(temporary) as file:
                for piece in pieces:
                    file.write(piece)
                file.flush()  # fsync does not see Python's own buffer
                sync(file.fileno())
            move(temporary, path)
        except BaseException:
            with suppress(OSError):
                temporary.unlink(missing_ok=True)
            raise


def temporary_beside(path: Path) -> Path:
    """A name in the same folder that no other writer uses; `TEMPORARY` matches what a kill leaves of such files."""
    return path.with_name(f"{path.name}.{token_hex(4)}.tmp")


def create(path: Path) -> BinaryIO:
    """Opens a new file for reading and writing. An existing name is removed first, and its content is left alone."""
    path.unlink(missing_ok=True)
    return path.open("x+b")


def unshare(path: Path) -> None:
    """Gives a file that is to be written further an inode of its own where hard links share it with other folders."""
    if path.stat().st_nlink > 1:
        own = temporary_beside(path)
        shutil.copyfile(path, own)
        sync_file(own)
        move(own, path)


def make_folder(path: Path) -> None:
    """Creates a folder and its missing parents, and waits until all their names are on the disk."""
    missing = [each for each in (path, *path.parents) if not each.exists()]
    path.mkdir(parents=True, exist_ok=True)
    for each in missing:
        sync_folder(each.parent)


def sync(descriptor: int) -> None:
    """Waits until what was written to a file is on the disk."""
    os.fsync(descriptor)


def sync_file(path: Path) -> None:
    """The same, for a file that somebody else wrote."""
    with storage(path), path.open("rb") as file:
        sync(file.fileno())


def sync_folder(path: Path) -> None:
    """Waits until the names in a folder are on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        sync(descriptor)
    finally:
        os.close(descriptor)


def move(source: Path, target: Path) -> None:
    """Gives a file or folder another name in one step, and waits until the name is on the disk."""
    source.replace(target)
    sync_folder(target.parent)


def remove(path: Path) -> None:
    """Removes a file or a folder; nothing happens where there is none."""
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def checksum(path: Path) -> str:
    """BLAKE2b of a file's bytes."""
    digest = hashlib.blake2b(digest_size=16)
    with path.open("rb") as file:
        while chunk := file.read(1 << 20):
            digest.update(chunk)
    return digest.hexdigest()


def checksum_of(content: bytes) -> str:
    """BLAKE2b of some bytes."""
    return hashlib.blake2b(content, digest_size=16).hexdigest()


def sign(body: dict[str, Any]) -> bytes:
    """A small file of ours: JSON that carries a checksum of itself."""
    return _canonical({**body, "checksum": checksum_of(_canonical(body))})


def read_signed(content: bytes) -> dict[str, Any]:
    """What `sign` was given. Raises ValueError, saying what is wrong, for anything else."""
    try:
        body: dict[str, Any] = json.loads(content)
        said = body.pop("checksum")
    except (ValueError, AttributeError, KeyError, TypeError) as error:
        raise ValueError(f"cannot be read ({error})") from error
    if said != checksum_of(_canonical(body)):
        raise ValueError("was changed (wrong checksum)")
    return body


def _canonical(body: Any) -> bytes:
    return json.dumps(body, sort_keys=True, separators=(",", ":"), ensure_ascii=True).encode()


def is_under(path: Path, roots: Sequence[Path]) -> bool:
    """Whether a path is under one of some folders, or one of them, once links are followed. What can be no path, as
    with a NUL in it or links in a circle, is under none.
    """
    try:
        real = path.resolve()
    except (ValueError, RuntimeError):
        return False
    return any(real.is_relative_to(root.resolve()) for root in roots)
