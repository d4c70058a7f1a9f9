"""Writing so that a kill or a full disk leaves what was there before.

Everything that a store puts on disk goes through the four verbs of this file: write, sync, move, remove. A file is
written under a temporary name, synced, moved to its own name, and the folder that names it is synced; only then
does it count.
"""

from __future__ import annotations

import errno
import hashlib
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from secrets import token_hex

from memlm.index.errors import StorageFull

_FULL = {errno.ENOSPC, errno.EDQUOT}


@contextmanager
def storage(path: Path) -> Iterator[None]:
    """Turns the system's word for a full disk into StorageFull, which names the path."""
    try:
        yield
    except OSError as error:
        if error.errno not in _FULL:
            raise
        free = shutil.disk_usage(path if path.is_dir() else path.parent).free
        raise StorageFull(
            f"the disk of {path} is full ({free:,} bytes are free); make room and run the same command again:"
            " what was committed stands, and it goes on from there"
        ) from error


def write_whole(path: Path, *pieces: bytes | memoryview) -> None:
    """Writes a file of some pieces at once: afterwards it is there, synced, or the old one still is."""
    temporary = path.with_name(f"{path.name}.{token_hex(4)}.tmp")  # a name of its own: others may write `path` too
    with storage(path):
        try:
            with temporary.open("xb") as file:
                for piece in pieces:
                    file.write(piece)
                file.flush()  # fsync does not see Python's own buffer
                sync(file.fileno())
            move(temporary, path)
        except BaseException:
            with suppress(OSError):
                temporary.unlink(missing_ok=True)
            raise


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
