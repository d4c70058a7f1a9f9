"""A model with its datastores and sessions, for a caller that takes turns: long work comes as `Steps`.

`LanguageModel` runs all steps at once. The server's worker takes one a turn.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Generator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from memlm.api.answers import FindPassagesRequest
from memlm.api.datastores import (
    GetDatastoreRequest,
    ListDatastoresRequest,
    RememberReport,
    RememberRequest,
    SearchBy,
    SearchRequest,
    UnloadDatastoreRequest,
)
from memlm.api.generation import DetokenizeRequest, Neighbor, TokenizeRequest
from memlm.api.params import RetrievalParams, StreamRequest
from memlm.api.passages import Passage
from memlm.api.request import Request
from memlm.api.scoring import Score, ScoreRequest
from memlm.api.server import GetModelRequest, GetTokenizerRequest, ModelInfo, TokenizerInfo
from memlm.api.sessions import (
    AppendToSessionRequest,
    CreateSessionRequest,
    DeleteSessionRequest,
    ForgetInSessionRequest,
    ForkSessionRequest,
    GetSessionRequest,
    ListSessionsRequest,
)
from memlm.api.tracing import Trace, TraceRequest
from memlm.base.steps import Offload, Steps
from memlm.data.chat import ChatTemplate
from memlm.errors import Incompatible, InvalidInput, NotFound
from memlm.generation.answer_settings import AnswerSettings
from memlm.generation.early_exit import own_decoder_of
from memlm.generation.generation import Generation
from memlm.generation.loaded_stores import LoadedStores, PendingChange
from memlm.generation.prefix_cache import DEFAULT_MAX_BYTES, PrefixCache
from memlm.generation.remembering import entries_of
from memlm.generation.scoring import score_text
from memlm.generation.sessions.files import SessionState
from memlm.generation.sessions.sessions import Sessions
from memlm.index.store.derived.passage_vectors import PassageEncoder
from memlm.index.store.exclusion import search_views
from memlm.model.files.checkpoint import Checkpoint
from memlm.retrieval.context_cache import ContextCache
from memlm.retrieval.encoder import key_after
from memlm.retrieval.own_past import OwnPast
from memlm.retrieval.passage_search import find_passages
from memlm.retrieval.retriever import Retriever
from memlm.retrieval.store import ModelStore, OnLost, ViewSearch
from memlm.retrieval.tracing import trace

NO_STORE = "no datastore is loaded, and this needs one; load one"

R = TypeVar("R")


class Engine:
    """Not thread-safe, but for `stores.prepare_delete` and `stores.prepare_refresh`."""

    def __init__(
        self,
        checkpoint: Checkpoint,
        stores: Sequence[str | Path] | Mapping[str, str | Path] = (),
        sessions: Sessions | None = None,
        *,
        may_fail: Collection[str] = (),
        on_lost: OnLost = lambda store, document_ids: None,
        passage_encoder: PassageEncoder | None = None,
        search: ViewSearch = search_views,
        max_prefix_bytes: int = DEFAULT_MAX_BYTES,
    ) -> None:
        """Opens the datastores as `LoadedStores` does. With a `passage_encoder`, passages are found by its vectors. The
        states of texts that were read take at most `max_prefix_bytes`, and go where documents are deleted.
        """
        self.checkpoint, self.passage_encoder = checkpoint, passage_encoder
        self._answers: AnswerSettings | None = None
        self.prefixes = prefixes = PrefixCache(checkpoint.decoder, max_prefix_bytes)

        def lost(store: str, document_ids: Sequence[str] | None) -> None:
            prefixes.clear()
            on_lost(store, document_ids)

        self.sessions = Sessions(checkpoint) if sessions is None else sessions
        self.stores = LoadedStores(checkpoint, stores, may_fail=may_fail, on_lost=lost, search=search)
        self.stores.on_retired = prefixes.clear

    @property
    def answers(self) -> AnswerSettings:
        """How questions are asked with passages: as it is saved with the model, which is read at the first question.
        Raises Corrupt.
        """
        if self._answers is None:
            self._answers = AnswerSettings.of(self.checkpoint)
        return self._answers

    def ask_by(self, settings: AnswerSettings | None) -> None:
        """Asks by other settings from now on. None: by those that are saved."""
        self._answers = settings

    @property
    def info(self) -> ModelInfo:
        """Shape, limits and fingerprints of the model."""
        config = self.checkpoint.decoder.config
        return ModelInfo(
            name=self.checkpoint.path.name,
            num_parameters=self.checkpoint.decoder.num_parameters,
            vocab_size=config.vocab_size,
            context_length=config.context_length,
            dim=config.dim,
            num_layers=config.num_layers,
            dtype=self.checkpoint.decoder.dtype_name,
            model_fingerprint=self.checkpoint.fingerprint,
            tokenizer_fingerprint=self.checkpoint.tokenizer.fingerprint,
            device=str(self.checkpoint.decoder.device),
            adapters=self.checkpoint.decoder.adapters.names,
        )

    def tokenizer_info(self) -> Steps[TokenizerInfo]:
        """The special tokens and the chat template, which the first time is read outside the loop."""
        tokenizer = self.checkpoint.tokenizer

        def read_template() -> ChatTemplate | None:
            try:
                return self.checkpoint.chat_template
            except (NotFound, Incompatible):
                return None

        template: ChatTemplate | None = yield Offload(read_template)
        names = {number: text for text, number in tokenizer.special_tokens.items()}
        named = {} if template is None else template.tokens
        return TokenizerInfo(
            special_tokens=tokenizer.special_tokens,
            bos_token=names.get(tokenizer.start_id),
            eos_token=names.get(tokenizer.end_id),
            unk_token=named.get("unk_token"),
            pad_token=named.get("pad_token"),
            adds_bos=tokenizer.start_id in tokenizer.special.prefix,
            chat_template=None if template is None else template.source,
        )

    def ask(self, request: Request[R], *, owner: str = "") -> Steps[R]:
        """Returns the answer to a request that has one. `owner` is the owner of its sessions. Raises InvalidInput for a
        request that a model does not answer, and else what the request raises.
        """
        if (find := _ANSWERS.get(type(request))) is None:
            raise InvalidInput(f"a model alone does not answer a {type(request).__name__}; stream it, or ask a server")
        answer = find(self, request, owner)
        result: R = (yield from answer) if isinstance(answer, Generator) else answer
        return result

    def start(self, request: StreamRequest, *, request_id: str = "", owner: str = "") -> Steps[Generation]:
        """Makes a generation for a `Batch`, to be closed at its end. `owner` is the owner of its session."""
        adapter = self.sessions.adapter_of(request, owner=owner)
        retrieval = request.retrieval if adapter is None else self._beside_adapter(request.retrieval)
        retriever = yield from self._retriever(retrieval)
        own_decoder, most_past = own_decoder_of(self.checkpoint, request, retriever), self._most_past(retrieval)
        lease = None if request.session is None else self.sessions.lease(request.session, owner=owner)
        past = None if own_decoder else self._past(most_past, None if lease is None else lease.state)
        epoch = self.prefixes.epoch
        generation = yield from Generation.start(
            self.checkpoint, replace(request, adapter=adapter), retriever, past,
            request_id=request_id, lease=lease, own_decoder=own_decoder,
        )  # fmt: skip
        generation.epoch = epoch
        return generation

    def score(self, request: ScoreRequest) -> Steps[Score]:
        """Scores a text, a few windows a step. Raises InvalidInput for an empty one."""
        retriever = yield from self._retriever(request.retrieval)
        searched = retriever if retriever is not None and retriever.stores else None
        return (yield from score_text(self.checkpoint, request, searched, self.own_past(request.retrieval)))

    def remember(self, request: RememberRequest) -> Steps[RememberReport]:
        """Adds documents to a datastore, which are found from the last step on, and are on the disk then. They are read
        a piece a step. Raises as `LoadedStores.model_store` and `LoadedStores.prepare_remember` do.
        """
        store = self.stores.model_store(request.store)
        spec, keyed = store.snapshot.manifest.spec, store.snapshot.is_keyed
        documents = yield from entries_of(self.checkpoint, spec, request.documents, keyed=keyed)
        write = partial(self.stores.prepare_remember, store, spec, documents, replace=request.replace)
        pending: PendingChange[RememberReport] = yield Offload(write, is_long=True, must_end=True)
        return pending.apply()

    def own_past(self, params: RetrievalParams) -> OwnPast | None:
        """The past of a text as a memory, None for a request that does not use it.

        Raises InvalidInput for a model that was not tuned for it, if the request names a number of positions.
        """
        return self._past(self._most_past(params), None)

    def _most_past(self, params: RetrievalParams) -> int | None:
        """How many of the last positions a request searches, None for all. Raises InvalidInput as `own_past`."""
        most = params.context_cache
        if self.sessions.context_settings is None and most:
            raise InvalidInput(
                f"context_cache is {most}, but {self.checkpoint.path.name} was not tuned for it; run `memlm tune`"
                " on held-out text, or leave context_cache out",
                field="context_cache",
            )
        if params.spalm and most:
            raise InvalidInput("a trained gate mixes datastores alone; leave out context_cache or spalm", field="spalm")
        return 0 if most is None and (params.spalm or not params.use_store) else most

    def _past(self, most: int | None, session: SessionState | None) -> OwnPast | None:
        """The past of which `most` positions are searched. A session keeps it for later requests, even if none are."""
        settings = self.sessions.context_settings
        if settings is None or (most == 0 and session is None):
            return None
        cache = None if session is None else session.past_to_extend()
        return OwnPast(settings, cache or ContextCache(self.checkpoint.decoder.config.dim), most)

    def search(self, request: SearchRequest) -> Steps[tuple[Neighbor, ...]]:
        """Finds places in datastores. A long text is read in several steps, and words are indexed in several.

        Raises InvalidInput if no datastore is loaded, and Incompatible for one without keys, unless words are searched.
        """
        if request.by is SearchBy.WORDS:
            return (yield from self._search_words(request))
        stores = self._searched(request.store)
        if not any(store.snapshot.is_keyed for store in stores):
            stores[0].snapshot.check_searchable(stores[0].name)
        retriever = yield from self._retriever(request.retrieval)
        assert retriever is not None  # there is a datastore with keys
        key_1D = yield from key_after(self.checkpoint, request.text, retriever.window_size.window)
        if not request.only and request.as_of is None:
            return retriever.describe(retriever.search(key_1D), request.k)
        while True:  # the table of documents is read outside the loop
            snapshots = [store.snapshot for store in retriever.stores]
            result = yield Offload(partial(retriever.search, key_1D, only=request.only), is_long=True)
            if [store.snapshot for store in retriever.stores] == snapshots:  # no document was deleted meanwhile
                return retriever.describe(result, request.k)

    def find_passages(
        self, request: FindPassagesRequest, stores: Sequence[str] = (), *, before: str = "", close: bool = False
    ) -> Steps[tuple[Passage, ...]]:
        """Finds passages for a question, as `passage_search.find_passages`, in the datastores of these names, else in
        that of the request. Raises InvalidInput if no datastore is loaded.
        """
        names: Sequence[str | None] = stores or [request.store]
        return (
            yield from find_passages(self._searched(*names), request, self.passage_encoder, before=before, close=close)
        )

    def trace(self, request: TraceRequest) -> Steps[Trace]:
        """Finds the passages of a text that stand in datastores. Raises InvalidInput if no datastore is loaded."""
        stores = self._searched(request.store)
        return (yield from trace(stores, request, self.checkpoint.tokenizer))

    def _beside_adapter(self, params: RetrievalParams) -> RetrievalParams:
        """The parameters of a request with an adapter, which searches no datastore unless it names one.

        Raises InvalidInput for a named one with keys: they are those of the model alone, and would not be found by the
        adapter's.
        """
        names = [each.name for each in params.stores] or ([] if params.store is None else [params.store])
        if not params.use_store or not names:
            return replace(params, use_store=False)
        keyed = [store.name for store in self.stores.model_stores(names) if store.snapshot.is_keyed]
        if keyed:
            raise InvalidInput(
                f"the datastore {keyed[0]!r} has the keys of the model without the adapter; search none, or build one"
                " with the merged model (`memlm models merge`) and serve that",
                field="adapter",
            )
        return params

    def _retriever(self, params: RetrievalParams) -> Steps[Retriever | None]:
        """Returns the retriever of a request. Excluded documents are looked up outside the loop."""
        retriever = self.stores.shared_retriever(params)
        if retriever is None or not (params.exclude_documents or params.as_of):
            return retriever
        excluding = partial(retriever.excluding, params.exclude_documents, params.as_of)
        without: Retriever = yield Offload(excluding, is_long=params.as_of is not None)
        return without

    def _searched(self, *names: str | None) -> list[ModelStore]:
        """The datastores of some names, or all. Raises InvalidInput if none is loaded."""
        stores = self.stores.model_stores([name for name in names if name is not None])
        if not stores:
            raise InvalidInput(NO_STORE, field="store")
        return stores

    def _search_words(self, request: SearchRequest) -> Steps[tuple[Neighbor, ...]]:
        stores = self._searched(request.store)
        found: list[Neighbor] = []
        for store in stores:
            found += yield from store.find_phrase(request.text, request.k - len(found), request.only, request.as_of)
            if len(found) == request.k:
                break
        return tuple(found)


# How each kind of request is answered, at once or in steps: the request, and the owner of its sessions.
_ANSWERS: dict[type[Request[Any]], Callable[[Engine, Any, str], Any]] = {
    ScoreRequest: lambda engine, asked, _: engine.score(asked),
    SearchRequest: lambda engine, asked, _: engine.search(asked),
    FindPassagesRequest: lambda engine, asked, _: engine.find_passages(asked),
    TraceRequest: lambda engine, asked, _: engine.trace(asked),
    RememberRequest: lambda engine, asked, _: engine.remember(asked),
    TokenizeRequest: lambda engine, asked, _: engine.checkpoint.tokenizer.pack_steps(asked.text),
    DetokenizeRequest: lambda engine, asked, _: engine.checkpoint.tokenizer.decode_steps(asked.token_ids, whole=True),
    CreateSessionRequest: lambda engine, asked, owner: engine.sessions.create(
        owner=owner, ttl_s=asked.ttl_s, adapter=asked.adapter
    ),
    AppendToSessionRequest: lambda engine, asked, owner: engine.sessions.append(
        asked.session, asked.text, token_ids=asked.token_ids, owner=owner
    ),
    ForgetInSessionRequest: lambda engine, asked, owner: engine.sessions.forget(
        asked.session, asked.start, asked.stop, owner=owner
    ),
    ForkSessionRequest: lambda engine, asked, owner: engine.sessions.fork(asked.session, owner=owner),
    DeleteSessionRequest: lambda engine, asked, owner: engine.sessions.delete(asked.session, owner=owner),
    GetSessionRequest: lambda engine, asked, owner: engine.sessions.get(asked.session, owner=owner),
    ListSessionsRequest: lambda engine, _, owner: engine.sessions.list(owner=owner),
    GetModelRequest: lambda engine, *_: engine.info,
    GetTokenizerRequest: lambda engine, *_: engine.tokenizer_info(),
    ListDatastoresRequest: lambda engine, *_: engine.stores.infos,
    GetDatastoreRequest: lambda engine, asked, _: engine.stores.info(asked.store),
    UnloadDatastoreRequest: lambda engine, asked, _: engine.stores.unload(asked.store),
}
