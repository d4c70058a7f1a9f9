"""Ask a memlm server from Python: the same calls and the same dataclasses as in process.

    with Client("localhost:50051") as client:
        for token in client.generate("def main(", max_tokens=64, neighbors=4):
            print(token.text, end="")

`memlm.AsyncClient` is the same, awaited. Needs neither torch nor Faiss. Every failure is an error of `memlm.errors`,
with the server's own reason; calls that change nothing are tried again while the server is unavailable.
"""

from __future__ import annotations

import os
import time
from collections.abc import Generator, Sequence
from contextlib import closing, suppress
from types import TracebackType
from typing import Any, cast

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from memlm import wire
from memlm.connection import (
    DEFAULT_MAX_MESSAGE_BYTES,
    DEFAULT_TIMEOUT_S,
    READY_POLL_S,
    Heard,
    Tls,
    appends_of,
    broken_off,
    channel_to,
    metadata_of,
    not_ready,
    our_errors,
    rpcs_of,
)
from memlm.datastores import Datastores, Operations
from memlm.errors import MemlmError, NotFound, Unavailable
from memlm.events import Finished, GenerationEvent, Neighbor, TokenStream
from memlm.params import GenerateRequest, MemoryParams
from memlm.questions import (
    AppendToSessionRequest,
    CancelGenerationRequest,
    CreateSessionRequest,
    DeleteSessionRequest,
    DetokenizeRequest,
    ForkSessionRequest,
    GetModelRequest,
    GetServerInfoRequest,
    GetSessionRequest,
    ListSessionsRequest,
    ScoreRequest,
    SearchRequest,
    TokenizeRequest,
)
from memlm.reports import ModelInfo, Score, ServerInfo, SessionInfo
from memlm.session import Session


class Client:
    """A connection to a server. Safe to use from several threads; after a fork the child connects anew (where grpc was
    not imported before memlm).

    `timeout_s` is how long a call may take unless it says otherwise itself. Answers and questions larger than
    `max_message_bytes` are refused. A server may want a `token`, which goes with every call, and `tls`.
    """

    def __init__(
        self,
        target: str,
        *,
        timeout_s: float = DEFAULT_TIMEOUT_S,
        max_message_bytes: int = DEFAULT_MAX_MESSAGE_BYTES,
        token: str | None = None,
        tls: Tls | None = None,
    ) -> None:
        """Connects when first used; `target` is HOST:PORT."""
        self.target, self.timeout_s = target, timeout_s
        self._tls, self._metadata = tls, metadata_of(token)
        self.max_message_bytes = max_message_bytes
        self._connect()
        self.datastores, self.operations = Datastores(self), Operations(self)

    def generate(self, prompt: str, *, timeout_s: float | None = None, **options: Any) -> TokenStream:
        """Continues a prompt, token by token; the options are those of `LanguageModel.generate`.

        Raises what the server tells: InvalidInput, NotFound, Overloaded, ... Closing the stream stops the work there.
        """
        return TokenStream(self._events(GenerateRequest.of(prompt, options), timeout_s))

    def score(self, text: str, *, token_scores: bool = False, timeout_s: float | None = None, **memory: Any) -> Score:
        """The text's log-probability; `memory` are the fields of `MemoryParams`."""
        return cast(Score, self._ask(ScoreRequest(text, MemoryParams.of(**memory), token_scores), timeout_s))

    def search(
        self, store: str | None, text: str, *, k: int = 8, nprobe: int | None = None, timeout_s: float | None = None
    ) -> tuple[Neighbor, ...]:
        """The places of a datastore whose context is most like the end of `text`, nearest first.

        `store=None` asks all that are loaded.
        """
        return tuple(self._ask(SearchRequest(text, store, k, nprobe), timeout_s))

    def tokenize(self, text: str, *, timeout_s: float | None = None) -> list[int]:
        """Token ids of a text."""
        return list(self._ask(TokenizeRequest(text), timeout_s))

    def detokenize(self, token_ids: Sequence[int], *, timeout_s: float | None = None) -> str:
        """The text of some tokens. Raises InvalidInput for an id outside the vocabulary."""
        return str(self._ask(DetokenizeRequest(tuple(token_ids)), timeout_s))

    def get_model(self, *, timeout_s: float | None = None) -> ModelInfo:
        """Shape, limits and fingerprints of the loaded model."""
        return cast(ModelInfo, self._ask(GetModelRequest(), timeout_s))

    def get_server_info(self, *, timeout_s: float | None = None) -> ServerInfo:
        """The limits of the server, and its version."""
        return cast(ServerInfo, self._ask(GetServerInfoRequest(), timeout_s))

    def session(self, *, ttl_s: float | None = None, timeout_s: float | None = None) -> Session:
        """A new session, which lives until it was not used for `ttl_s` seconds; see `memlm.session.Session`."""
        return Session(self, self._ask(CreateSessionRequest(ttl_s), timeout_s).name)

    def append_to_session(
        self, name: str, text: str = "", *, token_ids: Sequence[int] = (), timeout_s: float | None = None
    ) -> SessionInfo:
        """Reads a text, or tokens, into a session, sent in pieces: all of it, or nothing."""
        with our_errors(self.target):
            reply = self._rpc(AppendToSessionRequest)(
                appends_of(name, text, token_ids), timeout=self._allowed_s(timeout_s), metadata=self._metadata
            )
        return cast(SessionInfo, wire.answer_from_wire(reply))

    def get_session(self, name: str, *, timeout_s: float | None = None) -> SessionInfo:
        """What is known of a session. Raises NotFound where it has gone."""
        return cast(SessionInfo, self._ask(GetSessionRequest(name), timeout_s))

    def list_sessions(self, *, timeout_s: float | None = None) -> tuple[SessionInfo, ...]:
        """The caller's sessions, the latest used first."""
        return tuple(self._ask(ListSessionsRequest(), timeout_s))

    def fork_session(self, name: str, *, timeout_s: float | None = None) -> SessionInfo:
        """Another session that has read the same."""
        return cast(SessionInfo, self._ask(ForkSessionRequest(name), timeout_s))

    def delete_session(self, name: str, *, timeout_s: float | None = None) -> SessionInfo:
        """Forgets a session; tells what it was."""
        return cast(SessionInfo, self._ask(DeleteSessionRequest(name), timeout_s))

    def wait_until_ready(self, timeout_s: float = DEFAULT_TIMEOUT_S) -> None:
        """Waits until the server serves. Raises Unavailable where it does not in time."""
        self._check_process()
        check, deadline_s = health_pb2_grpc.HealthStub(self._channel).Check, time.monotonic() + timeout_s
        while (left_s := deadline_s - time.monotonic()) > 0:
            with suppress(grpc.RpcError):
                health = check(health_pb2.HealthCheckRequest(), timeout=left_s, wait_for_ready=True)
                if health.status == health_pb2.HealthCheckResponse.SERVING:
                    return
            time.sleep(READY_POLL_S)
        raise not_ready(self.target, timeout_s)

    def close(self) -> None:
        """Closes the connection; generations still going on are stopped."""
        self._channel.close()

    def __enter__(self) -> Client:
        """Closes at the end of the block."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Closes."""
        self.close()

    def _connect(self) -> None:
        self._channel, self._pid = channel_to(grpc, self.target, self.max_message_bytes, self._tls), os.getpid()
        self._rpcs = rpcs_of(self._channel)

    def _rpc(self, question: type) -> Any:
        """The call that asks a kind of question; in a child of the process that connected, over its own channel."""
        self._check_process()
        return self._rpcs[question]

    def _check_process(self) -> None:
        if os.getpid() != self._pid:
            self._connect()

    def _allowed_s(self, timeout_s: float | None) -> float:
        return self.timeout_s if timeout_s is None else timeout_s

    def _ask(self, question: Any, timeout_s: float | None) -> Any:
        message = wire.to_wire(question)
        with our_errors(self.target):
            reply = self._rpc(type(question))(message, timeout=self._allowed_s(timeout_s), metadata=self._metadata)
        return wire.answer_from_wire(reply)

    def _events(self, request: GenerateRequest, timeout_s: float | None) -> Generator[GenerationEvent, None, None]:
        heard = Heard(request, self._allowed_s(timeout_s))
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
                    self._ask(CancelGenerationRequest(heard.request_id), None)
            raise

    def _heard(self, heard: Heard) -> Generator[GenerationEvent, None, None]:
        """The events of one connection, to the last."""
        asked = wire.to_wire(heard.question)
        with our_errors(self.target):
            call = self._rpc(type(heard.question))(asked, timeout=heard.left_s, metadata=self._metadata)
        try:
            event: GenerationEvent = ()
            while not isinstance(event, Finished):
                with our_errors(self.target):
                    message = next(call, None)
                if message is None:
                    raise broken_off(self.target)
                event = wire.event_from_wire(message)
                yield event
            with suppress(grpc.RpcError):  # the status says no more than the event did; not to wait for it is to cancel
                next(call, None)
        finally:
            call.cancel()
