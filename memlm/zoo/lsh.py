"""LSH attention (Reformer, arXiv 2001.04451): a token sees tokens whose vectors point the same way.

A round turns a vector at random, and its bucket is the axis, with its sign, to which it comes nearest. A head sees the
tokens that share its bucket in some round, and itself only if there are none, since its own key is always nearest.

The softmax is over the union of the rounds, to which the paper's sum of rounds comes where it does not count repeats.
Vectors are turned before positions turn them, so that equal tokens share their buckets at any distance.

Shapes: B batch, T new tokens, S places, H heads, d width of a head, N rounds, b buckets.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from memlm.errors import InvalidInput, check_range
from memlm.model.attention.attention import Heads
from memlm.model.attention.knn_attention import exact, unit
from memlm.model.draws import normals
from memlm.model.forward import ForwardContext
from memlm.model.state.fields import PLACES, Field
from memlm.zoo.buckets import BUCKET_TYPE, MOST_BUCKETS, BucketAttention, BucketPart, is_in_front, is_self, latest

if TYPE_CHECKING:
    from memlm.model.config import ModelConfig


@dataclass(frozen=True, slots=True)
class LSH(BucketPart):
    """A mixer whose heads see the last `span` tokens (0: all) of their bucket in each of some rounds."""

    seam: ClassVar[str] = "mixer"
    kind: ClassVar[str] = "lsh"

    buckets: int = 16
    rounds: int = 4
    span: int = 0
    seed: int = 0

    def __post_init__(self) -> None:
        check_range("buckets", self.buckets, least=2, most=MOST_BUCKETS, whole=True)
        check_range("rounds", self.rounds, least=1, whole=True)
        check_range("span", self.span, least=0, whole=True)
        check_range("seed", self.seed, least=0, whole=True)
        if self.buckets % 2:
            raise InvalidInput(f"buckets is {self.buckets}; expected an even number, two for an axis", field="buckets")

    def fields(self, config: ModelConfig) -> tuple[Field, ...]:
        """The buckets of each token."""
        return (Field("bucket", (config.num_heads, PLACES, self.rounds), BUCKET_TYPE),)

    def build(self, config: ModelConfig, layer: int, sublayer: str = "") -> LSHAttention:
        """Returns attention with as many random rotations as heads and rounds."""
        return LSHAttention(config, layer, self)


class LSHAttention(BucketAttention):
    """Attention within buckets of random rotations."""

    def __init__(self, config: ModelConfig, layer: int, part: LSH) -> None:
        super().__init__(config, layer)
        self.part = part
        sizes = config.num_heads, part.rounds, config.head_dim, part.buckets // 2
        axes = torch.meshgrid(*(torch.arange(size, device="cpu") for size in sizes), indexing="ij")
        # Not a buffer: the loader builds decoders without memory, and no file has these numbers.
        self.turns_HNda = normals(part.seed, layer, *axes)

    def scaled(
        self, shared_BHTd: Float[Tensor, "B H T d"]
    ) -> tuple[Float[Tensor, "B H T d"], Float[Tensor, "B H T d"]]:
        """Keys have unit length, and queries are as long as they are."""
        return shared_BHTd, unit(shared_BHTd)

    @torch.no_grad()
    def buckets(self, heads: Heads) -> Int[Tensor, "B H T N"]:
        """Returns the buckets of the new tokens in all rounds."""
        key_BHTd = exact(heads.key_BGTd)
        self.turns_HNda = self.turns_HNda.to(key_BHTd.device)
        turned_BHTNa = torch.einsum("bhtd,hnda->bhtna", key_BHTd, self.turns_HNda.to(key_BHTd.dtype))
        return torch.cat([turned_BHTNa, -turned_BHTNa], dim=4).argmax(dim=4)

    def visible(self, heads: Heads, context: ForwardContext) -> Bool[Tensor, "B H T S"]:
        """Returns the places of each query's buckets. Writes the buckets of the new tokens."""
        new_BHTN, all_BHSN = self.write_buckets(heads, context)
        mask = context.mask
        visible_R1TS, front_S, self_R1TS = mask.visible(self.window), is_in_front(mask), is_self(mask)
        others_R1TS = visible_R1TS & ~self_R1TS & ~front_S
        seen_BHTS = visible_R1TS & ~self_R1TS & front_S
        for number in range(self.part.rounds):
            same_BHTS = new_BHTN[..., None, number] == all_BHSN[:, :, None, :, number]
            seen_BHTS = seen_BHTS | latest(same_BHTS & others_R1TS, self.part.span)
        return seen_BHTS | self_R1TS & ~seen_BHTS.any(dim=3, keepdim=True)
