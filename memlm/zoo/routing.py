"""Routing attention (Routing Transformer, arXiv 2003.05997): a token sees the tokens of its cluster.

Each head has centroids, and a token is of the cluster whose centroid is nearest. As in the paper, queries and keys are
one vector under a LayerNorm without parameters, and the first heads may see a window instead.

The paper moves a centroid by a running mean of its tokens. Here it follows the loss `clusters`, half the mean square
distance of tokens to their centroids, whose gradient is the same step. So it is a parameter like all others, to
accumulated steps, to several processes and to files. The paper's clusters have as many members each, the nearest ones
of the whole sequence, which a later token changes. Here a token has one cluster, and sees the last `span` of it.

Shapes: B batch, T new tokens, S places, H heads, K heads with clusters, d width of a head, C clusters.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from memlm.errors import InvalidInput, check_range
from memlm.model.attention.attention import Heads
from memlm.model.attention.knn_attention import exact, unit
from memlm.model.forward import ForwardContext
from memlm.model.state.fields import PLACES, Field
from memlm.zoo.buckets import BUCKET_TYPE, MOST_BUCKETS, BucketAttention, BucketPart, is_in_front, latest

if TYPE_CHECKING:
    from memlm.model.config import ModelConfig


@dataclass(frozen=True, slots=True)
class Routing(BucketPart):
    """A mixer whose heads see the last `span` tokens (0: all) of their cluster.

    The first `local_heads` see `local_window` tokens instead. `follow` weighs the loss that moves the centroids.
    """

    seam: ClassVar[str] = "mixer"
    kind: ClassVar[str] = "routing"

    clusters: int = 16
    span: int = 0
    local_heads: int = 0
    local_window: int = 128
    follow: float = 1.0

    def __post_init__(self) -> None:
        check_range("clusters", self.clusters, least=1, most=MOST_BUCKETS, whole=True)
        check_range("span", self.span, least=0, whole=True)
        check_range("local_heads", self.local_heads, least=0, whole=True)
        check_range("local_window", self.local_window, least=1, whole=True)
        check_range("follow", self.follow, above=0)

    def check(self, config: ModelConfig) -> None:
        """Raises InvalidInput as for other buckets, and where no head has clusters."""
        BucketPart.check(self, config)
        if self.local_heads >= config.num_heads:
            raise InvalidInput(
                f"local_heads is {self.local_heads} of {config.num_heads} heads; expected fewer", field="local_heads"
            )

    def fields(self, config: ModelConfig) -> tuple[Field, ...]:
        """The cluster of each token."""
        return (Field("bucket", (config.num_heads - self.local_heads, PLACES), BUCKET_TYPE),)

    def build(self, config: ModelConfig, layer: int, sublayer: str = "") -> RoutingAttention:
        """Returns attention with centroids for its heads."""
        return RoutingAttention(config, layer, self)


class RoutingAttention(BucketAttention):
    """Attention within clusters that are learned."""

    def __init__(self, config: ModelConfig, layer: int, part: Routing) -> None:
        super().__init__(config, layer)
        self.part = part
        self.centroid_KCd = nn.Parameter(
            torch.zeros(config.num_heads - part.local_heads, part.clusters, config.head_dim)
        )

    def initialize(self) -> None:
        """Draws centroids in directions at random, about one long."""
        nn.init.normal_(self.centroid_KCd, std=self.config.head_dim**-0.5)

    def scaled(
        self, shared_BHTd: Float[Tensor, "B H T d"]
    ) -> tuple[Float[Tensor, "B H T d"], Float[Tensor, "B H T d"]]:
        """Queries and keys are one vector, with mean 0 and variance 1."""
        normed_BHTd = F.layer_norm(shared_BHTd, shared_BHTd.shape[3:])
        return normed_BHTd, normed_BHTd

    @torch.no_grad()
    def buckets(self, heads: Heads) -> Int[Tensor, "B K T"]:
        """Returns the cluster whose centroid is nearest in direction."""
        unit_BKTd, unit_KdC = self._units(heads), unit(exact(self.centroid_KCd)).mT
        return (unit_BKTd @ unit_KdC).argmax(dim=3)

    def visible(self, heads: Heads, context: ForwardContext) -> Bool[Tensor, "B H T S"]:
        """Returns the places of each query's cluster. Writes the clusters of the new tokens, and tells `clusters`."""
        new_BKT, all_BKS = self.write_buckets(heads, context)
        if context.losses is not None:
            context.tell("clusters", self.part.follow * self._distance(heads, new_BKT.long(), context))
        mask, front_S = context.mask, is_in_front(context.mask)
        visible_R1TS = mask.visible(self.window)
        same_BKTS = (new_BKT[..., None] == all_BKS[:, :, None]) & visible_R1TS & ~front_S
        seen_BHTS = latest(same_BKTS, self.part.span)
        if self.part.local_heads:
            away_R1TS = (mask.query_RT[:, :, None] - mask.key_RS[:, None])[:, None]
            near_R1TS = visible_R1TS & (away_R1TS < self.part.local_window)
            local_BhTS = near_R1TS.expand(len(seen_BHTS), self.part.local_heads, -1, -1)
            seen_BHTS = torch.cat([local_BhTS, seen_BHTS], dim=1)
        return seen_BHTS | visible_R1TS & front_S

    def _units(self, heads: Heads) -> Float[Tensor, "B K T d"]:
        return unit(exact(heads.key_BGTd[:, self.part.local_heads :]))

    def _distance(self, heads: Heads, cluster_BKT: Tensor, context: ForwardContext) -> Float[Tensor, ""]:
        """Half the mean square distance of real tokens to their centroids. Its gradient is for centroids alone."""
        head_K1 = torch.arange(len(self.centroid_KCd), device=cluster_BKT.device)[:, None]
        nearest_BKTd = self.centroid_KCd[head_K1, cluster_BKT]
        square_BKT = (self._units(heads).detach() - nearest_BKTd).square().sum(dim=3)
        return square_BKT.transpose(1, 2)[context.is_real_BT].mean() / 2
