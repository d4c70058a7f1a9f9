"""What both clients share: how they connect, which call asks which question, and errors in our own words."""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import grpc
from google.longrunning.operations_grpc_pb2 import OperationsStub
from google.protobuf.message import Message

from memlm import wire
from memlm.errors import InvalidInput, MemlmError, NotFound, Unavailable
from memlm.events import Accepted, GenerationEvent
from memlm.params import GenerateRequest
from memlm.questions import (
    AddDocumentsRequest,
    AppendToSessionRequest,
    BuildDatastoreRequest,
    CancelGenerationRequest,
    CancelOperationRequest,
    CompactDatastoreRequest,
    CreateSessionRequest,
    DeleteDocumentsRequest,
    DeleteOperationRequest,
    DeleteSessionRequest,
    DetokenizeRequest,
    ForkSessionRequest,
    GetDatastoreRequest,
    GetModelRequest,
    GetOperationRequest,
    GetServerInfoRequest,
    GetSessionRequest,
    ListDatastoresRequest,
    ListOperationsRequest,
    ListSessionsRequest,
    LoadDatastoreRequest,
    NewDocument,
    ResumeGenerationRequest,
    ScoreRequest,
    SearchRequest,
    TokenizeRequest,
    UnloadDatastoreRequest,
    WaitOperationRequest,
)
from memlm.status import error_of
from memlm.v1 import datastores_pb2_grpc, generation_pb2_grpc, sessions_pb2_grpc

if TYPE_CHECKING:
    from memlm.corpus import Document

DEFAULT_TIMEOUT_S = 60.0
DEFAULT_MAX_MESSAGE_BYTES = 16 << 20
KEEPALIVE_S = 30
READY_POLL_S = 0.05
PIECE_CHARACTERS = 1 << 17
PIECE_BYTES, MESSAGE_SPARE = 1 << 20, 1024
FRAME_BYTES = 16  # what stands around a document in a message, and around its text
BYTES_A_CHARACTER = 4  # in UTF-8, at most
RESUME_PAUSE_S = 0.2
# Streams are not among them, since half of one cannot be taken back. Nor is deleting: an answer lost on its way would
# be followed by NotFound.
RETRIED = {
    "memlm.v1.Generation": ("Score", "Tokenize", "Detokenize", "GetModel", "GetServerInfo"),
    "memlm.v1.Datastores": ("ListDatastores", "GetDatastore", "Search"),
    "memlm.v1.Sessions": ("GetSession", "ListSessions"),
    "google.longrunning.Operations": ("GetOperation", "ListOperations", "WaitOperation"),
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
    operations = OperationsStub(channel)
    return {
        GenerateRequest: generation.Generate,
        ResumeGenerationRequest: generation.ResumeGeneration,
        CancelGenerationRequest: generation.CancelGeneration,
        ScoreRequest: generation.Score,
        TokenizeRequest: generation.Tokenize,
        DetokenizeRequest: generation.Detokenize,
        GetModelRequest: generation.GetModel,
        GetServerInfoRequest: generation.GetServerInfo,
        ListDatastoresRequest: datastores.ListDatastores,
        SearchRequest: datastores.Search,
        DeleteDocumentsRequest: datastores.DeleteDocuments,
        GetDatastoreRequest: datastores.GetDatastore,
        BuildDatastoreRequest: datastores.BuildDatastore,
        AddDocumentsRequest: datastores.AddDocuments,
        CompactDatastoreRequest: datastores.CompactDatastore,
        LoadDatastoreRequest: datastores.LoadDatastore,
        UnloadDatastoreRequest: datastores.UnloadDatastore,
        GetOperationRequest: operations.GetOperation,
        ListOperationsRequest: operations.ListOperations,
        WaitOperationRequest: operations.WaitOperation,
        CancelOperationRequest: operations.CancelOperation,
        DeleteOperationRequest: operations.DeleteOperation,
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


def additions_of(
    request: AddDocumentsRequest, documents: Iterable[NewDocument | Document], limit: int
) -> Iterator[Message]:
    """Documents that are added, several a message or in parts, each message below the limit.

    Raises InvalidInput for a title and metadata that are too large for one.
    """
    yield wire.to_wire(request)
    batch, size, room = list[NewDocument](), 0, limit - MESSAGE_SPARE
    for document in documents:
        for part in _parts(document, room):
            own = wire.to_wire(part).ByteSize() + FRAME_BYTES
            if batch and size + own > min(PIECE_BYTES, room):
                yield wire.to_wire(AddDocumentsRequest(documents=tuple(batch)))
                batch, size = [], 0
            batch.append(part)
            size += own
    if batch:
        yield wire.to_wire(AddDocumentsRequest(documents=tuple(batch)))


def _parts(document: NewDocument | Document, room: int) -> Iterator[NewDocument]:
    """A document as it is, or in parts of so many bytes at most."""
    whole = NewDocument(document.id, document.text, document.title, document.metadata)
    about = wire.to_wire(replace(whole, text="-")).ByteSize()
    if about + FRAME_BYTES + BYTES_A_CHARACTER * len(whole.text) <= room:
        yield whole
        return
    characters = (room - about - FRAME_BYTES) // BYTES_A_CHARACTER
    if characters < 1:
        raise InvalidInput(
            f"document {whole.id!r} has a title and metadata of {about:,} bytes, and a message takes {room:,}; raise"
            " max_message_bytes on both sides",
            field="documents",
        )
    yield replace(whole, text=whole.text[:characters])
    for begin in range(characters, len(whole.text), characters):
        yield NewDocument(whole.id, whole.text[begin : begin + characters], continues=True)


class Heard:
    """What has been heard of a generation, and how to take it up again when its connection breaks."""

    def __init__(self, request: GenerateRequest, allowed_s: float) -> None:
        """Nothing yet; it may take so long in all."""
        self.question: GenerateRequest | ResumeGenerationRequest = request
        self.request_id = ""
        self._tokens, self._resume_s = 0, request.resume_s
        self._deadline_s, self._broken_s = time.monotonic() + allowed_s, 0.0
        self._error: MemlmError | None = None

    @property
    def left_s(self) -> float:
        """Seconds that are left for it."""
        return max(0.0, self._deadline_s - time.monotonic())

    @property
    def must_be_cancelled(self) -> bool:
        """Whether it would go on without anybody."""
        return self._resume_s is not None and bool(self.request_id)

    def is_new(self, event: GenerationEvent) -> bool:
        """Whether an event is for the user. After a break the first one comes again."""
        self._error = None
        if isinstance(event, tuple):
            self._tokens += len(event)
        elif isinstance(event, Accepted):
            first, self.request_id = not self.request_id, event.request_id
            return first
        return True

    def resume(self, error: MemlmError) -> float:
        """Prepares to ask again, and tells after how many seconds. Raises what it broke with where that is no use."""
        if self._error is not None and isinstance(error, NotFound):
            raise self._error from None
        if self._resume_s is None or not self.request_id or not isinstance(error, Unavailable):
            raise error
        now_s = time.monotonic()
        if self._error is None:
            self._error, self._broken_s = error, now_s
        if now_s - self._broken_s + RESUME_PAUSE_S > self._resume_s:
            raise self._error from None
        self.question = ResumeGenerationRequest(self.request_id, self._tokens)
        return RESUME_PAUSE_S


def broken_off(target: str) -> Unavailable:
    """A stream that ended without its last event."""
    return Unavailable(f"{target} broke the stream off before its end; ask again")


def not_ready(target: str, timeout_s: float) -> Unavailable:
    """A server that did not come to serve in time."""
    return Unavailable(f"{target} was not ready within {timeout_s:g} s; check the address, and the server's log")
