"""Every error that memlm raises on purpose, in one tree.

    MemlmError
    ├── InvalidInput        an argument, a flag or a text that cannot be used     (also a ValueError)
    ├── NotFound            no such store, document, model or file                (also a LookupError)
    ├── AlreadyExists       the name is taken, and nothing was changed
    ├── Incompatible        a store of another model, or of another format
    ├── Corrupt             a file that differs from its manifest
    ├── Locked              another process is writing to the store
    ├── StorageFull         the disk is full
    ├── Overloaded          the queue is full, retry after `retry_after_s`
    ├── Cancelled           the caller cancelled
    ├── DeadlineExceeded    the time allowed for the call ran out
    ├── Unauthenticated     the server wants a token that it knows
    ├── PermissionDenied    the token may not do that
    ├── Unavailable         the server is draining, restarting, or cannot be reached
    └── InternalError       a bug of memlm, reported with the request's id

The library in process and the client across the wire raise these classes alike. Each message is one line: the problem,
the expected value, and a remedy. This module imports nothing of memlm.
"""

from __future__ import annotations

import os
import reprlib
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
    "check_kind",
    "check_path",
    "check_range",
]


class MemlmError(Exception):
    """Every error that memlm reports to its user. Any other exception is a bug of memlm."""


class InvalidInput(MemlmError, ValueError):
    """An argument that cannot be used. `field` names it, if there is one."""

    def __init__(self, message: str, *, field: str = "") -> None:
        super().__init__(message)
        self.field = field


class NotFound(MemlmError, LookupError):
    """A store, document, model or file does not exist. `kind` and `name` identify it."""

    def __init__(self, message: str, *, kind: str = "", name: str = "") -> None:
        super().__init__(message)
        self.kind = kind
        self.name = name


class AlreadyExists(MemlmError):
    """The name is taken. Nothing was changed."""


class Incompatible(MemlmError):
    """A store made by another model, another tokenizer, or another version of the format."""


class Corrupt(MemlmError):
    """A file is missing, truncated or changed. The message names it."""


class Locked(MemlmError):
    """Another process is writing to the store."""


class StorageFull(MemlmError):
    """The disk is full. The last committed state is intact."""


class NotWritable(MemlmError):
    """The file system is read-only, or this user may not write there. Nothing was changed."""


class Overloaded(MemlmError):
    """The server's queue is full. Nothing was started."""

    def __init__(self, message: str, *, retry_after_s: float = 1.0) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class Cancelled(MemlmError):
    """The caller cancelled before the answer was complete."""


class DeadlineExceeded(MemlmError):
    """The call's time limit passed. The work was stopped."""


class Unauthenticated(MemlmError):
    """The call lacks a token that the server knows."""


class PermissionDenied(MemlmError):
    """The caller's token does not allow the call."""


class Unavailable(MemlmError):
    """The server is draining, restarting, or cannot be reached."""


class InternalError(MemlmError):
    """A bug of memlm. The server's log has the details under the request's id."""


def check_range(
    name: str,
    value: float | None,
    *,
    least: float | None = None,
    above: float | None = None,
    most: float | None = None,
    whole: bool = False,
) -> None:
    """Raises InvalidInput, with `name` as its field, unless a number is finite and in a range, or None.

    `least` and `most` belong to the range, `above` does not. A `whole` number is an integer by its type.
    """
    if value is None:
        return
    if not hasattr(value, "__index__" if whole else "__float__"):
        kind = "a whole number" if whole else "a number"
        raise InvalidInput(f"{name} is {value!r}; expected {kind}", field=name)
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


def check_kind(name: str, value: object, kind: type | tuple[type, ...], expected: str) -> None:
    """Raises InvalidInput, with `name` as its field, unless a value is of a type. `expected` says which in words."""
    if not isinstance(value, kind):
        raise InvalidInput(f"{name} is {reprlib.repr(value)}; expected {expected}", field=name)


def check_path(name: str, value: object, expected: str = "a path") -> None:
    """Raises InvalidInput, with `name` as its field, unless a value can be a path."""
    check_kind(name, value, (str, os.PathLike), expected)
