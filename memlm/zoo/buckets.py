"""Attention within buckets: a token sees the earlier tokens that fell into its bucket.

The base of LSH attention and routing attention. As in both papers' causal form, queries and keys are one vector. A
bucket follows from a token alone, and a state remembers it. So later tokens change nothing that an earlier one sees,
which they do where a sequence is sorted by buckets and cut into chunks, as the papers have it.

The places in front (sinks, compressed memories, or those of a border) are seen by all.

Shapes: B batch, T new tokens, S places, H heads, d width of a head, D width, R rows (1 if all have equal positions).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from memlm.errors import InvalidInput
from memlm.model.attention.attention import Heads, MaskedAttention
from memlm.model.attention.mask import AttentionMask
from memlm.model.forward import ForwardContext
from memlm.model.kernels.linear import Linear
from memlm.model.parts import Part

if TYPE_CHECKING:
    from memlm.model.config import ModelConfig

BUCKET_TYPE = torch.int16
MOST_BUCKETS = 1 << 15  # that the type tells apart


class BucketPart(Part):
    """A mixer with one vector for query and key."""

    __slots__ = ()

    def check(self, config: ModelConfig) -> None:
        """Raises InvalidInput for grouped queries, for norms of queries or keys, and for kNN attention."""
        if config.num_heads != config.num_kv_heads:
            raise InvalidInput(
                f"{self.kind} has one vector for query and key; got {config.num_heads} heads and {config.num_kv_heads}"
                " kv heads, expected as many",
                field="num_kv_heads",
            )
        self.refuse(config, "qk_norm", "memorizing", "extended_attention")


class BucketAttention(MaskedAttention):
    """Attention whose queries are also keys. Subclasses say how both are scaled, and the buckets and places."""

    field: ClassVar[str] = "bucket"

    def __init__(self, config: ModelConfig, layer: int) -> None:
        super().__init__(config, layer)
        self.qkv = Linear(config.dim, 2 * config.num_heads * config.head_dim, bias=config.qkv_bias)

    def project(self, hidden_BTD: Float[Tensor, "B T D"]) -> Heads:
        """Queries, keys that are the queries scaled, and values."""
        H, d = self.config.num_heads, self.config.head_dim
        shared_BHTd, value_BHTd = self.qkv(hidden_BTD).unflatten(2, (2 * H, d)).transpose(1, 2).chunk(2, dim=1)
        query_BHTd, key_BHTd = self.scaled(shared_BHTd)
        return Heads(torch.cat([query_BHTd * self.config.query_scale, key_BHTd], dim=1), value_BHTd, H)

    def keep(self, hidden_BTD: Float[Tensor, "B T D"], context: ForwardContext) -> None:
        """Writes keys, values and buckets of new tokens to the state without attending to anything."""
        super().keep(hidden_BTD, context)
        self.write_buckets(self.project(hidden_BTD), context)

    def write_buckets(self, heads: Heads, context: ForwardContext) -> tuple[Tensor, Tensor]:
        """Returns the buckets of the new tokens and of all places, as `Part.fields` lays them out."""
        new = self.buckets(heads).to(BUCKET_TYPE)
        return new, context.write_field(self.layer, self.field, new)

    def scaled(
        self, shared_BHTd: Float[Tensor, "B H T d"]
    ) -> tuple[Float[Tensor, "B H T d"], Float[Tensor, "B H T d"]]:
        """Returns queries and keys, made of the vectors that they share."""
        raise NotImplementedError

    def buckets(self, heads: Heads) -> Int[Tensor, "B H T ..."]:
        """Returns the bucket of each new token, for each head."""
        raise NotImplementedError


def latest(same_BHTS: Bool[Tensor, "B H T S"], span: int) -> Bool[Tensor, "B H T S"]:
    """Keeps the last `span` places of each query, all for 0."""
    return same_BHTS & (same_BHTS.flip(3).cumsum(dim=3).flip(3) <= span) if span else same_BHTS


def is_in_front(mask: AttentionMask) -> Bool[Tensor, " S"]:
    """Whether a place stands in front of the latest tokens."""
    return torch.arange(mask.num_places, device=mask.key_RS.device) < mask.num_front


def is_self(mask: AttentionMask) -> Bool[Tensor, "R 1 T S"]:
    """Whether a place is the query's own."""
    return (mask.query_RT[:, :, None] == mask.key_RS[:, None])[:, None]
