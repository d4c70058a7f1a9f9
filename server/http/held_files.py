"""Files of a form that are converted: held in memory or in files without a name, and read by children once complete."""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import AsyncIterator, Iterator
from functools import partial
from pathlib import Path

from memlm.api.datastores import NewDocument
from memlm.base.files import storage
from memlm.data.extract.kinds import MAIL, MAILBOX, kind_of, kind_within, refusal_of
from memlm.data.extract.outcome import Extracted, Unreadable
from memlm.data.extract.pool import MAX_FILE_BYTES, Extractor, Limits, too_large
from memlm.data.extract.readers import TEXT
from memlm.data.mailbox import messages_in
from memlm.errors import InvalidInput

LIMITS = Limits()
HEAD_BYTES = 8000  # of a file that tell its kind
PIECE_CHARACTERS = 1 << 16  # of a text that are stored at a time
HELD_BYTES = 1 << 20  # in memory: a form may have more small files than a process may open


class HeldFile:
    """A file that is complete before it is read. A large one lies on the disk of temporary files."""

    def __init__(self, name: str, kind: str) -> None:
        self.name, self.kind = name, kind
        self._file, self._bytes = tempfile.SpooledTemporaryFile(HELD_BYTES), 0  # noqa: SIM115 - read, or dropped

    def add(self, data: bytes) -> None:
        """Appends some bytes. Raises InvalidInput for more than are read of one file, and StorageFull."""
        self._bytes += len(data)
        if self._bytes > MAX_FILE_BYTES:
            raise refused(self.name, too_large(self._bytes))
        with storage(Path(tempfile.gettempdir())):
            self._file.write(data)

    def parts(self) -> Iterator[tuple[str, str, bytes]]:
        """The id, kind and bytes of each document in it. Raises StorageFull."""
        with storage(Path(tempfile.gettempdir())):
            self._file.seek(0)  # writes what is still buffered
        with self._file:
            if self.kind != MAILBOX:
                yield self.name, self.kind, self._file.read()
                return
            for number, message in enumerate(messages_in(self._file, MAX_FILE_BYTES), start=1):
                yield f"{self.name}:{number}", MAIL, message


def held_kind(name: str, head: bytes) -> str:
    """The kind of a file that has to be held, "" for one that is read as it comes. Raises InvalidInput for one that is
    not read at all.
    """
    if kind := kind_of(name) or kind_within(head):
        return kind
    if why := refusal_of(name, head):
        raise refused(name, why)
    try:
        head.decode()
    except UnicodeDecodeError as error:
        return TEXT if error.start < len(head) - 3 else ""  # else a character that the head cuts
    return TEXT if b"\0" in head else ""


class Converter:
    """Converts held files, one at a time. A context manager, which ends its child."""

    def __init__(self) -> None:
        self._extractor = Extractor(LIMITS, children=1)

    def __enter__(self) -> Converter:
        return self

    def __exit__(self, *error: object) -> None:
        self._extractor.close()

    async def documents(self, file: HeldFile) -> AsyncIterator[tuple[NewDocument, ...]]:
        """The documents of a file, in pieces. Raises InvalidInput, naming it, for one that cannot be read."""
        count, parts = 0, file.parts()
        while part := await asyncio.to_thread(next, parts, None):  # a mailbox may have many lines before one is whole
            count += 1
            id_, kind, data = part
            try:
                extracted = await asyncio.wrap_future(self._extractor.submit(kind, partial(bytes, data)))
            except Unreadable as why:
                raise refused(id_, why) from None
            for piece in _pieces(id_, kind, extracted):
                yield (piece,)
        if not count:
            raise refused(file.name, "has no messages")


def refused(name: str, why: object) -> InvalidInput:
    """Why an upload is refused."""
    return InvalidInput(f"{name!r} {why}", field="files")


def _pieces(id_: str, kind: str, extracted: Extracted) -> Iterator[NewDocument]:
    """A document in parts, as an upload's messages hold them."""
    text, metadata = extracted.text, {} if kind == TEXT else {"format": kind}
    yield NewDocument(id_, text[:PIECE_CHARACTERS], extracted.title, metadata)
    for begin in range(PIECE_CHARACTERS, len(text), PIECE_CHARACTERS):
        yield NewDocument(id_, text[begin : begin + PIECE_CHARACTERS], continues=True)
