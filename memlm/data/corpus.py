"""Files and folders -> documents, one at a time.

Takes paths of plain text (one document a file), JSON Lines and Parquet (`id`, `text`, `title`, anything else kept as
metadata), text also as `.gz` and `.zst`, folders of these, and `-` for standard input, which is JSON Lines where its
first line is a JSON object. Gives documents in a fixed order under stable ids: a file in a folder is called by its path
within that folder, a line or row by its `id`, or by file and number. Holds one document at a time, of Parquet a few.
"""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path, PurePath
from typing import IO, Any, TypeAlias

from memlm.api.prompts import check_text
from memlm.base.figures import counted
from memlm.base.files import is_under
from memlm.base.lists import items_of
from memlm.base.printable import one_line
from memlm.base.storable import is_utf8
from memlm.data.folders import Folder, check_glob
from memlm.data.formats import (
    JSON_LINES,
    PARQUET,
    PIPED_IN,
    STANDARD_INPUT,
    UNREADABLE,
    layout_of,
    open_unpacked,
    rows_of,
    standard_input_name,
    unpacked_size,
)
from memlm.data.ignored import IgnoreRules
from memlm.data.records import read_record, without_infinite
from memlm.errors import InvalidInput, MemlmError, NotFound
from memlm.index.store.journal import is_datastore

SAMPLE_BYTES = 8000  # where git looks for a NUL
SHOWN_NAMES, SHOWN_PROBLEMS = 3, 3
ALL_FILES = "**/*"
NUL_BYTE = "a NUL byte, as in binary files"
ADVICE = "convert the file to UTF-8 text, or leave it out with --glob"

Listing: TypeAlias = "list[tuple[str, Path]]"  # files by the names of their documents


@dataclass(frozen=True, slots=True)
class Document:
    """One text with a name. `num_bytes` is the size of the text in UTF-8."""

    id: str
    text: str
    title: str = ""
    metadata: Mapping[str, Any] = field(default_factory=dict)

    @property
    def num_bytes(self) -> int:
        """Size of the text in UTF-8."""
        return len(self.text.encode())


@dataclass(frozen=True, slots=True)
class Problem:
    """Something in the corpus that cannot be used: where (file, and line where there is one) and why."""

    where: str
    why: str

    def __str__(self) -> str:
        """One line, place first. File names and metadata keys may hold control characters, which are shown escaped."""
        return one_line(f"{self.where}: {self.why}")


class UnusableText(MemlmError):
    """A document that cannot be read, under `--on-error fail`."""


def _ignore(problem: Problem) -> None:
    """The default listener."""


@dataclass(frozen=True)
class Corpus:
    """Documents under some paths, read anew at each iteration, or documents in memory.

    `Corpus(["docs/", "notes.jsonl"])` reads files; `Corpus([Document("a", "text")])` takes documents, after any files.
    Of a folder, `IgnoreRules` leaves out hidden files, environments and what ignore files exclude, unless `hidden`, and
    always datastores.
    With `on_error="skip"` unusable documents are reported to `on_problem` and left out. With "fail" one raises
    `UnusableText`. Given `roots`, a file that lies under none of them, once links are followed, cannot be used.
    Raises NotFound for a path that is not there and InvalidInput where no document is found at all.
    """

    paths: Sequence[str | Path | Document]
    glob: str = ALL_FILES
    on_error: str = "skip"
    on_problem: Callable[[Problem], None] = _ignore
    roots: Sequence[Path] = ()
    hidden: bool = False
    documents: Sequence[Document] = ()

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
        """Yields the documents in order. Raises InvalidInput at the end, with the first problems, if there was none."""
        reading = _Reading(self)
        yield from reading.documents()
        yield from self.documents
        if not reading.num_documents and not self.documents:
            raise self._no_text(reading.problems)

    def require_text(self) -> None:
        """Raises InvalidInput where an iteration would find no document. Reads up to the first one, so that a caller
        knows it before a model is loaded. With a pipe, nothing is read.
        """
        if not self.documents and not self.has_pipes:
            next(iter(replace(self, on_problem=_ignore)))

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

    def _files_of(self, path: Path, on_unreadable: Callable[[Path, OSError], None]) -> Listing:
        if str(path) == STANDARD_INPUT:
            return [(standard_input_name(), PIPED_IN)]
        if not path.is_dir():
            return [(path.name, path)]
        return Folder(path, self.glob, IgnoreRules(path, hidden=self.hidden), on_unreadable).files()

    def _no_text(self, problems: Sequence[Problem]) -> InvalidInput:
        places = one_line(", ".join(str(path) for path in self.paths))
        if all(map(is_datastore, self.places)):
            why = "a datastore, and no text; name the files or folders whose text is to be read"
            return InvalidInput(f"{places}: {why}", field="corpus")
        chosen = "" if self.glob == ALL_FILES else f" with glob {self.glob!r}"
        reasons = "; ".join(map(str, problems[:SHOWN_PROBLEMS]))
        more = f" and {len(problems) - SHOWN_PROBLEMS} more" if len(problems) > SHOWN_PROBLEMS else ""
        why = f" ({reasons}{more})" if reasons else ""
        return InvalidInput(f"no text was found under {places}{chosen}; nothing was built{why}", field="corpus")

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


class _Reading:
    """One pass over the files of a corpus, which counts the documents and keeps the problems."""

    def __init__(self, corpus: Corpus) -> None:
        self._corpus, self.num_documents, self.problems = corpus, 0, list[Problem]()

    def documents(self) -> Iterator[Document]:
        """Yields the documents of all files, in order."""
        corpus, binary = self._corpus, list[Problem]()
        for path in filter(is_datastore, corpus.places):
            self._report(Problem(str(path), "a datastore, and no text; left out"))
        for name, path in corpus.found(self._report_unreadable):
            if not corpus.may_read(path):
                self._report_link(name, path)
                continue
            try:
                for document in self._read(name, path):
                    self.num_documents += 1
                    yield document
            except _IsBinary as found:
                binary.append(found.problem)
        if binary:
            self._report(_summary_of(binary))

    def _report_unreadable(self, path: Path, error: OSError) -> None:
        """Reports a folder that may not be listed. Of one outside of the roots, reports nothing."""
        if self._corpus.may_read(path):
            self._report(Problem(str(path), f"cannot be read ({error.strerror}); what is in it is left out"))

    def _report_link(self, name: str, path: Path) -> None:
        """Reports a link out of the roots. Of a linked folder, reports not even the number of its files."""
        if is_under(path.parent, self._corpus.roots):
            self._report(Problem(name, "a link to a place outside of what may be read"))

    def _read(self, name: str, path: Path) -> Iterator[Document]:
        if not is_utf8(name):
            self._report(Problem(name, "the file's name is not UTF-8, and its document's id would be; rename the file"))
            return
        layout = layout_of(name)
        try:
            if layout == PARQUET:
                yield from self._read_rows(name, path)
                return
            with open_unpacked(path) as stream:
                yield from (self._read_json_lines if layout in JSON_LINES else self._read_text)(name, stream)
        except UNREADABLE as error:
            self._report(Problem(name, f"cannot be read ({error})"))

    def _read_text(self, name: str, stream: IO[bytes]) -> Iterator[Document]:
        raw = stream.read(SAMPLE_BYTES)
        if b"\0" in raw and self._corpus.on_error == "skip":
            line = 1 + raw.count(b"\n", 0, raw.find(b"\0"))
            raise _IsBinary(Problem(f"{name}:{line}", f"{NUL_BYTE}; {ADVICE}"))
        raw += stream.read()
        if not raw.strip():
            self._report(Problem(name, "empty"))
        elif (text := self._decode(name, raw)) is not None:
            yield Document(id=name, text=text, title=name)

    def _read_json_lines(self, name: str, stream: IO[bytes]) -> Iterator[Document]:
        empty = True
        for number, line in enumerate(stream, start=1):
            where = f"{name}:{number}"
            if not line.strip():
                continue
            empty = False
            text = self._decode(where, line, first_line=number)
            if text is None:
                continue
            try:
                yield self._document_of(json.loads(text), where)
            except (ValueError, RecursionError) as error:
                self._report(Problem(where, f"not a JSON document ({error})"))
        if empty:
            self._report(Problem(name, "empty"))

    def _read_rows(self, name: str, path: Path) -> Iterator[Document]:
        number = 0
        for number, row in enumerate(rows_of(path), start=1):
            try:
                yield self._document_of(row, f"{name}:{number}")
            except ValueError as error:
                self._report(Problem(f"{name}:{number}", f"not a document ({error})"))
        if not number:
            self._report(Problem(name, "empty"))

    def _document_of(self, value: Any, where: str) -> Document:
        """Makes a document of a JSON object. Raises ValueError, naming the first thing that is wrong with it."""
        finite, infinite = without_infinite(value)
        document = Document(*read_record(finite, where))
        for name in infinite:
            self._report(Problem(where, f"{name!r} holds NaN or an infinity, which JSON does not have; left out"))
        return document

    def _decode(self, where: str, raw: bytes, first_line: int = 1) -> str | None:
        """Decodes a text. Returns None, after reporting the problem, if it cannot be used."""
        bad, why = raw.find(b"\0"), NUL_BYTE
        try:
            text = raw.decode()
        except UnicodeDecodeError as error:
            bad, why = error.start, f"byte 0x{raw[error.start]:02x} is not UTF-8"
        if bad < 0:
            return text
        line = first_line + raw.count(b"\n", 0, bad)
        place = where if where.endswith(f":{line}") else f"{where}:{line}"
        self._report(Problem(place, f"{why}; {ADVICE}"))
        return None

    def _report(self, problem: Problem) -> None:
        if self._corpus.on_error == "fail":
            raise UnusableText(f"{problem} (--on-error skip goes on without it)")
        self.problems.append(problem)
        self._corpus.on_problem(problem)


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


class _IsBinary(Exception):
    """A file that holds no text. Like git, takes a NUL among its first bytes as the sign."""

    def __init__(self, problem: Problem) -> None:
        super().__init__(problem)
        self.problem = problem


def _summary_of(binary: Sequence[Problem]) -> Problem:
    """One problem for all binary files."""
    if len(binary) == 1:
        return binary[0]
    names = [problem.where.rpartition(":")[0] for problem in binary[:SHOWN_NAMES]]
    more = f" and {len(binary) - SHOWN_NAMES} more" if len(binary) > SHOWN_NAMES else ""
    return Problem(counted(len(binary), "binary file"), f"left out: {', '.join(names)}{more}")
