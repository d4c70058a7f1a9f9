"""Ask a memlm server from Python: the same calls and the same dataclasses as in process.

    with Client("localhost:50051") as client:
        for token in client.generate("def main(", max_tokens=64, neighbors=4):
            print(token.text, end="")

`memlm.AsyncClient` is the same, awaited. Needs neither torch nor Faiss. Every failure is an error of
`memlm.errors`, with the server's own reason; calls that change nothing are tried again while the server is
unavailable.
"""

from __future__ import annotations

import json
import time
from collections.abc import Generator, Iterator, Sequence
from contextlib import contextmanager
from types import TracebackType
from typing import Any, Self

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from memlm import wire
from memlm.api import (
    DeleteReport,
    GenerateRequest,
    GenerationEvent,
    MemoryParams,
    ModelInfo,
    Neighbor,
    Score,
    StoreInfo,
    TokenStream,
)
from memlm.errors import DeadlineExceeded, MemlmError
from memlm.status import error_of
from memlm.v1 import datastores_pb2 as stores
from memlm.v1 import datastores_pb2_grpc, generation_pb2_grpc
from memlm.v1 import generation_pb2 as gen

DEFAULT_TIMEOUT_S = 60.0
MAX_MESSAGE_BYTES = 64 << 20
READY_POLL_S = 0.05
_RETRIED = {
    "memlm.v1.Generation": ("Score", "Tokenize", "Detokenize", "GetModel"),
    "memlm.v1.Datastores": ("ListDatastores", "Search"),
}


class Client:
    """A connection to a server. Safe to use from several threads; not across a fork.

    `timeout_s` is how long each call may take, unless it says otherwise itself.
    """

    def __init__(self, target: str, *, timeout_s: float = DEFAULT_TIMEOUT_S) -> None:
        """Connects when first used; `target` is HOST:PORT."""
        self.target, self.timeout_s = target, timeout_s
        self._channel = grpc.insecure_channel(target, options=channel_options())
        self._generation = generation_pb2_grpc.GenerationStub(self._channel)
        self.datastores = Datastores(self)

    def generate(self, prompt: str, *, timeout_s: float | None = None, **options: Any) -> TokenStream:
        """Continues a prompt, token by token; the options are those of `LanguageModel.generate`.

        Raises what the server tells: InvalidInput, NotFound, Overloaded, ... Closing the stream stops the work there.
        """
        request = wire.generate_request_to(GenerateRequest.of(prompt, options))
        return TokenStream(self._events(request, timeout_s))

    def score(self, text: str, *, token_scores: bool = False, timeout_s: float | None = None, **memory: Any) -> Score:
        """The text's log-probability; `memory` are the fields of `MemoryParams`."""
        request = score_request(text, token_scores, memory)
        return wire.score_from(self._call(self._generation.Score, request, timeout_s))

    def search(
        self, store: str | None, text: str, *, k: int = 8, nprobe: int | None = None, timeout_s: float | None = None
    ) -> tuple[Neighbor, ...]:
        """The places of a datastore (None: the only one) whose context is most like the end of `text`, nearest first."""
        request = stores.SearchRequest(text=text, store=store, k=k, nprobe=nprobe)
        answer = self._call(self.datastores._stub.Search, request, timeout_s)
        return tuple(map(wire.neighbor_from, answer.neighbors))

    def tokenize(self, text: str, *, timeout_s: float | None = None) -> list[int]:
        """Token ids of a text."""
        return list(self._call(self._generation.Tokenize, gen.TokenizeRequest(text=text), timeout_s).token_ids)

    def detokenize(self, token_ids: Sequence[int], *, timeout_s: float | None = None) -> str:
        """The text of some tokens."""
        request = gen.DetokenizeRequest(token_ids=token_ids)
        return str(self._call(self._generation.Detokenize, request, timeout_s).text)

    def get_model(self, *, timeout_s: float | None = None) -> ModelInfo:
        """Shape, limits and fingerprints of the loaded model."""
        return wire.model_from(self._call(self._generation.GetModel, gen.GetModelRequest(), timeout_s))

    def wait_until_ready(self, timeout_s: float = DEFAULT_TIMEOUT_S) -> None:
        """Waits until the server serves. Raises DeadlineExceeded, with its last word, where it does not in time."""
        check, deadline = health_pb2_grpc.HealthStub(self._channel).Check, time.monotonic() + timeout_s
        while (left := deadline - time.monotonic()) > 0:
            try:
                answer = check(health_pb2.HealthCheckRequest(), timeout=left, wait_for_ready=True)
            except grpc.RpcError as error:
                raise DeadlineExceeded(f"{self.target} is not ready: {error_of(error, self.target)}") from None
            if answer.status == health_pb2.HealthCheckResponse.SERVING:
                return
            time.sleep(READY_POLL_S)
        raise DeadlineExceeded(f"{self.target} answers, but was not ready within {timeout_s:g} s; look at its log")

    def close(self) -> None:
        """Closes the connection; generations still going on are stopped."""
        self._channel.close()

    def __enter__(self) -> Self:
        """Closes at the end of the block."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Closes."""
        self.close()

    def _call(self, method: Any, request: Any, timeout_s: float | None) -> Any:
        with told_as_ours(self.target):
            return method(request, timeout=self.timeout_s if timeout_s is None else timeout_s)

    def _events(self, request: gen.GenerateRequest, timeout_s: float | None) -> Generator[GenerationEvent, None, None]:
        call = self._generation.Generate(request, timeout=self.timeout_s if timeout_s is None else timeout_s)
        try:
            with told_as_ours(self.target):
                for message in call:
                    yield wire.event_from(message)
        finally:
            call.cancel()


class Datastores:
    """The datastores that the server has loaded."""

    def __init__(self, client: Client) -> None:
        """`Client.datastores` is one."""
        self._client = client
        self._stub = datastores_pb2_grpc.DatastoresStub(client._channel)

    def list(self, *, timeout_s: float | None = None) -> tuple[StoreInfo, ...]:
        """All of them, with their defaults."""
        answer = self._client._call(self._stub.ListDatastores, stores.ListDatastoresRequest(), timeout_s)
        return tuple(map(wire.store_from, answer.datastores))

    def delete_documents(
        self, store: str | None, document_ids: Sequence[str], *, timeout_s: float | None = None
    ) -> DeleteReport:
        """Deletes documents of a datastore (None: the only one); once this returns, they contribute to no answer.

        Raises NotFound, naming it, where one is not there: then none is deleted. Never tried twice by itself.
        """
        request = stores.DeleteDocumentsRequest(store=store, document_ids=document_ids)
        return wire.deleted_from(self._client._call(self._stub.DeleteDocuments, request, timeout_s))


def score_request(text: str, token_scores: bool, memory: dict[str, Any]) -> gen.ScoreRequest:
    """A text to score, and the fields of `MemoryParams`."""
    return gen.ScoreRequest(text=text, memory=wire.memory_to(MemoryParams(**memory)), token_scores=token_scores)


@contextmanager
def told_as_ours(target: str) -> Iterator[None]:
    """Raises a failed call's reason as one of our errors."""
    try:
        yield
    except MemlmError:
        raise
    except grpc.RpcError as error:
        raise error_of(error, target) from None


def channel_options() -> list[tuple[str, Any]]:
    """How both clients connect: large answers, retries of calls that change nothing, keepalive."""
    retries = {"maxAttempts": 4, "initialBackoff": "0.1s", "maxBackoff": "2s", "backoffMultiplier": 2}
    names = [{"service": service, "method": method} for service, methods in _RETRIED.items() for method in methods]
    config = {"methodConfig": [{"name": names, "retryPolicy": {**retries, "retryableStatusCodes": ["UNAVAILABLE"]}}]}
    return [
        ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
        ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
        ("grpc.service_config", json.dumps(config)),
        ("grpc.keepalive_time_ms", 60_000),
    ]
