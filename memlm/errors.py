"""Every error that memlm raises on purpose, in one tree.

    MemlmError
    ├── InvalidInput, NotFound, AlreadyExists, Incompatible, Corrupt, Locked,
    │   StorageFull, NotWritable                                                 (memlm.index.errors)
    ├── Overloaded          the queue is full; `retry_after_s` says when to come back
    ├── Cancelled           the caller gave up
    ├── DeadlineExceeded    the time allowed for the call ran out
    ├── Unauthenticated     the server wants a token that it knows
    ├── PermissionDenied    the token may not do that
    ├── Unavailable         the server is draining, restarting, or cannot be reached
    └── InternalError       a bug of ours, reported with the request's id

The same classes are raised by the library in process and by the client across the wire.
"""

from memlm.index.errors import (
    AlreadyExists,
    Corrupt,
    Incompatible,
    InvalidInput,
    Locked,
    MemlmError,
    NotFound,
    NotWritable,
    StorageFull,
)

__all__ = [
    "AlreadyExists",
    "Cancelled",
    "Corrupt",
    "DeadlineExceeded",
    "Incompatible",
    "InternalError",
    "InvalidInput",
    "Locked",
    "MemlmError",
    "NotFound",
    "NotWritable",
    "Overloaded",
    "PermissionDenied",
    "StorageFull",
    "Unauthenticated",
    "Unavailable",
]


class Overloaded(MemlmError):
    """The server has as much to do as it accepts; nothing was started."""

    def __init__(self, message: str, *, retry_after_s: float = 1.0) -> None:
        """Takes the one-line message and the seconds to wait before another try."""
        super().__init__(message)
        self.retry_after_s = retry_after_s


class Cancelled(MemlmError):
    """The caller gave up before the answer was complete."""


class DeadlineExceeded(MemlmError):
    """The time allowed for the call ran out; the work was stopped."""


class Unauthenticated(MemlmError):
    """The server wants a token that it knows."""


class PermissionDenied(MemlmError):
    """The caller's token may not do that."""


class Unavailable(MemlmError):
    """The server is draining, restarting, or cannot be reached."""


class InternalError(MemlmError):
    """A bug of ours. The server's log has the details under the request's id."""
