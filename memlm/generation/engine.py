"""A model with its datastores and sessions, for a caller that takes turns: long work comes as `Steps`.

`LanguageModel` runs all steps at once. The server's worker takes one a turn.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from pathlib import Path

from memlm.api.generation import Neighbor
from memlm.api.params import RetrievalParams, StreamRequest
from memlm.api.scoring import Score, ScoreRequest
from memlm.api.server import ModelInfo
from memlm.base.steps import Steps
from memlm.errors import InvalidInput
from memlm.generation.generation import Generation
from memlm.generation.loaded_stores import LoadedStores
from memlm.generation.scoring import score_text
from memlm.generation.sessions import Sessions
from memlm.model.checkpoint import Checkpoint
from memlm.retrieval.encoder import key_after
from memlm.retrieval.store import OnLost


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
    ) -> None:
        """Opens the datastores as `LoadedStores` does."""
        self.checkpoint = checkpoint
        self.sessions = Sessions(checkpoint) if sessions is None else sessions
        self.stores = LoadedStores(checkpoint, stores, may_fail=may_fail, on_lost=on_lost)

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

    def start(self, request: StreamRequest, *, request_id: str = "", owner: str = "") -> Steps[Generation]:
        """Makes a generation for a `Batch`, to be closed at its end. `owner` is the owner of its session."""
        retriever = self.stores.retriever(request.retrieval)
        lease = None if request.session is None else self.sessions.lease(request.session, owner=owner)
        return Generation.start(self.checkpoint, request, retriever, request_id=request_id, lease=lease)

    def score(self, request: ScoreRequest) -> Steps[Score]:
        """Scores a text, a few windows a step. Raises InvalidInput for an empty one."""
        return score_text(self.checkpoint, request, self.stores.retriever(request.retrieval))

    def search(
        self, text: str, *, k: int = 8, store: str | None = None, nprobe: int | None = None
    ) -> Steps[tuple[Neighbor, ...]]:
        """Finds the k entries with the context nearest to the end of a text. A long text is read in several steps.

        Raises InvalidInput if no datastore is loaded.
        """
        retriever = self.stores.retriever(RetrievalParams(store=store, k=k, nprobe=nprobe))
        if retriever is None:
            raise InvalidInput("no datastore is loaded, and search needs one; load one", field="store")
        key_1D = yield from key_after(self.checkpoint, text)
        return retriever.describe(retriever.search(key_1D), k)
