"""Uploads in several messages: texts for a session, and documents for a datastore."""

from __future__ import annotations

import asyncio
import reprlib
import threading
from collections.abc import Generator, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any, cast

from google.protobuf.message import Message

from memlm.api.datastores import AddDocumentsRequest, NewDocument
from memlm.api.sessions import AppendToSessionRequest
from memlm.errors import InvalidInput
from memlm.wire import codec

if TYPE_CHECKING:
    from memlm.data.corpus import Document
    from memlm.data.synced_folder import SyncedFolder

PIECE_CHARACTERS = 1 << 17
PIECE_BYTES, MESSAGE_SPARE = 1 << 20, 1024
PIECE_DOCUMENTS = 4096  # a server takes no more than 65,536 fields in a message
FRAME_BYTES = 16  # overhead of a document in a message, and of its text
BYTES_A_CHARACTER = 4  # in UTF-8, at most


def append_requests(request: AppendToSessionRequest) -> Iterator[Message]:
    """The messages of an append to a session, far below any limit."""
    text, token_ids = request.text, request.token_ids
    yield codec.to_wire(AppendToSessionRequest(request.session))
    for begin in range(0, len(text), PIECE_CHARACTERS):
        yield codec.to_wire(AppendToSessionRequest("", text[begin : begin + PIECE_CHARACTERS]))
    for begin in range(0, len(token_ids), PIECE_CHARACTERS):
        piece = tuple(token_ids[begin : begin + PIECE_CHARACTERS])
        yield codec.to_wire(AppendToSessionRequest("", token_ids=piece))


def add_document_requests(
    request: AddDocumentsRequest, documents: Iterable[NewDocument | Document], limit: int
) -> Generator[Message, None, None]:
    """The messages of an upload of documents, each below the limit: several documents, or a part of one.

    Raises InvalidInput for a title and metadata that are too large for one message.
    """
    yield codec.to_wire(request)
    batch, size, room = list[NewDocument](), 0, limit - MESSAGE_SPARE
    for document in documents:
        for part in _parts(document, room):
            part_bytes = codec.to_wire(part).ByteSize() + FRAME_BYTES
            if batch and (size + part_bytes > min(PIECE_BYTES, room) or len(batch) == PIECE_DOCUMENTS):
                yield codec.to_wire(AddDocumentsRequest(documents=tuple(batch)))
                batch, size = [], 0
            batch.append(part)
            size += part_bytes
    if batch:
        yield codec.to_wire(AddDocumentsRequest(documents=tuple(batch)))


def sync_requests(request: AddDocumentsRequest, folder: SyncedFolder, limit: int) -> Generator[Message, None, None]:
    """The messages of a synchronization: its documents, and when all are read, the doubtful files, and their number.
    Raises as `add_document_requests`, and NoText for a folder without a document.
    """
    count = 0

    def documents() -> Iterator[NewDocument]:
        nonlocal count
        for each in folder.documents():
            count += 1
            yield NewDocument(each.id, each.text, each.title, each.metadata, file=folder.way(each.id))

    yield from add_document_requests(request, documents(), limit)
    keep = tuple(sorted(folder.doubtful()))
    for begin in range(0, len(keep), PIECE_DOCUMENTS):
        yield codec.to_wire(AddDocumentsRequest(keep=keep[begin : begin + PIECE_DOCUMENTS]))
    yield codec.to_wire(AddDocumentsRequest(num_documents=count))


def _parts(document: NewDocument | Document, room: int) -> Iterator[NewDocument]:
    """A document whole or in parts: each at most `room` bytes, and PIECE_BYTES beside title and metadata."""
    if not all(hasattr(document, name) for name in ("id", "text", "title", "metadata")):
        raise InvalidInput(
            f"documents holds {reprlib.repr(document)}; expected documents, as NewDocument(id, text)", field="documents"
        )
    file = document.file if isinstance(document, NewDocument) else ""
    whole = NewDocument(document.id, document.text, document.title, document.metadata, file=file)
    overhead = codec.to_wire(replace(whole, text="-")).ByteSize()
    room = min(room, overhead + PIECE_BYTES)
    if overhead + FRAME_BYTES + BYTES_A_CHARACTER * len(whole.text) <= room:
        yield whole
        return
    characters = (room - overhead - FRAME_BYTES) // BYTES_A_CHARACTER
    if characters < 1:
        raise InvalidInput(
            f"document {whole.id!r} has a title and metadata of {overhead:,} bytes, and a message takes {room:,}; raise"
            " max_message_bytes on both sides",
            field="documents",
        )
    yield replace(whole, text=whole.text[:characters])
    for begin in range(characters, len(whole.text), characters):
        yield NewDocument(whole.id, whole.text[begin : begin + characters], continues=True)


class RequestStream(Iterator[Message]):
    """The messages of a call. An error of their producer cancels the call and is raised unchanged.

    gRPC alone would log the error, and raise that the call was cancelled.
    """

    def __init__(self, messages: Generator[Message, None, None]) -> None:
        self._messages, self._failure = messages, list[Exception]()
        self._call, self._travels = cast(Any, None), threading.Event()

    def bind_call(self, call: Any) -> None:
        """Sets the call, which may have started to read the messages."""
        self._call = call
        self._travels.set()

    def __next__(self) -> Message:
        try:
            return next(self._messages)
        except StopIteration:
            raise
        except Exception as error:
            self._failure.append(error)
            self._travels.wait()
            self._call.cancel()
            raise StopIteration from None

    @contextmanager
    def reraising_producer_errors(self) -> Iterator[None]:
        """Raises the producer's error, or else the error of the call."""
        try:
            yield
        except BaseException:
            if self._failure:
                raise self._failure[0] from None
            raise


class AsyncRequestStream(RequestStream):
    """The messages of a call that is awaited. A thread of their own makes one at a time, while the loop goes on."""

    def __init__(self, messages: Generator[Message, None, None]) -> None:
        super().__init__(messages)
        self._thread = ThreadPoolExecutor(1, "upload")

    def __aiter__(self) -> AsyncRequestStream:
        return self

    async def __anext__(self) -> Message:
        try:
            message = await asyncio.get_running_loop().run_in_executor(self._thread, next, self._messages, None)
        except Exception as error:
            self._failure.append(error)
            self._call.cancel()
            raise StopAsyncIteration from None
        if message is None:
            raise StopAsyncIteration
        return message

    @contextmanager
    def reraising_producer_errors(self) -> Iterator[None]:
        """Raises as that of the base. Then the thread closes the rest of the messages, and ends."""
        try:
            with super().reraising_producer_errors():
                yield
        finally:
            self._thread.submit(self._messages.close)
            self._thread.shutdown(wait=False)
