"""A datastore, opened for one model: keys -> neighbours -> the words a person can read.

Keeps what the library and the server both promise: a store of another model is refused, what a request leaves open
comes from the store's own defaults, and every neighbour can say where it came from.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Float, Float32, Int64

from memlm.adaptive import AdaptiveLam, features_of
from memlm.api import MemoryParams, Neighbor, StoreInfo
from memlm.checkpoint import Checkpoint
from memlm.errors import Incompatible
from memlm.gate import load_gate
from memlm.index.datastore import Datastore
from memlm.index.neighbours import Neighbours
from memlm.interpolation import neighbor_logweights
from memlm.model.spalm import MemoryGate

SNIPPET_TOKENS = 12


@dataclass(frozen=True, slots=True)
class Retrieved:
    """What Q keys brought back: neighbours, nearest first, the logarithms of their weights in p_kNN, and how loudly
    they speak. Where the memory was not asked there are none.
    """

    neighbours: Neighbours
    logweights_QK: Float32[np.ndarray, "Q K"]
    lams_Q: Float[np.ndarray, " Q"]


class Memory:
    """One loaded datastore. Raises Incompatible for a store that another model or tokenizer built."""

    def __init__(self, datastore: Datastore, checkpoint: Checkpoint, name: str = "") -> None:
        """Takes an open datastore; its name is its folder's unless another is given."""
        check_fingerprints(datastore, checkpoint)
        self.datastore, self.name = datastore, name or datastore.path.name
        self._tokenizer, self._model = checkpoint.tokenizer, checkpoint.path

    @classmethod
    def open(cls, path: str | Path, checkpoint: Checkpoint, name: str = "") -> Memory:
        """Opens the datastore at `path` for a model."""
        return cls(Datastore.open(path), checkpoint, name)

    @property
    def info(self) -> StoreInfo:
        """Size and defaults, as of the manifest in use."""
        store = self.datastore
        return StoreInfo(
            name=self.name,
            path=str(store.path),
            manifest=store.manifest.number,
            num_entries=store.num_entries,
            num_documents=store.num_documents,
            num_deleted_documents=store.num_deleted_documents,
            dim=store.dim,
            index=store.index_kind,
            bytes_per_entry=store.bytes_on_disk / max(1, store.num_entries),
            k=store.defaults.k,
            lam=store.defaults.lam,
            knn_temperature=store.defaults.temperature,
            tuned_on=store.defaults.tuned_on,
        )

    def resolve(self, params: MemoryParams) -> Retrieval:
        """The request's settings, with the store's defaults where it left them open."""
        defaults = self.datastore.defaults
        lam = 0.0 if params.spalm else defaults.lam  # the gate already mixes: interpolation comes only when asked for
        return Retrieval(
            memory=self,
            k=defaults.k if params.k is None else params.k,
            lam=lam if params.lam is None else float(params.lam),
            temperature=defaults.temperature if params.knn_temperature is None else params.knn_temperature,
            nprobe=params.nprobe,
            gate=load_gate(self._model) if params.spalm else None,
            **self._as_tuned(params),
        )

    def _as_tuned(self, params: MemoryParams) -> dict[str, Any]:
        """What tuning found beyond one lam; for whoever asks for nothing else."""
        defaults = self.datastore.defaults
        if params.spalm or any(each is not None for each in (params.lam, params.k, params.knn_temperature)):
            return {}
        adaptive = None if defaults.adaptive is None else AdaptiveLam.of(defaults.adaptive)
        return {"adaptive": adaptive, "skip_above": defaults.skip_above}

    def describe(
        self,
        ids_K: Int64[np.ndarray, " K"],
        distances_K: Float32[np.ndarray, " K"],
        logweights_K: Float32[np.ndarray, " K"],
        values_K: Int64[np.ndarray, " K"],
    ) -> tuple[Neighbor, ...]:
        """Where each neighbour stands: document, line, and the text around it. Missing places are left out."""
        there_K = ids_K >= 0
        places = self.datastore.locate(ids_K[there_K])
        rows = zip(distances_K[there_K], logweights_K[there_K], values_K[there_K], places, strict=True)
        return tuple(
            Neighbor(
                store=self.name,
                document_id=place.document_id,
                title=place.title,
                token_offset=place.token_offset,
                line=self._line_of(place.document_id, place.token_offset),
                token_id=int(value),
                token_text=self._tokenizer.decode([int(value)]),
                distance=float(distance),
                weight=float(np.exp(logweight)),
                snippet=self._snippet(place.document_id, place.token_offset),
            )
            for distance, logweight, value, place in rows
        )

    def _line_of(self, document_id: str, token_offset: int) -> int:
        before = self.datastore.tokens(document_id, 0, token_offset)
        return 1 + int(self._tokenizer.newlines[before].sum())

    def _snippet(self, document_id: str, token_offset: int) -> str:
        begin = max(0, token_offset - SNIPPET_TOKENS)
        return self._tokenizer.decode(self.datastore.tokens(document_id, begin, token_offset + SNIPPET_TOKENS).tolist())


@dataclass(frozen=True, slots=True)
class Retrieval:
    """A memory and how it is asked: k neighbours, softmax temperature, weight lam in the mixture, and, where it is
    wanted, the gate that mixes what they say into the model's final state.
    """

    memory: Memory
    k: int
    lam: float
    temperature: float
    nprobe: int | None
    gate: MemoryGate | None = None
    adaptive: AdaptiveLam | None = None
    skip_above: float | None = None

    @property
    def wants_peaks(self) -> bool:
        """Whether searching goes by how sure the model is."""
        return self.adaptive is not None or self.skip_above is not None

    def search(
        self, keys_QD: Float32[np.ndarray, "Q D"], peaks_Q: Float32[np.ndarray, " Q"] | None = None
    ) -> Retrieved:
        """The neighbours of some keys, with their weights. Given the model's largest log-probability at each, lam may
        differ from position to position, and those where the model is sure enough are not asked about, if the store
        was tuned so.
        """
        found = self._found(keys_QD, peaks_Q)
        logweights_QK = neighbor_logweights(found.distances_QK, self.temperature)
        lams_Q = np.full(len(keys_QD), self.lam)
        if self.adaptive and peaks_Q is not None:
            lams_Q = self.adaptive.lams(features_of(found, logweights_QK, self.temperature, peaks_Q)).astype(np.float64)
        return Retrieved(found, logweights_QK, lams_Q)

    def _found(self, keys_QD: Float32[np.ndarray, "Q D"], peaks_Q: Float32[np.ndarray, " Q"] | None) -> Neighbours:
        search = self.memory.datastore.search
        if self.skip_above is None or peaks_Q is None:
            return search(keys_QD, self.k, nprobe=self.nprobe)
        asked_Q = peaks_Q < self.skip_above
        found = Neighbours.none(len(keys_QD), self.k)
        if asked_Q.any():
            some = search(keys_QD[asked_Q], self.k, nprobe=self.nprobe)
            width = some.ids_QK.shape[1]
            found.distances_QK[asked_Q, :width] = some.distances_QK
            found.ids_QK[asked_Q, :width] = some.ids_QK
            found.values_QK[asked_Q, :width] = some.values_QK
        return found


def check_fingerprints(datastore: Datastore, checkpoint: Checkpoint) -> None:
    """Raises Incompatible, saying what differs, unless the store was built by this model and tokenizer."""
    spec = datastore.manifest.spec
    if spec.tokenizer_fingerprint != checkpoint.tokenizer.fingerprint:
        raise Incompatible(
            f"the datastore {datastore.path} was built with another tokenizer than {checkpoint.path} has;"
            " build it anew with this model, or load the model it was built with"
        )
    if spec.model_fingerprint != checkpoint.fingerprint:
        raise Incompatible(
            f"the datastore {datastore.path} was built by another model (fingerprint {spec.model_fingerprint}) than"
            f" {checkpoint.path} ({checkpoint.fingerprint}); build it anew, or load the model it was built with"
        )
