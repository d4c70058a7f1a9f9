"""Dataclasses <-> protobuf: the only module that knows both.

A record and its message share the names of their fields, save for those in `_RENAMED`. None is not set, and what is not
set takes the dataclass's default; 0 is 0. Importing this loads no torch, no Faiss, no numpy.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import MISSING, fields, is_dataclass
from functools import cache
from operator import not_
from typing import Any, NamedTuple, TypeAlias, cast

from google.longrunning import operations_pb2
from google.protobuf import empty_pb2
from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import DecodeError, Message
from google.protobuf.unknown_fields import UnknownFieldSet

from memlm.api import datastores, generation, params, scoring, server, sessions
from memlm.errors import InternalError, InvalidInput
from memlm.v1 import datastores_pb2, generation_pb2, sessions_pb2
from memlm.wire import operations
from memlm.wire.bounds import check_fields

# Every service of the contract: the calls that the front takes, and that the clients make.
SERVICES = tuple(
    service
    for file in (generation_pb2, datastores_pb2, sessions_pb2, operations_pb2)
    for service in file.DESCRIPTOR.services_by_name.values()
)

_MESSAGE_OF: dict[type, type[Message]] = {
    params.SamplingParams: generation_pb2.SamplingParams,
    params.StoreWeight: generation_pb2.StoreWeight,
    params.RetrievalParams: generation_pb2.RetrievalParams,
    params.GenerateRequest: generation_pb2.GenerateRequest,
    generation.Accepted: generation_pb2.Accepted,
    generation.Token: generation_pb2.Token,
    generation.Alternative: generation_pb2.Alternative,
    generation.Neighbor: generation_pb2.Neighbor,
    generation.Finished: generation_pb2.Finished,
    generation.Usage: generation_pb2.Usage,
    scoring.Score: generation_pb2.ScoreResponse,
    scoring.Figures: generation_pb2.Figures,
    scoring.TokenScore: generation_pb2.TokenScore,
    server.ModelInfo: generation_pb2.Model,
    server.ServerInfo: generation_pb2.ServerInfo,
    server.GetServerInfoRequest: generation_pb2.GetServerInfoRequest,
    datastores.StoreInfo: datastores_pb2.Datastore,
    datastores.DeleteReport: datastores_pb2.DeleteDocumentsResponse,
    generation.ResumeGenerationRequest: generation_pb2.ResumeGenerationRequest,
    generation.CancelGenerationRequest: generation_pb2.CancelGenerationRequest,
    scoring.ScoreRequest: generation_pb2.ScoreRequest,
    generation.TokenizeRequest: generation_pb2.TokenizeRequest,
    generation.DetokenizeRequest: generation_pb2.DetokenizeRequest,
    server.GetModelRequest: generation_pb2.GetModelRequest,
    datastores.SearchRequest: datastores_pb2.SearchRequest,
    datastores.ListDatastoresRequest: datastores_pb2.ListDatastoresRequest,
    datastores.DeleteDocumentsRequest: datastores_pb2.DeleteDocumentsRequest,
    datastores.GetDatastoreRequest: datastores_pb2.GetDatastoreRequest,
    datastores.BuildDatastoreRequest: datastores_pb2.BuildDatastoreRequest,
    datastores.NewDocument: datastores_pb2.Document,
    datastores.AddDocumentsRequest: datastores_pb2.AddDocumentsRequest,
    datastores.CompactDatastoreRequest: datastores_pb2.CompactDatastoreRequest,
    datastores.LoadDatastoreRequest: datastores_pb2.LoadDatastoreRequest,
    datastores.UnloadDatastoreRequest: datastores_pb2.UnloadDatastoreRequest,
    sessions.SessionInfo: sessions_pb2.Session,
    sessions.CreateSessionRequest: sessions_pb2.CreateSessionRequest,
    sessions.AppendToSessionRequest: sessions_pb2.AppendToSessionRequest,
    sessions.GetSessionRequest: sessions_pb2.GetSessionRequest,
    sessions.ListSessionsRequest: sessions_pb2.ListSessionsRequest,
    sessions.ForkSessionRequest: sessions_pb2.ForkSessionRequest,
    sessions.DeleteSessionRequest: sessions_pb2.DeleteSessionRequest,
}
_AS_JSON = {(generation.Neighbor, "metadata"), (datastores.NewDocument, "metadata")}
_RECORD_OF = {message: record for record, message in _MESSAGE_OF.items()}
# `bytes` is a type's name in the .proto; a bool that is not set is false, so the wire asks for the exception.
_RENAMED = {(generation.Token, "bytes"): "raw", (params.RetrievalParams, "use_store"): "without_store"}
_REASONS = {
    reason: generation_pb2.FinishReason.Value(f"FINISH_REASON_{reason.name}") for reason in generation.FinishReason
}
_REASON_OF = {number: reason for reason, number in _REASONS.items()}

# An event of a generation, its tokens each as `token_to_wire` makes them.
WireEvent: TypeAlias = generation.Accepted | tuple[bytes, ...] | generation.Finished

# Replies that wrap a single value, which is what the library returns.
_WRAPPED: dict[type, tuple[type[Message], str]] = {
    generation.TokenizeRequest: (generation_pb2.TokenizeResponse, "token_ids"),
    generation.DetokenizeRequest: (generation_pb2.DetokenizeResponse, "text"),
    datastores.SearchRequest: (datastores_pb2.SearchResponse, "neighbors"),
    datastores.ListDatastoresRequest: (datastores_pb2.ListDatastoresResponse, "datastores"),
    sessions.ListSessionsRequest: (sessions_pb2.ListSessionsResponse, "sessions"),
}
_WRAPPED_FIELD = dict(_WRAPPED.values())


def to_wire(record: Any) -> Message:
    """A dataclass as its message. Raises InvalidInput, naming the field, for a value that the wire cannot carry."""
    record_type: type = type(record)
    if special := operations.TO_WIRE.get(record_type):
        return special(record)
    wanted = {
        wire: value if pack is None else pack(value)
        for name, wire, _, _, pack, _ in _fields_of(record_type)
        if (value := getattr(record, name)) is not None and value != ()
    }
    message_type = _MESSAGE_OF[record_type]
    try:
        return message_type(**wanted)
    except (TypeError, ValueError):
        raise _find_bad_field(message_type, wanted) from None


def from_wire(message: Message) -> Any:
    """A message as its dataclass. Raises InvalidInput, naming the field, where the dataclass refuses a value."""
    if special := operations.FROM_WIRE.get(type(message)):
        return special(message)
    record_type, values = _RECORD_OF[type(message)], {}
    for name, wire, required, optional, _, unpack in _fields_of(record_type):
        if not optional or message.HasField(wire):
            value = getattr(message, wire)
            values[name] = value if unpack is None else unpack(value)
        elif required:
            values[name] = None
    return record_type(**values)


def token_to_wire(token: generation.Token) -> bytes:
    """A token's place in an event's `tokens`, in bytes; those of several tokens, joined, are all their places."""
    return generation_pb2.Tokens(tokens=(_token_to_wire(token),)).SerializeToString()


def event_to_wire(event: WireEvent) -> generation_pb2.GenerateEvent:
    """One event of a generation's stream."""
    if isinstance(event, tuple):
        return generation_pb2.GenerateEvent(tokens=generation_pb2.Tokens.FromString(b"".join(event)))
    if isinstance(event, generation.Accepted):
        return generation_pb2.GenerateEvent(accepted=cast(generation_pb2.Accepted, to_wire(event)))
    return generation_pb2.GenerateEvent(finished=cast(generation_pb2.Finished, to_wire(event)))


def event_from_wire(message: generation_pb2.GenerateEvent) -> generation.GenerationEvent:
    """One event of a generation's stream. Raises InternalError for one that this version does not know."""
    kind = message.WhichOneof("event")
    if kind is None:
        raise InternalError("the server sent an event that this client does not know; install the server's version")
    if kind == "tokens":
        return tuple(map(_token_from_wire, message.tokens.tokens))
    return cast("generation.Accepted | generation.Finished", from_wire(getattr(message, kind)))


def _token_to_wire(token: generation.Token) -> generation_pb2.Token:
    """As `to_wire`, in a fifth of its time: of no other record are there so many."""
    message = generation_pb2.Token(
        id=token.id,
        text=token.text,
        raw=token.bytes,
        logprob=token.logprob,
        lm_logprob=token.lm_logprob,
        knn_logprob=token.knn_logprob,
        lam=token.lam,
    )
    if token.neighbors:
        message.neighbors.extend(_each_to_wire(token.neighbors))
    if token.top_logprobs:
        message.top_logprobs.extend(_each_to_wire(token.top_logprobs))
    return message


def _token_from_wire(token: generation_pb2.Token) -> generation.Token:
    """As `from_wire`."""
    return generation.Token(
        token.id,
        token.text,
        token.raw,
        token.logprob,
        token.lm_logprob,
        token.knn_logprob if token.HasField("knn_logprob") else None,
        token.lam,
        tuple(map(from_wire, token.neighbors)),
        tuple(map(from_wire, token.top_logprobs)),
    )


def response_to_wire(question: Any, answer: Any) -> Message:
    """What the library answered to a question, as the reply of its call."""
    if answer is None:
        return empty_pb2.Empty()
    if type(question) not in _WRAPPED:
        return to_wire(answer)
    reply_type, name = _WRAPPED[type(question)]
    is_plain = isinstance(answer, str) or reply_type is generation_pb2.TokenizeResponse
    return reply_type(**{name: answer if is_plain else _each_to_wire(answer)})


def response_from_wire(reply: Message) -> Any:
    """A reply, as what the library would have answered."""
    if isinstance(reply, empty_pb2.Empty):
        return None
    name = _WRAPPED_FIELD.get(type(reply))
    if name is None:
        return from_wire(reply)
    value = getattr(reply, name)
    return value if isinstance(value, str) else _each_from_wire(value)


def read_request(request_type: type[Message], data: bytes) -> Message:
    """Bytes that a client sent, as a message.

    Raises InvalidInput for what is no such message, for one of too many fields, for text that is not UTF-8, and for a
    field that this version does not know: what is not supported is refused, never ignored.
    """
    check_fields(request_type.DESCRIPTOR, data)
    try:
        message = request_type.FromString(data)
    except DecodeError:
        field = _undecodable_text(request_type.DESCRIPTOR, data)
        problem = (
            f"{field} is not valid UTF-8; send text" if field else f"these are not the bytes of a {_name(request_type)}"
        )
        raise InvalidInput(problem, field=field) from None
    _refuse_unknown(message)
    return message


class _Field(NamedTuple):
    """How a field travels. What is packed or unpacked by None is what it is."""

    name: str
    wire: str
    required: bool
    optional: bool
    pack: Callable[[Any], Any] | None
    unpack: Callable[[Any], Any] | None


@cache
def _fields_of(record_type: type) -> tuple[_Field, ...]:
    on_wire = _MESSAGE_OF[record_type].DESCRIPTOR.fields_by_name
    return tuple(
        _Field(
            name=field.name,
            wire=(wire := _RENAMED.get((record_type, field.name), field.name)),
            required=field.default is MISSING and field.default_factory is MISSING,
            optional=on_wire[wire].has_presence,
            pack=(ways := _codec_for(record_type, field, on_wire[wire]))[0],
            unpack=ways[1],
        )
        for field in fields(record_type)
    )


def _codec_for(record_type: type, field: Any, on_wire: Any) -> tuple[Callable[[Any], Any] | None, ...]:
    """How a field is packed, and unpacked."""
    if str(field.type).startswith("tuple"):
        return (_each_to_wire, _tuple_from_wire) if on_wire.message_type is not None else (None, tuple)
    if on_wire.name == "without_store":
        return not_, not_
    if (record_type, on_wire.name) in _AS_JSON:
        return _json_of, _metadata
    if on_wire.enum_type is not None:
        return _REASONS.__getitem__, _reason_of
    return (to_wire, from_wire) if on_wire.message_type is not None else (None, None)


def _tuple_from_wire(values: Sequence[Any]) -> tuple[Any, ...]:
    return tuple(_each_from_wire(values))


def _each_to_wire(values: Sequence[Any]) -> list[Any]:
    return [to_wire(value) if is_dataclass(value) else value for value in values]


def _each_from_wire(values: Sequence[Any]) -> list[Any]:
    return [from_wire(value) if isinstance(value, Message) else value for value in values]


def _json_of(metadata: Any) -> str:
    try:
        return json.dumps(dict(metadata), allow_nan=False) if metadata else ""
    except (TypeError, ValueError) as error:
        raise InvalidInput(f"metadata cannot be sent as JSON ({error})", field="metadata") from None


def _metadata(said: str) -> dict[str, Any]:
    try:
        told = json.loads(said or "{}")
    except (ValueError, RecursionError) as error:
        raise InvalidInput(f"metadata is no JSON ({error})", field="metadata") from None
    if not isinstance(told, dict):
        raise InvalidInput(f"metadata is a {type(told).__name__}; expected a JSON object", field="metadata")
    return told


def _reason_of(number: int) -> generation.FinishReason:
    if number not in _REASON_OF:
        raise InternalError(f"the server sent the unknown finish reason {number}; install the server's version")
    return _REASON_OF[number]


def _find_bad_field(message_type: type[Message], wanted: dict[str, Any]) -> InvalidInput:
    """Finds the field whose value protobuf would not take."""
    for name, value in wanted.items():
        try:
            message_type(**{name: value})
        except (TypeError, ValueError) as error:
            return InvalidInput(f"{name} cannot be sent: {error}", field=name)
    return InvalidInput(f"this cannot be sent as a {_name(message_type)}")


def _undecodable_text(descriptor: Any, data: bytes) -> str:
    """The name of the first text field that is not UTF-8; empty where the bytes are wrong in another way."""
    try:
        parts = _unknown_fields(empty_pb2.Empty.FromString(data))  # to Empty, all are
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
            f"{_name(type(message))} has a field {unknown.field_number} that this version does not know; leave it"
            " out, or ask a server of your client's version"
        )
    for field, value in message.ListFields():
        if field.message_type is not None:
            for inner in [value] if isinstance(value, Message) else value:
                _refuse_unknown(inner)


def _unknown_fields(message: Message) -> Iterable[Any]:
    return cast("Iterable[Any]", UnknownFieldSet(message))  # its stub does not tell that it can be iterated


def _name(message_type: type[Message]) -> str:
    return str(message_type.DESCRIPTOR.name)
