"""The documents that are uploaded for a job: written as they come, and read by an index worker."""

from __future__ import annotations

import hashlib
import json
import os
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from io import BufferedWriter
from pathlib import Path
from secrets import token_hex

from memlm.api.datastores import AddDocumentsRequest, NewDocument
from memlm.base.files import remove, storage, write_atomic
from memlm.data.corpus import Corpus, Problem
from memlm.data.synced_folder import way_of
from memlm.errors import InvalidInput

LINE_END = b'"}\n'  # of a document, behind its text


class Upload:
    """Documents that are being sent, written to a file of JSON Lines, which is removed unless `is_kept`.

    Those of a synchronization have a second file, with their files and the doubtful ones.
    """

    def __init__(
        self, folder: Path, max_bytes: int, max_documents: int = sys.maxsize, *, is_sync: bool = False
    ) -> None:
        """Creates a file in a folder, of at most `max_bytes` bytes and `max_documents` documents."""
        self.path = folder / f"{token_hex(8)}.jsonl"
        self.num_documents, self.num_bytes, self.is_kept = 0, 0, False
        self._max_bytes, self._max_documents, self._digest = max_bytes, max_documents, hashlib.sha256()
        # Of each id its 64-bit hash, seeded anew by each process: an id may be long, and there may be a million. Two of
        # a million have the same by chance once in 40 million uploads.
        self._ids, self._last_id = set[int](), ""
        self._num_kept = 0
        with storage(self.path):
            self._file = self.path.open("wb")
            self._ways = ways_beside(self.path).open("wb") if is_sync else None

    def take(self, message: AddDocumentsRequest) -> None:
        """Writes some documents, or the next part of one that `continues`, and the doubtful files of a synchronization.

        Raises InvalidInput for a repeated id, a part of another document, or more than the limits, and StorageFull.
        """
        self.add(message.documents)
        self._keep(message.keep)

    def add(self, documents: tuple[NewDocument, ...]) -> None:
        """Writes documents. Raises as `take`."""
        with storage(self.path):
            for document in documents:
                if not document.continues:
                    self._begin(document)
                elif document.id != self._last_id:
                    raise InvalidInput(
                        f"document {document.id!r} continues {self._last_id!r}; send the parts of each one after the"
                        " other",
                        field="documents.continues",
                    )
                self._write(_as_json(document.text)[1:-1])

    def _keep(self, hashes: tuple[str, ...]) -> None:
        """Notes files and folders of a synchronization that keep their documents."""
        self._num_kept += len(hashes)
        if self._num_kept > self._max_documents:
            raise InvalidInput(
                f"more than {self._max_documents:,} files and folders to keep in one upload; {self._advice}",
                field="keep",
            )
        with storage(self.path):
            for each in hashes:
                self._note("", each)

    def _begin(self, document: NewDocument) -> None:
        """Ends a line and begins the next, up to the document's text."""
        if self.num_documents >= self._max_documents:
            raise InvalidInput(
                f"more than {self._max_documents:,} documents in one upload; {self._advice}", field="documents"
            )
        if hash(document.id) in self._ids:
            raise InvalidInput(f"document {document.id!r} came twice; send each once", field="documents.id")
        if self.num_documents:
            self._write(LINE_END)
        self._ids.add(hash(document.id))
        self._last_id = document.id
        self.num_documents += 1
        fields_before_text = {**document.metadata, "id": document.id, "title": document.title}
        fields_before_text.pop("text", None)
        self._write(_as_json({**fields_before_text, "text": ""}).removesuffix(LINE_END.rstrip()))
        if self._ways is not None or document.file:
            self._note(document.id, document.file or way_of(document.id))

    def _note(self, document_id: str, way: str) -> None:
        if self._ways is None:
            raise InvalidInput("file and keep are of a synchronization; name one in sync", field="sync")
        self._write(_as_json([document_id, way]) + b"\n", self._ways)

    def _write(self, data: bytes, file: BufferedWriter | None = None) -> None:
        self.num_bytes += len(data)
        if self.num_bytes > self._max_bytes:
            raise InvalidInput(f"more than {self._max_bytes:,} bytes in one upload; {self._advice}", field="documents")
        self._digest.update(data)
        (file or self._file).write(data)

    def finish(self, num_documents: int = 0) -> None:
        """Syncs the files. Raises InvalidInput for an upload without documents, or of a synchronization with another
        number of documents than it says at its end, and StorageFull.
        """
        if not self.num_documents:
            raise InvalidInput("no document was sent; send at least one", field="documents")
        if self._ways is not None and num_documents != self.num_documents:
            raise InvalidInput(
                f"num_documents is {num_documents:,} in the last message, and {self.num_documents:,} documents came;"
                " nothing was done, since what did not come would be deleted: send all, and then their number",
                field="num_documents",
            )
        with storage(self.path):
            self._write(LINE_END)
            for file in self._files:
                file.flush()
                os.fsync(file.fileno())
                file.close()

    @property
    def _advice(self) -> str:
        return "add in several calls" if self._ways is None else "synchronize its folders one by one"

    @property
    def digest(self) -> str:
        """SHA-256 of the file."""
        return self._digest.hexdigest()

    def __enter__(self) -> Upload:
        return self

    def __exit__(self, *_: object) -> None:
        if not self.is_kept:
            remove_upload(self.path)
        for file in self._files:
            with suppress(OSError):  # the buffer does not fit a full disk, which `finish` has reported
                file.close()

    @property
    def _files(self) -> list[BufferedWriter]:
        return [self._file] if self._ways is None else [self._file, self._ways]


class UploadedFolder:
    """An upload as a synchronization reads it (`memlm.indexing.sync.SyncSource`). Two machines, or folders with names,
    may have files of one way.
    """

    is_local = False

    def __init__(self, documents: Path, origin: str, on_problem: Callable[[Problem], None]) -> None:
        self.origin, self._documents, self._on_problem = origin, documents, on_problem
        self._files, self._doubtful = dict[str, str](), set[str]()
        with ways_beside(documents).open("rb") as lines:
            for document_id, way in map(json.loads, lines):
                if document_id:
                    self._files[document_id] = way
                else:
                    self._doubtful.add(way)

    def documents(self) -> Corpus:
        """All documents that can be used."""
        return Corpus((self._documents,), on_problem=self._on_problem)

    def files(self) -> dict[str, str]:
        """Also of documents that cannot be used, which stay as they are in the datastore."""
        return self._files

    def doubtful(self) -> set[str]:
        """As the caller said."""
        return self._doubtful


def ways_beside(documents: Path) -> Path:
    """The file of an upload of a synchronization that has the ways of its documents' files, and the doubtful ones."""
    return documents.with_suffix(".ways")


def note_deletions(documents: Path, document_ids: Sequence[str]) -> None:
    """Writes down, beside the upload of a synchronization, which documents it is about to delete, after those that an
    earlier attempt deleted.
    """
    noted = dict.fromkeys((*noted_deletions(documents), *document_ids))
    write_atomic(_deletions_beside(documents), _as_json(list(noted)))


def noted_deletions(documents: Path) -> tuple[str, ...]:
    """The ids of `note_deletions`."""
    try:
        return tuple(json.loads(_deletions_beside(documents).read_bytes()))
    except FileNotFoundError:
        return ()


def _deletions_beside(documents: Path) -> Path:
    return documents.with_suffix(".deleted")


def remove_upload(documents: Path) -> None:
    """Removes the files of an upload."""
    remove(documents)
    remove(ways_beside(documents))
    remove(_deletions_beside(documents))


def _as_json(value: object) -> bytes:
    return json.dumps(value, ensure_ascii=False).encode()
