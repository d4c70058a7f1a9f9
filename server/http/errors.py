"""Errors in OpenAI's shape: the HTTP status, and a body that names the parameter and the reason of gRPC's details."""

from __future__ import annotations

from http import HTTPStatus
from typing import Any, NamedTuple

from memlm.errors import (
    AlreadyExists,
    Cancelled,
    DeadlineExceeded,
    Incompatible,
    InvalidInput,
    Locked,
    MemlmError,
    NotFound,
    NotWritable,
    Overloaded,
    PermissionDenied,
    StorageFull,
    Unauthenticated,
    Unavailable,
)
from memlm.wire.status import kind_of, shortened

CLIENT_CLOSED_REQUEST = 499  # nginx's number; nobody is left to read it


class TooLarge(InvalidInput):
    """A body above the limit."""


class NotAllowed(InvalidInput):
    """A method that a path does not have."""


class _Kind(NamedTuple):
    status: int
    type: str


_REFUSED = "invalid_request_error"
_KINDS: dict[type[MemlmError], _Kind] = {
    TooLarge: _Kind(HTTPStatus.REQUEST_ENTITY_TOO_LARGE, _REFUSED),
    NotAllowed: _Kind(HTTPStatus.METHOD_NOT_ALLOWED, _REFUSED),
    InvalidInput: _Kind(HTTPStatus.BAD_REQUEST, _REFUSED),
    NotFound: _Kind(HTTPStatus.NOT_FOUND, "not_found_error"),
    AlreadyExists: _Kind(HTTPStatus.CONFLICT, "conflict_error"),
    Incompatible: _Kind(HTTPStatus.BAD_REQUEST, _REFUSED),
    Locked: _Kind(HTTPStatus.CONFLICT, "conflict_error"),
    NotWritable: _Kind(HTTPStatus.INSUFFICIENT_STORAGE, "server_error"),
    StorageFull: _Kind(HTTPStatus.INSUFFICIENT_STORAGE, "server_error"),
    Overloaded: _Kind(HTTPStatus.TOO_MANY_REQUESTS, "rate_limit_error"),
    Cancelled: _Kind(CLIENT_CLOSED_REQUEST, _REFUSED),
    DeadlineExceeded: _Kind(HTTPStatus.REQUEST_TIMEOUT, "timeout_error"),
    Unauthenticated: _Kind(HTTPStatus.UNAUTHORIZED, "authentication_error"),
    PermissionDenied: _Kind(HTTPStatus.FORBIDDEN, "permission_error"),
    Unavailable: _Kind(HTTPStatus.SERVICE_UNAVAILABLE, "server_error"),
}
_BUG = _Kind(HTTPStatus.INTERNAL_SERVER_ERROR, "server_error")


def _kind(error: MemlmError) -> _Kind:
    return next((_KINDS[each] for each in type(error).__mro__ if each in _KINDS), _BUG)


def status_of(error: MemlmError) -> int:
    """The HTTP status of an error."""
    return int(_kind(error).status)


def body_of(error: MemlmError) -> dict[str, Any]:
    """The body of an error. `code` is the reason in gRPC's details: the name of the client's class."""
    param = error.field if isinstance(error, InvalidInput) and error.field else None
    return {
        "error": {
            "message": shortened(str(error)),
            "type": _kind(error).type,
            "param": None if param is None else shortened(param, 200),
            "code": kind_of(error).__name__,
        }
    }


def headers_of(error: MemlmError) -> dict[str, str]:
    """Headers that a client needs to try again."""
    if isinstance(error, Overloaded):
        return {"retry-after": f"{max(1, round(error.retry_after_s))}"}
    return {"www-authenticate": "Bearer"} if isinstance(error, Unauthenticated) else {}
