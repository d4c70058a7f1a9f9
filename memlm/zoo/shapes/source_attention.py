"""Cross attention: a decoder reads an encoded text beside its own (arXiv 1706.03762, section 3.2.3).

Shapes: B batch, T new tokens, N tokens of a source, H query heads, G key-value heads, d width of a head, D width.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from jaxtyping import Float
from torch import Tensor, nn

from memlm.model.config import ModelConfig
from memlm.model.forward import ForwardContext
from memlm.model.kernels.cpu import sdpa
from memlm.model.kernels.linear import Linear
from memlm.model.norms import make_norm
from memlm.model.parts import Part
from memlm.model.state.source import Source


@dataclass(frozen=True, slots=True)
class SourceAttention(Part):
    """Each layer attends to all of its row's source, which `DecoderState.give_sources` sets."""

    seam: ClassVar[str] = "cross"
    kind: ClassVar[str] = "source"
    reads_source: ClassVar[bool] = True

    def build(self, config: ModelConfig, layer: int, sublayer: str = "") -> CrossAttention:
        return CrossAttention(config, layer)


class CrossAttention(nn.Module):
    """Attention of the stream to a source, with a norm before it, and without positions."""

    def __init__(self, config: ModelConfig, layer: int) -> None:
        super().__init__()
        self.layer, self.head_dim, self.query_scale = layer, config.head_dim, config.query_scale
        self.norm = make_norm(config)
        self.query = Linear(config.dim, config.num_heads * config.head_dim, bias=config.qkv_bias)
        self.key_value = Linear(config.dim, 2 * config.num_kv_heads * config.head_dim, bias=config.qkv_bias)
        self.out = Linear(config.num_heads * config.head_dim, config.dim, bias=config.out_bias)

    def forward(self, stream_BTD: Float[Tensor, "B T D"], context: ForwardContext) -> Float[Tensor, "B T D"]:
        """Returns the change of the stream: each token's mixture of its row's source."""
        pairs_L2BGNd, mask = context.source
        key_BGNd, value_BGNd = pairs_L2BGNd[self.layer].unbind(0)
        query_BHTd = self.query(self.norm(stream_BTD)).unflatten(2, (-1, self.head_dim)).transpose(1, 2)
        if self.query_scale != 1:
            query_BHTd = query_BHTd * self.query_scale
        return self.out(sdpa(query_BHTd, key_BGNd, value_BGNd, mask, 0).transpose(1, 2).flatten(2))

    def pairs(self, states_BND: Float[Tensor, "B N D"]) -> Float[Tensor, "2 B G N d"]:
        """Returns keys and values of encoded texts."""
        return self.key_value(states_BND).unflatten(2, (2, -1, self.head_dim)).permute(2, 0, 3, 1, 4)


def make_sources(blocks: Iterable[Any], states_BND: Float[Tensor, "B N D"], length_B: Sequence[int]) -> list[Source]:
    """Returns what the layers of a decoder read of encoded texts, `length_B` states of each."""
    pairs_L2BGNd = torch.stack([block.cross.pairs(states_BND) for block in blocks])
    # Copies: a view would keep the whole batch for as long as one of its rows.
    return [Source(pairs_L2BGNd[:, :, row, :, :length].clone()) for row, length in enumerate(length_B)]
