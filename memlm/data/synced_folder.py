"""A folder as a synchronization reads it: its documents, the file of each, and the files and folders in doubt.

Files and folders go by hashes of their paths, so that neither a datastore nor a server learns where they are. A file's
way is the hash of each folder from the one that is synchronized, and its own: `0f1e.../a2b3.../c4d5...`.
"""

from __future__ import annotations

import hashlib
import os
import platform
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path

from memlm.data.corpus import ALL_FILES, Corpus, Document, Listing, Problem
from memlm.errors import InvalidInput

HASH_DIGITS = 16
MAX_FOLDERS = 31  # of a way; of deeper ones the first
NO_FILE = "no file was found, as where a folder is not mounted; none of its documents is deleted"


def hash_of(text: str) -> str:
    """The hash of a path, an id, or the name of a folder."""
    return hashlib.sha256(text.encode(errors="surrogateescape")).hexdigest()[:HASH_DIGITS]


def way_of(id_: str) -> str:
    """The way of a document that is its own file, as its id spells it."""
    parts = id_.split("/")
    ends = [*range(1, min(len(parts), MAX_FOLDERS + 1)), len(parts)]
    return "/".join(hash_of("/".join(parts[:end])) for end in ends)


@dataclass(frozen=True)
class _Listed(Corpus):
    """A corpus whose files were listed before, so that all who ask for them learn of the same ones."""

    listing: Sequence[tuple[str, Path]] = ()
    unlisted: Sequence[tuple[Path, OSError]] = ()

    @classmethod
    def of(cls, corpus: Corpus) -> _Listed:
        """Lists the files of a corpus."""
        unlisted = list[tuple[Path, OSError]]()
        listing = corpus.found(lambda path, error: unlisted.append((path, error)))
        settings = {field.name: getattr(corpus, field.name) for field in fields(Corpus)}
        return cls(**settings, listing=listing, unlisted=unlisted)

    def found(self, on_unreadable: Callable[[Path, OSError], None] = lambda path, error: None) -> Listing:
        """As they were."""
        for each in self.unlisted:
            on_unreadable(*each)
        return list(self.listing)


class SyncedFolder:
    """Files and folders, whose documents are read first, before their files and the doubtful ones are asked for.

    Raises InvalidInput for documents in memory or from a pipe, which cannot be read again.
    """

    def __init__(self, corpus: Corpus, name: str | None = None) -> None:
        """Given a `name` for all of them, files go by their paths within the folder that holds all. Else they go by
        those on this machine.
        """
        if corpus.documents or corpus.has_pipes:
            raise InvalidInput("only files and folders can be synchronized; name some", field="corpus")
        if name == "":
            raise InvalidInput("name is empty; give the folder a name, or leave it out", field="name")
        self._corpus, self._troubled, self._names = corpus, set[str](), dict[str, str]()
        self._ways = dict[str, str]()  # of folders
        self._places = {os.path.abspath(path) for path in corpus.places}
        folders = [path if os.path.isdir(path) else os.path.dirname(path) for path in self._places]
        self._base = os.path.commonpath(folders) if name is not None else None
        self.origin = hash_of("\n".join(sorted(self._places)))
        # Other machines may have other files under the same path.
        self.name = hash_of(f"{platform.node()}\n{self.origin}") if name is None else name

    def documents(self) -> Corpus:
        """All documents, in order, of the files that are there now."""
        listed = _Listed.of(self._corpus)
        self._paths = dict(listed.listing)
        return replace(listed, on_problem=self._on_problem, on_document=self._on_document)

    def way(self, id_: str) -> str:
        """The way of the file of a document that was read."""
        return self._way(os.path.abspath(self._paths[self._names[id_]]))

    def files(self) -> dict[str, str]:
        """The ways of files by the ids of their documents."""
        return {id_: self.way(id_) for id_ in self._names}

    def doubtful(self) -> set[str]:
        """Hashes of the files and folders that keep their documents although these were not read: files that are there
        and had a problem, gave no document or were left out; folders that could not be listed, or have no file.
        """
        doubtful = {os.path.abspath(self._paths[name]) for name in self._troubled & self._paths.keys()}

        def on_unreadable(path: Path, error: OSError) -> None:
            doubtful.add(os.path.abspath(path))

        everything = replace(self._corpus, glob=ALL_FILES, hidden=True).found(on_unreadable)
        whole = {os.path.abspath(self._paths[name]) for name in self._whole()}
        there = {os.path.abspath(path) for _, path in everything}
        return {self._hash(path) for path in doubtful | (there - whole) | self._empty_folders(there)}

    def _whole(self) -> set[str]:
        """The names of files that were read without a problem."""
        return (set(self._names.values()) - self._troubled) & self._paths.keys()

    def _empty_folders(self, files: set[str]) -> set[str]:
        """Folders below which no file is."""
        with_files = set[str]()
        for file in files:
            while (file := os.path.dirname(file)) not in with_files:
                with_files.add(file)
        folders = {os.path.abspath(folder) for place in self._places for folder, _, _ in os.walk(place)}
        for place in (empty := folders - with_files) & self._places:
            self._corpus.on_problem(Problem(place, NO_FILE))
        return empty

    def _way(self, path: str) -> str:
        return self._hash(path) if path in self._places else f"{self._way_to(os.path.dirname(path))}/{self._hash(path)}"

    def _way_to(self, folder: str) -> str:
        if folder not in self._ways:
            above = os.path.dirname(folder)
            before = "" if folder in self._places or above == folder else self._way_to(above)
            is_deep = before.count("/") >= MAX_FOLDERS - 1
            self._ways[folder] = before if is_deep else f"{before}/{self._hash(folder)}".lstrip("/")
        return self._ways[folder]

    def _hash(self, path: str) -> str:
        return hash_of(path if self._base is None else os.path.relpath(path, self._base))

    def _on_problem(self, problem: Problem) -> None:
        where = problem.where
        self._troubled |= {where, where.rpartition(":")[0]}
        self._corpus.on_problem(problem)

    def _on_document(self, file: str, document: Document) -> None:
        self._names[document.id] = file
        self._corpus.on_document(file, document)


def signature_of(corpus: Corpus) -> dict[str, tuple[int, int]]:
    """The time of change, in nanoseconds, and the size of each file: equal where no file was written to."""
    found = dict[str, tuple[int, int]]()
    for name, path in corpus.files():
        try:
            status = path.stat()
        except OSError:  # it went away meanwhile
            continue
        found[name] = status.st_mtime_ns, status.st_size
    return found
