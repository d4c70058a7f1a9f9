"""A job with its record, and the documents that are uploaded for it."""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import re
import sys
import time
from collections.abc import Collection
from contextlib import suppress
from dataclasses import dataclass, field, fields
from pathlib import Path
from secrets import token_hex
from typing import Any

from memlm.api.datastores import NewDocument
from memlm.api.operations import JobReport, JobState, OperationInfo
from memlm.base.clock import Stamp
from memlm.base.files import remove, sign, storage
from memlm.errors import InternalError, InvalidInput, MemlmError, NotFound
from memlm.server.jobs.process import IndexWorker
from memlm.server.jobs.worker import Progressed
from memlm.wire.status import CODES

PREFIX = "operations/"
QUOTED = re.compile(r"'(?:[^'\\]|\\.)*'|\"(?:[^\"\\]|\\.)*\"")  # as `repr` writes a text
REDACTED = "'(deleted)'"
LINE_END = b'"}\n'  # of a document, behind its text
_ERRORS = {kind.__name__: kind for kind in CODES}


@dataclass(eq=False, slots=True)
class Job:
    """A job. The first fields are recorded, the others belong to the attempt that runs.

    `deleted` lists the documents that were deleted from the datastore while its replacement was built. `is_published`
    once its text is in service, before its keys are there.
    """

    id: str
    owner: str
    kind: str
    store: str
    path: str
    request: dict[str, Any]
    digest: str
    request_id: str = ""
    documents: str = ""
    since: int = 0
    state: str = JobState.QUEUED
    created_s: float = field(default_factory=time.time)
    started_s: float | None = None
    ended_s: float | None = None
    ended_stamp: Stamp | None = None  # its end by `Clock`, which decides how long it is kept
    attempts: int = 0
    deaths: int = 0
    has_begun: bool = False
    is_published: bool = False
    skipped: int = 0
    report: dict[str, Any] | None = None
    error: dict[str, str] | None = None
    deleted: list[str] = field(default_factory=list)

    phase: str = field(default="", metadata={"kept": False})
    done: int = field(default=0, metadata={"kept": False})
    total: int = field(default=0, metadata={"kept": False})
    phase_s: float = field(default=0.0, metadata={"kept": False})
    phase_done: int = field(default=0, metadata={"kept": False})
    not_before_s: float = field(default=0.0, metadata={"kept": False})
    is_cancelled: bool = field(default=False, metadata={"kept": False})
    worker: IndexWorker | None = field(default=None, metadata={"kept": False})
    ended: asyncio.Event = field(default_factory=asyncio.Event, metadata={"kept": False})
    writing: asyncio.Lock = field(default_factory=asyncio.Lock, metadata={"kept": False})

    @property
    def name(self) -> str:
        """The name of the operation."""
        return PREFIX + self.id

    @property
    def is_open(self) -> bool:
        """Whether it waits or runs."""
        return self.state in (JobState.QUEUED, JobState.RUNNING)

    def encode(self) -> bytes:
        """The record, signed."""
        return sign({each.name: getattr(self, each.name) for each in KEPT_FIELDS})

    def update_progress(self, message: Progressed) -> None:
        if message.phase != self.phase:
            self.phase, self.phase_s, self.phase_done = message.phase, time.monotonic(), message.done
        self.done, self.total = message.done, message.total

    def redact(self, document_ids: Collection[str] | None = None) -> bool:
        """Removes the ids of deleted documents (None: all quoted texts) from the error message. Returns whether it
        changed.
        """
        if self.error is None:
            return False
        names = None if document_ids is None else set(map(repr, document_ids))
        message = QUOTED.sub(
            lambda found: REDACTED if names is None or found[0] in names else found[0], self.error["message"]
        )
        is_changed = message != self.error["message"]
        self.error = {**self.error, "message": message}
        return is_changed

    def info(self) -> OperationInfo:
        """The job as its owner sees it."""
        passed_s = time.monotonic() - self.phase_s
        per_s = (self.done - self.phase_done) / passed_s if self.phase and passed_s > 0 else 0.0
        runs = self.state == JobState.RUNNING
        return OperationInfo(
            name=self.name,
            kind=self.kind,
            store=self.store,
            state=JobState(self.state),
            phase=self.phase,
            done=self.done,
            total=self.total,
            per_s=per_s if runs else 0.0,
            left_s=max(0, self.total - self.done) / per_s if runs and per_s > 0 and self.total else None,
            created_s=self.created_s,
            started_s=self.started_s,
            ended_s=self.ended_s,
            attempts=self.attempts,
            skipped=self.skipped,
            report=None if self.report is None else JobReport(**self.report),
            error=None if self.error is None else _decode_error(self.error),
        )


KEPT_FIELDS = tuple(each for each in fields(Job) if each.metadata.get("kept", True))


class Upload:
    """Documents that are being sent, written to a file of JSON Lines, which is removed unless `is_kept`."""

    def __init__(self, folder: Path, max_bytes: int, max_documents: int = sys.maxsize) -> None:
        """Creates a file in a folder, of at most `max_bytes` bytes and `max_documents` documents."""
        self.path = folder / f"{token_hex(8)}.jsonl"
        self.num_documents, self.num_bytes, self.is_kept = 0, 0, False
        self._max_bytes, self._max_documents, self._digest = max_bytes, max_documents, hashlib.sha256()
        # Of each id its 64-bit hash, seeded anew by each process: an id may be long, and there may be a million. Two of
        # a million have the same by chance once in 40 million uploads.
        self._ids, self._last_id = set[int](), ""
        with storage(self.path):
            self._file = self.path.open("wb")

    def add(self, documents: tuple[NewDocument, ...]) -> None:
        """Writes some documents, or the next part of one that `continues`.

        Raises InvalidInput for a repeated id, a part of another document, or more than the limits, and StorageFull.
        """
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

    def _begin(self, document: NewDocument) -> None:
        """Ends a line and begins the next, up to the document's text."""
        if self.num_documents >= self._max_documents:
            raise InvalidInput(
                f"more than {self._max_documents:,} documents in one upload; add in several calls", field="documents"
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

    def _write(self, data: bytes) -> None:
        self.num_bytes += len(data)
        if self.num_bytes > self._max_bytes:
            raise InvalidInput(
                f"more than {self._max_bytes:,} bytes in one upload; add in several calls", field="documents"
            )
        self._digest.update(data)
        self._file.write(data)

    def finish(self) -> None:
        """Syncs the file. Raises InvalidInput for an upload without documents, and StorageFull."""
        if not self.num_documents:
            raise InvalidInput("no document was sent; send at least one", field="documents")
        with storage(self.path):
            self._write(LINE_END)
            self._file.flush()
            os.fsync(self._file.fileno())
            self._file.close()

    @property
    def digest(self) -> str:
        """SHA-256 of the file."""
        return self._digest.hexdigest()

    def __enter__(self) -> Upload:
        return self

    def __exit__(self, *_: object) -> None:
        if not self.is_kept:
            remove(self.path)
        with suppress(OSError):  # the buffer does not fit a full disk, which `finish` has reported
            self._file.close()


def _as_json(value: object) -> bytes:
    return json.dumps(value, ensure_ascii=False).encode()


def _decode_error(record: dict[str, str]) -> MemlmError:
    kind, message = _ERRORS.get(record["kind"], InternalError), record["message"]
    return NotFound(message, kind="", name="") if kind is NotFound else kind(message)
