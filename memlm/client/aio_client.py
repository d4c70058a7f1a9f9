"""The client of a memlm server, awaited. `memlm/client/client.py` is generated from this file.

    async with AsyncClient("localhost:50051") as client:
        async for token in await client.generate("def main(", max_tokens=64, neighbors=4):
            print(token.text, end="")

The methods and dataclasses are those of `memlm.LanguageModel`. The client needs neither torch nor Faiss. Failures raise
errors of `memlm.errors` with the server's message. Read-only calls are retried while the server is unavailable.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Sequence
from types import TracebackType
from typing import TypeVar, Unpack, cast, overload

from memlm.api.aio_handles import AsyncSession, AsyncTokenStream
from memlm.api.answers import Answer, AnswerRequest, FindPassagesRequest, passage_settings
from memlm.api.chat import ChatRequest, Conversation
from memlm.api.datastores import AddDocumentsRequest, RememberReport, SearchRequest
from memlm.api.feedback import feedback_request, nearest_request, with_feedback
from memlm.api.generation import (
    Completion,
    DetokenizeRequest,
    Neighbor,
    ResumeGenerationRequest,
    TokenizeRequest,
)
from memlm.api.options import ChatOptions, FilterOptions, GenerateOptions, RetrievalOptions, StreamOptions, TraceOptions
from memlm.api.paging import MAX_PAGE
from memlm.api.params import GenerateRequest, StreamRequest, batch_requests
from memlm.api.passages import Passage
from memlm.api.prompts import is_batch, token_ids_of
from memlm.api.request import Request
from memlm.api.scoring import Score, ScoreRequest
from memlm.api.server import GetModelRequest, GetServerInfoRequest, ModelInfo, ServerInfo
from memlm.api.sessions import (
    AppendToSessionRequest,
    CreateSessionRequest,
    DeleteSessionRequest,
    ForgetInSessionRequest,
    ForkSessionRequest,
    GetSessionRequest,
    ListSessionsRequest,
    SessionInfo,
)
from memlm.api.tracing import Trace, TraceRequest
from memlm.client.aio_datastores import AsyncDatastores, AsyncOperations
from memlm.client.resume import DEFAULT_TARGET, DEFAULT_TIMEOUT_S, Tls
from memlm.errors import InvalidInput, check_kind
from memlm.wire.limits import DEFAULT_MAX_MESSAGE_BYTES

R = TypeVar("R")

BATCH_STREAMS = 8  # generations of a batch that run side by side


class AsyncClient:
    """A connection to a server.

    `Client` may be used from several threads, `AsyncClient` from one event loop. A forked child connects anew, unless
    grpc was imported before the first client. `timeout_s` is the default time limit of a call. Messages larger than
    `max_message_bytes` are refused. `token` is sent with every call, encrypted with `tls`.
    """

    def __init__(
        self,
        target: str = DEFAULT_TARGET,
        *,
        timeout_s: float = DEFAULT_TIMEOUT_S,
        max_message_bytes: int = DEFAULT_MAX_MESSAGE_BYTES,
        token: str | None = None,
        tls: Tls | None = None,
    ) -> None:
        """Connects at the first call. `target` is HOST:PORT."""
        os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "true")  # grpc reads it when it is first imported
        from memlm.client.aio_transport import AsyncTransport  # here, so that importing a client does not load grpc

        self.target = target
        self._transport = AsyncTransport(target, timeout_s, max_message_bytes, token, tls)
        self.operations = AsyncOperations(self._transport)
        self.datastores = AsyncDatastores(self._transport, self.operations)

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.target}>"

    async def ask(self, request: Request[R], *, timeout_s: float | None = None) -> R:
        """Sends any request that has one answer, as the other methods do. Raises InvalidInput for those of
        `stream`, and for documents, which `datastores.add` adds.
        """
        if isinstance(request, StreamRequest | ResumeGenerationRequest | AddDocumentsRequest):
            raise InvalidInput(f"a {type(request).__name__} has no single answer; see `stream` and `datastores.add`")
        check_kind("request", request, Request, "a request of memlm.api")
        return await self._transport.ask(request, timeout_s)

    async def stream(self, request: StreamRequest, *, timeout_s: float | None = None) -> AsyncTokenStream:
        """Sends a request for a text: a `GenerateRequest`, `ChatRequest` or `AnswerRequest`."""
        check_kind("request", request, StreamRequest, "a GenerateRequest, ChatRequest or AnswerRequest")
        return await AsyncTokenStream.begin(self._transport.stream(request, timeout_s))

    @overload
    async def generate(
        self,
        prompt: str | Sequence[int] | GenerateRequest = "",
        *,
        timeout_s: float | None = None,
        **options: Unpack[GenerateOptions],
    ) -> AsyncTokenStream: ...

    @overload
    async def generate(
        self, prompt: list[str] | tuple[str, ...], *, timeout_s: float | None = None, **options: Unpack[GenerateOptions]
    ) -> tuple[Completion, ...]: ...

    async def generate(
        self,
        prompt: str | Sequence[int] | GenerateRequest | list[str] | tuple[str, ...] = "",
        *,
        timeout_s: float | None = None,
        **options: Unpack[GenerateOptions],
    ) -> AsyncTokenStream | tuple[Completion, ...]:
        """Continues a prompt, a text or token ids, token by token, with the options of `LanguageModel.generate`.

        Raises the server's error: InvalidInput, NotFound, Overloaded, ... Closing the stream stops the generation.
        """
        if is_batch(prompt):
            return await self.generate_batch(cast("Sequence[str]", prompt), timeout_s=timeout_s, **options)
        request = GenerateRequest.of(cast("str | Sequence[int] | GenerateRequest", prompt), options)
        return await self.stream(request, timeout_s=timeout_s)

    async def generate_batch(
        self,
        prompts: Sequence[str | Sequence[int]],
        *,
        timeout_s: float | None = None,
        **options: Unpack[GenerateOptions],
    ) -> tuple[Completion, ...]:
        """Continues several prompts, a few side by side, as `LanguageModel.generate_batch`."""
        streams, completions = deque[AsyncTokenStream](), list[Completion]()
        try:
            for request in batch_requests(prompts, options):
                if len(streams) == BATCH_STREAMS:
                    completions.append(await streams[0].result())
                    streams.popleft()
                streams.append(await self.stream(request, timeout_s=timeout_s))
            while streams:
                completions.append(await streams[0].result())
                streams.popleft()
            return tuple(completions)
        finally:
            for stream in streams:
                await stream.aclose()

    async def chat(
        self,
        messages: Conversation | ChatRequest,
        *,
        memory: str | None = None,
        timeout_s: float | None = None,
        **options: Unpack[ChatOptions],
    ) -> AsyncTokenStream:
        """Answers a conversation, token by token, with the options of `LanguageModel.generate`.

        The messages are `Message` objects, dicts of role and content, or the text of one user message. Raises NotFound
        for a model without a chat template, and else as `generate`.

        `memory` names a datastore with feedback (`remember_feedback`). Feedback on the most similar question is put
        behind the last message.
        """
        request = ChatRequest.of(messages, options)
        if memory is not None:
            found = await self.ask(nearest_request(request, memory), timeout_s=timeout_s)
            request = with_feedback(request, found)
        return await self.stream(request, timeout_s=timeout_s)

    async def remember_feedback(
        self, question: str, feedback: str, *, store: str | None = None, timeout_s: float | None = None
    ) -> RememberReport:
        """Remembers feedback on the answer to a question, as `LanguageModel.remember_feedback`."""
        return await self.ask(feedback_request(question, feedback, store), timeout_s=timeout_s)

    @overload
    async def score(
        self,
        text: str | Sequence[int],
        *,
        token_scores: bool = False,
        top_logprobs: int = 0,
        timeout_s: float | None = None,
        **retrieval: Unpack[RetrievalOptions],
    ) -> Score: ...

    @overload
    async def score(
        self,
        text: list[str] | tuple[str, ...],
        *,
        token_scores: bool = False,
        top_logprobs: int = 0,
        timeout_s: float | None = None,
        **retrieval: Unpack[RetrievalOptions],
    ) -> tuple[Score, ...]: ...

    async def score(
        self,
        text: str | Sequence[int] | list[str] | tuple[str, ...],
        *,
        token_scores: bool = False,
        top_logprobs: int = 0,
        timeout_s: float | None = None,
        **retrieval: Unpack[RetrievalOptions],
    ) -> Score | tuple[Score, ...]:
        """Log-probability of a text, or of token ids after the first one. `top_logprobs` likely tokens come with each
        of the `token_scores`. `retrieval` are the fields of `RetrievalParams`.
        """
        texts = cast("list[str | Sequence[int]]", text if is_batch(text) else [text])
        requests = [
            ScoreRequest.of(each, retrieval, token_scores=token_scores, top_logprobs=top_logprobs) for each in texts
        ]
        scores = [await self.ask(request, timeout_s=timeout_s) for request in requests]
        return tuple(scores) if is_batch(text) else scores[0]

    async def search(
        self,
        store: str | None,
        text: str,
        *,
        k: int = 8,
        nprobe: int | None = None,
        by: str = "state",
        timeout_s: float | None = None,
        **filters: Unpack[FilterOptions],
    ) -> tuple[Neighbor, ...]:
        """Finds places in a datastore (None: in all loaded ones), as `LanguageModel.search`."""
        return await self.ask(SearchRequest.of(text, store, k=k, nprobe=nprobe, by=by, **filters), timeout_s=timeout_s)

    async def find_passages(
        self,
        question: str,
        *,
        store: str | None = None,
        k: int = 8,
        by: str = "auto",
        exclude_documents: str | Sequence[str] = (),
        timeout_s: float | None = None,
        **filters: Unpack[FilterOptions],
    ) -> tuple[Passage, ...]:
        """Finds the passages that are likeliest to answer a question, as `LanguageModel.find_passages`."""
        request = FindPassagesRequest.of(
            question, store=store, k=k, by=by, exclude_documents=exclude_documents, **filters
        )
        return await self.ask(request, timeout_s=timeout_s)

    async def answer(
        self,
        question: str | AnswerRequest,
        passages: Sequence[Passage] | None = None,
        *,
        num_passages: int | None = None,
        passages_by: str = "auto",
        passage_stores: str | Sequence[str] = (),
        budget: int | None = None,
        mixture: bool = False,
        timeout_s: float | None = None,
        **options: Unpack[StreamOptions],
    ) -> Answer:
        """Answers a question from passages, as `LanguageModel.answer`. Raises NotFound if a document of the passages is
        deleted meanwhile, and else as `generate`.
        """
        settings = passage_settings(num_passages, passages_by, passage_stores, budget, mixture=mixture)
        request = AnswerRequest.of(question, passages, settings, options)
        stream = await self.stream(request, timeout_s=timeout_s)
        return Answer.of(await stream.result())

    async def stream_answer(
        self,
        question: str | AnswerRequest,
        passages: Sequence[Passage] | None = None,
        *,
        num_passages: int | None = None,
        passages_by: str = "auto",
        passage_stores: str | Sequence[str] = (),
        budget: int | None = None,
        mixture: bool = False,
        timeout_s: float | None = None,
        **options: Unpack[StreamOptions],
    ) -> AsyncTokenStream:
        """Answers a question as `answer`, token by token. `accepted.prompt` of the stream has the prompt and its
        passages, and `Answer.of` its result makes the whole answer.
        """
        settings = passage_settings(num_passages, passages_by, passage_stores, budget, mixture=mixture)
        request = AnswerRequest.of(question, passages, settings, options)
        return await self.stream(request, timeout_s=timeout_s)

    async def trace(
        self,
        text: str,
        store: str | None = None,
        *,
        timeout_s: float | None = None,
        **options: Unpack[TraceOptions],
    ) -> Trace:
        """Finds the passages of a text that stand word for word in datastores, as `LanguageModel.trace`."""
        return await self.ask(TraceRequest.of(text, store, **options), timeout_s=timeout_s)

    async def tokenize(self, text: str, *, timeout_s: float | None = None) -> list[int]:
        """Token ids of a text."""
        return list(await self.ask(TokenizeRequest(text), timeout_s=timeout_s))

    async def detokenize(self, token_ids: Sequence[int], *, timeout_s: float | None = None) -> str:
        """Text of token ids. Raises InvalidInput for an id outside the vocabulary."""
        return await self.ask(DetokenizeRequest(tuple(token_ids)), timeout_s=timeout_s)

    async def get_model(self, *, timeout_s: float | None = None) -> ModelInfo:
        """Shape, limits and fingerprints of the loaded model."""
        return await self.ask(GetModelRequest(), timeout_s=timeout_s)

    async def get_server_info(self, *, timeout_s: float | None = None) -> ServerInfo:
        """Version and limits of the server."""
        return await self.ask(GetServerInfoRequest(), timeout_s=timeout_s)

    async def session(
        self, *, ttl_s: float | None = None, adapter: str | None = None, timeout_s: float | None = None
    ) -> AsyncSession:
        """Creates a session, which expires `ttl_s` seconds after its last use. Its text is read with an `adapter`."""
        return AsyncSession(self, (await self.ask(CreateSessionRequest(ttl_s, adapter), timeout_s=timeout_s)).name)

    async def append_to_session(
        self, name: str, text: str = "", *, token_ids: Sequence[int] = (), timeout_s: float | None = None
    ) -> SessionInfo:
        """Appends a text or tokens to a session, sent in several messages: all of it, or nothing on an error."""
        return await self.ask(
            AppendToSessionRequest(name, text, token_ids_of("token_ids", token_ids, least=0)), timeout_s=timeout_s
        )

    async def get_session(self, name: str, *, timeout_s: float | None = None) -> SessionInfo:
        """Describes a session. Raises NotFound if it has expired."""
        return await self.ask(GetSessionRequest(name), timeout_s=timeout_s)

    async def list_sessions(self, *, timeout_s: float | None = None) -> tuple[SessionInfo, ...]:
        """The caller's sessions, last used first."""
        found, token = list[SessionInfo](), ""
        while True:
            page = await self.ask(ListSessionsRequest(MAX_PAGE, token), timeout_s=timeout_s)
            found += page.sessions
            if not (token := page.next_page_token):
                return tuple(sorted(found, key=lambda session: session.used_s, reverse=True))

    async def forget_in_session(
        self, name: str, start: int, stop: int, *, timeout_s: float | None = None
    ) -> SessionInfo:
        """Forgets the tokens of a session from `start` up to `stop`, as `Session.forget`."""
        return await self.ask(ForgetInSessionRequest(name, start, stop), timeout_s=timeout_s)

    async def fork_session(self, name: str, *, timeout_s: float | None = None) -> SessionInfo:
        """Copies a session under a new name."""
        return await self.ask(ForkSessionRequest(name), timeout_s=timeout_s)

    async def delete_session(self, name: str, *, timeout_s: float | None = None) -> SessionInfo:
        """Deletes a session and returns its last description."""
        return await self.ask(DeleteSessionRequest(name), timeout_s=timeout_s)

    async def wait_until_ready(self, timeout_s: float = DEFAULT_TIMEOUT_S) -> None:
        """Waits until the server serves. Raises Unavailable after `timeout_s`."""
        await self._transport.wait_until_ready(timeout_s)

    async def close(self) -> None:
        """Closes the connection and stops its generations."""
        await self._transport.close()

    async def __aenter__(self) -> AsyncClient:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.close()
