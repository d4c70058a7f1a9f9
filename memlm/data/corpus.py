"""Files and folders -> documents, one at a time.

Takes paths of text (one document a file), of formats that hold text (`memlm.data.extract`: HTML, PDF, Office, EPUB,
notebooks and mail), JSON Lines and Parquet (`id`, `text`, `title`, anything else kept as metadata), all also as `.gz`
and `.zst`, folders of these, and `-` for standard input, which is JSON Lines where its first line is a JSON object.
Gives documents in a fixed order under stable ids: a file in a folder is called by its path within that folder, a line
or row by its `id`, or by file and number, as a message of a mailbox is. Holds one document at a time, of Parquet a few,
and of formats that are converted a few more.
"""

from __future__ import annotations

import os
from collections import Counter, deque
from collections.abc import Callable, Container, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path, PurePath
from typing import TypeAlias

from memlm.api.prompts import check_text
from memlm.base.figures import counted
from memlm.base.files import is_under
from memlm.base.lists import items_of
from memlm.base.printable import one_line
from memlm.data.document import Document, NoText, Problem, UnusableText
from memlm.data.folders import Folder, check_glob
from memlm.data.formats import PIPED_IN, STANDARD_INPUT, standard_input_name, unpacked_size
from memlm.data.ignored import IgnoreRules
from memlm.data.reading import Reading
from memlm.data.records import read_record
from memlm.errors import InvalidInput, NotFound
from memlm.index.store.journal import is_datastore

__all__ = ["Corpus", "Document", "NoText", "Problem", "Texts", "UnusableText", "corpus_of"]

SHOWN_PROBLEMS = 3
ALL_FILES = "**/*"

Listing: TypeAlias = "list[tuple[str, Path]]"  # files by the names of their documents


def _ignore(*told: object) -> None:
    """The default listener."""


@dataclass(frozen=True)
class Corpus:
    """Documents under some paths, read anew at each iteration, or documents in memory.

    `Corpus(["docs/", "notes.jsonl"])` reads files; `Corpus([Document("a", "text")])` takes documents, after any files.
    Of a folder, `IgnoreRules` leaves out hidden files, environments and all that ignore files exclude, unless `hidden`,
    and always datastores.
    With `on_error="skip"` unusable documents are reported to `on_problem` and left out. With "fail" one raises
    `UnusableText`. Each document of a file is told to `on_document`, with the name of that file. Given `only`,
    documents of files with other ids are left out. Given `roots`, a file that lies under none of them, once links are
    followed, cannot be used.
    Raises NotFound for a path that is not there and NoText where no document is found at all.
    """

    paths: Sequence[str | Path | Document]
    glob: str = ALL_FILES
    on_error: str = "skip"
    on_problem: Callable[[Problem], None] = _ignore
    roots: Sequence[Path] = ()
    hidden: bool = False
    documents: Sequence[Document] = ()
    on_document: Callable[[str, Document], None] = _ignore
    only: Container[str] | None = None

    def __post_init__(self) -> None:
        given = items_of("corpus", self.paths, str | Path | Document, expected="files, folders or documents")
        in_memory = items_of("documents", self.documents, Document, expected="documents")
        items_of("roots", self.roots, Path, expected="folders")
        documents = (*in_memory, *(each for each in given if isinstance(each, Document)))
        for document in documents:
            _check(document)
        object.__setattr__(self, "documents", documents)
        object.__setattr__(self, "paths", tuple(each for each in given if not isinstance(each, Document)))
        if self.on_error not in ("skip", "fail"):
            raise InvalidInput(f"on_error is {self.on_error!r}; expected 'skip' or 'fail'", field="on_error")
        if not self.paths and not self.documents:
            raise InvalidInput("no corpus was given; name at least one file or folder", field="corpus")
        for path in self.places:
            if str(path) != STANDARD_INPUT:
                _check_there(path)
        check_glob(self.glob)

    def __iter__(self) -> Iterator[Document]:
        """Yields the documents in order. Raises NoText at the end, with the first problems, if there was none."""
        reading = Reading(self)
        yield from reading.documents()
        yield from self.documents
        if not reading.num_documents and not self.documents:
            raise self._no_text(reading.problems)

    def require_text(self) -> None:
        """Raises NoText where an iteration would find no document. Reads up to the first one, so that a caller
        knows it before a model is loaded. With `on_error="fail"` reads all, so that UnusableText is raised
        before anything is written. With a pipe, nothing is read.
        """
        if self.has_pipes:
            return
        documents = iter(replace(self, on_problem=_ignore, on_document=_ignore))
        if self.on_error == "fail":
            deque(documents, maxlen=0)
        elif not self.documents:
            next(documents)

    @property
    def has_pipes(self) -> bool:
        """Whether a part of it can be read once, or waits for another program."""
        return not all(path.is_file() or path.is_dir() for path in self.places)

    def files(self) -> Iterator[tuple[str, Path]]:
        """Yields each file that may be read, with the name its documents go by."""
        return ((name, path) for name, path in self.found() if self.may_read(path))

    def found(self, on_unreadable: Callable[[Path, OSError], None] = lambda path, error: None) -> Listing:
        """Lists all files that are there, in the order of the paths, before any is read.

        A file is called by its path within its folder. Those that would have one name, as the README.md of two folders,
        are called by their paths within the folder that holds all paths.
        """
        listings = [self._files_of(path, on_unreadable) for path in self.places]
        names = Counter(name for listing in listings for name, _ in listing)
        if len(names) < names.total():
            return _called_apart(self.places, listings, {name for name, count in names.items() if count > 1})
        return [each for listing in listings for each in listing]

    def empty_places(self) -> list[Path]:
        """Those of the folders in which no file is found."""
        return [path for path in self.places if not self._files_of(path, lambda path, error: None)]

    def _files_of(self, path: Path, on_unreadable: Callable[[Path, OSError], None]) -> Listing:
        if str(path) == STANDARD_INPUT:
            return [(standard_input_name(), PIPED_IN)]
        if not path.is_dir():
            return [(path.name, path)]
        return Folder(path, self.glob, IgnoreRules(path, hidden=self.hidden), on_unreadable).files()

    def _no_text(self, problems: Sequence[Problem]) -> NoText:
        places = one_line(", ".join(str(path) for path in self.paths))
        if all(map(is_datastore, self.places)):
            why = "a datastore, and no text; name the files or folders whose text is to be read"
            return NoText(f"{places}: {why}", field="corpus")
        chosen = "" if self.glob == ALL_FILES else f" with glob {self.glob!r}"
        reasons = "; ".join(map(str, problems[:SHOWN_PROBLEMS]))
        more = f" and {len(problems) - SHOWN_PROBLEMS} more" if len(problems) > SHOWN_PROBLEMS else ""
        why = f" ({reasons}{more})" if reasons else ""
        return NoText(f"no text was found under {places}{chosen}; nothing was built{why}", field="corpus")

    @property
    def num_bytes(self) -> int:
        """Estimates the size of all texts, files once unpacked, for progress bars."""
        in_memory = sum(document.num_bytes for document in self.documents)
        return in_memory + sum(unpacked_size(path) for _, path in self.files())

    @property
    def label(self) -> str:
        """The names of the files and folders, or the number of documents, for a report."""
        names = [path.name for path in self.places]
        return ", ".join([*names, *([counted(len(self.documents), "document")] if self.documents else [])])

    @property
    def places(self) -> list[Path]:
        """The files and folders."""
        return [Path(path) for path in self.paths if not isinstance(path, Document)]

    def may_read(self, path: Path) -> bool:
        """Whether a file lies under one of the `roots`, if there are some."""
        return not self.roots or is_under(path, self.roots)


Texts: TypeAlias = Corpus | str | Path | Document | Sequence[str | Path | Document]


def corpus_of(given: Texts) -> Corpus:
    """A corpus as it is, or one of a path, a document, or a list of these."""
    if isinstance(given, Corpus):
        return given
    return Corpus([given] if isinstance(given, str | Path | Document) else given)


def _check_there(path: Path) -> None:
    try:
        is_there, why = path.exists(), "check the path"
    except OSError as error:
        is_there, why = False, f"its folder cannot be read ({error.strerror})"
    if not is_there:
        raise NotFound(f"no file or folder at {path}; {why}", kind="corpus", name=str(path))


def _called_apart(places: Sequence[Path], listings: Sequence[Listing], shared: Container[str]) -> Listing:
    """Files, those with `shared` names under names that tell folders apart. A file that was given twice comes once."""
    folders = [place if place.is_dir() else place.parent for place in places if str(place) != STANDARD_INPUT]
    common = os.path.commonpath([os.path.abspath(folder) for folder in folders or [PIPED_IN.parent]])
    files = {(name, os.path.abspath(path)): path for listing in listings for name, path in listing}

    def named(name: str, where: str) -> str:
        return name if files[name, where] is PIPED_IN else PurePath(os.path.relpath(where, common)).as_posix()

    called = [(named(*each) if each[0] in shared else each[0], path) for each, path in files.items()]
    if len({name for name, _ in called}) < len(called):  # a new name is that of another file within its folder
        called = [(named(*each), path) for each, path in files.items()]
    return called


def _check(document: Document) -> None:
    """Raises InvalidInput for a document in memory that no datastore can hold."""
    record = {**document.metadata, "id": document.id, "text": document.text, "title": document.title}
    try:
        check_text("its id", document.id, field="id")
        check_text("its title", document.title, field="title")
        if not document.id:
            raise ValueError("its id is empty")
        read_record(record, document.id)
    except ValueError as error:
        raise InvalidInput(f"document {document.id!r}: {error}", field="documents") from error
