"""Held-out text -> a gate between a model and its datastore (SPALM, arXiv 2102.02557). Experimental.

The gate alone learns, from text that neither the model nor the datastore has seen. The model's weights do not change,
and neither do its keys and its fingerprint. The gate has a file of its own in the model's folder.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from jaxtyping import Float, Int64
from safetensors.torch import save
from torch import Tensor

from memlm.api.params import RetrievalParams
from memlm.base.files import write_atomic
from memlm.base.progress import Progress, silent
from memlm.data.corpus import Corpus
from memlm.data.windows import blocks_of
from memlm.errors import InvalidInput
from memlm.model.files.checkpoint import Checkpoint, load_checkpoint
from memlm.model.files.gguf import companion
from memlm.retrieval.encoder import BLOCK_WINDOWS, Encoder, text_windows
from memlm.retrieval.gate import GATE_FILE, SpalmGate
from memlm.retrieval.retriever import Retriever
from memlm.retrieval.store import ModelStore

BATCH = 512
VALIDATION_SHARE = 0.2  # of the tokens: the gate never learns from them
PATIENCE = 5


@dataclass(frozen=True, slots=True)
class SpalmReport:
    """Nats per token on the validation part, of the model alone and with the gate. `share` is the mean share of a state
    that comes from the neighbors.
    """

    base_nats: float
    gated_nats: float
    share: float
    tokens: int
    steps: int
    k: int


@dataclass(frozen=True, slots=True)
class _Evidence:
    """N positions of the text: final hidden states, the tokens that follow, and the neighbors' values (-1: none)."""

    hidden_ND: Tensor
    targets_N: Tensor
    values_NK: Tensor

    def part(self, begin: int, end: int) -> _Evidence:
        return _Evidence(self.hidden_ND[begin:end], self.targets_N[begin:end], self.values_NK[begin:end])

    def at(self, places: Tensor) -> _Evidence:
        return _Evidence(self.hidden_ND[places], self.targets_N[places], self.values_NK[places])


def train_spalm(
    model: str | Path | Checkpoint,
    store: str | Path,
    texts: Corpus,
    *,
    k: int = 16,
    learning_rate: float = 3e-3,
    max_tokens: int = 50_000,
    max_epochs: int = 20,
    seed: int = 0,
    progress: Progress = silent,
) -> SpalmReport:
    """Trains a gate on text that neither the model nor the datastore has seen, and writes it to the model's folder if
    it helps.

    Raises InvalidInput if a document of the text is in the store, or if the text is shorter than 1,000 tokens.
    """
    checkpoint = model if isinstance(model, Checkpoint) else load_checkpoint(model)
    with ModelStore.open(store, checkpoint).datastore as datastore:
        datastore.snapshot.check_searchable()
        retriever = Retriever.of([ModelStore(datastore, checkpoint)], RetrievalParams(k=k))
        evidence = _gather(checkpoint, retriever, texts, max_tokens, progress)
    count = len(evidence.targets_N)
    if count < 1000:
        raise InvalidInput(f"the texts have {count} tokens; a gate takes at least 1,000: give more", field="texts")
    border = int(count * (1 - VALIDATION_SHARE))
    torch.manual_seed(seed)
    gate = SpalmGate(checkpoint.decoder.config.dim)
    training, validation = evidence.part(0, border), evidence.part(border, count)
    embeddings_VD = checkpoint.decoder.output_embedding_VD.float().cpu().clone()
    with torch.no_grad():
        gate.scale.copy_(training.hidden_ND.square().mean().sqrt() / embeddings_VD.square().mean().sqrt())
    steps = _fit(gate, embeddings_VD, training, validation, learning_rate, max_epochs, progress)
    gated, base = _loss(gate, embeddings_VD, validation), _loss(None, embeddings_VD, validation)
    if gated < base:
        write_atomic(companion(checkpoint.path, GATE_FILE), save(gate.state_dict()))
    with torch.inference_mode():
        share = float(1 - torch.sigmoid(gate.gate(validation.hidden_ND)).mean())
    return SpalmReport(base, gated, share, count, steps, k)


def _gather(
    checkpoint: Checkpoint, retriever: Retriever, texts: Corpus, max_tokens: int, progress: Progress
) -> _Evidence:
    """Encodes the texts and finds the neighbors of every position."""
    hidden: list[Tensor | None] = []
    targets: list[Int64[np.ndarray, " N"]] = []
    values: list[np.ndarray] = []
    encoder, read = Encoder(checkpoint.decoder), 0
    for document in texts:
        if retriever.stores[0].snapshot.has_document(document.id):
            raise InvalidInput(
                f"the document {document.id!r} is in the datastore, which would find it; give text that is not",
                field="texts",
            )
        for block in blocks_of(text_windows(checkpoint, document.text, retriever.window_size), BLOCK_WINDOWS):
            for window, prediction in zip(block, encoder.predictions(block, hidden=True), strict=True):
                found = retriever.search(prediction.keys_ND).neighbors
                hidden.append(prediction.hidden_ND)
                targets.append(window.targets_N)
                values.append(np.where(found.ids_QK >= 0, found.values_QK, -1).astype(np.int64))
                read += len(window.targets_N)
        progress("retrieve", min(read, max_tokens), max_tokens)
        if read >= max_tokens:
            break
    if not read:
        raise InvalidInput("there is no token to learn from; give some held-out text", field="texts")
    return _Evidence(
        torch.cat([each for each in hidden if each is not None]),
        *(torch.from_numpy(np.concatenate(each)) for each in (targets, values)),
    )


def _fit(
    gate: SpalmGate,
    embeddings_VD: Tensor,
    training: _Evidence,
    validation: _Evidence,
    learning_rate: float,
    max_epochs: int,
    progress: Progress,
) -> int:
    """Trains with AdamW until the validation loss has not improved for `PATIENCE` epochs. The best gate stays."""
    optimizer = torch.optim.AdamW(gate.parameters(), lr=learning_rate, weight_decay=0.01)
    best, best_loss, waited, steps = gate.state_dict(), math.inf, 0, 0
    for epoch in range(max_epochs):
        for places in torch.randperm(len(training.targets_N)).split(BATCH):
            loss = _cross_entropy(gate, embeddings_VD, training.at(places)).mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            steps += 1
        valid = _loss(gate, embeddings_VD, validation)
        progress("train gate", epoch + 1, max_epochs, f"valid {valid:.4f}")
        waited = 0 if valid < best_loss else waited + 1
        if valid < best_loss:
            best, best_loss = {name: tensor.clone() for name, tensor in gate.state_dict().items()}, valid
        if waited == PATIENCE:
            break
    gate.load_state_dict(best)
    return steps


def _loss(gate: SpalmGate | None, embeddings_VD: Tensor, evidence: _Evidence) -> float:
    with torch.inference_mode():
        places = torch.arange(len(evidence.targets_N)).split(BATCH)
        losses = [_cross_entropy(gate, embeddings_VD, evidence.at(part)) for part in places]
    return float(torch.cat(losses).double().mean())


def _cross_entropy(gate: SpalmGate | None, embeddings_VD: Tensor, evidence: _Evidence) -> Float[Tensor, " N"]:
    hidden_ND = evidence.hidden_ND
    if gate is not None:
        neighbors_NKD = embeddings_VD[evidence.values_NK.clamp(min=0)]
        hidden_ND = gate(hidden_ND, neighbors_NKD, evidence.values_NK >= 0)
    return F.cross_entropy(hidden_ND @ embeddings_VD.T, evidence.targets_N, reduction="none")
