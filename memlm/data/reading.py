"""One pass over the files of a corpus: plain ones are read here, and those of other formats ahead, by children."""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, NamedTuple

from memlm.base.files import is_under
from memlm.base.storable import is_utf8
from memlm.data.document import Document, Problem, UnusableText
from memlm.data.extract.encodings import decode, has_mark, utf_16_of
from memlm.data.extract.front_matter import fields_of_markdown
from memlm.data.extract.kinds import MAIL, MAILBOX, MARKDOWN, kind_of, kind_within, refusal_of
from memlm.data.extract.outcome import Extracted, Unreadable
from memlm.data.extract.pool import MAX_FILE_BYTES, Extractor, Limits, too_large
from memlm.data.formats import (
    JSON_LINES,
    PARQUET,
    UNREADABLE,
    layout_of,
    name_without_packing,
    open_as_utf_8,
    open_unpacked,
    rows_of,
)
from memlm.data.mailbox import messages_in
from memlm.data.records import read_record, without_infinite
from memlm.index.store.journal import is_datastore

if TYPE_CHECKING:
    from memlm.data.corpus import Corpus

LIMITS = Limits()
SAMPLE_BYTES = 8000  # where git looks for a NUL
AHEAD_FILES = 4  # that are extracted or wait for it, for each child
AHEAD_BYTES = 64 << 20  # of these, before another one is begun


class _File(NamedTuple):
    name: str
    path: Path
    extracted: Future[Extracted] | None
    num_bytes: int


class Reading:
    """One pass over the files of a corpus, which counts the documents and keeps the problems."""

    def __init__(self, corpus: Corpus) -> None:
        self._corpus, self.num_documents, self.problems = corpus, 0, list[Problem]()
        self._extractor = Extractor(LIMITS)

    def documents(self) -> Iterator[Document]:
        """Yields the documents of all files, in order."""
        corpus = self._corpus
        for path in filter(is_datastore, corpus.places):
            self._report(Problem(str(path), "a datastore, and no text; left out"))
        with self._extractor:
            for file in self._ahead():
                if not corpus.may_read(file.path):
                    self._report_link(file.name, file.path)
                    continue
                for document in self._read(file):
                    if corpus.only is not None and document.id not in corpus.only:
                        continue
                    self.num_documents += 1
                    corpus.on_document(file.name, document)
                    yield document

    def _ahead(self) -> Iterator[_File]:
        """All files in order, while the next ones of other formats are extracted."""
        waiting, most = deque[_File](), AHEAD_FILES * self._extractor.children
        files, pending, pending_bytes = iter(self._corpus.found(self._report_unreadable)), 0, 0
        while True:
            while pending < most and pending_bytes < AHEAD_BYTES and (found := next(files, None)):
                file = self._begin(*found)
                waiting.append(file)
                pending += file.extracted is not None
                pending_bytes += file.num_bytes
                if file.extracted is None and len(waiting) == 1:
                    break
            if not waiting:
                return
            file = waiting.popleft()
            yield file
            pending -= file.extracted is not None
            pending_bytes -= file.num_bytes

    def _begin(self, name: str, path: Path) -> _File:
        kind = kind_of(name_without_packing(name))
        if not kind or kind == MAILBOX or not is_utf8(name) or not self._corpus.may_read(path):
            return _File(name, path, None, 0)
        try:
            num_bytes = path.stat().st_size
        except OSError:  # which reading it tells
            num_bytes = 0
        return _File(name, path, self._extractor.submit(kind, partial(_bytes_of, path)), num_bytes)

    def _report_unreadable(self, path: Path, error: OSError) -> None:
        """Reports a folder that may not be listed. Of one outside of the roots, reports nothing."""
        if self._corpus.may_read(path):
            self._report(Problem(str(path), f"cannot be read ({error.strerror}); what is in it is left out"))

    def _report_link(self, name: str, path: Path) -> None:
        """Reports a link out of the roots. Of a linked folder, reports not even the number of its files."""
        if is_under(path.parent, self._corpus.roots):
            self._report(Problem(name, "a link to a place outside of what may be read"))

    def _read(self, file: _File) -> Iterator[Document]:
        name = file.name
        if not is_utf8(name):
            self._report(Problem(name, "the file's name is not UTF-8, and its document's id would be; rename the file"))
            return
        try:
            if file.extracted is not None:
                yield self._extracted(name, kind_of(name_without_packing(name)), file.extracted.result())
            else:
                yield from self._read_here(name, file.path)
        except UNREADABLE as error:
            self._report(Problem(name, f"cannot be read ({error})"))
        except Unreadable as error:
            self._report(Problem(f"{name}:{error.line}" if error.line else name, str(error)))

    def _read_here(self, name: str, path: Path) -> Iterator[Document]:
        layout = layout_of(name)
        if layout == PARQUET:
            yield from self._read_rows(name, path)
        elif layout in JSON_LINES:
            with open_as_utf_8(path) as stream:
                yield from self._read_json_lines(name, stream)
        else:
            with open_unpacked(path) as stream:
                is_mailbox = kind_of(name_without_packing(name)) == MAILBOX
                yield from (self._read_mailbox if is_mailbox else self._read_text)(name, stream)

    def _read_text(self, name: str, stream: IO[bytes]) -> Iterator[Document]:
        """A text as it is, or a file of another format whose name does not say so."""
        head = stream.read(SAMPLE_BYTES)
        kind, inner = kind_within(head), name_without_packing(name)
        if kind:
            data = head + stream.read(MAX_FILE_BYTES + 1 - len(head))
            yield self._extracted(name, kind, self._extractor.extract(kind, data))
            return
        if why := refusal_of(inner, head):
            raise Unreadable(why)
        raw = head + (b"" if _is_binary(head) else stream.read())
        if not raw.strip():
            raise Unreadable("empty")
        text = decode(raw)
        if not text.strip("\ufeff \t\r\n\v\f"):
            raise Unreadable("empty")
        title, metadata = fields_of_markdown(text) if layout_of(name) in MARKDOWN else ("", {})
        yield Document(id=name, text=text, title=title or name, metadata=metadata)

    def _read_mailbox(self, name: str, stream: IO[bytes]) -> Iterator[Document]:
        number = 0
        for number, message in enumerate(messages_in(stream, MAX_FILE_BYTES), start=1):
            where = f"{name}:{number}"
            try:
                yield self._extracted(where, MAIL, self._extractor.extract(MAIL, message))
            except Unreadable as error:
                self._report(Problem(where, str(error)))
        if not number:
            raise Unreadable("has no messages; one begins with a line 'From SENDER DATE'")

    def _extracted(self, id_: str, kind: str, extracted: Extracted) -> Document:
        return Document(id_, extracted.text, extracted.title or id_, {"format": kind})

    def _read_json_lines(self, name: str, stream: IO[bytes]) -> Iterator[Document]:
        empty = True
        for number, line in enumerate(stream, start=1):
            where = f"{name}:{number}"
            if not line.strip():
                continue
            empty = False
            try:
                text = _utf_8(line)
                yield self._document_of(json.loads(text), where)
            except Unreadable as error:
                self._report(Problem(where, str(error)))
            except (ValueError, RecursionError) as error:
                self._report(Problem(where, f"not a JSON document ({error})"))
        if empty:
            raise Unreadable("empty")

    def _read_rows(self, name: str, path: Path) -> Iterator[Document]:
        number = 0
        for number, row in enumerate(rows_of(path), start=1):
            try:
                yield self._document_of(row, f"{name}:{number}")
            except ValueError as error:
                self._report(Problem(f"{name}:{number}", f"not a document ({error})"))
        if not number:
            raise Unreadable("empty")

    def _document_of(self, value: Any, where: str) -> Document:
        """Makes a document of a JSON object. Raises ValueError, naming the first thing that is wrong with it."""
        finite, infinite = without_infinite(value)
        document = Document(*read_record(finite, where))
        for name in infinite:
            self._report(Problem(where, f"{name!r} holds NaN or an infinity, which JSON does not have; left out"))
        return document

    def _report(self, problem: Problem) -> None:
        if self._corpus.on_error == "fail":
            raise UnusableText(f"{problem} (--on-error skip goes on without it)")
        self.problems.append(problem)
        self._corpus.on_problem(problem)


def _bytes_of(path: Path) -> bytes:
    with open_unpacked(path) as stream:
        data = stream.read(MAX_FILE_BYTES + 1)
    if len(data) > MAX_FILE_BYTES:
        raise too_large(len(data))
    return data


def _is_binary(head: bytes) -> bool:
    """Whether a file need not be read further: its first bytes have a NUL, and are in no encoding that has it."""
    return b"\0" in head and not has_mark(head) and not utf_16_of(head)


def _utf_8(line: bytes) -> str:
    """A line of JSON. Raises Unreadable."""
    if b"\0" in line:
        raise Unreadable("a NUL byte, as in binary files")
    try:
        return line.decode()
    except UnicodeDecodeError as error:
        raise Unreadable(f"not UTF-8 (byte 0x{line[error.start]:02x}); convert the file to UTF-8 text") from None
