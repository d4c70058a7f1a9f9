"""A folder as a synchronization reads it: its documents, the file of each, and the files and folders in doubt.

Files and folders go by hashes of their paths, so that neither a datastore nor a server learns where they are. A file's
way is the hash of each folder from the one that is synchronized, and its own: `0f1e.../a2b3.../c4d5...`.
"""

from __future__ import annotations

import hashlib
import os
import platform
from collections.abc import Callable, Iterable, Sequence, Set
from dataclasses import dataclass, fields, replace
from pathlib import Path

from memlm.data.corpus import Corpus, Document, Listing, Problem
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

    is_local = True

    def __init__(self, corpus: Corpus, name: str | None = None) -> None:
        """Given a `name` for all of them, files go by their paths within the folders that are given: these may lie
        elsewhere next time, and more may be given. Else they go by those on this machine.
        """
        if corpus.documents or corpus.has_pipes:
            raise InvalidInput("only files and folders can be synchronized; name some", field="corpus")
        if name == "":
            raise InvalidInput("name is empty; give the folder a name, or leave it out", field="name")
        self._corpus, self._troubled, self._names = corpus, set[str](), dict[str, str]()
        self._paths, self._unlisted = dict[str, Path](), set[str]()
        self._ways = dict[str, str]()  # of folders
        self._places = {os.path.abspath(path) for path in corpus.places}
        folders = {path: path if os.path.isdir(path) else os.path.dirname(path) for path in self._places}
        self._bases = folders if name is not None else None
        self.origin = hash_of("\n".join(sorted(self._places)))
        # Other machines may have other files under the same path.
        self.name = hash_of(f"{platform.node()}\n{self.origin}") if name is None else name

    def documents(self) -> Corpus:
        """All documents, in order, of the files that are there now."""
        listed = _Listed.of(self._corpus)
        self._paths |= dict(listed.listing)  # files that were read before may be gone by now
        self._unlisted |= {os.path.abspath(path) for path, _ in listed.unlisted}
        return replace(listed, on_problem=self._on_problem, on_document=self._on_document)

    def way(self, id_: str) -> str:
        """The way of the file of a document that was read."""
        return self._way(os.path.abspath(self._paths[self._names[id_]]))

    def files(self) -> dict[str, str]:
        """The ways of files by the ids of their documents."""
        return {id_: self.way(id_) for id_ in self._names}

    def doubtful(self) -> set[str]:
        """Hashes of the files and folders that keep their documents although these were not read: files that are there
        and had a problem, gave no document or were left out; links that lead nowhere; folders that could not be listed,
        or of which no file was to be read, as where they are not mounted or left out.
        """
        listed = {os.path.abspath(path) for path in self._paths.values()}
        whole = {os.path.abspath(self._paths[name]) for name in self._names.values() if name not in self._troubled}
        doubtful = self._unlisted | (listed - whole)
        with_files = _folders_above(listed)
        for place in self._corpus.places:
            path = os.path.abspath(place)
            if path in with_files:
                doubtful |= _not_read(place, whole, with_files)
            elif path not in whole:
                doubtful.add(path)
                if path not in self._unlisted and place.is_dir():
                    self._corpus.on_problem(Problem(path, NO_FILE))
        return {self._in_ways(path) for path in doubtful}

    def _in_ways(self, path: str) -> str:
        """The hash of a file or folder. Of a folder that is too deep for ways, that of the last one above in them."""
        before = "" if path in self._places else self._way_to(os.path.dirname(path))
        is_file = os.path.isfile(path) and not os.path.islink(path)
        return before.rpartition("/")[2] if is_full(before) and not is_file else self._hash(path)

    def _way(self, path: str) -> str:
        return self._hash(path) if path in self._places else f"{self._way_to(os.path.dirname(path))}/{self._hash(path)}"

    def _way_to(self, folder: str) -> str:
        """The way of a folder: those that are not known yet wait in a list, as in `memlm.data.folders`."""
        unknown = list[str]()
        while folder not in self._ways:
            unknown.append(folder)
            above = os.path.dirname(folder)
            if folder in self._places or above == folder:
                break
            folder = above
        before = self._ways.get(folder, "")
        for each in reversed(unknown):
            before = before if is_full(before) else f"{before}/{self._hash(each)}".lstrip("/")
            self._ways[each] = before
        return before

    def _hash(self, path: str) -> str:
        if self._bases is None:
            return hash_of(path)
        within = [place for place in self._bases if path == place or path.startswith(os.path.join(place, ""))]
        return hash_of(os.path.relpath(path, self._bases[max(within, key=len)]))

    def _on_problem(self, problem: Problem) -> None:
        where = problem.where
        self._troubled |= {where, where.rpartition(":")[0]}
        self._corpus.on_problem(problem)

    def _on_document(self, file: str, document: Document) -> None:
        self._names[document.id] = file
        self._corpus.on_document(file, document)


def is_full(way: str) -> bool:
    """Whether no folder is added to a way of folders."""
    return way.count("/") >= MAX_FOLDERS - 1


def _folders_above(files: Iterable[str]) -> set[str]:
    above = set[str]()
    for file in files:
        while (file := os.path.dirname(file)) not in above:
            above.add(file)
    return above


def _not_read(place: Path, whole: Set[str], with_files: Set[str]) -> set[str]:
    """All that is below a place, links too, but for the files that were read as a `whole` and the folders on the way to
    a file. What is in another folder is not told: it may be large, or a link to all there is.
    """
    waiting, not_read = [str(place)], set[str]()
    while waiting:
        folder = waiting.pop()
        try:
            inside = [os.path.join(folder, name) for name in os.listdir(folder)]
        except OSError:
            not_read.add(os.path.abspath(folder))
            continue
        for each in inside:
            path = os.path.abspath(each)
            if path in with_files and os.path.isdir(each):
                waiting.append(each)
            elif path not in whole:
                not_read.add(path)
    return not_read


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
