"""Dataclasses <-> protobuf: the only module that knows both.

A dataclass and its message share their names and the names of their fields, except for those in the tables below. None
is not set. A field that is not set takes the dataclass's default, and 0 is 0. This module imports neither torch, Faiss
nor numpy.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import MISSING, fields, is_dataclass
from enum import Enum
from functools import cache
from operator import not_
from typing import Any, NamedTuple, TypeAlias, TypeVar, cast, get_args, get_origin, get_type_hints

from google.longrunning import operations_pb2
from google.protobuf import empty_pb2
from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.duration_pb2 import Duration
from google.protobuf.message import DecodeError, Message
from google.protobuf.unknown_fields import UnknownFieldSet

from memlm.api import (
    answers,
    chat,
    datastores,
    generation,
    operations,
    params,
    passages,
    scoring,
    server,
    sessions,
    tracing,
)
from memlm.api.request import Request
from memlm.errors import InternalError, InvalidInput
from memlm.v1 import datastores_pb2, generation_pb2, sessions_pb2
from memlm.wire.bounds import check_fields
from memlm.wire.status import sent_error, status_of

R = TypeVar("R")

_FILES = (generation_pb2, datastores_pb2, sessions_pb2, operations_pb2)
# Every service of the contract: the calls that the server accepts, and that the clients make.
SERVICES = tuple(service for file in _FILES for service in file.DESCRIPTOR.services_by_name.values())

# Dataclasses whose messages have other names.
_MESSAGE_NAMES = {
    "Message": "ChatMessage",
    "ModelInfo": "Model",
    "StoreInfo": "Datastore",
    "SessionInfo": "Session",
    "NewDocument": "Document",
    "Score": "ScoreResponse",
    "Trace": "TraceResponse",
    "DeleteReport": "DeleteDocumentsResponse",
    "RememberReport": "RememberResponse",
    "OperationInfo": "JobMetadata",
    "DatastorePage": "ListDatastoresResponse",
    "SessionPage": "ListSessionsResponse",
    "OperationPage": "ListOperationsResponse",
}
# Fields whose message fields have other names: `bytes` is a type in the .proto, a bool that is not set is false, and
# google.longrunning has its own words.
_RENAMED = {
    (generation.Token, "bytes"): "raw",
    (params.RetrievalParams, "use_store"): "without_store",
    (operations.WaitOperationRequest, "timeout_s"): "timeout",
}
_ENVELOPE = {(operations.OperationInfo, name) for name in ("name", "report", "error")}  # around JobMetadata


def _message_of(record_type: type) -> type[Message] | None:
    name = _MESSAGE_NAMES.get(record_type.__name__, record_type.__name__)
    return next((getattr(file, name) for file in _FILES if hasattr(file, name)), None)


_API = (params, passages, chat, answers, generation, scoring, tracing, server, datastores, sessions, operations)
_MESSAGE_OF: dict[type, type[Message]] = {
    record_type: message_type
    for module in _API
    for record_type in vars(module).values()
    if is_dataclass(record_type) and isinstance(record_type, type) and (message_type := _message_of(record_type))
}
_RECORD_OF = {message_type: record_type for record_type, message_type in _MESSAGE_OF.items()}

# The field `tokens` of an event, whose length follows.
_TOKENS_TAG = bytes((generation_pb2.GenerateEvent.TOKENS_FIELD_NUMBER << 3 | 2,))

# An event of a generation whose tokens are already in the bytes of `token_to_wire`.
WireEvent: TypeAlias = generation.Accepted | tuple[bytes, ...] | generation.Finished

# Requests whose response is the value of one field.
_WRAPPED: dict[type, tuple[type[Message], str]] = {
    generation.TokenizeRequest: (generation_pb2.TokenizeResponse, "token_ids"),
    generation.DetokenizeRequest: (generation_pb2.DetokenizeResponse, "text"),
    datastores.SearchRequest: (datastores_pb2.SearchResponse, "neighbors"),
    answers.FindPassagesRequest: (datastores_pb2.FindPassagesResponse, "passages"),
}


def to_wire(record: Any) -> Message:
    """Converts a dataclass to its message. Raises InvalidInput, naming the field, for a value that does not fit."""
    if isinstance(record, operations.OperationInfo):
        return _operation_to_wire(record)
    return _message(record)


def from_wire(message: Message) -> Any:
    """Converts a message to its dataclass. Raises InvalidInput, naming the field, if the dataclass refuses a value."""
    if isinstance(message, operations_pb2.Operation):
        return _operation_from_wire(message)
    if isinstance(message, operations_pb2.ListOperationsRequest):
        _check_listing(message)
    record_type = _RECORD_OF[type(message)]
    return record_type(**_values(record_type, message))


def token_to_wire(token: generation.Token) -> bytes:
    """One token as bytes of an event's `tokens` field. Joined bytes are a sequence of tokens."""
    return generation_pb2.Tokens(tokens=(cast(generation_pb2.Token, to_wire(token)),)).SerializeToString()


def tokens_from_wire(encoded: Iterable[bytes]) -> tuple[generation.Token, ...]:
    """The tokens in the bytes of `token_to_wire`."""
    return tuple(map(from_wire, generation_pb2.Tokens.FromString(b"".join(encoded)).tokens))


def event_to_wire(event: WireEvent) -> bytes:
    """One event of a generation's stream as the bytes of its message. Tokens are joined and not read."""
    if isinstance(event, tuple):
        data = b"".join(event)
        return _TOKENS_TAG + _varint(len(data)) + data
    if isinstance(event, generation.Accepted):
        message = generation_pb2.GenerateEvent(accepted=cast(generation_pb2.Accepted, to_wire(event)))
    else:
        message = generation_pb2.GenerateEvent(finished=cast(generation_pb2.Finished, to_wire(event)))
    return message.SerializeToString()


def _varint(number: int) -> bytes:
    """A number as protobuf writes it: seven bits a byte, the lowest first, and the eighth bit where more follow."""
    data = bytearray()
    while number > 0x7F:
        data.append(number & 0x7F | 0x80)
        number >>= 7
    return bytes((*data, number))


def event_from_wire(message: generation_pb2.GenerateEvent) -> generation.GenerationEvent:
    """Converts an event of a generation's stream. Raises InternalError for an event of another version."""
    kind = message.WhichOneof("event")
    if kind is None:
        raise InternalError("the server sent an event that this client does not know; install the server's version")
    if kind == "tokens":
        return tuple(map(from_wire, message.tokens.tokens))
    return cast("generation.Accepted | generation.Finished", from_wire(getattr(message, kind)))


def response_to_wire(request: Request[R], response: R) -> Message:
    """Converts the response to a request."""
    if response is None:
        return empty_pb2.Empty()
    if type(request) not in _WRAPPED:
        return to_wire(response)
    message_type, name = _WRAPPED[type(request)]
    is_repeated_message = message_type.DESCRIPTOR.fields_by_name[name].message_type is not None
    return message_type(**{name: _each_to_wire(cast(Any, response)) if is_repeated_message else response})


def response_from_wire(request: Request[R], reply: Message) -> R:
    """Converts the reply to a request."""
    if isinstance(reply, empty_pb2.Empty):
        return cast(R, None)
    if type(request) not in _WRAPPED:
        return cast(R, from_wire(reply))
    value = getattr(reply, _WRAPPED[type(request)][1])
    return cast(R, value if isinstance(value, str) else _each_from_wire(value))


def read_request(request_type: type[Message], data: bytes) -> Message:
    """Parses a request.

    Raises InvalidInput for invalid bytes, too many fields, text that is not UTF-8, and fields of another version, which
    would otherwise be ignored silently.
    """
    check_fields(request_type.DESCRIPTOR, data)
    try:
        message = request_type.FromString(data)
    except DecodeError:
        field = _undecodable_text(request_type.DESCRIPTOR, data)
        problem = (
            f"{field} is not valid UTF-8; send text"
            if field
            else f"these are not the bytes of a {_message_name(request_type)}"
        )
        raise InvalidInput(problem, field=field) from None
    _refuse_unknown(message)
    return message


class _Field(NamedTuple):
    """How one field is converted. `pack` and `unpack` are None for values that need no conversion."""

    name: str
    wire: str
    required: bool
    optional: bool
    pack: Callable[[Any], Any] | None
    unpack: Callable[[Any], Any] | None


@cache
def _fields_of(record_type: type) -> tuple[_Field, ...]:
    on_wire, hints = _MESSAGE_OF[record_type].DESCRIPTOR.fields_by_name, get_type_hints(record_type)
    found = []
    for field in fields(record_type):
        if (record_type, field.name) in _ENVELOPE:
            continue
        wire = _RENAMED.get((record_type, field.name), field.name)
        required = field.default is MISSING and field.default_factory is MISSING
        codec = _codec_for(hints[field.name], on_wire[wire])
        found.append(_Field(field.name, wire, required, on_wire[wire].has_presence, *codec))
    return tuple(found)


def _codec_for(hint: Any, on_wire: Any) -> tuple[Callable[[Any], Any] | None, Callable[[Any], Any] | None]:
    """How a field of a type is packed and unpacked."""
    kinds = (hint, *get_args(hint)) if get_origin(hint) not in (tuple, Mapping) else (get_origin(hint),)
    enum = next((kind for kind in kinds if isinstance(kind, type) and issubclass(kind, Enum)), None)
    if get_origin(hint) is tuple:
        return (_each_to_wire, _each_from_wire) if on_wire.message_type is not None else (None, tuple)
    if Mapping in kinds:
        return _metadata_to_json, _metadata_from_json
    if enum is not None:
        prefix = re.sub(r"(?<=[a-z])(?=[A-Z])", "_", enum.__name__).upper()
        numbers = {member: on_wire.enum_type.values_by_name[f"{prefix}_{member.name}"].number for member in enum}
        return numbers.__getitem__, lambda number: _member(enum, numbers, number)
    if on_wire.name == "without_store":
        return not_, not_
    if on_wire.message_type is Duration.DESCRIPTOR:
        return _duration_to_wire, lambda duration: duration.ToMilliseconds() / 1000
    return (to_wire, from_wire) if on_wire.message_type is not None else (None, None)


def _message(record: Any) -> Message:
    record_type: type = type(record)
    message_type = _MESSAGE_OF[record_type]
    values = {
        wire: value if pack is None else pack(value)
        for name, wire, _, _, pack, _ in _fields_of(record_type)
        if (value := getattr(record, name)) is not None and value != ()
    }
    try:
        return message_type(**values)
    except (TypeError, ValueError):
        raise _find_bad_field(message_type, values) from None


def _values(record_type: type, message: Message) -> dict[str, Any]:
    values = {}
    for name, wire, required, optional, _, unpack in _fields_of(record_type):
        if not optional or message.HasField(wire):
            value = getattr(message, wire)
            values[name] = value if unpack is None else unpack(value)
        elif required:
            values[name] = None
    return values


def _each_to_wire(values: Sequence[Any]) -> list[Any]:
    return [to_wire(value) for value in values]


def _each_from_wire(values: Sequence[Any]) -> tuple[Any, ...]:
    return tuple(from_wire(value) if isinstance(value, Message) else value for value in values)


def _metadata_to_json(metadata: Any) -> str:
    try:
        return json.dumps(dict(metadata), allow_nan=False) if metadata else ""
    except (TypeError, ValueError) as error:
        raise InvalidInput(f"metadata cannot be sent as JSON ({error})", field="metadata") from None


def _metadata_from_json(text: str) -> dict[str, Any]:
    try:
        metadata = json.loads(text or "{}")
    except (ValueError, RecursionError) as error:
        raise InvalidInput(f"metadata is not JSON ({error})", field="metadata") from None
    if not isinstance(metadata, dict):
        raise InvalidInput(f"metadata is a {type(metadata).__name__}; expected a JSON object", field="metadata")
    return metadata


def _member(enum: type[Enum], numbers: Mapping[Any, int], number: int) -> Enum:
    for member in enum:
        if numbers[member] == number:
            return member
    raise InternalError(f"the server sent the unknown {enum.__name__} {number}; install the server's version")


def _duration_to_wire(seconds: float) -> Duration:
    duration = Duration()
    duration.FromMilliseconds(round(1000 * seconds))
    return duration


def _operation_to_wire(info: operations.OperationInfo) -> Message:
    operation = operations_pb2.Operation(name=info.name, done=info.has_ended)
    operation.metadata.Pack(_message(info))
    if info.error is not None:
        operation.error.CopyFrom(status_of(info.error))
    elif info.report is not None:
        operation.response.Pack(to_wire(info.report))
    return operation


def _operation_from_wire(operation: Any) -> operations.OperationInfo:
    metadata, report = datastores_pb2.JobMetadata(), datastores_pb2.JobReport()
    if not operation.metadata.Unpack(metadata):
        raise InternalError(f"{operation.name} has no JobMetadata; this is not the operation of a memlm server")
    values = _values(operations.OperationInfo, metadata)
    if operation.HasField("error"):
        values["error"] = sent_error(operation.error) or InternalError(operation.error.message)
    elif operation.HasField("response") and operation.response.Unpack(report):
        values["report"] = from_wire(report)
    return operations.OperationInfo(name=operation.name, **values)


def _check_listing(message: Any) -> None:
    """Refuses the options of google.longrunning.ListOperations that are not supported."""
    for field, value in message.ListFields():
        if field.name not in ("page_size", "page_token") and (field.name, value) != ("name", "operations"):
            raise InvalidInput(
                f"{field.name} is {value!r}; this server lists all operations of the caller", field=field.name
            )


def _find_bad_field(message_type: type[Message], values: dict[str, Any]) -> InvalidInput:
    """The error for the field that protobuf refuses."""
    for name, value in values.items():
        try:
            message_type(**{name: value})
        except (TypeError, ValueError) as error:
            return InvalidInput(f"{name} cannot be sent: {error}", field=name)
    return InvalidInput(f"this cannot be sent as a {_message_name(message_type)}")


def _undecodable_text(descriptor: Any, data: bytes) -> str:
    """Name of the first text field that is not UTF-8, empty if the bytes are invalid in another way."""
    try:
        parts = _unknown_fields(empty_pb2.Empty.FromString(data))  # every field is unknown to Empty
    except DecodeError:
        return ""
    for part in parts:
        field = descriptor.fields_by_number.get(part.field_number)
        if field is None or not isinstance(part.data, bytes):
            continue
        if field.type == FieldDescriptor.TYPE_STRING and not _is_utf8(part.data):
            return str(field.name)
        if field.message_type and (inner := _undecodable_text(field.message_type, part.data)):
            return f"{field.name}.{inner}"
    return ""


def _is_utf8(data: bytes) -> bool:
    try:
        data.decode()
    except UnicodeDecodeError:
        return False
    return True


def _refuse_unknown(message: Message) -> None:
    for unknown in _unknown_fields(message):
        raise InvalidInput(
            f"{_message_name(type(message))} has the field {unknown.field_number}, which this version does not know;"
            " leave it out, or use a server of the client's version"
        )
    for field, value in message.ListFields():
        if field.enum_type is not None and not (value and value in field.enum_type.values_by_number):
            known = ", ".join(each.name for each in field.enum_type.values if each.number)
            raise InvalidInput(f"{field.name} is {value}; expected one of {known}", field=field.name)
        if field.message_type is not None:
            for inner in [value] if isinstance(value, Message) else value:
                _refuse_unknown(inner)


def _unknown_fields(message: Message) -> Iterable[Any]:
    return cast("Iterable[Any]", UnknownFieldSet(message))  # its stub lacks __iter__


def _message_name(message_type: type[Message]) -> str:
    return str(message_type.DESCRIPTOR.name)
