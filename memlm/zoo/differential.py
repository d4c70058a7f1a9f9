"""Differential attention: the difference of two softmaxes, so that what both see alike cancels.

Differential Transformer (arXiv 2410.05258), and its second version (microsoft/unilm, Diff-Transformer-V2, at 31646c5).
Both turn pairs of query heads into one head, so `num_heads` is twice the number of heads in the paper.

| kind | a pair | share of the second softmax | behind the difference |
|---|---|---|---|
| `differential` | heads h and h + H/2, and key-value heads likewise | learned, one for the layer | norm of each pair |
| `differential_v2` | heads 2p and 2p + 1, on the same keys and values | of each token and pair | nothing |

Shapes: B batch, T new tokens, S places, H query heads, G key-value heads, P = H / 2 pairs, d width of a head, D width.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import torch
from jaxtyping import Float
from torch import Tensor, nn

from memlm.errors import InvalidInput
from memlm.model.attention.attention import Heads, MaskedAttention
from memlm.model.attention.knn_attention import KnnResult, exact
from memlm.model.forward import ForwardContext
from memlm.model.kernels.linear import Linear
from memlm.model.parts import Part

if TYPE_CHECKING:
    from memlm.model.config import ModelConfig

NORM_EPS = 1e-5  # of the paper's code, whatever the norms of the model have


@dataclass(frozen=True, slots=True)
class Differential(Part):
    """Attention by the difference of the softmaxes of two heads, both over the values of both, and normed."""

    seam: ClassVar[str] = "mixer"
    kind: ClassVar[str] = "differential"

    def build(self, config: ModelConfig, layer: int, sublayer: str = "") -> DifferentialAttention:
        """Returns attention with one learned share for its pairs."""
        return DifferentialAttention(config, layer)

    def check(self, config: ModelConfig) -> None:
        """Raises InvalidInput for an odd number of heads, and for memories or positions that add values of one head."""
        if config.num_heads % 2 or config.num_kv_heads % 2:
            raise InvalidInput(
                f"differential pairs heads; got {config.num_heads} heads and {config.num_kv_heads} kv heads, expected"
                " even numbers",
                field="num_heads",
            )
        self.refuse(config, "memorizing", "extended_attention")
        if config.positions == "shaw":
            raise InvalidInput("shaw positions add to the values of one head, and pairs read two", field="positions")


@dataclass(frozen=True, slots=True)
class DifferentialV2(Part):
    """Attention by the difference of two heads on the same keys and values, with a share for each token."""

    seam: ClassVar[str] = "mixer"
    kind: ClassVar[str] = "differential_v2"

    def build(self, config: ModelConfig, layer: int, sublayer: str = "") -> DifferentialV2Attention:
        """Returns attention whose last projection takes H / 2 heads."""
        return DifferentialV2Attention(config, layer)

    def check(self, config: ModelConfig) -> None:
        """Raises InvalidInput where pairs would not share their keys and values, and for kNN attention."""
        if config.num_heads // config.num_kv_heads % 2:
            raise InvalidInput(
                f"differential_v2 pairs the heads of one kv head; got {config.num_heads} heads on"
                f" {config.num_kv_heads} kv heads, expected an even number on each",
                field="num_kv_heads",
            )
        self.refuse(config, "memorizing")


class DifferentialAttention(MaskedAttention):
    """Differential attention. Of its state, nothing differs from plain attention."""

    def __init__(self, config: ModelConfig, layer: int) -> None:
        super().__init__(config, layer)
        d = config.head_dim
        self.first_share = 0.8 - 0.6 * math.exp(-0.3 * layer)  # layers count from 0 here, and from 1 in the paper
        self.first_query_d, self.first_key_d = nn.Parameter(torch.zeros(d)), nn.Parameter(torch.zeros(d))
        self.second_query_d, self.second_key_d = nn.Parameter(torch.zeros(d)), nn.Parameter(torch.zeros(d))
        self.pair_norm = nn.RMSNorm(2 * d, eps=NORM_EPS)

    def initialize(self) -> None:
        """Draws the vectors of the share as the paper does."""
        for vector_d in (self.first_query_d, self.first_key_d, self.second_query_d, self.second_key_d):
            nn.init.normal_(vector_d, std=0.1)

    @property
    def share(self) -> Float[Tensor, ""]:
        """The share of the second softmax that is taken from the first, about `first_share` before training."""
        first, second = self.first_query_d @ self.first_key_d, self.second_query_d @ self.second_key_d
        return exact(first).exp() - exact(second).exp() + self.first_share

    def _attend_explicitly(
        self,
        query_BHTd: Tensor,
        heads: Heads,
        key_BGSd: Tensor,
        value_BGSd: Tensor,
        context: ForwardContext,
        found: KnnResult | None,
    ) -> Float[Tensor, "B H T d"]:
        """Attends to keys as plain heads do, and each time to the values of both heads of a pair, side by side."""
        pair_values = torch.cat(value_BGSd.chunk(2, dim=1), dim=3)
        both = torch.cat([pair_values, pair_values], dim=1)
        return super()._attend_explicitly(query_BHTd, heads, key_BGSd, both, context, found)

    def combine(self, mixed_BHTd: Float[Tensor, "B H T e"], context: ForwardContext) -> Float[Tensor, "B H T d"]:
        """Subtracts, norms each pair (e = 2 d), and hands its halves back as two heads."""
        first_BPTe, second_BPTe = mixed_BHTd.chunk(2, dim=1)
        normed_BPTe = self.pair_norm(first_BPTe - self.share.to(first_BPTe.dtype) * second_BPTe)
        return torch.cat((normed_BPTe * (1 - self.first_share)).chunk(2, dim=3), dim=1)


class DifferentialV2Attention(MaskedAttention):
    """The second version. Its state is that of plain attention with as many key-value heads."""

    def __init__(self, config: ModelConfig, layer: int) -> None:
        super().__init__(config, layer)
        self.num_pairs = config.num_heads // 2
        self.out = Linear(self.num_pairs * config.head_dim, config.dim, bias=config.out_bias)
        # As small as a router, and like it neither quantized nor changed by adapters.
        self.share = nn.Linear(config.dim, self.num_pairs, bias=False)

    def forward(self, hidden_BTD: Float[Tensor, "B T D"], context: ForwardContext) -> Float[Tensor, "B T D"]:
        """Returns each new token's differences of mixtures, and writes its key and value to the state."""
        context.shared[self] = self.share(hidden_BTD).sigmoid().mT[..., None]
        return super().forward(hidden_BTD, context)

    def combine(self, mixed_BHTd: Float[Tensor, "B H T d"], context: ForwardContext) -> Float[Tensor, "B P T d"]:
        """Returns the first head of each pair less the token's share of the second."""
        return mixed_BHTd[:, 0::2] - context.shared[self] * mixed_BHTd[:, 1::2]
