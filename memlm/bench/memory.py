"""The gain of a model's kNN attention on held-out text, and the cost of its approximate search.

One model reads the text several times: with its kNN cache, without it, with the pairs of another document, and with
values of zero. Each change must cost nats, or the cache was of no use. Faiss is compared with exact search on the
queries of that reading: recall@k, softmax mass, and nats per token.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator
from math import sqrt
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor

from memlm.base.progress import Progress, silent
from memlm.data.corpus import Corpus
from memlm.errors import InvalidInput
from memlm.model import Decoder, DecoderState
from memlm.model.checkpoint import Checkpoint, load_checkpoint
from memlm.model.knn_attention import KnnAttention
from memlm.model.knn_memory import FAISS_FROM, KnnCache

Place = Callable[[Decoder], DecoderState]


class Off(KnnCache):
    """A cache that stays empty."""

    def add(self, keys_GNd: Float[Tensor, "G N d"], values_GNd: Float[Tensor, "G N d"]) -> None:
        """Adds nothing."""


class Zero(KnnCache):
    """A cache with values of zero."""

    def read(self, ids_GQK: Int[Tensor, "G Q K"], weights_GQK: Float[Tensor, "G Q K"]) -> Float[Tensor, "G Q d"]:
        """Returns zeros."""
        return torch.zeros_like(super().read(ids_GQK, weights_GQK))


class Swapped(KnnCache):
    """A cache that answers with the pairs of the other row."""

    other: Swapped

    def search(self, queries_GQd: Float[Tensor, "G Q d"], k: int) -> tuple[Tensor, Tensor]:
        """Searches the other row."""
        return super(Swapped, self.other).search(queries_GQd, k)

    def read(self, ids_GQK: Int[Tensor, "G Q K"], weights_GQK: Float[Tensor, "G Q K"]) -> Float[Tensor, "G Q d"]:
        """Reads the other row."""
        return super(Swapped, self.other).read(ids_GQK, weights_GQK)


class Judged(KnnCache):
    """A cache that measures the recall and softmax mass of its Faiss searches."""

    def __init__(self, *args: Any, **named: Any) -> None:
        super().__init__(*args, **named)
        self.recalls: list[float] = []
        self.masses: list[float] = []

    def search(self, queries_GQd: Float[Tensor, "G Q d"], k: int) -> tuple[Tensor, Tensor]:
        """Searches by Faiss and measures the result."""
        scores_GQK, ids_GQK = super().search(queries_GQd, k)
        if self.size >= FAISS_FROM:
            true_GQK, wanted_GQK = self._search_exactly(queries_GQd, min(k, self.size))
            hit_GQK = (wanted_GQK[..., None] == ids_GQK[..., None, :]).any(dim=-1)
            weights_GQK = (true_GQK.float() / sqrt(queries_GQd.shape[2])).softmax(dim=2)
            self.recalls.append(float(hit_GQK.float().mean()))
            self.masses.append(float((weights_GQK * hit_GQK).sum(dim=2).mean()))
        return scores_GQK, ids_GQK


def bench_memory(
    model: Path,
    texts: Corpus,
    *,
    max_tokens: int = 200_000,
    dtype: str = "auto",
    device: str = "auto",
    progress: Progress = silent,
) -> dict[str, Any]:
    """Nats per token of a model with its kNN cache and with changed ones.

    Documents are read in pairs of similar length, longest first. Errors are standard errors over pairs of the
    difference. Raises InvalidInput for a model without kNN attention.
    """
    checkpoint = load_checkpoint(model, dtype=dtype, device=device)
    if checkpoint.decoder.config.memorizing is None:
        raise InvalidInput(f"{model} has no kNN attention; train it with --memorizing-layers", field="model")
    pairs = list(_pairs(checkpoint, texts, max_tokens))
    if not pairs:
        raise InvalidInput("there are no two documents to read; give some held-out text", field="texts")
    judges: list[Judged] = []
    kinds: dict[str, Place] = {
        "exact": lambda decoder: _state(decoder, KnnCache, "exact"),
        "off": lambda decoder: _state(decoder, Off, "exact"),
        "another_documents": lambda decoder: _state(decoder, Swapped, "exact"),
        "zero_values": lambda decoder: _state(decoder, Zero, "exact"),
        "faiss": lambda decoder: _state(decoder, Judged, "faiss", judges),
    }
    nats: dict[str, list[float]] = {kind: [] for kind in kinds}
    for number, pair_2T in enumerate(pairs):
        for kind, place in kinds.items():
            nats[kind].append(_nats(checkpoint.decoder, pair_2T, place(checkpoint.decoder)))
        progress("read", number + 1, len(pairs))
    recalls = [each for judge in judges for each in judge.recalls]
    masses = [each for judge in judges for each in judge.masses]
    sizes = [pair_2T[:, 1:].numel() for pair_2T in pairs]
    return {
        "tokens": sum(sizes),
        "nats_per_token": sum(nats["exact"]) / sum(sizes),
        **dict(figure for kind in kinds if kind != "exact" for figure in _cost(kind, nats, sizes)),
        "faiss_searches": len(recalls),
        "faiss_recall": statistics.mean(recalls) if recalls else None,
        "faiss_softmax_mass": statistics.mean(masses) if masses else None,
        "gates": _gates(checkpoint.decoder),
    }


def _cost(kind: str, nats: dict[str, list[float]], sizes: list[int]) -> Iterator[tuple[str, float]]:
    """Nats per token of a kind of cache beyond the real one, and the standard error."""
    more = [one - other for one, other in zip(nats[kind], nats["exact"], strict=True)]
    mean = sum(more) / sum(sizes)
    spread = [(each - mean * size) ** 2 for each, size in zip(more, sizes, strict=True)]
    yield f"nats_more_{kind}", mean
    yield f"nats_more_{kind}_error", sqrt(sum(spread) * len(sizes) / max(1, len(sizes) - 1)) / sum(sizes)


def _pairs(checkpoint: Checkpoint, texts: Corpus, max_tokens: int) -> Iterator[Int[Tensor, "2 T"]]:
    """Pairs of documents of similar length, longest first, with start tokens."""
    encode, start_id = checkpoint.tokenizer.encode, checkpoint.tokenizer.start_id
    longest = sorted((encode(document.text) for document in texts), key=len, reverse=True)
    taken = 0
    for one, other in zip(longest[::2], longest[1::2], strict=False):
        if taken >= max_tokens or not len(other):
            return
        length = min(len(other), (max_tokens - taken + 1) // 2)
        taken += 2 * length
        yield torch.tensor([[start_id, *one[:length]], [start_id, *other[:length]]])


def _state(decoder: Decoder, kind: type[KnnCache], search: str, made: list[Any] | None = None) -> DecoderState:
    """An empty state with kNN caches of a kind."""
    state = decoder.new_state(batch_size=2)
    config, memorizing = decoder.config, decoder.config.memorizing
    assert memorizing
    storage = decoder.dtype if memorizing.storage == "model" else torch.float16
    for layer in memorizing.layers:
        rows = [
            kind(
                config.num_kv_heads, config.head_dim, capacity=memorizing.capacity, dtype=storage, search=search,
                device=decoder.device,
            )
            for _ in range(2)
        ]  # fmt: skip
        for row, other in zip(rows, reversed(rows), strict=True):
            if isinstance(row, Swapped) and isinstance(other, Swapped):
                row.other = other
        state.knn_caches[layer] = list(rows)
        if made is not None:
            made += rows
    return state


@torch.inference_mode()
def _nats(decoder: Decoder, pair_2T: Int[Tensor, "2 T"], state: DecoderState) -> float:
    """Nats of both documents, read segment by segment."""
    inputs_2N, targets_2N = pair_2T[:, :-1].to(decoder.device), pair_2T[:, 1:].to(decoder.device)
    length, nats = decoder.config.context_length, 0.0
    for inputs_2S, targets_2S in zip(inputs_2N.split(length, 1), targets_2N.split(length, 1), strict=True):
        hidden_2SD, _ = decoder(inputs_2S, state)
        logits_NV = decoder.logits(hidden_2SD).float().flatten(0, 1)
        nats += float(F.cross_entropy(logits_NV, targets_2S.flatten(), reduction="sum"))
    return nats


def _gates(decoder: Decoder) -> list[float]:
    """The share of kNN attention in each head."""
    attentions = [module for module in decoder.modules() if isinstance(module, KnnAttention)]
    return [round(float(share), 4) for attention in attentions for share in attention.shares_H]
