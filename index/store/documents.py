"""The documents of a segment: an SQLite table of row, id, title, metadata and size."""

from __future__ import annotations

import json
import sqlite3
import weakref
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import quote

from memlm.base.storable import check_document, is_utf8, read_metadata
from memlm.errors import AlreadyExists, Corrupt, StorageFull
from memlm.index.store.document_names import folder_of, is_glob, is_named

_TABLE = (
    "create table documents (row integer primary key, id text not null unique, title text, metadata text, tokens int)"
)
MOST_RECENT = 256  # documents of a table that are kept, with their metadata
MOST_AT_ONCE = 500  # SQLite takes at least 999 values in one statement


@dataclass(frozen=True, slots=True)
class DocumentRow:
    """One document: `row` counts from 0 within its segment."""

    row: int
    id: str
    title: str
    metadata: Mapping[str, Any]
    num_tokens: int


class DocumentTableWriter:
    """Writes a table. A resumed build writes it anew."""

    def __init__(self, path: Path) -> None:
        path.unlink(missing_ok=True)
        self._path, self.rows = path, 0
        self._base = sqlite3.connect(path, isolation_level=None)
        self._run("pragma journal_mode = off")
        self._run("pragma synchronous = off")
        self._run(_TABLE)
        self._run("begin")

    def add(self, document_id: str, title: str, metadata: Mapping[str, Any]) -> None:
        """Adds a document. Raises AlreadyExists for a repeated id, and InvalidInput for values that UTF-8 and JSON
        cannot hold.
        """
        check_document(document_id, title, metadata)
        try:
            self._run(
                "insert into documents values (?, ?, ?, ?, 0)",
                self.rows,
                document_id,
                title,
                json.dumps(dict(metadata)),
            )
        except sqlite3.IntegrityError as error:
            raise AlreadyExists(
                f"two documents of the corpus are called {document_id!r}; give each its own id (or file name)"
            ) from error
        self.rows += 1

    def set_sizes(self, sizes: Iterable[int]) -> None:
        """Sets the number of tokens of each document, in order."""
        self._run_many("update documents set tokens = ? where row = ?", ((size, row) for row, size in enumerate(sizes)))

    def commit(self) -> None:
        """Completes the table. The caller syncs the file."""
        self._run("commit")
        self._base.close()

    def close(self) -> None:
        """Closes the file in any state."""
        self._base.close()

    def _run(self, statement: str, *values: Any) -> None:
        self._guard(lambda: self._base.execute(statement, values))

    def _run_many(self, statement: str, rows: Iterable[tuple[Any, ...]]) -> None:
        self._guard(lambda: self._base.executemany(statement, rows))

    def _guard(self, work: Any) -> None:
        try:
            work()
        except sqlite3.OperationalError as error:
            if "full" not in str(error):
                raise
            raise StorageFull(
                f"the disk of {self._path} is full; make room and run the same command again: what was committed stands"
            ) from error


class DocumentTable:
    """A finished, read-only table. It stays readable when its file is removed, because the file stays open. Raises
    Corrupt if the file cannot be opened.
    """

    def __init__(self, path: Path) -> None:
        self._recent = dict[int, DocumentRow]()  # neighbors of a text come from few documents, token after token
        self._path, where = path, f"file:{quote(str(path))}?mode=ro&immutable=1"
        with self._readable():
            self._base = sqlite3.connect(where, uri=True, check_same_thread=False)
        # Views share segments, in several threads: the last one that lets go of a table closes it.
        self._closing = weakref.finalize(self, self._base.close)

    def at(self, row: int) -> DocumentRow:
        """The document in a row."""
        return self.at_each([row])[row]

    def at_each(self, rows: Collection[int]) -> dict[int, DocumentRow]:
        """The documents in several rows, by row."""
        recent = self._recent  # another thread may replace it
        unread = sorted(row for row in set(rows) if row not in recent)
        read = dict[int, DocumentRow]()
        with self._readable():
            for begin in range(0, len(unread), MOST_AT_ONCE):
                batch = unread[begin : begin + MOST_AT_ONCE]
                query = f"select * from documents where row in ({', '.join('?' * len(batch))})"
                read |= {document.row: document for document in map(_document, self._base.execute(query, batch))}
            if len(read) != len(unread):
                raise ValueError("documents are missing")
        if read:
            self._recent = dict([*recent.items(), *read.items()][-MOST_RECENT:])
        return {row: read.get(row) or recent[row] for row in rows}

    def row_of(self, document_id: str) -> int | None:
        """The row of an id, or None."""
        if not is_utf8(document_id):
            return None
        with self._readable():
            found = self._base.execute("select row from documents where id = ?", (document_id,)).fetchone()
        return None if found is None else int(found[0])

    def rows_of(self, document_ids: Iterable[str]) -> dict[str, int]:
        """The rows of those of some ids that it has."""
        unread, rows = [each for each in dict.fromkeys(document_ids) if is_utf8(each)], dict[str, int]()
        with self._readable():
            for begin in range(0, len(unread), MOST_AT_ONCE):
                batch = unread[begin : begin + MOST_AT_ONCE]
                query = f"select id, row from documents where id in ({', '.join('?' * len(batch))})"
                rows |= {id_: int(row) for id_, row in self._base.execute(query, batch)}
        return rows

    def with_fields(self, *names: str) -> Iterator[DocumentRow]:
        """The documents whose metadata have one of some fields, and maybe others with that name elsewhere in it. Reads
        the whole table, and parses the metadata of these alone.
        """
        with self._readable():
            query = (
                "select * from documents where exists"
                " (select 1 from json_each(?) where instr(metadata, json_each.value)) order by row"
            )
            needles = json.dumps([json.dumps(name) for name in names])
            yield from map(_document, self._base.execute(query, (needles,)))

    def rows_named(self, name: str) -> list[int]:
        """The rows of all documents that `is_named` accepts. Only a glob reads the whole table."""
        if not is_utf8(name):
            return []
        with self._readable():
            if is_glob(name):
                every = self._base.execute("select row, id from documents order by row")
                return [int(row) for row, document_id in every if is_named(document_id, name)]
            folder = folder_of(name)
            behind = folder[:-1] + chr(ord("/") + 1)
            within = "select row from documents where id = ? or (id >= ? and id < ?) order by row"
            return [int(row) for (row,) in self._base.execute(within, (name, folder, behind))]

    def __iter__(self) -> Iterator[DocumentRow]:
        with self._readable():
            yield from map(_document, self._base.execute("select * from documents order by row"))

    @contextmanager
    def _readable(self) -> Iterator[None]:
        """Turns SQLite's errors about a damaged table into Corrupt, with the file's name."""
        try:
            yield
        except (sqlite3.DatabaseError, TypeError, ValueError) as error:
            raise Corrupt(f"{self._path} cannot be read ({error}); build the store anew") from error

    def close(self) -> None:
        """Closes the file."""
        self._closing()


def _document(fields: tuple[Any, ...]) -> DocumentRow:
    row, document_id, title, metadata, num_tokens = fields
    return DocumentRow(row, document_id, title, read_metadata(metadata), num_tokens)
