"""Selective attention: tokens hide earlier ones from later queries (arXiv 2410.02703).

    scores_hij = scores_hij - F_ij,   F_ij = sum of relu(scores_0mj) over queries m < i

So the scores of the first head also say how much a token hides another one. None hides itself or the first token of the
document. There are no parameters.

Shapes: B batch, T new tokens, S places, H query heads, d width of a head, D width, R rows.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from memlm.errors import InvalidInput, check_range
from memlm.model.attention.attention import Attention, Heads
from memlm.model.attention.knn_attention import exact
from memlm.model.forward import ForwardContext
from memlm.model.parts import Part
from memlm.model.state.fields import PLACES, Field

if TYPE_CHECKING:
    from memlm.model.config import ModelConfig


@dataclass(frozen=True, slots=True)
class Selective(Part):
    """Attention to what no token in between has hidden (arXiv 2410.02703).

    With `forget_at` above 0, a token that is hidden by more than this is not seen at all, for good: F only grows. The
    paper keeps a number of tokens instead. At 30, a token among others of its score loses a weight below 1e-12.
    """

    seam: ClassVar[str] = "mixer"
    kind: ClassVar[str] = "selective"

    forget_at: float = 0.0

    def __post_init__(self) -> None:
        check_range("forget_at", self.forget_at, least=0)

    def fields(self, config: ModelConfig) -> tuple[Field, ...]:
        """How much each place is hidden, F of the next query: 4 bytes a place."""
        return (Field("hidden", (PLACES,), wide=True, adds=True),)

    def check(self, config: ModelConfig) -> None:
        """Refuses memories of tokens that nothing says how much they are hidden."""
        for name in ("compression", "memorizing", "extended_attention", "border"):
            if getattr(config, name):
                raise InvalidInput(
                    f"selective attention does not know how much the tokens in {name} are hidden; leave one out",
                    field=name,
                )

    def build(self, config: ModelConfig, layer: int, sublayer: str = "") -> SelectiveAttention:
        """Returns the mixer. It has the parameters of attention."""
        return SelectiveAttention(config, layer, self)


class SelectiveAttention(Attention):
    """Attention whose scores fall as earlier tokens hide keys."""

    is_explicit = True

    def __init__(self, config: ModelConfig, layer: int, part: Selective) -> None:
        super().__init__(config, layer)
        self.part = part

    def keep(self, hidden_BTD: Float[Tensor, "B T D"], context: ForwardContext) -> None:
        """Writes tokens that skip the layer to the state, where they hide others too."""
        self(hidden_BTD, context)

    def scores(
        self,
        query_BHTd: Float[Tensor, "B H T d"],
        heads: Heads,
        key_BHSd: Float[Tensor, "B H S d"],
        context: ForwardContext,
    ) -> Float[Tensor, "B H T S"]:
        """Returns the scores less F. Places that are forgotten have -inf. Updates the state."""
        scores_BHTS = exact(super().scores(query_BHTd, heads, key_BHSd, context))
        hides_BTS = scores_BHTS[:, 0].relu() * self._may_hide(heads, context)
        before_BS = self._hidden_before(context)
        after_BTS = before_BS[:, None] + hides_BTS.cumsum(dim=1)
        hidden_BTS = torch.cat([before_BS[:, None], after_BTS[:, :-1]], dim=1)
        context.field(self.layer, "hidden")[:, : before_BS.shape[1]] = after_BTS[:, -1].detach()
        scores_BHTS = scores_BHTS - hidden_BTS[:, None]
        if not self.part.forget_at:
            return scores_BHTS
        return scores_BHTS.masked_fill((hidden_BTS > self.part.forget_at)[:, None], -torch.inf)

    def _may_hide(self, heads: Heads, context: ForwardContext) -> Bool[Tensor, "B T S"]:
        """Where a real token sees another one, which is not the first of its document."""
        mask = context.mask
        query_RT1, first_RT1, key_R1S = mask.query_RT[..., None], mask.document_RT[..., None], mask.key_RS[:, None]
        others_RTS = (key_R1S != query_RT1) & (key_R1S != first_RT1)
        return self.visible(heads, context)[:, 0] & others_RTS & context.is_real_BT[..., None]

    def _hidden_before(self, context: ForwardContext) -> Float[Tensor, "B S"]:
        """How much the places are hidden from the first new token. New places, or ones used before, have none."""
        assert context.state is not None
        S, field_BS = context.mask.num_places, context.field(self.layer, "hidden")
        ends_B1 = torch.tensor(context.state.places_B(), device=field_BS.device)[:, None]
        return field_BS[:, :S].masked_fill(torch.arange(S, device=field_BS.device) >= ends_B1, 0.0)
