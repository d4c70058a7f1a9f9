"""A linear layer that predicts from packed weights."""

from __future__ import annotations

from jaxtyping import Float
from torch import Tensor, nn

import memlm.model.cpu as cpu
from memlm.model.cpu import Activation
from memlm.model.quantized import Int8Weight


class Linear(nn.Linear):
    """`nn.Linear` with a second, packed form. Call `pack` once the weights are final."""

    packed: Tensor | Int8Weight | None = None

    def pack(self, *, quantize: bool = False) -> None:
        """Lays the weight out for prediction where the processor has a product for it, or rounds it to 8 bits.

        A large or a rounded plain weight is dropped then.
        """
        self.packed = cpu.quantize(self.weight) if quantize else cpu.pack(self.weight)
        if self.packed is None:
            return
        if quantize or self.weight.numel() >= cpu.SMALL_WEIGHT:
            self.weight = nn.Parameter(self.weight.new_empty(0), requires_grad=False)
        for parameter in self.parameters():
            parameter.requires_grad_(False)

    @property
    def num_parameters(self) -> int:
        """Learned numbers, packed or not."""
        return self.in_features * self.out_features + sum(
            p.numel() for name, p in self.named_parameters() if name == "bias"
        )

    def forward(self, x: Float[Tensor, "*P I"], activation: Activation | None = None) -> Float[Tensor, "*P O"]:
        """Returns activation(x W' + b)."""
        return cpu.linear(x, self.weight, self.bias, activation, packed=self.packed)
