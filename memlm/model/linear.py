"""A linear layer that multiplies by packed weights where it only predicts, and upcasts bfloat16 where it is emulated.

The ordinary product reaches a quarter of the memory's bandwidth for one row and a third of the processor's peak for
many (docs/log, 2026-11-21); oneDNN's product with weights laid out in its own blocks reaches most of both. Where
the processor only emulates bfloat16, its product takes as long again for each row, and many rows want float32.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import partial
from typing import Literal, TypeAlias

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

UPCAST_BYTES = 8 << 20  # what stays in a processor's cache

PACKED_DTYPES = (torch.float32, torch.bfloat16)
ROWS_HINT = 16  # the layout that is best for 16 rows is best, or nearly, for one and for many
SMALL_WEIGHT = 1 << 19  # below this many numbers, and for a row or two, calling oneDNN costs more than it saves
FEW_ROWS = 4
MANY_ROWS = 8  # from here on, widening bfloat16 weights costs less than emulating their product

Activation: TypeAlias = Literal["relu", "gelu", "gelu_tanh"]
# Each as oneDNN names it and its algorithm, and as torch does it by itself.
ACTIVATIONS: dict[Activation, tuple[str, str, Callable[[Tensor], Tensor]]] = {
    "relu": ("relu", "", F.relu),
    "gelu": ("gelu", "none", F.gelu),
    "gelu_tanh": ("gelu", "tanh", partial(F.gelu, approximate="tanh")),
}


class _UpcastBuffer(threading.local):
    """Numbers in a wider type, until the next ones. Each thread keeps the memory that they lie in: new memory the
    system would have to clear every time.
    """

    def __init__(self) -> None:
        self._kept = torch.empty(0, dtype=torch.uint8)

    def __call__(self, some: Tensor, wide: torch.dtype) -> Tensor:
        size = some.numel() * wide.itemsize
        if self._kept.numel() < size:
            self._kept = torch.empty(max(UPCAST_BYTES, 1 << size.bit_length()), dtype=torch.uint8)
        return self._kept[:size].view(wide).view(some.shape).copy_(some)


upcast_buffer = _UpcastBuffer()


class Linear(nn.Linear):
    """`nn.Linear` with a second, packed form. `pack()` once the weights are final."""

    packed: Tensor | None = None
    upcasts = False

    def pack(self) -> None:
        """Lays the weights out for prediction; a large ordinary weight is given up. Where the processor only emulates
        bfloat16, such weights are to be upcast instead; elsewhere does nothing.
        """
        if not can_pack(self.weight):
            self.upcasts = is_emulated(self.weight)
            return
        self.packed = torch.ops.mkldnn._reorder_linear_weight(self.weight.detach().contiguous(), ROWS_HINT)
        if self.weight.numel() >= SMALL_WEIGHT:
            self.weight = nn.Parameter(self.weight.new_empty(0), requires_grad=False)
        for parameter in self.parameters():
            parameter.requires_grad_(False)

    def unpack(self) -> None:
        """Back to the ordinary form, to train or to save."""
        self.upcasts = False
        if self.packed is not None:
            self.weight = nn.Parameter(self.packed.to_dense())
            self.packed = None

    @property
    def num_parameters(self) -> int:
        """Numbers learned, packed or not."""
        return self.in_features * self.out_features + sum(
            p.numel() for name, p in self.named_parameters() if name == "bias"
        )

    def forward(self, x: Float[Tensor, "*P I"], activation: Activation | None = None) -> Float[Tensor, "*P O"]:
        """x W' + b, behind which an activation costs nothing where weights are packed."""
        if self.upcasts and x.numel() >= MANY_ROWS * self.in_features and not torch.is_grad_enabled():
            return self._upcast(x, activation)
        if self.packed is None or (self.weight.numel() and x.numel() < FEW_ROWS * self.in_features):
            y = F.linear(x, self.weight, self.bias)
            return y if activation is None else ACTIVATIONS[activation][2](y)
        name, algorithm, _ = ("none", "", None) if activation is None else ACTIVATIONS[activation]
        return torch.ops.mkldnn._linear_pointwise(x, self.packed, self.bias, name, [], algorithm)

    def _upcast(self, x: Float[Tensor, "*P I"], activation: Activation | None) -> Float[Tensor, "*P O"]:
        """The same in float32, some of the weights at a time."""
        x_RI = x.reshape(-1, self.in_features).float()
        y_RO = x.new_empty(len(x_RI), self.out_features)
        bias_O, size = self._parameters["bias"], max(1, UPCAST_BYTES // (4 * self.in_features))
        for begin in range(0, self.out_features, size):
            some = slice(begin, begin + size)
            bias_o = None if bias_O is None else bias_O[some].float()
            y_Ro = F.linear(x_RI, upcast_buffer(self.weight[some], torch.float32), bias_o)
            y_RO[:, some] = y_Ro if activation is None else ACTIVATIONS[activation][2](y_Ro)
        return y_RO.view(*x.shape[:-1], self.out_features)


def can_pack(weight: Tensor) -> bool:
    """Whether packed weights are to be had for such a weight, on this machine."""
    return (
        weight.device.type == "cpu"
        and weight.dtype in PACKED_DTYPES
        and torch.backends.mkldnn.is_available()
        and (weight.dtype != torch.bfloat16 or multiplies_bfloat16())
        and hasattr(torch.ops.mkldnn, "_reorder_linear_weight")
        and hasattr(torch.ops.mkldnn, "_linear_pointwise")
    )


def is_emulated(some: Tensor) -> bool:
    """Whether these are bfloat16 numbers of a processor that does not multiply such ones."""
    return some.dtype == torch.bfloat16 and some.device.type == "cpu" and not multiplies_bfloat16()


def multiplies_bfloat16() -> bool:
    """Whether oneDNN multiplies bfloat16 on this processor; where it does not, it refuses to lay such weights out."""
    known = getattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", None)
    return bool(known and known())
