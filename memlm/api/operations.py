"""Requests about long operations on datastores, their state, and the handle that follows one.

job = client.datastores.build("docs", corpus="docs/")
job.progress().done                          # now
report = job.result()                        # waits for the end; raises what went wrong
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol, TypeAlias

from memlm.api.params import MAX_TTL_S
from memlm.errors import DeadlineExceeded, InternalError, InvalidInput, MemlmError

WAIT_SLICE_S = 20.0


class JobState(StrEnum):
    """Where an operation is in its life."""

    QUEUED = "queued"
    RUNNING = "running"
    DONE = "done"
    FAILED = "failed"
    CANCELLED = "cancelled"


@dataclass(frozen=True, slots=True)
class JobReport:
    """What an operation made of a datastore, as of which manifest; `seconds` is how long its last attempt took.
    `num_deleted_documents` are deleted and still in its files.
    """

    store: str
    manifest: int
    num_documents: int
    num_entries: int
    index: str
    bytes_per_entry: float
    seconds: float
    num_deleted_documents: int = 0


@dataclass(frozen=True, slots=True)
class OperationInfo:
    """How far an operation has come: `done` of `total` in the unit of its `phase`, `per_s` of them a second, `left_s`
    seconds to the end of the phase where that can be said. Times are seconds since 1970. `attempts` says how often it
    was begun: after a restart it goes on with what was done. `skipped` documents could not be used. When it has ended
    it has either a `report` or an `error`.
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
        """Whether there is nothing more to wait for."""
        return self.state not in (JobState.QUEUED, JobState.RUNNING)

    def outcome(self) -> JobReport:
        """What it made. Raises its error where it failed or was cancelled."""
        if self.error is not None:
            raise self.error
        if self.report is None:
            raise InternalError(f"{self.name} has ended without a report; install the server's version")
        return self.report


@dataclass(frozen=True, slots=True)
class OperationPage:
    """Some operations, the latest first, and what to ask for those that follow; empty where there are none."""

    operations: tuple[OperationInfo, ...]
    next_page_token: str = ""


class OperationHost(Protocol):
    """What runs operations: `Client.operations`."""

    def get(self, name: str) -> OperationInfo:
        """How far it is."""

    def wait(self, name: str, timeout_s: float) -> OperationInfo:
        """The same, once it has ended or the time is over."""

    def cancel(self, name: str) -> None:
        """Stops it."""


class Operation:
    """One operation, as its user holds it. It goes on whether or not anybody does."""

    def __init__(self, host: OperationHost, name: str) -> None:
        """What begins an operation makes one; an old one is taken up by its name."""
        self._host, self.name = host, name

    def progress(self) -> OperationInfo:
        """How far it is now."""
        return self._host.get(self.name)

    def wait(self, timeout_s: float | None = None) -> OperationInfo:
        """Waits for its end, however it ends. Raises DeadlineExceeded where that takes longer than allowed."""
        deadline_s = None if timeout_s is None else time.monotonic() + timeout_s
        while True:
            info = self._host.wait(self.name, wait_slice(deadline_s))
            if info.has_ended:
                return info
            check_deadline(deadline_s, info)

    def result(self, timeout_s: float | None = None) -> JobReport:
        """Waits for its end, and tells what it made. Raises its error where it failed or was cancelled."""
        return self.wait(timeout_s).outcome()

    def cancel(self) -> None:
        """Stops it, and removes what it had done; one that has ended stays as it is."""
        self._host.cancel(self.name)


def wait_slice(deadline_s: float | None) -> float:
    """How long one call may wait, on the way to a deadline on the monotonic clock."""
    return WAIT_SLICE_S if deadline_s is None else max(0.0, min(WAIT_SLICE_S, deadline_s - time.monotonic()))


def check_deadline(deadline_s: float | None, info: OperationInfo) -> None:
    """Raises DeadlineExceeded for an operation that goes on past it."""
    if deadline_s is not None and time.monotonic() >= deadline_s:
        raise DeadlineExceeded(f"{info.name} goes on ({info.phase or info.state}); wait again, or cancel it")


@dataclass(frozen=True, slots=True)
class _OperationRequest:
    """A question about an operation."""

    name: str


class GetOperationRequest(_OperationRequest):
    """How far is this operation?"""

    __slots__ = ()


@dataclass(frozen=True, slots=True)
class ListOperationsRequest:
    """Which operations are the caller's? `page_size=0` asks for as many as there are, `page_token` for what follows."""

    page_size: int = 0
    page_token: str = ""


@dataclass(frozen=True, slots=True)
class WaitOperationRequest:
    """How far is it, once it has ended or `timeout_s` are over?"""

    name: str
    timeout_s: float = 0.0

    def __post_init__(self) -> None:
        """Refuses what is no time."""
        if not 0 <= self.timeout_s <= MAX_TTL_S:
            raise InvalidInput(f"timeout_s is {self.timeout_s}; expected 0 to {MAX_TTL_S:,.0f}", field="timeout")


class CancelOperationRequest(_OperationRequest):
    """Stop this operation, and take back what it did."""

    __slots__ = ()


class DeleteOperationRequest(_OperationRequest):
    """Forget an operation that has ended."""

    __slots__ = ()


OperationRequest: TypeAlias = (
    GetOperationRequest | ListOperationsRequest | WaitOperationRequest | CancelOperationRequest | DeleteOperationRequest
)
