"""Every error that memlm raises on purpose, in one tree.

    MemlmError
    ├── InvalidInput        an argument, a flag or a text that cannot be used     (also a ValueError)
    ├── NotFound            no such store, document, model or file                (also a LookupError)
    ├── AlreadyExists       something is there already, and is left as it was
    ├── Incompatible        a store of another model, or of another format
    ├── Corrupt             a file that is not what its manifest says
    ├── Locked              another process is writing to the store
    ├── StorageFull         the disk would not take what had to be written
    ├── Overloaded          the queue is full; `retry_after_s` says when to come back
    ├── Cancelled           the caller gave up
    ├── DeadlineExceeded    the time allowed for the call ran out
    ├── Unauthenticated     the server wants a token that it knows
    ├── PermissionDenied    the token may not do that
    ├── Unavailable         the server is draining, restarting, or cannot be reached
    └── InternalError       a bug of ours, reported with the request's id

The same classes are raised by the library in process and by the client across the wire. Each message is one line: what
was wrong, what was expected, what to try. This module imports nothing of memlm.
"""

from __future__ import annotations

from collections.abc import Iterable

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
    "check_choice",
    "check_range",
]


class MemlmError(Exception):
    """Anything that memlm reports to its user. Whatever else is raised is a bug of ours."""


class InvalidInput(MemlmError, ValueError):
    """An argument that cannot be used; `field` names it where there is one to name."""

    def __init__(self, message: str, *, field: str = "") -> None:
        """Takes the one-line message and the name of the offending argument."""
        super().__init__(message)
        self.field = field


class NotFound(MemlmError, LookupError):
    """Something named does not exist; `kind` and `name` say what."""

    def __init__(self, message: str, *, kind: str = "", name: str = "") -> None:
        """Takes the one-line message, and what was looked for."""
        super().__init__(message)
        self.kind = kind
        self.name = name


class AlreadyExists(MemlmError):
    """Something is there already, and was left as it was."""


class Incompatible(MemlmError):
    """A store made by another model, another tokenizer, or another version of the format."""


class Corrupt(MemlmError):
    """A file is missing, truncated or changed; the message names it."""


class Locked(MemlmError):
    """Another process is writing to the store."""


class StorageFull(MemlmError):
    """The disk would not take what had to be written; the last committed state stands."""


class NotWritable(MemlmError):
    """The file system is read-only, or this user may not write there; nothing was changed."""


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


def check_range(
    name: str,
    value: float | None,
    *,
    least: float | None = None,
    above: float | None = None,
    most: float | None = None,
) -> None:
    """Raises InvalidInput, with `name` as its field, unless a number is finite and in a range, or None.

    `least` and `most` belong to the range, `above` does not.
    """
    if value is None:
        return
    is_inside = (
        value - value == 0  # false for NaN and the infinities
        and (least is None or value >= least)
        and (above is None or value > above)
        and (most is None or value <= most)
    )
    if is_inside:
        return
    if least is not None and most is not None:
        expected = f"between {least} and {most}"
    else:
        bounds = (("at least", least), ("above", above), ("at most", most))
        expected = " and ".join(f"{word} {bound}" for word, bound in bounds if bound is not None)
    raise InvalidInput(f"{name} is {value!r}; expected {expected}", field=name)


def check_choice(name: str, value: object, choices: Iterable[object]) -> None:
    """Raises InvalidInput, with `name` as its field, unless a value is among the choices."""
    choices = tuple(choices)
    if value not in choices:
        raise InvalidInput(f"{name} is {value!r}; expected one of {', '.join(map(str, choices))}", field=name)
