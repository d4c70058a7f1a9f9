"""Watching the attention of one pass, head by head.

Shapes: B batch, T new tokens, S places, E = S and the keys of a memory that share the softmax, H query heads, d width
of a head.
"""

from __future__ import annotations

from typing import Protocol

from jaxtyping import Float
from torch import Tensor

from memlm.model.attention.mask import AttentionMask


class Watch(Protocol):
    """An observer of attention, which `Decoder.forward` takes. Attention spells its weights out for one.

    A pass may read a text in several pieces. Each piece calls every layer, in their order.
    """

    def weights(self, layer: int, weights_BHTE: Float[Tensor, "B H T E"], mask: AttentionMask) -> None:
        """Takes the weights behind the softmax. `mask` has the positions of the queries and of the first S keys."""

    def gate(self, layer: int, share_BHT: Float[Tensor, "B H T"]) -> None:
        """Takes the share of kNN attention in each head's output, where a gate mixes it with the weights above."""

    def heads(self, layer: int, mixed_BHTd: Float[Tensor, "B H T d"]) -> Float[Tensor, "B H T d"]:
        """Returns the heads' outputs that the layer goes on with: the given ones, or others."""
        ...
