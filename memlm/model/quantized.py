"""Weights in 8 bits, in blocks of 32 inputs with a scale each, laid out for memlm/model/csrc/kernels.h.

Shapes: O outputs, I inputs, P panels of 8 outputs, K blocks of 32 inputs, R rows.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int, UInt8
from torch import Tensor

BLOCK, OUTPUTS, GROUP = 32, 8, 4
BLOCK_BYTES = 2 * OUTPUTS + OUTPUTS * BLOCK
LARGEST = 127
LARGEST_INPUT = 32_767  # inputs of a product have 16 bits: more than the weights need, in no more time


@dataclass(frozen=True, slots=True)
class Int8Weight:
    """A matrix of a linear layer: for each panel and block 8 scales in float16, then 8 x 32 numbers of 8 bits.

    The numbers of a block are ordered by groups of 4 inputs, then outputs, then inputs.
    """

    panels_PKB: UInt8[Tensor, "P K B"]
    out_features: int
    in_features: int

    @classmethod
    def empty(cls, out_features: int, in_features: int) -> Int8Weight:
        """Returns a weight whose numbers are not set."""
        shape = -(-out_features // OUTPUTS), -(-in_features // BLOCK), BLOCK_BYTES
        return cls(torch.empty(shape, dtype=torch.uint8), out_features, in_features)

    @classmethod
    def of(cls, weight_OI: Float[Tensor, "O I"]) -> Int8Weight:
        """Rounds a weight. The largest number of each block becomes 127 or -127."""
        O, I = weight_OI.shape
        padded = F.pad(weight_OI.detach().float(), (0, -I % BLOCK, 0, -O % OUTPUTS))
        blocks_PoKi = padded.unflatten(0, (-1, OUTPUTS)).unflatten(2, (-1, BLOCK))
        scales_PoK = (blocks_PoKi.abs().amax(dim=3) / LARGEST).half()
        divisors = scales_PoK.float().masked_fill(scales_PoK == 0, 1)
        rounded_PoKi = (blocks_PoKi / divisors[..., None]).round().clamp(-LARGEST, LARGEST).to(torch.int8)
        grouped = rounded_PoKi.unflatten(3, (-1, GROUP)).permute(0, 2, 3, 1, 4)
        scales_PKo = scales_PoK.transpose(1, 2).contiguous()
        return cls(
            torch.cat([scales_PKo.view(torch.uint8), grouped.flatten(2).contiguous().view(torch.uint8)], dim=2), O, I
        )

    @property
    def num_bytes(self) -> int:
        return self.panels_PKB.numel()

    def to_dense(self) -> Float[Tensor, "O I"]:
        """Returns the rounded weight in float32."""
        scales_PKo, rounded_PKoi = self._parts()
        blocks_PKoi = rounded_PKoi * scales_PKo.float()[..., None]
        return blocks_PKoi.transpose(1, 2).flatten(2).flatten(0, 1)[: self.out_features, : self.in_features]

    def multiply(self, x_RI: Float[Tensor, "R I"]) -> Float[Tensor, "R O"]:
        """Returns x W' as the native product computes it: `x` in blocks of 16 bits, sums of integers, then scales."""
        values_RKi, scales_RK = quantize_rows(x_RI)
        scales_PKo, rounded_PKoi = self._parts()
        sums_RPKo = torch.einsum("rki,pkoi->rpko", values_RKi.double(), rounded_PKoi.double())
        products = (sums_RPKo * scales_PKo.double() * scales_RK.double()[:, None, :, None]).sum(dim=2)
        return products.flatten(1)[:, : self.out_features].float()

    def _parts(self) -> tuple[Tensor, Int[Tensor, "P K o i"]]:
        scales, numbers = self.panels_PKB.split([2 * OUTPUTS, OUTPUTS * BLOCK], dim=2)
        grouped = numbers.contiguous().view(torch.int8).unflatten(2, (-1, OUTPUTS, GROUP))
        return scales.contiguous().view(torch.float16), grouped.transpose(2, 3).flatten(3)


def quantize_rows(x_RI: Float[Tensor, "R I"]) -> tuple[Float[Tensor, "R K i"], Float[Tensor, "R K"]]:
    """Rounds each block of a row to multiples of a 32,767th of its largest number. Returns multiples and units."""
    blocks_RKi = F.pad(x_RI.float(), (0, -x_RI.shape[1] % BLOCK)).unflatten(1, (-1, BLOCK))
    largest_RK = blocks_RKi.abs().amax(dim=2)
    inverses_RK = torch.where(largest_RK > 0, torch.full_like(largest_RK, LARGEST_INPUT) / largest_RK, 0)
    return (blocks_RKi * inverses_RK[..., None]).round(), largest_RK / LARGEST_INPUT
