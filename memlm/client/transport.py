"""How the client's questions travel to a server and its answers come back: gRPC, and errors in our own words.

The clients load this when they connect, so that importing them is quick and leaves gRPC out of a process that may yet
fork.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Generator, Iterable, Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import grpc
from google.protobuf.message_factory import GetMessageClass
from grpc_health.v1 import health_pb2, health_pb2_grpc

from memlm.api.datastores import AddDocumentsRequest, NewDocument
from memlm.api.generation import CancelGenerationRequest, Finished, GenerationEvent
from memlm.api.params import GenerateRequest
from memlm.api.sessions import AppendToSessionRequest
from memlm.client.resume import StreamResumer, Tls
from memlm.client.uploads import RequestStream, add_document_requests, append_requests
from memlm.errors import InvalidInput, MemlmError, NotFound, Unavailable
from memlm.wire import codec
from memlm.wire.limits import KEEPALIVE_S
from memlm.wire.status import error_of

if TYPE_CHECKING:
    from memlm.data.corpus import Document

READY_POLL_S = 0.05
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


def rpcs_by_request(channel: Any) -> dict[str, Any]:
    """The calls of the contract over a channel of either kind, by what asks for them: Score by a ScoreRequest."""
    return {
        f"{method.name}Request": _way_of(channel, method)(
            f"/{service.full_name}/{method.name}",
            request_serializer=GetMessageClass(method.input_type).SerializeToString,
            response_deserializer=GetMessageClass(method.output_type).FromString,
        )
        for service in codec.SERVICES
        for method in service.methods
    }


def _way_of(channel: Any, method: Any) -> Any:
    if method.client_streaming:
        return channel.stream_unary
    return channel.unary_stream if method.server_streaming else channel.unary_unary


@contextmanager
def translate_rpc_errors(target: str) -> Iterator[None]:
    """Raises a failed call's reason as an error of `memlm.errors`."""
    try:
        yield
    except grpc.RpcError as error:
        raise error_of(error, target) from None
    except (ValueError, grpc.aio.UsageError) as error:
        raise InvalidInput(f"the client of {target} is closed ({error}); open another one") from None


def stream_broke_off(target: str) -> Unavailable:
    """A stream that ended without its last event."""
    return Unavailable(f"{target} broke the stream off before its end; ask again")


def not_ready(target: str, timeout_s: float) -> Unavailable:
    """A server that did not come to serve in time."""
    return Unavailable(f"{target} was not ready within {timeout_s:g} s; check the address, and the server's log")


class Transport:
    """A channel and the calls over it; in a child of the process that opened it, another channel."""

    def __init__(
        self, target: str, timeout_s: float, max_message_bytes: int, token: str | None, tls: Tls | None
    ) -> None:
        """Takes what `Client` takes. Raises InvalidInput where a file of `tls` cannot be read."""
        self._target, self._timeout_s, self._max_message_bytes = target, timeout_s, max_message_bytes
        self._metadata, self._open = metadata_of(token), partial(channel_to, grpc, target, max_message_bytes, tls)
        self._connect()

    def ask(self, question: Any, timeout_s: float | None = None) -> Any:
        """What the library would have answered."""
        message = codec.to_wire(question)
        with translate_rpc_errors(self._target):
            reply = self._rpc(type(question))(message, **self._with(timeout_s))
        return codec.response_from_wire(reply)

    def append(self, session: str, text: str, token_ids: Sequence[int], timeout_s: float | None) -> Any:
        """Reads a text, or tokens, into a session; what is then known of it."""
        with translate_rpc_errors(self._target):
            reply = self._rpc(AppendToSessionRequest)(
                append_requests(session, text, token_ids), **self._with(timeout_s)
            )
        return codec.response_from_wire(reply)

    def add(
        self, request: AddDocumentsRequest, documents: Iterable[NewDocument | Document], timeout_s: float | None
    ) -> Any:
        """Sends documents to be added; how far that operation is."""
        messages = RequestStream(add_document_requests(request, documents, self._max_message_bytes))
        with messages.reraising_producer_errors(), translate_rpc_errors(self._target):
            call = self._rpc(AddDocumentsRequest).future(messages, **self._with(timeout_s))
            messages.bind_call(call)
            reply = call.result()
        return codec.response_from_wire(reply)

    def events(self, request: GenerateRequest, timeout_s: float | None) -> Generator[GenerationEvent, None, None]:
        """A generation's events, over as many connections as they take. Closing it stops the generation."""
        heard = StreamResumer(request, self._allowed_s(timeout_s))
        try:
            while True:
                try:
                    with closing(self._heard(heard)) as events:
                        for event in events:
                            if heard.is_new(event):
                                yield event
                    return
                except (Unavailable, NotFound) as error:
                    time.sleep(heard.resume(error))
        except GeneratorExit:
            if heard.must_be_cancelled:
                with suppress(MemlmError):
                    self.ask(CancelGenerationRequest(heard.request_id))
            raise

    def wait_until_ready(self, timeout_s: float) -> None:
        """Waits until the server serves. Raises Unavailable where it does not in time."""
        self._check_process()
        check, deadline_s = health_pb2_grpc.HealthStub(self._channel).Check, time.monotonic() + timeout_s
        while (left_s := deadline_s - time.monotonic()) > 0:
            with suppress(grpc.RpcError):
                health = check(health_pb2.HealthCheckRequest(), timeout=left_s, wait_for_ready=True)
                if health.status == health_pb2.HealthCheckResponse.SERVING:
                    return
            time.sleep(READY_POLL_S)
        raise not_ready(self._target, timeout_s)

    def close(self) -> None:
        """Closes the channel; what goes on over it is stopped."""
        self._channel.close()

    def _connect(self) -> None:
        self._channel, self._pid = self._open(), os.getpid()
        self._rpcs = rpcs_by_request(self._channel)

    def _check_process(self) -> None:
        if os.getpid() != self._pid:
            self._connect()

    def _rpc(self, question: type) -> Any:
        """The call that asks a kind of question."""
        self._check_process()
        return self._rpcs[question.__name__]

    def _allowed_s(self, timeout_s: float | None) -> float:
        return self._timeout_s if timeout_s is None else timeout_s

    def _with(self, timeout_s: float | None) -> dict[str, Any]:
        """What goes with a call: its time, and who calls."""
        return {"timeout": self._allowed_s(timeout_s), "metadata": self._metadata}

    def _heard(self, heard: StreamResumer) -> Generator[GenerationEvent, None, None]:
        """The events of one connection, to the last."""
        asked = codec.to_wire(heard.question)
        with translate_rpc_errors(self._target):
            call = self._rpc(type(heard.question))(asked, **self._with(heard.left_s))
        try:
            event: GenerationEvent = ()
            while not isinstance(event, Finished):
                with translate_rpc_errors(self._target):
                    message = next(call, None)
                if message is None:
                    raise stream_broke_off(self._target)
                event = codec.event_from_wire(message)
                yield event
            with suppress(grpc.RpcError):  # the status says no more than the event did; not to wait for it is to cancel
                next(call, None)
        finally:
            call.cancel()
