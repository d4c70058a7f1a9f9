"""Averages over the depth: a block reads a mixture of all earlier blocks' outputs (DenseFormer, arXiv 2402.02622).

Shapes: B batch, T new tokens, D width.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import torch
from jaxtyping import Float
from torch import Tensor, nn

from memlm.errors import InvalidInput, check_range
from memlm.model.parts import Part

if TYPE_CHECKING:
    from memlm.model.config import ModelConfig
    from memlm.model.forward import ForwardContext
    from memlm.model.layers import Block


@dataclass(frozen=True, slots=True)
class Dense(Part):
    """A stack that averages over the depth behind every `period`-th block.

    With X_0 the embedding and X_j the output of block j, the next block reads Y_i = sum(a_ij X_j) over the j <= i that
    are equal to i modulo `dilation`. A fresh model has a_ii = 1 and all others 0, and equals the plain one. With both 1
    there are L (L + 3) / 2 weights for L blocks, and a pass holds L + 1 streams instead of one.
    """

    seam: ClassVar[str] = "stack"
    kind: ClassVar[str] = "dense"

    dilation: int = 1
    period: int = 1

    def __post_init__(self) -> None:
        check_range("dilation", self.dilation, least=1, whole=True)
        check_range("period", self.period, least=1, whole=True)

    def build(self, config: ModelConfig, layer: int, sublayer: str = "") -> DenseStack:
        """Returns the weights of all averages."""
        return DenseStack(config.num_layers, self)

    def check(self, config: ModelConfig) -> None:
        """Refuses averages that have no block to average over."""
        if max(self.dilation, self.period) > config.num_layers:
            raise InvalidInput(
                f"dilation {self.dilation} and period {self.period} leave no average in {config.num_layers} layers",
                field="stack",
            )


class DenseStack(nn.Module):
    """The weights of the averages, the latest output last."""

    def __init__(self, num_layers: int, part: Dense) -> None:
        super().__init__()
        self.part = part
        # Vectors, so that no optimizer treats them as matrices and none decays them.
        self.weights = nn.ParameterDict(
            {
                str(n): nn.Parameter(torch.empty(len(self._read_by(n))))
                for n in range(1, num_layers + 1)
                if self._averages(n)
            }
        )

    def _averages(self, number: int) -> bool:
        return number % self.part.period == 0

    def _read_by(self, number: int) -> range:
        """The outputs that the average behind a block reads: its own last, 0 for the embedding."""
        return range(number % self.part.dilation, number + 1, self.part.dilation)

    def initialize(self) -> None:
        """Starts as the plain stack."""
        for weight in self.weights.values():
            nn.init.zeros_(weight)
            nn.init.ones_(weight[-1:])

    def read(
        self, blocks: Sequence[Block], hidden_BTD: Float[Tensor, "B T D"], context: ForwardContext, *, finishes: bool
    ) -> tuple[Float[Tensor, "B T D"], Float[Tensor, "B T D"]]:
        """Returns the stream behind the last average, and the keys."""
        made = [hidden_BTD]
        for number, block in enumerate(blocks, start=1):
            attended_BTD, key_BTD = block.attend(hidden_BTD, context)
            if number == len(blocks) and not finishes:
                return attended_BTD, key_BTD
            hidden_BTD = block.finish(attended_BTD, key_BTD, context)
            made.append(hidden_BTD)
            if self._averages(number):
                weights = self.weights[str(number)].to(hidden_BTD.dtype)
                hidden_BTD = sum(
                    (weight * made[n] for weight, n in zip(weights, self._read_by(number), strict=True)),
                    start=torch.zeros_like(hidden_BTD),
                )
        return hidden_BTD, key_BTD
