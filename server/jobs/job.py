"""A job with its record."""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Collection
from dataclasses import asdict, dataclass, field, fields
from typing import Any

from memlm.api.operations import JobReport, JobState, OperationInfo, SyncOutcome
from memlm.base.clock import Stamp
from memlm.base.files import sign
from memlm.errors import InternalError, MemlmError, NotFound
from memlm.server.jobs.process import IndexWorker
from memlm.server.jobs.worker import BUILD, Progressed
from memlm.wire.status import CODES

PREFIX = "operations/"
QUOTED = re.compile(r"'(?:[^'\\]|\\.)*'|\"(?:[^\"\\]|\\.)*\"")  # as `repr` writes a text
REDACTED = "'(deleted)'"
_ERRORS = {kind.__name__: kind for kind in CODES}


@dataclass(eq=False, slots=True)
class Job:
    """A job. The first fields are recorded, the others belong to the attempt that runs.

    `deleted` lists the documents that were deleted from the datastore while its replacement was built. `is_published`
    once its text is in service, before its keys are there. `found` is the outcome of a synchronization by its counts,
    since a record names no documents that may be deleted; the ids are in `named`.
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
    found: dict[str, int] | None = None

    named: dict[str, tuple[str, ...]] = field(default_factory=dict, metadata={"kept": False})
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
    def creates(self) -> bool:
        """Whether it makes a datastore in a folder of its own, which goes into service when there is text in it."""
        return self.kind == BUILD or bool(self.request.get("creates"))

    @property
    def publishes(self) -> bool:
        """Whether what it makes goes into service: all but a dry run of a synchronization."""
        return self.creates and not self.request.get("dry_run")

    @property
    def replaces(self) -> bool:
        """Whether what it makes takes the place of a datastore of its name. `replace` of others is about documents."""
        return self.kind == BUILD and bool(self.request.get("replace"))

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

    def note_found(self, outcome: SyncOutcome) -> None:
        """Keeps the outcome of a synchronization. A later attempt finds only the rest of the first one."""
        if self.found is None:
            every = asdict(outcome)
            self.named = {name: value for name, value in every.items() if isinstance(value, tuple)}
            self.found = {name: value for name, value in every.items() if name not in self.named}

    def redact(self, document_ids: Collection[str] | None = None) -> bool:
        """Removes the ids of deleted documents from the outcome of a synchronization and from the error message (None:
        all ids, and all quoted texts). Returns whether the record changed.
        """
        self.named = {
            kind: tuple(id_ for id_ in ids if document_ids is not None and id_ not in document_ids)
            for kind, ids in self.named.items()
        }
        if self.error is None:
            return False
        names = None if document_ids is None else set(map(repr, document_ids))
        message = QUOTED.sub(
            lambda found: REDACTED if names is None or found[0] in names else found[0], self.error["message"]
        )
        is_changed = message != self.error["message"]
        self.error = {**self.error, "message": message}
        return is_changed

    def info(self, *, names: bool = True) -> OperationInfo:
        """The job as its owner sees it, with or without the `named` documents."""
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
            report=None if self.report is None else JobReport(**{**self.report, "sync": self._outcome(names=names)}),
            error=None if self.error is None else _decode_error(self.error),
        )

    def _outcome(self, *, names: bool) -> SyncOutcome | None:
        if self.found is None:
            return None
        known: dict[str, Any] = {**self.found, **(self.named if names else {})}
        return SyncOutcome(**known)


KEPT_FIELDS = tuple(each for each in fields(Job) if each.metadata.get("kept", True))


def _decode_error(record: dict[str, str]) -> MemlmError:
    kind, message = _ERRORS.get(record["kind"], InternalError), record["message"]
    return NotFound(message, kind="", name="") if kind is NotFound else kind(message)
