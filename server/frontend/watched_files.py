"""Files that are read again when they change: tokens and certificates."""

from __future__ import annotations

import logging
import os
import stat
import time
from pathlib import Path

RECHECK_S = 1.0  # after a change; clocks of file systems tick every few milliseconds, or every second

log = logging.getLogger("memlm.server")


class WatchedFiles:
    """Some files and their latest contents.

    A file may be read while it is written, and its next version may have the same time and size. So a change is noticed
    by times, size and inode, and the files are read again for a second after it, and once more.
    """

    def __init__(self, *paths: Path) -> None:
        """Reads the files. Raises OSError where one cannot be read."""
        self._paths = paths
        self._stamp, self._changed_s, self._is_settled = self._stamp_of(), time.monotonic(), False
        self.contents = self._read()

    def reload(self) -> bool:
        """Reads the files again if they may have changed, and returns whether `contents` did. Raises OSError, once for
        each change, for a file that cannot be read.
        """
        now_s, stamp = time.monotonic(), self._stamp_of()
        if stamp != self._stamp:
            self._stamp, self._changed_s, self._is_settled = stamp, now_s, False
        elif self._is_settled:
            return False
        else:
            self._is_settled = now_s - self._changed_s > RECHECK_S
        before = self.contents
        try:
            self.contents = self._read()
        except OSError:
            self._is_settled = True
            raise
        return self.contents != before

    def _stamp_of(self) -> list[tuple[int, ...] | None]:
        return [_stamp_of(path) for path in self._paths]

    def _read(self) -> list[bytes]:
        return [path.read_bytes() for path in self._paths]


def warn_if_world_readable(path: Path) -> None:
    """Logs a warning if every user of the machine can read a secret."""
    if path.stat().st_mode & stat.S_IROTH:
        log.warning("%s has secrets, and every user of this machine can read it; chmod o-r it", path)


def _stamp_of(path: Path) -> tuple[int, ...] | None:
    try:
        status = os.stat(path)
    except FileNotFoundError:
        return None
    return status.st_mtime_ns, status.st_ctime_ns, status.st_size, status.st_ino  # chmod changes st_ctime alone
