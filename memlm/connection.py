"""What both clients share: how they connect, which call asks which question, and errors in our own words."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
from google.protobuf.message import Message

from memlm import wire
from memlm.api import GenerateRequest
from memlm.errors import InvalidInput, Unavailable
from memlm.questions import (
    AppendToSessionRequest,
    CreateSessionRequest,
    DeleteDocumentsRequest,
    DeleteSessionRequest,
    DetokenizeRequest,
    ForkSessionRequest,
    GetModelRequest,
    GetServerInfoRequest,
    GetSessionRequest,
    ListDatastoresRequest,
    ListSessionsRequest,
    ScoreRequest,
    SearchRequest,
    TokenizeRequest,
)
from memlm.status import error_of
from memlm.v1 import datastores_pb2_grpc, generation_pb2_grpc, sessions_pb2_grpc

DEFAULT_TIMEOUT_S = 60.0
DEFAULT_MAX_MESSAGE_BYTES = 16 << 20
KEEPALIVE_S = 30
READY_POLL_S = 0.05
PIECE_CHARACTERS = 1 << 17
# Streams are not among them, since half of one cannot be taken back. Nor is deleting: an answer lost on its way would
# be followed by NotFound.
RETRIED = {
    "memlm.v1.Generation": ("Score", "Tokenize", "Detokenize", "GetModel", "GetServerInfo"),
    "memlm.v1.Datastores": ("ListDatastores", "Search"),
    "memlm.v1.Sessions": ("GetSession", "ListSessions"),
}


def channel_options(max_message_bytes: int) -> list[tuple[str, Any]]:
    """Message limits, retries of calls that change nothing, and pings that the server has agreed to."""
    retries = {"maxAttempts": 4, "initialBackoff": "0.1s", "maxBackoff": "2s", "backoffMultiplier": 2}
    names = [{"service": service, "method": method} for service, methods in RETRIED.items() for method in methods]
    config = {"methodConfig": [{"name": names, "retryPolicy": {**retries, "retryableStatusCodes": ["UNAVAILABLE"]}}]}
    return [
        ("grpc.max_receive_message_length", max_message_bytes),
        ("grpc.max_send_message_length", max_message_bytes),
        ("grpc.service_config", json.dumps(config)),
        ("grpc.keepalive_time_ms", 1000 * KEEPALIVE_S),
        ("grpc.initial_reconnect_backoff_ms", 100),
        ("grpc.min_reconnect_backoff_ms", 100),
        ("grpc.max_reconnect_backoff_ms", 5000),
    ]


@dataclass(frozen=True, slots=True)
class Tls:
    """How a client speaks TLS: whom it trusts (`ca`, a file; the system's own if not given), and, where the server asks
    for that, who it is (`cert` and `key`).
    """

    ca: str | Path | None = None
    cert: str | Path | None = None
    key: str | Path | None = None


def channel_to(kind: Any, target: str, max_message_bytes: int, tls: Tls | None) -> Any:
    """A channel of either kind (`grpc`, `grpc.aio`). Raises InvalidInput where a file of `tls` cannot be read."""
    options = channel_options(max_message_bytes)
    if tls is None:
        return kind.insecure_channel(target, options=options)
    try:
        ca, key, cert = (None if path is None else Path(path).read_bytes() for path in (tls.ca, tls.key, tls.cert))
    except OSError as error:
        raise InvalidInput(f"a certificate cannot be read: {error}", field="tls") from error
    return kind.secure_channel(target, grpc.ssl_channel_credentials(ca, key, cert), options=options)


def metadata_of(token: str | None) -> tuple[tuple[str, str], ...]:
    """What goes with every call. A token goes in the clear unless there is TLS."""
    return () if token is None else (("authorization", f"Bearer {token}"),)


def rpcs_of(channel: Any) -> dict[type, Any]:
    """The call that asks each kind of question, over a channel of either kind."""
    generation = generation_pb2_grpc.GenerationStub(channel)
    datastores = datastores_pb2_grpc.DatastoresStub(channel)
    sessions = sessions_pb2_grpc.SessionsStub(channel)
    return {
        GenerateRequest: generation.Generate,
        ScoreRequest: generation.Score,
        TokenizeRequest: generation.Tokenize,
        DetokenizeRequest: generation.Detokenize,
        GetModelRequest: generation.GetModel,
        GetServerInfoRequest: generation.GetServerInfo,
        ListDatastoresRequest: datastores.ListDatastores,
        SearchRequest: datastores.Search,
        DeleteDocumentsRequest: datastores.DeleteDocuments,
        CreateSessionRequest: sessions.CreateSession,
        AppendToSessionRequest: sessions.AppendToSession,
        GetSessionRequest: sessions.GetSession,
        ListSessionsRequest: sessions.ListSessions,
        ForkSessionRequest: sessions.ForkSession,
        DeleteSessionRequest: sessions.DeleteSession,
    }


@contextmanager
def our_errors(target: str) -> Iterator[None]:
    """Raises a failed call's reason as an error of `memlm.errors`."""
    try:
        yield
    except grpc.RpcError as error:
        raise error_of(error, target) from None
    except (ValueError, grpc.aio.UsageError) as error:
        raise InvalidInput(f"the client of {target} is closed ({error}); open another one") from None


def appends_of(name: str, text: str, token_ids: Sequence[int]) -> Iterator[Message]:
    """What is appended to a session, in messages far below any limit."""
    yield wire.to_wire(AppendToSessionRequest(name))
    for begin in range(0, len(text), PIECE_CHARACTERS):
        yield wire.to_wire(AppendToSessionRequest("", text[begin : begin + PIECE_CHARACTERS]))
    for begin in range(0, len(token_ids), PIECE_CHARACTERS):
        piece = tuple(token_ids[begin : begin + PIECE_CHARACTERS])
        yield wire.to_wire(AppendToSessionRequest("", token_ids=piece))


def broken_off(target: str) -> Unavailable:
    """A stream that ended without its last event."""
    return Unavailable(f"{target} broke the stream off before its end; ask again")


def not_ready(target: str, timeout_s: float) -> Unavailable:
    """A server that did not come to serve in time."""
    return Unavailable(f"{target} was not ready within {timeout_s:g} s; check the address, and the server's log")
