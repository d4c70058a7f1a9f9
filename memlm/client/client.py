"""Ask a memlm server from Python: the same calls and the same dataclasses as in process.

    with Client("localhost:50051") as client:
        for token in client.generate("def main(", max_tokens=64, neighbors=4):
            print(token.text, end="")

`memlm.AsyncClient` is the same, awaited. Needs neither torch nor Faiss. Every failure is an error of `memlm.errors`,
with the server's own reason; calls that change nothing are tried again while the server is unavailable.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import TracebackType
from typing import Any, cast

from memlm.api.datastores import SearchRequest
from memlm.api.generation import DetokenizeRequest, Neighbor, TokenizeRequest, TokenStream
from memlm.api.params import GenerateRequest, RetrievalParams
from memlm.api.scoring import Score, ScoreRequest
from memlm.api.server import GetModelRequest, GetServerInfoRequest, ModelInfo, ServerInfo
from memlm.api.sessions import (
    CreateSessionRequest,
    DeleteSessionRequest,
    ForkSessionRequest,
    GetSessionRequest,
    ListSessionsRequest,
    Session,
    SessionInfo,
)
from memlm.client.datastores import Datastores, Operations
from memlm.client.resume import DEFAULT_TIMEOUT_S, Tls
from memlm.wire.limits import DEFAULT_MAX_MESSAGE_BYTES


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
        from memlm.client.transport import Transport  # here, so that only who connects loads gRPC

        self.target = target
        self._transport = Transport(target, timeout_s, max_message_bytes, token, tls)
        self.operations = Operations(self._transport)
        self.datastores = Datastores(self._transport, self.operations)

    def generate(self, prompt: str, *, timeout_s: float | None = None, **options: Any) -> TokenStream:
        """Continues a prompt, token by token; the options are those of `LanguageModel.generate`.

        Raises what the server tells: InvalidInput, NotFound, Overloaded, ... Closing the stream stops the work there.
        """
        return TokenStream(self._transport.events(GenerateRequest.of(prompt, options), timeout_s))

    def score(
        self, text: str, *, token_scores: bool = False, timeout_s: float | None = None, **retrieval: Any
    ) -> Score:
        """The text's log-probability; `retrieval` are the fields of `RetrievalParams`."""
        return cast(
            Score, self._transport.ask(ScoreRequest(text, RetrievalParams.of(**retrieval), token_scores), timeout_s)
        )

    def search(
        self, store: str | None, text: str, *, k: int = 8, nprobe: int | None = None, timeout_s: float | None = None
    ) -> tuple[Neighbor, ...]:
        """The places of a datastore whose context is most like the end of `text`, nearest first.

        `store=None` asks all that are loaded.
        """
        return tuple(self._transport.ask(SearchRequest(text, store, k, nprobe), timeout_s))

    def tokenize(self, text: str, *, timeout_s: float | None = None) -> list[int]:
        """Token ids of a text."""
        return list(self._transport.ask(TokenizeRequest(text), timeout_s))

    def detokenize(self, token_ids: Sequence[int], *, timeout_s: float | None = None) -> str:
        """The text of some tokens. Raises InvalidInput for an id outside the vocabulary."""
        return str(self._transport.ask(DetokenizeRequest(tuple(token_ids)), timeout_s))

    def get_model(self, *, timeout_s: float | None = None) -> ModelInfo:
        """Shape, limits and fingerprints of the loaded model."""
        return cast(ModelInfo, self._transport.ask(GetModelRequest(), timeout_s))

    def get_server_info(self, *, timeout_s: float | None = None) -> ServerInfo:
        """The limits of the server, and its version."""
        return cast(ServerInfo, self._transport.ask(GetServerInfoRequest(), timeout_s))

    def session(self, *, ttl_s: float | None = None, timeout_s: float | None = None) -> Session:
        """A new session, which lives until it was not used for `ttl_s` seconds; see `memlm.api.sessions.Session`."""
        return Session(self, self._transport.ask(CreateSessionRequest(ttl_s), timeout_s).name)

    def append_to_session(
        self, name: str, text: str = "", *, token_ids: Sequence[int] = (), timeout_s: float | None = None
    ) -> SessionInfo:
        """Reads a text, or tokens, into a session, sent in pieces: all of it, or nothing."""
        return cast(SessionInfo, self._transport.append(name, text, token_ids, timeout_s))

    def get_session(self, name: str, *, timeout_s: float | None = None) -> SessionInfo:
        """What is known of a session. Raises NotFound where it has gone."""
        return cast(SessionInfo, self._transport.ask(GetSessionRequest(name), timeout_s))

    def list_sessions(self, *, timeout_s: float | None = None) -> tuple[SessionInfo, ...]:
        """The caller's sessions, the latest used first."""
        return tuple(self._transport.ask(ListSessionsRequest(), timeout_s))

    def fork_session(self, name: str, *, timeout_s: float | None = None) -> SessionInfo:
        """Another session that has read the same."""
        return cast(SessionInfo, self._transport.ask(ForkSessionRequest(name), timeout_s))

    def delete_session(self, name: str, *, timeout_s: float | None = None) -> SessionInfo:
        """Forgets a session; tells what it was."""
        return cast(SessionInfo, self._transport.ask(DeleteSessionRequest(name), timeout_s))

    def wait_until_ready(self, timeout_s: float = DEFAULT_TIMEOUT_S) -> None:
        """Waits until the server serves. Raises Unavailable where it does not in time."""
        self._transport.wait_until_ready(timeout_s)

    def close(self) -> None:
        """Closes the connection; generations still going on are stopped."""
        self._transport.close()

    def __enter__(self) -> Client:
        """Closes at the end of the block."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Closes."""
        self.close()
