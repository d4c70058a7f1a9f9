"""Adaptive attention span: each head learns how far it looks (arXiv 1905.07799).

    a_tj = m(t - j) exp(score_tj) / sum_i m(t - i) exp(score_ti),   m(x) = clamp((ramp + z - x) / ramp, 0, 1)

z is the span of a head, a learned share of `longest`. A loss of `penalty` times the mean span of the heads keeps it
short. A token sees itself, and places in front of the latest tokens have m = 1. The paper leaves a token itself out.

Shapes: B batch, T new tokens, S places, H query heads, R rows (1 if all have equal positions), d width of a head.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn

from memlm.errors import check_range
from memlm.model.attention.attention import Attention, Heads
from memlm.model.attention.knn_attention import exact
from memlm.model.forward import ForwardContext
from memlm.model.parts import Part

if TYPE_CHECKING:
    from memlm.model.config import ModelConfig


@dataclass(frozen=True, slots=True)
class AdaptiveSpan(Part):
    """Attention with a learned span of each head (arXiv 1905.07799).

    Spans begin at the share `start` of `longest` (0: the context length). `ramp` tokens behind a span fade out.
    """

    seam: ClassVar[str] = "mixer"
    kind: ClassVar[str] = "adaptive_span"

    ramp: int = 32
    longest: int = 0
    start: float = 0.0
    penalty: float = 2e-6

    def __post_init__(self) -> None:
        check_range("ramp", self.ramp, least=1, whole=True)
        check_range("longest", self.longest, least=0, whole=True)
        check_range("start", self.start, least=0, most=1)
        check_range("penalty", self.penalty, least=0)

    def build(self, config: ModelConfig, layer: int, sublayer: str = "") -> AdaptiveSpanAttention:
        """Returns the mixer. It has a number for each head beside the parameters of attention."""
        return AdaptiveSpanAttention(config, layer, self)


class AdaptiveSpanAttention(Attention):
    """Attention whose heads fade out behind their spans."""

    is_explicit = True

    def __init__(self, config: ModelConfig, layer: int, part: AdaptiveSpan) -> None:
        super().__init__(config, layer)
        self.part, self.longest = part, part.longest or config.context_length
        self.share_H = nn.Parameter(torch.full((config.num_heads,), part.start))

    @property
    def spans_H(self) -> Float[Tensor, " H"]:
        """The span of each head, in tokens."""
        return exact(self.share_H).clamp(0, 1) * self.longest

    @property
    def reach(self) -> int:
        """How many latest tokens the widest head sees. As a window of the layer, it changes nothing that is read."""
        return math.ceil(self.spans_H.max().item()) + self.part.ramp

    def forward(self, hidden_BTD: Float[Tensor, "B T D"], context: ForwardContext) -> Float[Tensor, "B T D"]:
        """Attends, and tells the loss `span`."""
        if self.training and torch.is_grad_enabled():
            with torch.no_grad():  # beyond its bounds a share has no gradient, and would never come back
                if bool(((self.share_H < 0) | (self.share_H > 1)).any()):
                    self.share_H.clamp_(0, 1)
        if self.part.penalty:
            context.tell("span", self.part.penalty * self.spans_H.mean())
        return super().forward(hidden_BTD, context)

    def scores(
        self,
        query_BHTd: Float[Tensor, "B H T d"],
        heads: Heads,
        key_BHSd: Float[Tensor, "B H S d"],
        context: ForwardContext,
    ) -> Float[Tensor, "B H T S"]:
        """Returns the scores plus log m."""
        scores_BHTS = exact(super().scores(query_BHTd, heads, key_BHSd, context))
        seen_RHTS = self._mask(context).to(scores_BHTS.dtype)
        return scores_BHTS + seen_RHTS.clamp(min=torch.finfo(scores_BHTS.dtype).tiny).log()

    def visible(self, heads: Heads, context: ForwardContext) -> Bool[Tensor, "R H T S"]:
        """Returns where m is above 0."""
        return context.mask.visible(self.window) & (self._mask(context) > 0)

    def _mask(self, context: ForwardContext) -> Float[Tensor, "R H T S"]:
        """Returns m."""
        away_R1TS, ramp = context.mask.distances()[:, None], self.part.ramp
        seen_RHTS = ((ramp + self.spans_H[:, None, None] - away_R1TS) / ramp).clamp(0, 1)
        front_S = torch.arange(context.mask.num_places, device=seen_RHTS.device) < context.mask.num_front
        return seen_RHTS.masked_fill(front_S, 1.0)
