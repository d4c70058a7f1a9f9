"""Locks and fences on the server's folders, and file permissions that keep other users out."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from secrets import token_hex

from filelock import FileLock, Timeout

from memlm.base.files import make_folder
from memlm.errors import InvalidInput, Locked
from memlm.generation.sessions.fence import SessionFence
from memlm.server.config import ServerConfig

LOCK = "server.lock"
PRIVATE_UMASK = 0o077


def keep_private() -> None:
    """Makes new files of this process and its children readable by the server's user only: they hold private texts."""
    os.umask(PRIVATE_UMASK)


@contextmanager
def lock_folders(config: ServerConfig) -> Iterator[SessionFence | None]:
    """Creates and locks the folders that one server at a time may use. Yields the fence of the session folder, if there
    is one, under a new name for this server.

    The system releases the locks when this process ends. Child processes do not inherit them. Raises Locked, with
    folder and option, for a folder of another server, and InvalidInput for a folder that cannot be used.
    """
    with ExitStack() as locks:
        for folder, option in _folders_with_options(config).items():
            locks.callback(_lock(folder, option).release)
        sessions = config.session_dir
        yield None if sessions is None else SessionFence.take(sessions.absolute(), new_name())


def new_name() -> str:
    """A name that no other server has, nor the same one in another life."""
    return f"memlm-{socket.gethostname()}-{token_hex(8)}"


def _folders_with_options(config: ServerConfig) -> dict[Path, str]:
    """Each folder with its option. Both options may name the same folder."""
    options = {"--session-dir": config.session_dir, "--store-dir": config.store_dir}
    return {folder.resolve(): option for option, folder in options.items() if folder is not None}


def _lock(folder: Path, option: str) -> FileLock:
    lock = FileLock(folder / LOCK)
    try:
        make_folder(folder)
        lock.acquire(timeout=0)
    except Timeout:
        raise Locked(
            f"{folder} ({option}) is used by another server, which holds {LOCK} in it; give each server a folder of"
            " its own, or, in a rolling restart, start this one once the other has ended"
        ) from None
    except OSError as error:
        field = option.removeprefix("--").replace("-", "_")
        raise InvalidInput(
            f"{folder} ({option}) cannot be used ({error.strerror}); give a folder that this user may write to",
            field=field,
        ) from error
    return lock
