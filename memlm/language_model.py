"""A model with its datastores and sessions, in this process: the object that `memlm.load` returns."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from types import TracebackType
from typing import Any, TypeVar, Unpack, cast, overload

import numpy as np
from jaxtyping import Float, Float32
from torch import Tensor

from memlm.api.answers import Answer, AnswerRequest, FindPassagesRequest, passage_settings
from memlm.api.chat import ChatRequest, Conversation
from memlm.api.datastores import (
    DeleteReport,
    ListDatastoresRequest,
    NewDocument,
    RememberReport,
    RememberRequest,
    SearchRequest,
    StoreInfo,
)
from memlm.api.feedback import feedback_request, nearest_request, with_feedback
from memlm.api.generation import Completion, Neighbor, TokenizeRequest
from memlm.api.handles import Session, TokenStream
from memlm.api.options import ChatOptions, FilterOptions, GenerateOptions, RetrievalOptions, StreamOptions, TraceOptions
from memlm.api.params import GenerateRequest, RetrievalParams, StreamRequest, batch_requests
from memlm.api.passages import Passage
from memlm.api.prompts import is_batch, token_ids_of
from memlm.api.request import Request
from memlm.api.scoring import Score, ScoreRequest
from memlm.api.server import ModelInfo
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
from memlm.base.figures import counted
from memlm.base.steps import run_steps
from memlm.data.tokenizer import Tokenizer
from memlm.errors import InvalidInput, MemlmError, check_kind, check_path
from memlm.generation.drive import complete_all
from memlm.generation.engine import Engine
from memlm.generation.likelihood import keys_of, logits_of, loglikelihood, split_ids
from memlm.generation.prefix_cache import DEFAULT_MAX_BYTES
from memlm.generation.sessions.sessions import Sessions
from memlm.index.store.derived.passage_vectors import PassageEncoder
from memlm.index.store.exclusion import search_views
from memlm.index.store.manifest import read_manifest
from memlm.model.files.adapter_files import attach_adapters
from memlm.model.files.checkpoint import Checkpoint, load_checkpoint
from memlm.model.files.encoder_files import encoder_of
from memlm.prompting.answers import stream_request
from memlm.retrieval.store import ModelStore, ViewSearch

R = TypeVar("R")


def load(
    model: str | Path,
    stores: Sequence[str | Path] | Mapping[str, str | Path] = (),
    *,
    dtype: str = "auto",
    device: str = "auto",
    attention_window: int | None = None,
    extended_attention: int | None = None,
    adapters: Sequence[str | Path] | Mapping[str, str | Path] = (),
    passage_encoder: str | Path | None = "auto",
) -> LanguageModel:
    """Loads a model, by its folder or its id on the Hugging Face hub, and datastores that it built.

    `stores` are folders, or folders by name. Without a name, a datastore has its folder's. `device` is cpu, cuda,
    cuda:N, mps, or auto for the first GPU or else the processor. `dtype` is float32, bfloat16, float16, int8, int4,
    gguf for the blocks of a GGUF file, or auto for what is fast on the device and changes nothing
    (`memlm.model.device`). With an `attention_window`, a token sees so many of the latest tokens and the first four, so
    that texts and sessions have any length. With `extended_attention` too, each head also sees so many of the tokens
    that have left the window. `adapters` are folders, or folders by name, for the option `adapter` of `generate`,
    `chat` and `session`. `passage_encoder` is the folder of a BERT encoder, whose vectors find passages by meaning in
    place of the model's keys. auto is the installed one, if there is one, which its first use loads, and None is none.
    Raises NotFound where a folder is missing, Incompatible for a datastore of another model, Corrupt for a damaged
    file, InvalidInput for a device that is not there.
    """
    _check_folders(stores)
    checkpoint = load_checkpoint(
        model, dtype=dtype, device=device, attention_window=attention_window, extended_attention=extended_attention
    )
    attach_adapters(checkpoint, adapters)
    return LanguageModel(checkpoint, stores, passage_encoder=encoder_of(passage_encoder, device=device))


class LanguageModel:
    """A model, its tokenizer, its datastores and its sessions. For one thread at a time."""

    def __init__(
        self,
        checkpoint: Checkpoint,
        stores: Sequence[str | Path] | Mapping[str, str | Path] = (),
        sessions: Sessions | None = None,
        *,
        may_fail: Collection[str] = (),
        passage_encoder: PassageEncoder | None = None,
        shards: Sequence[str] = (),
        partial: bool = False,
        max_prefix_bytes: int = DEFAULT_MAX_BYTES,
    ) -> None:
        """Opens the datastores. Those named in `may_fail` need not be usable now. `shards` are the addresses, HOST:PORT
        or unix:PATH, of processes that search them (`memlm shard`). With `partial`, generation and `score` go on
        without those that do not answer, and tell the share of the entries that was searched. The states of earlier
        texts, which prompts go on from, take at most `max_prefix_bytes` (0: none). Raises InvalidInput if
        two datastores share a name, and for `partial` without shards.
        """
        if partial and not shards:
            raise InvalidInput("partial is for shards; give some, or leave it out", field="partial")
        search: ViewSearch = search_views
        with ExitStack() as held:
            if shards:
                from memlm.distributed.shards import Shards  # here, since it loads grpc

                search = held.enter_context(Shards(shards, partial=partial)).search
            self.engine = Engine(
                checkpoint, stores, sessions, may_fail=may_fail, passage_encoder=passage_encoder, search=search,
                max_prefix_bytes=max_prefix_bytes,
            )  # fmt: skip
            self._held = held.pop_all()
        self.checkpoint = checkpoint

    def __repr__(self) -> str:
        stores = ", ".join(f"{info.name} of {counted(info.num_entries, 'entry')}" for info in self.stores) or "none"
        info = self.info
        return f"<LanguageModel {info.name}: {info.num_parameters:,} parameters, {info.dtype}; datastores: {stores}>"

    @property
    def info(self) -> ModelInfo:
        """Shape, limits and fingerprints of the model."""
        return self.engine.info

    @property
    def stores(self) -> tuple[StoreInfo, ...]:
        """The loaded datastores. One that cannot be used now has a `problem`."""
        return self.engine.stores.infos

    def ask(self, request: Request[R]) -> R:
        """Answers a request that has one answer, as the other methods do. Raises InvalidInput for one that only a
        server answers, and for a `StreamRequest`.
        """
        answer: Any = run_steps(self.engine.ask(request))
        if isinstance(request, ListDatastoresRequest | ListSessionsRequest):
            answer = request.page(answer)
        if isinstance(request, TokenizeRequest):
            answer = tuple(answer)  # of an array, which a server sends faster
        if isinstance(request, RememberRequest):
            with suppress(MemlmError, OSError):  # the text is remembered all the same
                self.engine.stores.merge_small()
                self.refresh()
        return cast(R, answer)

    def stream(self, request: StreamRequest) -> TokenStream:
        """Answers a request for a text, token by token: a `GenerateRequest`, `ChatRequest` or `AnswerRequest`."""
        check_kind("request", request, StreamRequest, "a GenerateRequest, ChatRequest or AnswerRequest")
        return TokenStream.begin(stream_request(self.engine, request))

    @overload
    def generate(
        self, prompt: str | Sequence[int] | GenerateRequest = "", **options: Unpack[GenerateOptions]
    ) -> TokenStream: ...

    @overload
    def generate(
        self, prompt: list[str] | tuple[str, ...], **options: Unpack[GenerateOptions]
    ) -> tuple[Completion, ...]: ...

    def generate(
        self,
        prompt: str | Sequence[int] | GenerateRequest | list[str] | tuple[str, ...] = "",
        **options: Unpack[GenerateOptions],
    ) -> TokenStream | tuple[Completion, ...]:
        """Continues a prompt, a text or token ids, token by token. A list of prompts is a `generate_batch`.

        Ids (also given as `prompt_token_ids`) are read as they are, special tokens included. The options are the fields
        of `SamplingParams` and `RetrievalParams`, and `neighbors`, `top_logprobs`, `session`, `early_exit`, `drafts`,
        `draft` and `adapter`. Raises InvalidInput for a prompt that does not fit the context, for an unknown option,
        and for a value out of range.
        """
        if is_batch(prompt):
            return self.generate_batch(cast("Sequence[str]", prompt), **options)
        return self.stream(GenerateRequest.of(cast("str | Sequence[int] | GenerateRequest", prompt), options))

    def chat(
        self, messages: Conversation | ChatRequest, *, memory: str | None = None, **options: Unpack[ChatOptions]
    ) -> TokenStream:
        """Answers a conversation, token by token, with the options of `generate`.

        The messages are `Message` objects, dicts of role and content, or the text of one user message. The model's
        template renders them, and the end of its turn ends the answer. With a session, the messages are those that are
        new. Raises NotFound for a model without a chat template, InvalidInput for messages that the template refuses.

        Where datastores are loaded, `num_passages` for the last user message are found in them and stand before it, as
        in `answer`: `accepted.prompt` of the stream has them. With 0, none are found, and neighbors are mixed in.

        `memory` names a datastore with feedback (`remember_feedback`). Feedback on the most similar question is put
        behind the last message.
        """
        request = ChatRequest.of(messages, options)
        if memory is not None:
            request = with_feedback(request, self.ask(nearest_request(request, memory)))
        return self.stream(request)

    def generate_batch(
        self, prompts: Sequence[str | Sequence[int]], **options: Unpack[GenerateOptions]
    ) -> tuple[Completion, ...]:
        """Continues several prompts side by side, with the options of `generate`. Completions are in the order of the
        prompts.

        Given a seed, prompt n is sampled with seed + n.
        """
        requests = batch_requests(prompts, options)
        generations = [run_steps(self.engine.start(request)) for request in requests]
        return complete_all(self.checkpoint, generations, self.engine.prefixes) if generations else ()

    def session(self, *, ttl_s: float | None = None, adapter: str | None = None) -> Session:
        """Creates a session. Its text is read once, with an `adapter`: later requests continue from its KV cache."""
        return Session(self, self.ask(CreateSessionRequest(ttl_s, adapter)).name)

    def append_to_session(self, name: str, text: str = "", *, token_ids: Sequence[int] = ()) -> SessionInfo:
        """Appends a text, or tokens, to a session: all of it, or nothing."""
        return self.ask(AppendToSessionRequest(name, text, token_ids_of("token_ids", token_ids, least=0)))

    def get_session(self, name: str) -> SessionInfo:
        """Describes a session. Raises NotFound for one that was deleted or has expired."""
        return self.ask(GetSessionRequest(name))

    def list_sessions(self) -> tuple[SessionInfo, ...]:
        """Describes all sessions, the most recently used first."""
        return self.engine.sessions.list()

    def forget_in_session(self, name: str, start: int, stop: int) -> SessionInfo:
        """Forgets the tokens of a session from `start` up to `stop`, as `Session.forget`."""
        return self.ask(ForgetInSessionRequest(name, start, stop))

    def fork_session(self, name: str) -> SessionInfo:
        """Copies a session."""
        return self.ask(ForkSessionRequest(name))

    def delete_session(self, name: str) -> SessionInfo:
        """Deletes a session, and returns its last description."""
        return self.ask(DeleteSessionRequest(name))

    @overload
    def score(
        self,
        text: str | Sequence[int],
        *,
        token_scores: bool = False,
        top_logprobs: int = 0,
        **retrieval: Unpack[RetrievalOptions],
    ) -> Score: ...

    @overload
    def score(
        self,
        text: list[str] | tuple[str, ...],
        *,
        token_scores: bool = False,
        top_logprobs: int = 0,
        **retrieval: Unpack[RetrievalOptions],
    ) -> tuple[Score, ...]: ...

    def score(
        self,
        text: str | Sequence[int] | list[str] | tuple[str, ...],
        *,
        token_scores: bool = False,
        top_logprobs: int = 0,
        **retrieval: Unpack[RetrievalOptions],
    ) -> Score | tuple[Score, ...]:
        """Returns the log-probability and perplexity of a text, or of token ids after the first one.

        `top_logprobs` likely tokens come with each of the `token_scores`. `retrieval` are the fields of
        `RetrievalParams`.
        """
        texts = cast("list[str | Sequence[int]]", text if is_batch(text) else [text])
        requests = [
            ScoreRequest.of(each, retrieval, token_scores=token_scores, top_logprobs=top_logprobs) for each in texts
        ]
        scores = tuple(self.ask(request) for request in requests)
        return scores if is_batch(text) else scores[0]

    def search(
        self,
        store: str | None,
        text: str,
        *,
        k: int = 8,
        nprobe: int | None = None,
        by: str = "state",
        **filters: Unpack[FilterOptions],
    ) -> tuple[Neighbor, ...]:
        """Finds places in a datastore, or in all that are loaded (`store=None`).

        By `state`, the k entries where the model was in the state in which it is at the end of `text`, nearest first;
        of a long text the last `context_length - 1` tokens count. By `words`, the first k places where the words of
        `text` follow each other, whatever their case, punctuation and line ends; the first such search of a datastore
        indexes its words. `filters` choose documents: `documents` are ids, folders or globs, `where` is metadata, and
        `as_of` a time, at which they have to hold. Raises InvalidInput if no datastore is loaded.
        """
        return self.ask(SearchRequest.of(text, store, k=k, nprobe=nprobe, by=by, **filters))

    def find_passages(
        self,
        question: str,
        *,
        store: str | None = None,
        k: int = 8,
        by: str = "auto",
        exclude_documents: str | Sequence[str] = (),
        **filters: Unpack[FilterOptions],
    ) -> tuple[Passage, ...]:
        """Finds the k passages of a datastore, or of all that are loaded (`store=None`), that are likeliest to answer a
        question, the best first. Passages of nearly the same text count once, and the best names the others.

        By `words`, they are ranked by BM25 (k1 1.2, b 0.75). By `meaning`, by the cosine of their vector and that of
        the question, by the `passage_encoder` of `load`. By `auto`, by the sum of both where there is an encoder, and
        else by words: passages whose vectors `memlm index vectors` or a server has not made yet count by their words.
        The first search of a datastore indexes its passages. `filters` are those of `search`, and `exclude_documents`
        count as deleted. Raises InvalidInput if no datastore is loaded, and Incompatible for a search by meaning
        without an encoder.
        """
        request = FindPassagesRequest.of(
            question, store=store, k=k, by=by, exclude_documents=exclude_documents, **filters
        )
        return self.ask(request)

    def answer(
        self,
        question: str | AnswerRequest,
        passages: Sequence[Passage] | None = None,
        *,
        num_passages: int | None = None,
        passages_by: str = "auto",
        passage_stores: str | Sequence[str] = (),
        budget: int | None = None,
        mixture: bool = False,
        **options: Unpack[StreamOptions],
    ) -> Answer:
        """Answers a question from passages, the best first, by default from the `num_passages` that `find_passages`
        finds: 1, or 4 for a model of a billion parameters and for a mixture. They are found `passages_by` auto,
        words or meaning, in `passage_stores`, by default in those of the options, or in all.

        The passages that fit into `budget` tokens (1,024, or what the context leaves) stand in the prompt, of a
        conversation where the model has a chat template. The model answers alone behind them, unless an option says how
        neighbors are mixed in. With `mixture`, each stands in a prompt of its own, and their distributions are mixed
        token by token, without a datastore (REALM, arXiv 2002.08909). The options are those of `chat`.
        `exclude_documents` and `as_of` hold for the passages too.
        """
        settings = passage_settings(num_passages, passages_by, passage_stores, budget, mixture=mixture)
        request = AnswerRequest.of(question, passages, settings, options)
        return Answer.of(self.stream(request).result())

    def stream_answer(
        self,
        question: str | AnswerRequest,
        passages: Sequence[Passage] | None = None,
        *,
        num_passages: int | None = None,
        passages_by: str = "auto",
        passage_stores: str | Sequence[str] = (),
        budget: int | None = None,
        mixture: bool = False,
        **options: Unpack[StreamOptions],
    ) -> TokenStream:
        """Answers a question as `answer`, token by token. `accepted.prompt` of the stream has the prompt and its
        passages, and `Answer.of` its result makes the whole answer.
        """
        settings = passage_settings(num_passages, passages_by, passage_stores, budget, mixture=mixture)
        request = AnswerRequest.of(question, passages, settings, options)
        return self.stream(request)

    def trace(self, text: str, store: str | None = None, **options: Unpack[TraceOptions]) -> Trace:
        """Finds the passages of a text that stand word for word in a datastore, or in all that are loaded
        (`store=None`), with their documents.

        `options` are the other fields of `TraceRequest`; `documents` may be one string, and `where` values by field.
        The first trace of a datastore sorts its tokens, which takes some seconds for ten million. Raises InvalidInput
        if no datastore is loaded.
        """
        return self.ask(TraceRequest.of(text, store, **options))

    def loglikelihood(
        self, context: str, continuation: str, **retrieval: Unpack[RetrievalOptions]
    ) -> tuple[float, bool]:
        """The log-probability of a continuation after a context, and whether greedy decoding would give it.

        The context begins as that of `generate` does. An empty context is the start of a text. Both answers
        are those of the mixture with datastores, and with the text's own past where the model was tuned for it. Raises
        InvalidInput for an empty continuation, and for too long a text.
        """
        for name, text in (("context", context), ("continuation", continuation)):
            check_kind(name, text, str, "a text")
        params = RetrievalParams.of(**retrieval)
        retriever, past = self.engine.stores.retriever(params), self.engine.own_past(params)
        context_ids, new_ids = split_ids(self.tokenizer, context, continuation)
        as_document = retriever is not None and retriever.knn.changes_output
        framed = self.tokenizer.framed(context_ids, as_document=as_document)
        return loglikelihood(self.checkpoint, framed, new_ids, retriever, past)

    def logits(self, text: str | Sequence[int]) -> Float[Tensor, "T V"]:
        """The model's logits in float32 after each token of a text or of token ids, without a datastore.

        A text begins as in `generate` without a datastore. The last row is about the token that follows.
        """
        ids = self.tokenizer.prompt(text) if isinstance(text, str) else token_ids_of("text", text)
        return logits_of(self.checkpoint, ids)

    def keys(self, text: str | Sequence[int]) -> Float32[np.ndarray, "T D"]:
        """The key after each token of a text or of token ids: the queries of `Datastore.search`.

        A text is read as the documents of a datastore are, behind one start token. So row t is the key before token t
        of `tokenize(text)`, and the last row is the key of the token behind the text. Ids are read as they are.
        """
        start = self.tokenizer.start_id
        ids = (start, *self.tokenize(text)) if isinstance(text, str) else token_ids_of("text", text)
        return keys_of(self.checkpoint, ids)

    @property
    def tokenizer(self) -> Tokenizer:
        """The model's tokenizer."""
        return self.checkpoint.tokenizer

    def tokenize(self, text: str) -> list[int]:
        """Returns the token ids of a text."""
        check_kind("text", text, str, "a text")
        return self.checkpoint.tokenizer.encode(text).tolist()

    def detokenize(self, token_ids: Sequence[int]) -> str:
        """Returns the text of tokens. Raises InvalidInput for an id outside the vocabulary."""
        return self.checkpoint.tokenizer.decode(token_ids_of("token_ids", token_ids, least=0), whole=True)

    def remember(
        self,
        text: str | Sequence[NewDocument],
        *,
        store: str | None = None,
        document_id: str | None = None,
        title: str = "",
        metadata: Mapping[str, Any] | None = None,
        replace: bool = False,
    ) -> RememberReport:
        """Adds a text, or up to 1,000 short documents, to a datastore at once. From then on every answer can use them,
        and they are on the disk.

        The default id of a text is a hash of it. `replace` replaces documents of these ids. Raises AlreadyExists for an
        id that is taken, and then adds nothing.
        """
        request = RememberRequest.of(
            text, store, document_id=document_id, title=title, metadata=metadata, replace=replace
        )
        return self.ask(request)

    def remember_feedback(self, question: str, feedback: str, *, store: str | None = None) -> RememberReport:
        """Remembers feedback on the answer to a question, in place of earlier feedback on it, for the `memory` of
        later chats (MemPrompt, arXiv 2201.06009). It is a document of the datastore, which can be deleted.
        """
        return self.ask(feedback_request(question, feedback, store))

    def delete_documents(self, document_ids: Sequence[str], *, store: str | None = None) -> DeleteReport:
        """Deletes documents for good: once this returns, they influence no answer.

        Raises NotFound with the ids that the datastore does not have, and then deletes none. Raises InvalidInput for
        one id in place of a list.
        """
        return self.engine.stores.prepare_delete(document_ids, store).apply()

    def load_datastore(self, path: str | Path, *, name: str | None = None, replace: bool = False) -> StoreInfo:
        """Opens one more datastore. With `replace`, it replaces the one of its name. Running generations keep theirs.

        Raises AlreadyExists for a name in use, Incompatible for a datastore of another model.
        """
        check_kind("name", name, (str, type(None)), "a name")
        opened = ModelStore.open(path, self.checkpoint, name or "")
        if opened.snapshot.is_keyed and getattr(self.checkpoint.decoder.cross, "neighbors", None) is not None:
            opened.datastore.close()
            raise InvalidInput(
                f"the keys of the datastore {opened.name!r} were made without the texts that the model reads now, and"
                " would not be found; leave out either",
                field="path",
            )
        return self.engine.stores.register_store(opened, replace=replace)

    def unload_datastore(self, name: str) -> StoreInfo:
        """Unloads a datastore. It is closed once no generation uses it. Its files stay."""
        return self.engine.stores.unload(name)

    def get_datastore(self, name: str | None = None) -> StoreInfo:
        """Describes a loaded datastore. Without a name, the only one."""
        return self.engine.stores.info(name)

    def refresh(self) -> bool:
        """Switches to the snapshots that are in the datastores' folders now. Returns whether any is another one.

        A folder may hold a later commit, an earlier state, or another store of this model. If it holds none that can be
        used, twice in a row or by another model, the datastore is unavailable until it does: calls that use it raise
        Incompatible, Corrupt or Unavailable.
        """
        return self.engine.stores.prepare_refresh().apply()

    def close(self) -> None:
        """Closes the datastores, and the connections to shards."""
        self.engine.stores.close()
        self._held.close()

    def __enter__(self) -> LanguageModel:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()


def _check_folders(stores: object) -> None:
    """Raises NotFound for a folder without a datastore, before the model is read."""
    folders = tuple(stores.values()) if isinstance(stores, Mapping) else stores
    for folder in folders if isinstance(folders, tuple | list) else ():
        check_path("stores", folder, "folders in a list, or folders by name")
        read_manifest(Path(folder))
