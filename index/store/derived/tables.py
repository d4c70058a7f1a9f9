"""An SQLite file that is derived from the pieces of a segment: made some pieces at a time, and disposable.

Where the folder cannot be written, the tables live in RAM. They have deleted documents too, which the caller filters.
"""

from __future__ import annotations

import sqlite3
import threading
import weakref
from abc import ABC, abstractmethod
from collections.abc import Sized
from pathlib import Path
from typing import Generic, TypeVar
from urllib.parse import quote

from memlm.errors import MemlmError
from memlm.index.store.derived.files import DerivedFile
from memlm.index.store.segment import VALUES, Segment

P = TypeVar("P", bound=Sized)


class DerivedTables(ABC, Generic[P]):
    """Tables of some pieces. `build` completes them, `at_once` pieces a call.

    `form` names the tables' format. A file of another form, or of other tokens, is made anew. Any thread may call the
    methods. `is_complete` says whether `build` is done.
    """

    def __init__(self, store: Path, segment: Segment, name: str, *, form: str, pieces: P, at_once: int) -> None:
        self._file, self._pieces, self._at_once = DerivedFile(store, segment, name), pieces, at_once
        self._identity = f"{form} {segment.record.files[VALUES].checksum}"
        self._done, self._lock = 0, threading.Lock()
        self._base = self._opened()
        self.is_complete = self._base is not None

    @property
    def num_done(self) -> int:
        """Pieces that `build` has added, or all of a file that was complete."""
        return len(self._pieces) if self.is_complete else self._done

    @property
    def num_pieces(self) -> int:
        """Pieces of complete tables."""
        return len(self._pieces)

    @abstractmethod
    def _create(self, base: sqlite3.Connection) -> None:
        """Creates the empty tables."""

    @abstractmethod
    def _add(self, base: sqlite3.Connection, pieces: range) -> None:
        """Adds some pieces to the tables."""

    def build(self) -> None:
        """Adds some pieces to the tables, and completes them with the last ones."""
        with self._lock:
            if self.is_complete:
                return
            if self._base is None:
                self._base = self._begun()
            end = min(self._done + self._at_once, len(self._pieces))
            try:
                self._add(self._base, range(self._done, end))
            except sqlite3.OperationalError:  # the disk is full
                self._restart_in_ram()
                return
            self._done = end
            if end == len(self._pieces):
                self._base.execute("commit")
                self._file.publish()
                self.is_complete = True

    def close(self) -> None:
        """Closes the file. An incomplete one is removed."""
        with self._lock:
            if self._base is not None:
                self._base.close()
            if not self.is_complete:
                self._file.discard()

    @property
    def _damaged(self) -> str:
        """The beginning and the remedy of an error about the file, around the reason."""
        return f"{self._file.path} is damaged ({{}}); remove it, and the next search makes it anew"

    def _opened(self) -> sqlite3.Connection | None:
        """Opens complete tables of this very segment, if there are some."""
        if not self._file.path.is_file():
            return None
        base = None
        try:
            where = f"file:{quote(str(self._file.path))}?mode=ro&immutable=1"
            base = sqlite3.connect(where, uri=True, check_same_thread=False)
            found = base.execute("select identity from origin").fetchone()
            if found == (self._identity,):
                return self._closed_with_self(base)
        except (sqlite3.DatabaseError, UnicodeDecodeError):  # the other is of a name in a message of SQLite
            pass
        if base is not None:
            base.close()
        return None

    def _begun(self) -> sqlite3.Connection:
        try:
            with self._file.begun() as temporary:
                return self._created(str(temporary))
        except (MemlmError, OSError, sqlite3.OperationalError):
            return self._created(":memory:")

    def _created(self, where: str) -> sqlite3.Connection:
        base = self._closed_with_self(sqlite3.connect(where, isolation_level=None, check_same_thread=False))
        base.execute("pragma journal_mode = off")
        base.execute("pragma synchronous = off")
        base.execute("create table origin (identity text)")
        base.execute("insert into origin values (?)", (self._identity,))
        self._create(base)
        base.execute("begin")
        return base

    def _closed_with_self(self, base: sqlite3.Connection) -> sqlite3.Connection:
        """Closes a connection with its last user. By itself it closes in a garbage collection, as it refers to itself
        in the cache of its statements.
        """
        weakref.finalize(self, base.close)
        return base

    def _restart_in_ram(self) -> None:
        assert self._base is not None
        self._base.close()
        self._file.discard()
        self._base, self._done = self._created(":memory:"), 0
