"""A model with its memories, in this process: what `memlm.load` gives, and what the server's worker drives."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
import torch

from memlm.batch import complete_all
from memlm.checkpoint import Checkpoint, load_checkpoint
from memlm.errors import AlreadyExists, InvalidInput, MemlmError, NotFound
from memlm.events import Completion, Neighbor, TokenStream
from memlm.generate import Generation
from memlm.keys import PIECE_TOKENS
from memlm.memory import Memory
from memlm.params import GenerateRequest, MemoryParams
from memlm.reports import DeleteReport, ModelInfo, Score, SessionInfo, StoreInfo
from memlm.retrieval import Retrieval
from memlm.scoring import score_steps, score_text
from memlm.session import Session
from memlm.sessions import Sessions
from memlm.steps import Steps, outcome_of


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
    ) -> None:
        """Opens the datastores. Raises InvalidInput where two of them share a name."""
        self.checkpoint = checkpoint
        self.sessions = Sessions(checkpoint) if sessions is None else sessions
        self._memories: dict[str, Memory] = {}
        self._retired: list[weakref.ref[Memory]] = []
        for name, path in stores.items() if isinstance(stores, Mapping) else (("", path) for path in stores):
            memory = Memory.open(path, checkpoint, name)
            if memory.name in self._memories:
                raise InvalidInput(
                    f"two datastores are called {memory.name!r}; rename the folder of one", field="stores"
                )
            self._memories[memory.name] = memory

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
        """The loaded datastores."""
        return tuple(memory.info for memory in self._memories.values())

    def generate(self, prompt: str, **options: Any) -> TokenStream:
        """Continues a prompt, token by token.

        The options are the fields of `SamplingParams` and `MemoryParams`, and `neighbors` and `top_logprobs`.
        Raises InvalidInput for a prompt that does not fit the context, for an unknown option, and for a value that
        means nothing.
        """
        return TokenStream(self.start(GenerateRequest.of(prompt, options)).events())

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
        return outcome_of(self.start_steps(request, request_id=request_id, owner=owner))

    def start_steps(self, request: GenerateRequest, *, request_id: str = "", owner: str = "") -> Steps[Generation]:
        """Does the work of `start`: a long prompt is encoded outside the loop."""
        retrieval = self.retrieval(request.memory)
        lease = None if request.session is None else self.sessions.lease(request.session, owner=owner)
        return Generation.steps(self.checkpoint, request, retrieval, request_id=request_id, lease=lease)

    def session(self, *, ttl_s: float | None = None) -> Session:
        """A new session: what is appended to it and generated in it is read once, and gone on from."""
        return Session(self, self.sessions.create(ttl_s=ttl_s).name)

    def append_to_session(self, name: str, text: str = "", *, token_ids: Sequence[int] = ()) -> SessionInfo:
        """Reads a text, or tokens, into a session: all of it, or nothing."""
        return outcome_of(self.sessions.append(name, text, token_ids=tuple(token_ids)))

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

    def score(self, text: str, *, token_scores: bool = False, **memory: Any) -> Score:
        """The text's log-probability; `memory` are the fields of `MemoryParams`."""
        return score_text(self.checkpoint, text, self.retrieval(MemoryParams.of(**memory)), token_scores=token_scores)

    def score_steps(self, text: str, memory: MemoryParams, *, token_scores: bool = False) -> Steps[Score]:
        """Does the work of `score`, a few windows a step."""
        return score_steps(self.checkpoint, text, self.retrieval(memory), token_scores=token_scores)

    def search(self, store: str | None, text: str, *, k: int = 8, nprobe: int | None = None) -> tuple[Neighbor, ...]:
        """The places of a datastore whose context is most like the end of `text`, nearest first.

        `store=None` asks all that are loaded. Of a long text the last `context_length - 1` tokens count. Raises
        InvalidInput where no datastore is loaded.
        """
        return outcome_of(self.search_steps(text, k=k, store=store, nprobe=nprobe))

    def search_steps(
        self, text: str, *, k: int = 8, store: str | None = None, nprobe: int | None = None
    ) -> Steps[tuple[Neighbor, ...]]:
        """Does the work of `search`, a piece of the text a step."""
        retrieval = self.retrieval(MemoryParams(store=store, k=k, nprobe=nprobe))
        if retrieval is None:
            raise InvalidInput("no datastore is loaded, and search needs one; load one", field="store")
        key_1D = yield from self._key_after(text)
        return retrieval.describe(retrieval.search(key_1D), k)

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
        return self.deleting(document_ids, store=store)()

    def deleting(self, document_ids: Sequence[str], *, store: str | None = None) -> Callable[[], DeleteReport]:
        """The same, in any thread; what it gives moves on to what was committed, in one step."""
        memory = self.memory(store)
        deleted, newer = memory.datastore.deleting(document_ids)

        def move() -> DeleteReport:
            memory.datastore.adopt(newer)
            for other in self._asked():  # the same folder by another name, or opened anew meanwhile
                if other.datastore.path.resolve() == memory.datastore.path.resolve():
                    other.datastore.refresh()
            return DeleteReport(memory.name, newer.manifest.number, deleted.num_documents, deleted.num_entries)

        return move

    def load_datastore(self, path: str | Path, *, name: str | None = None, replace: bool = False) -> StoreInfo:
        """Opens one more datastore; with `replace`, in the place of the one of that name.

        Raises AlreadyExists where there is one of that name, Incompatible for a datastore of another model.
        """
        return self.take_in(Memory.open(path, self.checkpoint, name or ""), replace=replace)

    def take_in(self, memory: Memory, *, replace: bool = False) -> StoreInfo:
        """The same, for one that was opened elsewhere, with what was committed since. What runs goes on as it began."""
        if memory.name in self._memories and not replace:
            memory.datastore.close()
            raise AlreadyExists(f"a datastore {memory.name!r} is loaded already; ask for its replacement (replace)")
        memory.datastore.refresh()
        if memory.name in self._memories:
            self._retire(self._memories[memory.name])
        self._memories[memory.name] = memory
        return memory.info

    def unload_datastore(self, name: str) -> StoreInfo:
        """Lets go of a datastore, once what runs has come to its end. Its files stay."""
        memory = self.memory(name)
        self._retire(memory)
        del self._memories[name]
        return memory.info

    def get_datastore(self, name: str | None = None) -> StoreInfo:
        """What is known of a loaded datastore; of no name, the only one."""
        return self.memory(name).info

    def refresh(self) -> bool:
        """Moves on to what other processes have committed to the datastores meanwhile; tells whether there was any. A
        store that cannot be read now stays as it is.
        """
        return sum(take() for take in self.newer()) > 0  # each of them, not only up to the first

    def newer(self) -> list[Callable[[], bool]]:
        """Opens what others have committed, in any thread; what it gives moves on to it, each in one step."""
        found: list[Callable[[], bool]] = []
        for memory in self._asked():
            with suppress(MemlmError, OSError):
                if newer := memory.datastore.newer():
                    found.append(partial(memory.datastore.adopt, newer))
        return found

    def _retire(self, memory: Memory) -> None:
        """Nobody new asks it; what runs may go on asking it, so it follows what is committed as long as it is held."""
        held = [retired for retired in self._retired if retired() is not None]
        self._retired = [*held, weakref.ref(memory)]

    def _asked(self) -> tuple[Memory, ...]:
        """The datastores in service, and those that something may have begun with; in any thread."""
        retired = [retired() for retired in tuple(self._retired)]
        return (*tuple(self._memories.values()), *(memory for memory in retired if memory is not None))

    def memory(self, name: str | None = None) -> Memory:
        """The loaded datastore of that name; of no name, the only one.

        Raises NotFound for a name that is not loaded, InvalidInput where there is not just one to choose.
        """
        names = ", ".join(self._memories) or "none"
        if name is not None and name not in self._memories:
            raise NotFound(f"no datastore {name!r} is loaded; loaded: {names}", kind="datastore", name=name)
        if name is None and len(self._memories) != 1:
            raise InvalidInput(
                f"store was left out, but not just one datastore is loaded; loaded: {names}", field="store"
            )
        return self._memories[name] if name is not None else next(iter(self._memories.values()))

    def retrieval(self, params: MemoryParams) -> Retrieval | None:
        """How a request asks its memory; None where it has none: none is loaded, or it wants the model alone."""
        names = [each.name for each in params.stores] or ([] if params.store is None else [params.store])
        if not params.use_store or not (names or self._memories):
            return None
        return Retrieval.of([self.memory(name) for name in names or self._memories], params)

    def close(self) -> None:
        """Closes the datastores."""
        for memory in self._memories.values():
            memory.datastore.close()

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
        state = None if len(inputs) <= PIECE_TOKENS else decoder.new_state(capacity=len(inputs))
        for begin in range(0, len(inputs), PIECE_TOKENS):
            with torch.inference_mode():
                keys_1TD = decoder.keys(torch.tensor([inputs[begin : begin + PIECE_TOKENS]]), state)
            if begin + PIECE_TOKENS < len(inputs):
                yield None
        key_1D: np.ndarray = keys_1TD[0, -1:].float().numpy()
        return key_1D
