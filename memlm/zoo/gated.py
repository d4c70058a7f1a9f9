"""Residuals with gates, as a GRU has them (GTrXL, arXiv 1910.06764, section 3.2).

Shapes: B batch, T new tokens, D width.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import torch
from jaxtyping import Float
from torch import Tensor, nn

from memlm.errors import InvalidInput, check_range
from memlm.model.kernels.linear import Linear
from memlm.model.parts import Part

if TYPE_CHECKING:
    from memlm.model.config import ModelConfig


@dataclass(frozen=True, slots=True)
class Gated(Part):
    """A join that lets a learned share of each number of the stream pass, and takes the rest from a new value.

    With x the stream and y the output of the sub-layer behind a ReLU: r = sigmoid(W_r y + U_r x),
    z = sigmoid(W_z y + U_z x - b), and the stream becomes (1 - z) x + z tanh(W y + U (r x)). `start` is b of a fresh
    model. Above 0, a fresh model lets nearly all of the stream pass. Each join has 6 D^2 + D parameters.
    """

    seam: ClassVar[str] = "join"
    kind: ClassVar[str] = "gated"

    start: float = 2.0

    def __post_init__(self) -> None:
        check_range("start", self.start)

    def build(self, config: ModelConfig, layer: int, sublayer: str = "") -> GatedResidual:
        """Returns the gates of one residual."""
        return GatedResidual(config.dim, self.start)

    def check(self, config: ModelConfig) -> None:
        """Refuses norms that are not before the sub-layers: the stream must reach the last norm as it is."""
        if config.norm_order != "pre" or config.parallel_residual:
            order = "parallel" if config.parallel_residual else config.norm_order
            raise InvalidInput(f"gated joins need norm_order pre and no parallel residual; got {order}", field="join")


class GatedResidual(nn.Module):
    """The gates of one residual."""

    def __init__(self, dim: int, start: float) -> None:
        super().__init__()
        self.start = start
        self.change = Linear(dim, 3 * dim, bias=False)  # W_r, W_z and W
        self.stream = Linear(dim, 2 * dim, bias=False)  # U_r and U_z
        self.reset = Linear(dim, dim, bias=False)  # U
        self.bias_D = nn.Parameter(torch.empty(dim))

    def initialize(self) -> None:
        """Starts with gates that let the stream pass."""
        nn.init.constant_(self.bias_D, self.start)

    def forward(self, stream_BTD: Float[Tensor, "B T D"], change_BTD: Float[Tensor, "B T D"]) -> Float[Tensor, "B T D"]:
        """Returns the stream behind the gates."""
        of_reset_BTD, of_share_BTD, of_new_BTD = self.change(change_BTD.relu()).chunk(3, dim=-1)
        reset_BTD, share_BTD = self.stream(stream_BTD).chunk(2, dim=-1)
        reset_BTD = torch.sigmoid(of_reset_BTD + reset_BTD)
        share_BTD = torch.sigmoid(of_share_BTD + share_BTD - self.bias_D)
        new_BTD = torch.tanh(of_new_BTD + self.reset(reset_BTD * stream_BTD))
        return torch.lerp(stream_BTD, new_BTD, share_BTD)
