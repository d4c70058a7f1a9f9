"""The memory of a datastore of synchronizations, in `synced.json`: which documents each one brought, and from where.

An origin is the hash of a folder that was synchronized. Of each document that it brought there is a row: hashes of its
id, of its content as it is stored, and of its file and the folders on the way to that. So no name of a deleted document
stays, and a document that others have put in its place is told from it. A row takes 28 bytes, and a folder 12.
"""

from __future__ import annotations

import binascii
import json
from collections.abc import Callable, Container, Iterable, Mapping
from dataclasses import dataclass, field
from hashlib import blake2b
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from memlm.base.files import write_atomic
from memlm.data.synced_folder import hash_of, is_full
from memlm.errors import Corrupt
from memlm.index.store.lock import commit_lock

SYNCED = "synced.json"
VERSION = 4
ANY = 0  # the content of documents that a version without contents noted
_ROW = np.dtype([("id", "<u8"), ("content", "<u8"), ("file", "<u8"), ("folder", "<u4")])
_FOLDER = np.dtype([("hash", "<u8"), ("above", "<u4")])  # above: the place of the folder before it, from 1; 0 for none


class Row(NamedTuple):
    """A document that an origin brought: its content, and its way (`memlm.data.synced_folder`) up to its file."""

    content: int
    folder: str
    file: str

    @classmethod
    def of(cls, content: int, way: str) -> Row:
        """Splits the way of a file."""
        folder, _, file = way.rpartition("/")
        return cls(content, folder, file)

    @property
    def hashes(self) -> set[str]:
        """The file and the folders on the way to it."""
        return {*self.folder.split("/"), self.file}

    def has(self, content: int) -> bool:
        """Whether a content is the one that was brought."""
        return self.content in (ANY, content)


# By the hashes of ids. There are two of a document while another content of it is on its way.
Rows: TypeAlias = dict[str, tuple[Row, ...]]


def content_of(title: str, metadata: Mapping[str, Any], values_N: np.ndarray) -> int:
    """The hash of a document as it is stored: title, metadata and tokens."""
    digest = blake2b(json.dumps([title, dict(metadata)], sort_keys=True).encode(), digest_size=8)
    digest.update(values_N.astype("<u4").tobytes())
    return int.from_bytes(digest.digest(), "little") or ANY + 1


@dataclass(frozen=True)
class Notes:
    """The knowledge of a plan of documents: the contents of those that are stored as their files have them, and of
    those that are `gone`; `held` ones, whose rows stay as they are; and the rows of other origins whose documents are
    in the datastore no more.
    """

    contents: Mapping[str, int] = field(default_factory=dict)
    gone: Mapping[str, int] = field(default_factory=dict)
    held: frozenset[str] = frozenset()
    dead: Mapping[str, Rows] = field(default_factory=dict)


@dataclass(frozen=True)
class Memory:
    """The rows of all origins of a datastore. `own` are those of one of them."""

    own: Rows
    others: Mapping[str, Rows]

    @classmethod
    def read(cls, store: Path, origin: str) -> Memory:
        """Raises Corrupt."""
        synced = _read(store)
        return cls(synced.pop(origin, {}), synced)

    def has_own(self, id_: str, content: int) -> bool:
        """Whether a document, given with its content, is one that the origin brought."""
        return any(row.has(content) for row in self.own.get(hash_of(id_), ()))

    def of_others(self, id_: str, content: int) -> list[Row]:
        """The rows of other origins that brought a document with this content."""
        hash_ = hash_of(id_)
        return [row for rows in self.others.values() for row in rows.get(hash_, ()) if row.has(content)]

    def dead(self, live: Container[str]) -> dict[str, Rows]:
        """The rows of other origins, without those of live documents, which are given by the hashes of their ids."""
        dead = {
            origin: {hash_: each for hash_, each in rows.items() if hash_ not in live}
            for origin, rows in self.others.items()
        }
        return {origin: rows for origin, rows in dead.items() if rows}


def note_coming(store: Path, origin: str, files: Mapping[str, str], contents: Mapping[str, int]) -> None:
    """Notes documents, given by their ways and contents, that a commit is about to bring: after a kill behind it, a
    later call may replace and delete them.
    """
    coming = {hash_of(id_): Row.of(content, files[id_]) for id_, content in contents.items()}

    def change(synced: dict[str, Rows]) -> dict[str, Rows]:
        own = synced.get(origin, {})
        more = {hash_: tuple(dict.fromkeys((*own.get(hash_, ()), row))) for hash_, row in coming.items()}
        return {**synced, origin: {**own, **more}}

    _update(store, change)


def note_brought(
    store: Path, origin: str, files: Mapping[str, str], contents: Mapping[str, int], notes: Notes, *, takes: bool
) -> None:
    """Notes the documents of an origin, after its commits: `files` are the ways of all documents that it has, and
    `contents` those that were written. With `takes`, other origins have these no more. Rows of documents that are gone
    go.
    """
    contents = {**notes.contents, **contents}
    new = {hash_of(id_): (Row.of(contents[id_], way),) for id_, way in files.items() if id_ in contents}
    held = {hash_of(id_) for id_ in (*notes.held, *(files.keys() - contents.keys()))}

    def change(synced: dict[str, Rows]) -> dict[str, Rows]:
        before = synced.pop(origin, {})
        for other, dead in notes.dead.items():
            rows = synced.get(other, {})
            synced[other] = {hash_: each for hash_, each in rows.items() if dead.get(hash_) != each}
        if takes:
            for other, rows in synced.items():
                synced[other] = {hash_: each for hash_, each in rows.items() if hash_ not in new}
        stay = {hash_: before[hash_] for hash_ in held & before.keys()}
        return {**synced, origin: {**stay, **new}}

    _update(store, change)


def _update(store: Path, change: Callable[[dict[str, Rows]], dict[str, Rows]]) -> None:
    with commit_lock(store):
        before = _read(store)
        after = {origin: rows for origin, rows in change(dict(before)).items() if rows}
        if after != before:
            write_atomic(store / SYNCED, _encode(after))


def _encode(synced: Mapping[str, Rows]) -> bytes:
    return json.dumps(
        {"version": VERSION, "synced": {origin: _encode_rows(rows) for origin, rows in synced.items()}}
    ).encode()


def _encode_rows(rows: Rows) -> dict[str, str]:
    places, folders = {"": 0}, list[tuple[int, int]]()

    def place_of(folder: str) -> int:
        if folder not in places:
            above, _, hash_ = folder.rpartition("/")  # no longer than ways are
            folders.append((int(hash_, 16), place_of(above)))
            places[folder] = len(folders)
        return places[folder]

    table = [
        (int(hash_, 16), content, int(file, 16), places.get(folder) or place_of(folder))
        for hash_, each in rows.items()
        for content, folder, file in each
    ]
    return {"documents": _packed(table, _ROW), "folders": _packed(folders, _FOLDER)}


def _packed(table: Iterable[tuple[int, ...]], dtype: np.dtype[Any]) -> str:
    return binascii.b2a_base64(np.array(list(table), dtype).tobytes(), newline=False).decode()


def _unpacked(text: str, dtype: np.dtype[Any]) -> list[tuple[int, ...]]:
    rows: list[tuple[int, ...]] = np.frombuffer(binascii.a2b_base64(text, strict_mode=True), dtype).tolist()
    return rows


def _decode_rows(packed: Mapping[str, str]) -> Rows:
    ways = [""]
    for folder, above in _unpacked(packed["folders"], _FOLDER):
        # A file that was not written here may have deeper ones, whose ways grow as the square of their number.
        ways.append(ways[above] if is_full(ways[above]) else f"{ways[above]}/{_hex(folder)}".lstrip("/"))
    rows: Rows = {}
    for id_, content, file, folder in _unpacked(packed["documents"], _ROW):
        hash_ = _hex(id_)
        rows[hash_] = (*rows.get(hash_, ()), Row(content, ways[folder], _hex(file)))
    return rows


def _hex(hash_: int) -> str:
    return f"{hash_:016x}"


def _read(store: Path) -> dict[str, Rows]:
    try:
        content = json.loads((store / SYNCED).read_bytes())
        version, synced = content["version"], content["synced"]
        if version in (1, 2):  # which had no folders, so that none of its documents is known to be gone
            return {}
        if version == 3:  # which had no contents
            return {
                str(origin): {hash_: (Row.of(ANY, way),) for hash_, way in files.items()}
                for origin, files in synced.items()
            }
        if version != VERSION:
            raise ValueError(f"version {version}, expected {VERSION}")
        return {str(origin): _decode_rows(packed) for origin, packed in synced.items()}
    except FileNotFoundError:
        return {}
    except (ValueError, KeyError, TypeError, AttributeError, IndexError, RecursionError, OSError) as error:
        raise Corrupt(
            f"{store / SYNCED} is damaged ({error}); remove it: the next synchronization deletes nothing"
        ) from error
