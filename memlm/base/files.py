"""Files that survive a kill or a full disk, their checksums and signatures, and paths that stay within folders.

All files of a store go through the four verbs of this file: write, sync, move, remove. A file is written under a
temporary name, synced and moved to its own name, and then its folder is synced. Only then does it count.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import re
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from secrets import token_hex
from typing import Any, BinaryIO

from memlm.errors import NotWritable, StorageFull

PIECE_BYTES = 1 << 20
TEMPORARY = re.compile(r".+\.[0-9a-f]{8}\.tmp")
_FULL = {errno.ENOSPC, errno.EDQUOT}
_NO_LINK = {errno.EXDEV, errno.EMLINK, errno.ENOTSUP, errno.ENOSYS}
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


def write_atomic(path: Path, *pieces: bytes | memoryview, check: Callable[[], None] | None = None) -> None:
    """Replaces a file in one step by the joined pieces. Afterwards the file has the new content, synced, or else still
    the old one. `check` is called just before that step, and may raise to prevent it.
    """
    temporary = temporary_beside(path)
    with storage(path):
        try:
            with create(temporary) as file:
                for piece in pieces:
                    file.write(piece)
                file.flush()  # fsync does not see Python's own buffer
                sync(file.fileno())
            if check is not None:
                check()
            move(temporary, path)
        except BaseException:
            with suppress(OSError):
                temporary.unlink(missing_ok=True)
            raise


def temporary_beside(path: Path) -> Path:
    """A unique name in the same folder. `TEMPORARY` matches such names, also those that a kill left."""
    return path.with_name(f"{path.name}.{token_hex(4)}.tmp")


def create(path: Path) -> BinaryIO:
    """Opens a new file for reading and writing. An existing name is removed first, and its content stays in other hard
    links.
    """
    path.unlink(missing_ok=True)
    return path.open("x+b")


def unshare(path: Path) -> None:
    """Gives a file an inode of its own before it is written to, if hard links share it with other folders."""
    if path.stat().st_nlink > 1:
        own = temporary_beside(path)
        shutil.copyfile(path, own)
        sync_file(own)
        move(own, path)


def make_folder(path: Path) -> None:
    """Creates a folder and its missing parents, and syncs their names."""
    missing = [each for each in (path, *path.parents) if not each.exists()]
    path.mkdir(parents=True, exist_ok=True)
    for each in missing:
        sync_folder(each.parent)


def sync(descriptor: int) -> None:
    """Waits until a file's content is on the disk."""
    os.fsync(descriptor)


def sync_file(path: Path) -> None:
    """Syncs a file by its path, for example one that SQLite wrote."""
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
    """Renames a file or folder in one step, and syncs the name."""
    source.replace(target)
    sync_folder(target.parent)


def remove(path: Path) -> None:
    """Removes a file or a folder, if there is one."""
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def link(source: Path, target: Path) -> bool:
    """Makes a hard link. Returns False where the file system or the rights do not allow one."""
    try:
        with storage(target):
            os.link(source, target)
    except NotWritable:
        return False
    except OSError as error:
        if error.errno not in _NO_LINK:
            raise
        return False
    return True


def checksum(path: Path, on_bytes: Callable[[int], None] = lambda count: None) -> str:
    """BLAKE2b of a file. `on_bytes` is called with the size of each piece."""
    digest = hashlib.blake2b(digest_size=16)
    with path.open("rb") as file:
        while piece := file.read(PIECE_BYTES):
            digest.update(piece)
            on_bytes(len(piece))
    return digest.hexdigest()


def copy(source: Path, target: Path, on_bytes: Callable[[int], None] = lambda count: None) -> str:
    """Copies a file to a new name and syncs it. Returns the BLAKE2b of what was read."""
    digest = hashlib.blake2b(digest_size=16)
    with source.open("rb") as read, storage(target), create(target) as written:
        while piece := read.read(PIECE_BYTES):
            digest.update(piece)
            written.write(piece)
            on_bytes(len(piece))
        written.flush()
        sync(written.fileno())
    return digest.hexdigest()


def checksum_of(content: bytes) -> str:
    """BLAKE2b of bytes."""
    return hashlib.blake2b(content, digest_size=16).hexdigest()


def sign(body: dict[str, Any]) -> bytes:
    """Encodes a small file as JSON with a checksum of itself."""
    return _canonical({**body, "checksum": checksum_of(_canonical(body))})


def read_signed(content: bytes) -> dict[str, Any]:
    """Decodes the content of a `sign`ed file. Raises ValueError, with the problem, for other content."""
    try:
        body: dict[str, Any] = json.loads(content)
        expected = body.pop("checksum")
    except (ValueError, AttributeError, KeyError, TypeError) as error:
        raise ValueError(f"cannot be read ({error})") from error
    if expected != checksum_of(_canonical(body)):
        raise ValueError("was changed (wrong checksum)")
    return body


def _canonical(body: Any) -> bytes:
    return json.dumps(body, sort_keys=True, separators=(",", ":"), ensure_ascii=True).encode()


def is_under(path: Path, roots: Sequence[Path]) -> bool:
    """Whether a path is one of the folders or under one, once links are followed. Invalid paths, as with a NUL in it or
    links in a circle, are under none.
    """
    try:
        real = path.resolve()
    except (ValueError, RuntimeError):
        return False
    return any(real.is_relative_to(root.resolve()) for root in roots)
