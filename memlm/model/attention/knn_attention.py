"""kNN attention: local attention plus the nearest attention keys of the document's past (arXiv 2203.08913, section
3.2).

Shapes: B batch, T new tokens, H query heads, G key-value heads, Q = T H / G, K neighbors, d width of a head.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from memlm.model.attention.knn_memory import KnnCache
from memlm.model.config import ModelConfig
from memlm.model.forward import ForwardContext
from memlm.model.mechanisms import Memorizing


@dataclass(frozen=True)
class KnnResult:
    """The nearest pairs of each query: scores (-inf for missing ones) and their ids, row by row."""

    rows: list[KnnCache]
    ids: list[Tensor]  # G x Q x k, k at most K and different from row to row
    scores_BHTK: Float[Tensor, "B H T K"]

    @property
    def any_B1T1(self) -> Bool[Tensor, "B 1 T 1"]:
        """Whether a query has any neighbors."""
        return self.scores_BHTK[:, :1, :, :1] > -torch.inf

    def read(self, weights_BHTK: Float[Tensor, "B H T K"]) -> Float[Tensor, "B H T d"]:
        """Returns the weighted sum of the values."""
        read = []
        for row, ids_GQK, weights_HTK in zip(self.rows, self.ids, weights_BHTK, strict=True):
            weights_GQK = weights_HTK[..., : ids_GQK.shape[2]].reshape(ids_GQK.shape)
            read.append(row.read(ids_GQK, weights_GQK).view(*weights_HTK.shape[:2], -1))
        return torch.stack(read)


class KnnAttention(nn.Module):
    """kNN attention of one layer, with a scale and a gate for each head.

    The published gate (sigmoid) starts at one half, the tanh gate at zero.
    """

    def __init__(self, config: ModelConfig, memorizing: Memorizing) -> None:
        super().__init__()
        self.top_k, self.mixing = memorizing.top_k, memorizing.mixing
        self.normalizes_all = memorizing.normalize == "both"
        self.head_dim, self.num_kv_heads = config.head_dim, config.num_kv_heads
        self.log_scale_H = nn.Parameter(torch.full((config.num_heads,), math.log(config.head_dim) / 2))
        if not self.is_joint:
            self.gate_H = nn.Parameter(torch.zeros(config.num_heads))

    @property
    def is_joint(self) -> bool:
        """Whether kNN attention and local attention share one softmax."""
        return self.mixing == "joint"

    @property
    def shares_H(self) -> Float[Tensor, " S"]:
        """The gate: each head's share of kNN attention. Empty for a joint softmax."""
        if self.is_joint:
            return self.log_scale_H.new_empty(0)
        return torch.tanh(self.gate_H) if self.mixing == "tanh" else torch.sigmoid(self.gate_H)

    def normalize(self, query_BHTd: Float[Tensor, "B H T d"]) -> Float[Tensor, "B H T d"]:
        """Returns unit vectors times the learned scale, and times sqrt(d), which attention divides by."""
        scale_H11 = self.log_scale_H.exp()[:, None, None] * math.sqrt(self.head_dim)
        return unit(query_BHTd) * scale_H11.to(query_BHTd.dtype)

    def search(
        self, query_BHTd: Float[Tensor, "B H T d"], rows: list[KnnCache], context: ForwardContext
    ) -> KnnResult | None:
        """Returns the best pairs for each query, or None if no row has any. Gradients reach queries, not pairs."""
        if not any(row.size for row in rows):
            return None
        query_BHTd = query_BHTd if self.normalizes_all else self.normalize(query_BHTd)
        K = min(self.top_k, max(row.size for row in rows))
        found = [self._search_row(query_HTd, row, K) for query_HTd, row in zip(query_BHTd, rows, strict=True)]
        scores_BHTK = torch.stack([scores_HTK for scores_HTK, _ in found])
        continues_RT = context.mask.continues_RT
        if continues_RT is not None:
            scores_BHTK = scores_BHTK.masked_fill(~continues_RT[:, None, :, None], -torch.inf)
        return KnnResult(rows, [ids_GQK for _, ids_GQK in found], scores_BHTK)

    def gate(self, local_BHTd: Float[Tensor, "B H T d"], found: KnnResult) -> Float[Tensor, "B H T d"]:
        """Returns local + g (kNN - local) for the queries that have neighbors."""
        any_B1T1 = found.any_B1T1
        scores_BHTK = exact(found.scores_BHTK).masked_fill(~any_B1T1, 0.0)
        memory_BHTd = found.read(scores_BHTK.softmax(dim=3).to(local_BHTd.dtype))
        share_BHT1 = self.shares_H[:, None, None].to(local_BHTd.dtype) * any_B1T1
        return torch.lerp(local_BHTd, memory_BHTd, share_BHT1.expand_as(local_BHTd))

    def _search_row(
        self, query_HTd: Float[Tensor, "H T d"], row: KnnCache, K: int
    ) -> tuple[Float[Tensor, "H T K"], Int[Tensor, "G Q k"]]:
        """Returns the scores of one row, padded to K with -inf, and the ids of the pairs found."""
        H, T, d = query_HTd.shape
        query_GQd = query_HTd.reshape(self.num_kv_heads, -1, d)
        scores_GQK, ids_GQK = row.search(query_GQd.detach(), K)
        if torch.is_grad_enabled() and query_HTd.requires_grad and row.size:
            key_GQKd = row.pairs(ids_GQK)[0].to(query_GQd.dtype)
            learning_GQK = torch.einsum("gqd,gqkd->gqk", query_GQd, key_GQKd)
            scores_GQK = learning_GQK.masked_fill(scores_GQK == -torch.inf, -torch.inf)
        scores_HTK = scores_GQK.reshape(H, T, -1) / math.sqrt(d)
        return F.pad(scores_HTK, (0, K - scores_HTK.shape[2]), value=-torch.inf), ids_GQK


def exact(scores: Tensor) -> Tensor:
    """Returns scores in float32 or wider, for a softmax."""
    return scores if scores.dtype == torch.float64 else scores.float()


def unit(vectors: Tensor) -> Tensor:
    """Scales vectors to length one."""
    return F.normalize(vectors, dim=-1)
