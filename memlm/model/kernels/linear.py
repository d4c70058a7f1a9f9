"""A linear layer that predicts from packed weights."""

from __future__ import annotations

from collections import Counter
from typing import Protocol

import torch
from jaxtyping import Float
from torch import Tensor, nn

import memlm.model.kernels.cpu as cpu
from memlm.model.kernels.cpu import Activation
from memlm.model.kernels.quantized import PanelWeight


class LayerAdapters(Protocol):
    """The adapters of a layer (`memlm.model.adapters`), which change its output y for an input x."""

    @property
    def are_used(self) -> bool: ...

    def __call__(self, x: Float[Tensor, "B T I"], y: Float[Tensor, "B T O"]) -> Float[Tensor, "B T O"]: ...


def panel_weights(module: nn.Module) -> list[PanelWeight]:
    """The packed weights of a model's linear layers that native kernels read."""
    packed = [each.packed for each in module.modules() if isinstance(each, Linear)]
    return [weight for weight in packed if isinstance(weight, PanelWeight)]


def stored_as(module: nn.Module, dtype: torch.dtype) -> str:
    """How most of a model's weights are stored: as numbers of `dtype`, as int8 or int4, or as the types of the file."""
    sizes = Counter[str]()
    for weight in panel_weights(module):
        sizes[weight.kind] += weight.out_features * weight.in_features
    return max(sizes, key=sizes.__getitem__) if sizes else str(dtype).removeprefix("torch.")


class Linear(nn.Linear):
    """`nn.Linear` with a second, packed form. Call `pack` once the weights are final."""

    packed: Tensor | PanelWeight | None = None
    adapters: LayerAdapters | None = None

    def pack(self, *, bits: int | None = None) -> None:
        """Lays the weight out for prediction where the processor has a product for it, or rounds it to some bits.

        A large or a rounded plain weight is dropped then.
        """
        packed = cpu.pack(self.weight) if bits is None else cpu.quantize(self.weight, bits)
        if packed is not None:
            self.predict_from(packed)

    def predict_from(self, packed: Tensor | PanelWeight) -> None:
        """Takes a packed form of the weight. The layer cannot learn from then on."""
        self.packed = packed
        if isinstance(packed, PanelWeight) or self.weight.numel() >= cpu.SMALL_WEIGHT:
            dtype = self.weight.dtype
            self.weight = nn.Parameter(torch.empty(0, dtype=dtype), requires_grad=False)
        for parameter in self.parameters():
            parameter.requires_grad_(False)

    @property
    def num_parameters(self) -> int:
        """Learned numbers, packed or not."""
        return self.in_features * self.out_features + sum(
            p.numel() for name, p in self.named_parameters() if name == "bias"
        )

    def dense(self) -> Float[Tensor, "O I"]:
        """Returns the weight, unpacked where it is packed."""
        return self.weight if self.packed is None else self.packed.to_dense()

    def forward(self, x: Float[Tensor, "*P I"], activation: Activation | None = None) -> Float[Tensor, "*P O"]:
        """Returns activation(x W' + b), where the adapters of a pass add to x W' + b."""
        if self.adapters is None or not self.adapters.are_used:
            return cpu.linear(x, self.weight, self.bias, activation, packed=self.packed)
        y = self.adapters(x, cpu.linear(x, self.weight, self.bias, packed=self.packed))
        return y if activation is None else cpu.ACTIVATIONS[activation][2](y)
