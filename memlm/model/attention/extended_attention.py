"""Extended attention: beside its window, each head attends to its best keys among all tokens that have left it.

It needs no training (Extended Mind Transformers, arXiv 2406.02332).

As in the paper's Llama, keys are stored unturned, all of these tokens stand at one distance, and they share a softmax
with the window. Here that distance is the window, at which the model has seen keys in training, and a key is chosen by
its score instead of its cosine (benchmarks/log, 2026-11-26-extended-attention).

Shapes: B batch, T new tokens, H query heads, G key-value heads, Q = T H / G, K keys, d width of a head.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor

from memlm.model.attention.knn_attention import KnnResult
from memlm.model.attention.knn_memory import KnnCache
from memlm.model.config import ModelConfig
from memlm.model.forward import ForwardContext
from memlm.model.positions import apply_rope


@contextmanager
def remembering_alone(layers: Iterable[ExtendedAttention]) -> Iterator[None]:
    """Reads with the window alone, and remembers, so that a long text takes no longer than its windows."""
    chosen = list(layers)
    for layer in chosen:
        layer.searches = False
    try:
        yield
    finally:
        for layer in chosen:
            layer.searches = True


class ExtendedAttention:
    """Extended attention of one layer. It has no parameters."""

    def __init__(self, config: ModelConfig, layer: int) -> None:
        self.layer, self.top_k, self.window = layer, config.extended_attention, config.window_of(layer)
        self.num_sinks, self.num_kv_heads = config.num_sinks, config.num_kv_heads
        self.searches = True

    def remember(
        self, key_BGTd: Float[Tensor, "B G T d"], value_BGTd: Float[Tensor, "B G T d"], context: ForwardContext
    ) -> None:
        """Stores unturned keys and values of the new tokens at their positions, over any that were taken back."""
        state = context.state
        assert state is not None
        caches = state.knn_caches[self.layer]
        for number, (row, cache, count) in enumerate(zip(state.rows, caches, context.new_B, strict=True)):
            cache.crop(row.length)
            cache.add(key_BGTd[number, :, :count], value_BGTd[number, :, :count])

    def search(self, query_BHTd: Float[Tensor, "B H T d"], context: ForwardContext) -> KnnResult | None:
        """Finds the best keys that have left the window of each query, but for sinks, which it sees anyway.

        Returns None if nothing has left the window of any query, or if nothing is to be searched. Takes time in
        proportion to the tokens read.
        """
        state, mask = context.state, context.mask
        assert state is not None
        if not self.searches or mask.query_span[1] - self.window <= self.num_sinks:
            return None
        if (cos_sin := context.turn_by(self.window, self.layer)) is not None:
            query_BHTd = apply_rope(query_BHTd, cos_sin)
        caches, R = state.knn_caches[self.layer], mask.query_RT.shape[0]
        begins_RT = mask.document_RT.clamp(min=self.num_sinks)
        spans_RT2 = torch.stack([begins_RT, mask.query_RT - self.window + 1], dim=2)
        K = min(self.top_k, max(cache.size for cache in caches))
        found = [
            self._search_row(query_BHTd[number], cache, spans_RT2[number if R > 1 else 0], K)
            for number, cache in enumerate(caches)
        ]
        return KnnResult(caches, [ids_GQK for _, ids_GQK in found], torch.stack([scores for scores, _ in found]))

    def _search_row(
        self, query_HTd: Float[Tensor, "H T d"], cache: KnnCache, spans_T2: Int[Tensor, "T 2"], K: int
    ) -> tuple[Float[Tensor, "H T K"], Int[Tensor, "G Q k"]]:
        """Returns the scores of one row, padded to K with -inf, and the positions of the keys found."""
        H, T, d = query_HTd.shape
        spans_Q2 = spans_T2.repeat(H // self.num_kv_heads, 1)
        scores_GQK, ids_GQK = cache.search_within(query_HTd.reshape(self.num_kv_heads, -1, d), K, spans_Q2)
        scores_HTK = scores_GQK.reshape(H, T, -1) / math.sqrt(d)
        return F.pad(scores_HTK, (0, K - scores_HTK.shape[2]), value=-torch.inf), ids_GQK
