"""Files of a form (multipart/form-data) -> documents, as they come: no text is held or written whole.

A text file is one document, called by its file name. Of JSON Lines each line is one, with `id`, `text`, `title` and any
other fields as its metadata. Other formats are converted as those of a folder are (`held_files`).
"""

from __future__ import annotations

import codecs
import itertools
import json
from collections.abc import AsyncIterator, Callable, Iterable, Iterator

from python_multipart.exceptions import FormParserError
from python_multipart.multipart import MultipartParser, parse_options_header

from memlm.api.datastores import NewDocument
from memlm.base.texts import InUtf8
from memlm.data.records import read_record
from memlm.errors import InvalidInput
from memlm.server.http.held_files import HEAD_BYTES, PIECE_CHARACTERS, Converter, HeldFile, held_kind

MULTIPART = "multipart/form-data"
JSON_LINES = (".jsonl", ".ndjson")
MAX_LINE_BYTES = 4 << 20
MAX_HEADER_BYTES = 8192  # of one file


async def documents_in(chunks: AsyncIterator[bytes], content_type: str) -> AsyncIterator[tuple[NewDocument, ...]]:
    """The documents of a form's files. Raises InvalidInput, naming the file, for a file without text."""
    form = _Form(_boundary(content_type))
    with Converter() as converter:
        async for chunk in chunks:
            async for documents in _documents_of(form.feed(chunk), converter):
                yield documents
        async for documents in _documents_of(form.end(), converter):
            yield documents


async def _documents_of(
    found: Iterable[NewDocument | HeldFile], converter: Converter
) -> AsyncIterator[tuple[NewDocument, ...]]:
    """Converts the files that were held. Documents between them stay together."""
    for is_held, group in itertools.groupby(found, lambda each: isinstance(each, HeldFile)):
        if not is_held:
            yield tuple(each for each in group if isinstance(each, NewDocument))
            continue
        for file in group:
            if isinstance(file, HeldFile):
                async for documents in converter.documents(file):
                    yield documents


def _boundary(content_type: str) -> bytes:
    boundary = parse_options_header(content_type)[1].get(b"boundary", b"")
    if not 1 <= len(boundary) <= 70:
        raise InvalidInput("the form has no boundary in its Content-Type; let the client's library set it")
    return boundary


class _Form:
    """Parses the bytes of a form."""

    def __init__(self, boundary: bytes) -> None:
        self._found = list[NewDocument | HeldFile]()
        self._header, self._headers, self._header_bytes = [b"", b""], dict[bytes, bytes](), 0
        self._num_files, self._is_complete = 0, False
        self._parser = MultipartParser(
            boundary,
            {
                "on_part_begin": self._begin_part,
                "on_header_field": self._header_part(0),
                "on_header_value": self._header_part(1),
                "on_header_end": self._end_header,
                "on_headers_finished": self._begin_file,
                "on_part_data": self._add_data,
                "on_part_end": self._end_file,
                "on_end": self._complete,
            },
        )
        self._file: _Plain | _Lines | None = None

    def feed(self, data: bytes) -> tuple[NewDocument | HeldFile, ...]:
        """Takes some bytes, and returns the documents, parts of one and held files that they complete."""
        try:
            self._parser.write(data)
        except FormParserError as error:
            raise InvalidInput(f"the form cannot be read ({error})") from None
        return self._take()

    def end(self) -> tuple[NewDocument | HeldFile, ...]:
        """Raises InvalidInput for a form that breaks off, or has no file."""
        if self._file is not None:
            raise InvalidInput(f"the form breaks off within {self._file.name!r}")
        if not self._num_files:
            raise InvalidInput("the form has no files; send some in the field files", field="files")
        if not self._is_complete:
            raise InvalidInput("the form breaks off between two files; send its last boundary too")
        return self._take()

    def _complete(self) -> None:
        self._is_complete = True

    def _take(self) -> tuple[NewDocument | HeldFile, ...]:
        found, self._found = tuple(self._found), []
        return found

    def _begin_part(self) -> None:
        self._headers, self._header, self._header_bytes = {}, [b"", b""], 0

    def _header_part(self, place: int) -> Callable[[bytes, int, int], None]:
        def add(data: bytes, begin: int, end: int) -> None:
            self._header_bytes += end - begin
            if self._header_bytes > MAX_HEADER_BYTES:
                raise InvalidInput("the headers of a file in the form are too long")
            self._header[place] += data[begin:end]

        return add

    def _end_header(self) -> None:
        name, value = self._header
        self._headers[name.lower()], self._header = value, [b"", b""]

    def _begin_file(self) -> None:
        options = parse_options_header(self._headers.get(b"content-disposition", b""))[1]
        try:
            field, name = (options.get(key, b"").decode() for key in (b"name", b"filename"))
        except UnicodeDecodeError:
            raise InvalidInput("the name of a file in the form is not UTF-8; rename it", field="files") from None
        if field not in ("file", "files") or not name:
            raise InvalidInput(
                f"the form has a field {field[:100]!r}; send files as files, and options in the URL", field=field[:100]
            )
        self._num_files += 1
        self._file = _Lines(name) if name.lower().endswith(JSON_LINES) else _Plain(name)

    def _add_data(self, data: bytes, begin: int, end: int) -> None:
        if self._file is not None:
            self._found += self._file.feed(data[begin:end])

    def _end_file(self) -> None:
        if self._file is not None:
            self._found += self._file.end()
            self._file = None


class _Plain:
    """A file whose kind its name or its first bytes tell: a text, which goes on as it comes, or one that is held."""

    def __init__(self, name: str) -> None:
        self.name, self._head = name, b""
        self._inner: _Text | HeldFile | None = None

    def feed(self, data: bytes) -> Iterator[NewDocument]:
        if self._inner is None:
            self._head += data
            if len(self._head) >= HEAD_BYTES:
                yield from self._begin()
        elif isinstance(self._inner, HeldFile):
            self._inner.add(data)
        else:
            yield from self._inner.feed(data)

    def end(self) -> Iterator[NewDocument | HeldFile]:
        if self._inner is None:
            yield from self._begin()
        if isinstance(self._inner, HeldFile):
            yield self._inner
        elif self._inner is not None:
            yield from self._inner.end()

    def _begin(self) -> Iterator[NewDocument]:
        head, self._head = self._head, b""
        if kind := held_kind(self.name, head):
            self._inner = HeldFile(self.name, kind)
            self._inner.add(head)
        else:
            self._inner = _Text(self.name)
            yield from self._inner.feed(head)


class _Text:
    """A file that is one document."""

    def __init__(self, name: str) -> None:
        self.name, self._is_begun, self._text = name, False, ""
        self._bytes, self._decoder = InUtf8(), codecs.getincrementaldecoder("utf-8")()

    def feed(self, data: bytes, *, final: bool = False) -> Iterator[NewDocument]:
        try:
            self._text += self._decoder.decode(self._bytes.feed(data, final=final), final)
        except UnicodeDecodeError:
            raise InvalidInput(f"{self.name!r} is not UTF-8 text; convert it", field="files") from None
        if final or len(self._text) >= PIECE_CHARACTERS:
            text, self._text = self._text, ""
            if text or not self._is_begun:
                yield NewDocument(self.name, text, continues=self._is_begun)
                self._is_begun = True

    def end(self) -> Iterator[NewDocument]:
        return self.feed(b"", final=True)


class _Lines:
    """A file of JSON Lines."""

    def __init__(self, name: str) -> None:
        self.name, self._rest, self._number = name, b"", 0
        self._bytes = InUtf8()

    def feed(self, data: bytes, *, final: bool = False) -> Iterator[NewDocument]:
        try:
            text = self._bytes.feed(data, final=final)
        except UnicodeDecodeError as error:
            raise InvalidInput(f"{self.name!r} is not {error.encoding} text; convert it", field="files") from None
        *lines, self._rest = (self._rest + text).split(b"\n")
        if len(self._rest) > MAX_LINE_BYTES:
            raise InvalidInput(f"{self.name!r} has a line of more than {MAX_LINE_BYTES:,} bytes", field="files")
        for line in lines:
            yield from self._documents_of(line)

    def end(self) -> Iterator[NewDocument]:
        yield from self.feed(b"", final=True)
        yield from self._documents_of(self._rest)

    def _documents_of(self, line: bytes) -> Iterator[NewDocument]:
        self._number += 1
        if not line.strip():
            return
        try:
            yield NewDocument(*read_record(json.loads(line.decode()), f"{self.name}:{self._number}"))
        except (ValueError, RecursionError) as error:
            where = f"line {self._number} of {self.name!r}"
            raise InvalidInput(f"{where} is no JSON document ({error}); correct it", field="files") from None
