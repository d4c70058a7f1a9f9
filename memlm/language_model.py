"""A model with its memories, in this process: what `memlm.load` gives, and what the server's worker drives."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any
from weakref import WeakValueDictionary

import numpy as np
import torch

from memlm.api.datastores import DeleteReport, StoreInfo
from memlm.api.generation import Completion, Neighbor
from memlm.api.handles import Session, TokenStream
from memlm.api.params import GenerateRequest, RetrievalParams
from memlm.api.scoring import Score
from memlm.api.server import ModelInfo
from memlm.api.sessions import SessionInfo
from memlm.base.steps import Steps, run_steps
from memlm.errors import InvalidInput
from memlm.generation.batch import complete_all, stream
from memlm.generation.generation import Generation
from memlm.generation.loaded_stores import LoadedStores
from memlm.generation.scoring import score_steps, score_text
from memlm.generation.sessions import Sessions
from memlm.model.checkpoint import Checkpoint, load_checkpoint
from memlm.retrieval.encoder import PASS_TOKENS
from memlm.retrieval.retriever import Retriever
from memlm.retrieval.store import ModelStore, OnLost


def load(
    model: str | Path, stores: Sequence[str | Path] | Mapping[str, str | Path] = (), *, dtype: str = "float32"
) -> LanguageModel:
    """Loads a model, by its folder or its id on the Hugging Face hub, and the datastores it built: by the names of
    their folders, or by names of their own.

    `dtype` is float32, bfloat16, or auto for the faster of them on this processor.
    Raises NotFound where one is missing, Incompatible for a datastore of another model, Corrupt for a damaged file.
    """
    return LanguageModel(load_checkpoint(model, dtype=dtype), stores)


class LanguageModel:
    """A decoder, its tokenizer and its memories. One thread at a time."""

    def __init__(
        self,
        checkpoint: Checkpoint,
        stores: Sequence[str | Path] | Mapping[str, str | Path] = (),
        sessions: Sessions | None = None,
        *,
        may_fail: Collection[str] = (),
        on_lost: OnLost = lambda store, document_ids: None,
    ) -> None:
        """Opens the datastores; those of the names in `may_fail` need not be usable now. `on_lost` is called at each
        move to a snapshot that lacks documents. Raises InvalidInput where two share a name.
        """
        self.checkpoint = checkpoint
        self.sessions = Sessions(checkpoint) if sessions is None else sessions
        self._retrievers: WeakValueDictionary[tuple[Any, ...], Retriever] = WeakValueDictionary()
        self._stores = LoadedStores(checkpoint, stores, may_fail=may_fail, on_lost=on_lost)

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
            dtype=str(self.checkpoint.decoder.dtype).removeprefix("torch."),
            model_fingerprint=self.checkpoint.fingerprint,
            tokenizer_fingerprint=self.checkpoint.tokenizer.fingerprint,
        )

    @property
    def stores(self) -> tuple[StoreInfo, ...]:
        """The loaded datastores; those that cannot be used now tell why (`problem`)."""
        return self._stores.infos

    def generate(self, prompt: str | GenerateRequest, **options: Any) -> TokenStream:
        """Continues a prompt, token by token.

        The options are the fields of `SamplingParams` and `RetrievalParams`, and `neighbors` and `top_logprobs`.
        Raises InvalidInput for a prompt that does not fit the context, for an unknown option, and for a value that
        means nothing.
        """
        return TokenStream.begin(stream(self.checkpoint, self.start(GenerateRequest.of(prompt, options))))

    def generate_batch(self, prompts: Sequence[str], **options: Any) -> tuple[Completion, ...]:
        """Continues several prompts side by side, with the options of `generate`; in the order of the prompts.

        Given a seed, the prompt at place n is drawn with seed + n.
        """
        if not prompts:
            return ()
        generations = []
        for number, prompt in enumerate(prompts):
            seed = options.get("seed")
            own = options if seed is None else {**options, "seed": seed + number}
            generations.append(self.start(GenerateRequest.of(prompt, own)))
        return complete_all(self.checkpoint, generations)

    def start(self, request: GenerateRequest, *, request_id: str = "", owner: str = "") -> Generation:
        """Makes a generation that is driven step by step, and then closed. `owner` is the owner of its session."""
        return run_steps(self.start_steps(request, request_id=request_id, owner=owner))

    def start_steps(self, request: GenerateRequest, *, request_id: str = "", owner: str = "") -> Steps[Generation]:
        """Does the work of `start`: a long prompt is encoded outside the loop."""
        retriever = self.retriever(request.retrieval)
        lease = None if request.session is None else self.sessions.lease(request.session, owner=owner)
        return Generation.start(self.checkpoint, request, retriever, request_id=request_id, lease=lease)

    def session(self, *, ttl_s: float | None = None) -> Session:
        """A new session: what is appended to it and generated in it is read once, and gone on from."""
        return Session(self, self.sessions.create(ttl_s=ttl_s).name)

    def append_to_session(self, name: str, text: str = "", *, token_ids: Sequence[int] = ()) -> SessionInfo:
        """Reads a text, or tokens, into a session: all of it, or nothing."""
        return run_steps(self.sessions.append(name, text, token_ids=tuple(token_ids)))

    def get_session(self, name: str) -> SessionInfo:
        """What is known of a session. Raises NotFound where it has gone."""
        return self.sessions.get(name)

    def list_sessions(self) -> tuple[SessionInfo, ...]:
        """All sessions, the latest used first."""
        return self.sessions.list()

    def fork_session(self, name: str) -> SessionInfo:
        """Another session that has read the same."""
        return self.sessions.fork(name)

    def delete_session(self, name: str) -> SessionInfo:
        """Forgets a session; tells what it was."""
        return self.sessions.delete(name)

    def score(self, text: str, *, token_scores: bool = False, **retrieval: Any) -> Score:
        """The text's log-probability; `retrieval` are the fields of `RetrievalParams`."""
        return score_text(
            self.checkpoint, text, self.retriever(RetrievalParams.of(**retrieval)), token_scores=token_scores
        )

    def score_steps(self, text: str, retrieval: RetrievalParams, *, token_scores: bool = False) -> Steps[Score]:
        """Does the work of `score`, a few windows a step."""
        return score_steps(self.checkpoint, text, self.retriever(retrieval), token_scores=token_scores)

    def search(self, store: str | None, text: str, *, k: int = 8, nprobe: int | None = None) -> tuple[Neighbor, ...]:
        """The places of a datastore whose context is most like the end of `text`, nearest first.

        `store=None` asks all that are loaded. Of a long text the last `context_length - 1` tokens count. Raises
        InvalidInput where no datastore is loaded.
        """
        return run_steps(self.search_steps(text, k=k, store=store, nprobe=nprobe))

    def search_steps(
        self, text: str, *, k: int = 8, store: str | None = None, nprobe: int | None = None
    ) -> Steps[tuple[Neighbor, ...]]:
        """Does the work of `search`, a piece of the text a step."""
        retriever = self.retriever(RetrievalParams(store=store, k=k, nprobe=nprobe))
        if retriever is None:
            raise InvalidInput("no datastore is loaded, and search needs one; load one", field="store")
        key_1D = yield from self._key_after(text)
        return retriever.describe(retriever.search(key_1D), k)

    def tokenize(self, text: str) -> list[int]:
        """Token ids of a text."""
        return self.checkpoint.tokenizer.encode(text).tolist()

    def detokenize(self, token_ids: Sequence[int]) -> str:
        """The text of some tokens. Raises InvalidInput for an id outside the vocabulary."""
        return self.checkpoint.tokenizer.decode(token_ids, whole=True)

    def delete_documents(self, document_ids: Sequence[str], *, store: str | None = None) -> DeleteReport:
        """Deletes documents for good: once this returns, they contribute to no answer.

        Raises NotFound, naming them, where some are not there; then none is deleted.
        """
        return self.prepare_delete(document_ids, store=store)()

    def prepare_delete(self, document_ids: Sequence[str], *, store: str | None = None) -> Callable[[], DeleteReport]:
        """The thread-safe first phase of `delete_documents`: commits the deletion, and gives what moves the open
        datastores to it in one step.
        """
        return self._stores.prepare_delete(document_ids, store)

    def load_datastore(self, path: str | Path, *, name: str | None = None, replace: bool = False) -> StoreInfo:
        """Opens one more datastore; with `replace`, in the place of the one of that name.

        Raises AlreadyExists where there is one of that name, Incompatible for a datastore of another model.
        """
        return self.register_store(ModelStore.open(path, self.checkpoint, name or ""), replace=replace)

    def register_store(self, store: ModelStore, *, replace: bool = False) -> StoreInfo:
        """`load_datastore` for a datastore that was opened elsewhere, with what was committed to it since. Generations
        that run go on with the one they began with.
        """
        return self._stores.register_store(store, replace=replace)

    def unload_datastore(self, name: str) -> StoreInfo:
        """Takes a datastore out of service; it is closed once no generation uses it. Its files stay."""
        return self._stores.unload(name)

    def get_datastore(self, name: str | None = None) -> StoreInfo:
        """What is known of a loaded datastore; of no name, the only one."""
        return self._stores.info(name)

    def refresh(self) -> bool:
        """Moves to the snapshots that are in the datastores' folders now; tells whether any is another one.

        A folder may hold a later commit, an earlier state, or another store of this model. Where it holds none that can
        be used, twice in a row or by another model, the datastore is unavailable until it does: calls that use it raise
        Incompatible, Corrupt or Unavailable.
        """
        return sum(move() for move in self.prepare_refresh()) > 0  # each of them, not only up to the first

    def prepare_refresh(self) -> list[Callable[[], bool]]:
        """The thread-safe first phase of `refresh`: opens what is in the folders now, and gives what moves to it."""
        return self._stores.prepare_refresh()

    def prepare_refresh_of(self, store: str) -> list[Callable[[], bool]]:
        """`prepare_refresh` for one datastore, under all its names. Raises if its folder cannot be read."""
        return self._stores.prepare_refresh_of(store)

    def model_store(self, name: str | None = None) -> ModelStore:
        """The loaded datastore of that name; of no name, the only one.

        Raises NotFound for a name that is not loaded, InvalidInput where there is not just one to choose, and
        Incompatible, Corrupt or Unavailable where its folder cannot be used.
        """
        return self._stores.model_store(name)

    def retriever(self, params: RetrievalParams) -> Retriever | None:
        """The settings with which a request searches its datastores; None where it uses none, or none is loaded.

        Raises what `model_store` raises, also for a request that names no datastore while one of them cannot be used.
        """
        names = [each.name for each in params.stores] or ([] if params.store is None else [params.store])
        if not params.use_store or not (names or len(self._stores)):
            return None
        retriever = Retriever.of(self._stores.model_stores(names), params)
        return self._retrievers.setdefault(retriever.settings, retriever)

    def close(self) -> None:
        """Closes the datastores."""
        self._stores.close()

    def __enter__(self) -> LanguageModel:
        """Closes at the end of the block."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Closes."""
        self.close()

    def _key_after(self, text: str) -> Steps[np.ndarray]:
        new = yield from self.checkpoint.tokenizer.encode_steps(text)
        inputs = [self.checkpoint.tokenizer.start_id, *new]
        longest, decoder = self.checkpoint.decoder.config.max_length, self.checkpoint.decoder
        inputs = inputs[-longest:] if longest else inputs
        state = None if len(inputs) <= PASS_TOKENS else decoder.new_state(capacity=len(inputs))
        for begin in range(0, len(inputs), PASS_TOKENS):
            with torch.inference_mode():
                keys_1TD = decoder.keys(torch.tensor([inputs[begin : begin + PASS_TOKENS]]), state)
            if begin + PASS_TOKENS < len(inputs):
                yield None
        key_1D: np.ndarray = keys_1TD[0, -1:].float().numpy()
        return key_1D
