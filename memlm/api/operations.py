"""Requests about jobs on datastores, and their state. `memlm.api.handles.Operation` is the handle."""

from __future__ import annotations

import time
from dataclasses import dataclass
from enum import StrEnum
from typing import TypeAlias

from memlm.api.paging import check_page_size
from memlm.api.params import MAX_TTL_S
from memlm.api.request import Request
from memlm.errors import DeadlineExceeded, InternalError, MemlmError, check_range

WAIT_SLICE_S = 20.0


class JobState(StrEnum):
    """State of an operation."""

    QUEUED = "queued"
    RUNNING = "running"
    DONE = "done"
    FAILED = "failed"
    CANCELLED = "cancelled"


SYNC_KINDS = ("added", "replaced", "deleted", "kept")  # of documents that a synchronization names


@dataclass(frozen=True, slots=True)
class SyncOutcome:
    """The work that a synchronization found at its beginning: the number of documents of each kind, and the first
    ids. `kept` are those that were not sent and are not known to be gone. A server that was restarted, or lists its
    operations, names none.
    """

    num_added: int = 0
    num_replaced: int = 0
    num_deleted: int = 0
    num_kept: int = 0
    num_unchanged: int = 0
    added: tuple[str, ...] = ()
    replaced: tuple[str, ...] = ()
    deleted: tuple[str, ...] = ()
    kept: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class JobReport:
    """Size and index of a datastore after an operation, as of one manifest.

    `seconds` is the duration of the last attempt. `num_deleted_documents` are deleted but still in the files. `sync` is
    of a synchronization.
    """

    store: str
    manifest: int
    num_documents: int
    num_entries: int
    index: str
    bytes_per_entry: float
    seconds: float
    num_deleted_documents: int = 0
    sync: SyncOutcome | None = None


@dataclass(frozen=True, slots=True)
class OperationInfo:
    """Progress of an operation: `done` of `total` in the unit of its `phase`, at `per_s` a second.

    `left_s` estimates the seconds to the end of the phase. Times are seconds since 1970. `attempts` counts starts: an
    interrupted operation resumes after a restart. `skipped` counts documents that could not be used. An operation that
    has ended has either a `report` or an `error`.
    """

    name: str
    kind: str
    store: str
    state: JobState
    phase: str = ""
    done: int = 0
    total: int = 0
    per_s: float = 0.0
    left_s: float | None = None
    created_s: float = 0.0
    started_s: float | None = None
    ended_s: float | None = None
    attempts: int = 0
    skipped: int = 0
    report: JobReport | None = None
    error: MemlmError | None = None

    @property
    def has_ended(self) -> bool:
        """Whether it is done, failed or cancelled."""
        return self.state not in (JobState.QUEUED, JobState.RUNNING)

    def outcome(self) -> JobReport:
        """Returns its report. Raises its error if it failed or was cancelled."""
        if self.error is not None:
            raise self.error
        if self.report is None:
            raise InternalError(f"{self.name} has ended without a report; install the server's version")
        return self.report


@dataclass(frozen=True, slots=True)
class OperationPage:
    """One page of operations, latest first. `next_page_token` is empty on the last page."""

    operations: tuple[OperationInfo, ...]
    next_page_token: str = ""


def wait_slice(deadline_s: float | None) -> float:
    """Seconds that one call may wait before a deadline on the monotonic clock."""
    return WAIT_SLICE_S if deadline_s is None else max(0.0, min(WAIT_SLICE_S, deadline_s - time.monotonic()))


def check_deadline(deadline_s: float | None, info: OperationInfo) -> None:
    """Raises DeadlineExceeded for an operation that is still running at its deadline."""
    if deadline_s is not None and time.monotonic() >= deadline_s:
        raise DeadlineExceeded(f"{info.name} is still running ({info.phase or info.state}); wait again, or cancel it")


@dataclass(frozen=True, slots=True)
class GetOperationRequest(Request[OperationInfo]):
    """Returns the progress of an operation."""

    name: str


@dataclass(frozen=True, slots=True)
class ListOperationsRequest(Request[OperationPage]):
    """Lists the caller's operations. `page_size=0` asks for as many as fit, `page_token` for the next page."""

    page_size: int = 0
    page_token: str = ""

    def __post_init__(self) -> None:
        check_page_size(self.page_size)


@dataclass(frozen=True, slots=True)
class WaitOperationRequest(Request[OperationInfo]):
    """Returns the progress of an operation when it has ended, or after `timeout_s`."""

    name: str
    timeout_s: float = 0.0

    def __post_init__(self) -> None:
        check_range("timeout", self.timeout_s, least=0, most=MAX_TTL_S)


@dataclass(frozen=True, slots=True)
class CancelOperationRequest(Request[None]):
    """Cancels an operation and removes its unfinished work."""

    name: str


@dataclass(frozen=True, slots=True)
class DeleteOperationRequest(Request[None]):
    """Deletes the record of an operation that has ended."""

    name: str


OperationRequest: TypeAlias = (
    GetOperationRequest | ListOperationsRequest | WaitOperationRequest | CancelOperationRequest | DeleteOperationRequest
)
