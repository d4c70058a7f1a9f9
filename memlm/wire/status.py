"""Errors <-> gRPC status: one table, read by the server and by the client.

An error travels as a `google.rpc.Status` whose `ErrorInfo` names its class, so that the client raises the class and
message of the library. Details use their standard messages: the field
`BadRequest`, the missing thing `ResourceInfo`, the time to wait `RetryInfo`.
"""

from __future__ import annotations

from typing import NamedTuple

import grpc
from google.protobuf.duration_pb2 import Duration
from google.protobuf.message import DecodeError, Message
from google.rpc.error_details_pb2 import BadRequest, ErrorInfo, ResourceInfo, RetryInfo
from google.rpc.status_pb2 import Status

from memlm.base.addresses import proxy_advice
from memlm.errors import (
    AlreadyExists,
    Cancelled,
    Corrupt,
    DeadlineExceeded,
    Incompatible,
    InternalError,
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

DOMAIN = "memlm"
DETAILS_KEY = "grpc-status-details-bin"
# Trailers may hold 8 KiB, in which a message stands up to three times, once percent-encoded and twice in base64.
MAX_MESSAGE_BYTES = 1000

CODES: dict[type[MemlmError], grpc.StatusCode] = {
    InvalidInput: grpc.StatusCode.INVALID_ARGUMENT,
    NotFound: grpc.StatusCode.NOT_FOUND,
    AlreadyExists: grpc.StatusCode.ALREADY_EXISTS,
    Incompatible: grpc.StatusCode.FAILED_PRECONDITION,
    Corrupt: grpc.StatusCode.DATA_LOSS,
    Locked: grpc.StatusCode.ABORTED,
    NotWritable: grpc.StatusCode.FAILED_PRECONDITION,
    StorageFull: grpc.StatusCode.RESOURCE_EXHAUSTED,
    Overloaded: grpc.StatusCode.RESOURCE_EXHAUSTED,
    Cancelled: grpc.StatusCode.CANCELLED,
    DeadlineExceeded: grpc.StatusCode.DEADLINE_EXCEEDED,
    Unauthenticated: grpc.StatusCode.UNAUTHENTICATED,
    PermissionDenied: grpc.StatusCode.PERMISSION_DENIED,
    Unavailable: grpc.StatusCode.UNAVAILABLE,
    InternalError: grpc.StatusCode.INTERNAL,
}
_CLASS_OF = {kind.__name__: kind for kind in CODES}


class Trailer(NamedTuple):
    """The end of a failed call: the arguments of `context.abort`."""

    code: grpc.StatusCode
    details: str
    trailing_metadata: tuple[tuple[str, bytes], ...]


def trailer_of(error: MemlmError) -> Trailer:
    """The end of a call that fails with an error."""
    status = status_of(error)
    return Trailer(CODES[kind_of(error)], status.message, ((DETAILS_KEY, status.SerializeToString()),))


def status_of(error: MemlmError) -> Status:
    """An error as a status."""
    kind, message = kind_of(error), shortened(str(error))
    status = Status(code=CODES[kind].value[0], message=message)
    for detail in (ErrorInfo(reason=kind.__name__, domain=DOMAIN), *_details_of(error, message)):
        status.details.add().Pack(detail)
    return status


def kind_of(error: MemlmError) -> type[MemlmError]:
    """The class that is sent for an error: its nearest base class in the table."""
    return next((kind for kind in type(error).__mro__ if kind in CODES), InternalError)


def error_of(error: grpc.RpcError, target: str) -> MemlmError:
    """The error of a failed call: the server's if it sent one, else the transport's."""
    status = _status_in(error)
    if status is not None and (sent := sent_error(status)) is not None:
        return sent
    return _transport_error(error.code(), error.details() or "", target)


def shortened(text: str, limit: int = MAX_MESSAGE_BYTES) -> str:
    """A text cut in its middle to `limit` bytes of UTF-8: messages begin with the fault and end with advice."""
    data = text.encode(errors="replace")
    if len(data) <= limit:
        return data.decode()
    half = limit // 2 - 3
    return f"{data[:half].decode(errors='ignore')} … {data[-half:].decode(errors='ignore')}"


def _details_of(error: MemlmError, message: str) -> list[Message]:
    if isinstance(error, InvalidInput) and error.field:
        violation = BadRequest.FieldViolation(field=shortened(error.field, 200), description=message)
        return [BadRequest(field_violations=[violation])]
    if isinstance(error, NotFound):
        return [ResourceInfo(resource_type=error.kind, resource_name=shortened(error.name, 200), description=message)]
    if isinstance(error, Overloaded):
        wait = Duration()
        wait.FromMicroseconds(round(1e6 * error.retry_after_s))
        return [RetryInfo(retry_delay=wait)]
    return []


def _status_in(error: grpc.RpcError) -> Status | None:
    for key, value in error.trailing_metadata() or ():
        if key == DETAILS_KEY:
            try:
                return Status.FromString(value)
            except DecodeError:  # another server's format: its code and text remain
                return None
    return None


def sent_error(status: Status) -> MemlmError | None:
    """The error that a memlm server packed, None for the status of another server."""
    info, bad, resource, retry = ErrorInfo(), BadRequest(), ResourceInfo(), RetryInfo()
    for packed in status.details:
        for detail in (info, bad, resource, retry):
            packed.Unpack(detail)
    kind = _CLASS_OF.get(info.reason) if info.domain == DOMAIN else None
    if kind is None:
        return None
    if kind is InvalidInput:
        return InvalidInput(status.message, field=bad.field_violations[0].field if bad.field_violations else "")
    if kind is NotFound:
        return NotFound(status.message, kind=resource.resource_type, name=resource.resource_name)
    if kind is Overloaded:
        return Overloaded(status.message, retry_after_s=retry.retry_delay.ToMicroseconds() / 1e6)
    return kind(status.message)


def _transport_error(code: grpc.StatusCode, details: str, target: str) -> MemlmError:
    """The error of a status that gRPC made, on either side."""
    if code is grpc.StatusCode.UNAVAILABLE:
        return Unavailable(
            f"{target} cannot be reached ({details}){proxy_advice(target)}; check the address, that `memlm serve` runs"
            " there, and whether it wants TLS (--tls, --ca)"
        )
    if code is grpc.StatusCode.DEADLINE_EXCEEDED:
        return DeadlineExceeded(f"{target} did not answer in the time allowed; give more with timeout_s")
    if code is grpc.StatusCode.CANCELLED:
        return Cancelled(f"the call to {target} was cancelled")
    if code is grpc.StatusCode.RESOURCE_EXHAUSTED and "larger than max" in details:
        return InvalidInput(f"too much for one message ({details}); send less at once, or raise max_message_bytes")
    if code is grpc.StatusCode.UNIMPLEMENTED:
        return Incompatible(
            f"the server at {target} does not have this call ({details}); install the same version on both sides"
        )
    return InternalError(f"{target} answered {code.name}: {details}")
