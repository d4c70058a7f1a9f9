"""Weights in panels for memlm/model/kernels/csrc/kernels.h: in blocks of 4 or 8 bits, or as plain numbers of 16 bits.

Shapes: O outputs, I inputs, P panels of 8 outputs, K blocks of 32 inputs, h halves of a block, R rows.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from enum import Enum

import torch
import torch.nn.functional as F
from jaxtyping import Float, Integer, UInt8
from torch import Tensor

BLOCK, OUTPUTS, GROUP, HALVES = 32, 8, 4, 2
GROUPS = BLOCK // HALVES // GROUP
PLAIN_DTYPES = (torch.float16, torch.bfloat16)  # as native.cpp numbers them, after the layouts of blocks
LARGEST = 127
LARGEST_INPUT = 32_767  # inputs of a product have 16 bits: more than the weights need, in no more time
LEAST_INPUT = 1e-30  # a block below it is zero: its inverse would be infinite


class Layout(Enum):
    """How a block lies in memory: its scales, its minimums, its numbers. A weight is scale x number + minimum."""

    INT8 = 0, 8, torch.float16, 1, False
    INT4 = 1, 4, torch.float16, 1, True
    INT4_WIDE = 2, 4, torch.float32, 1, True
    INT8_WIDE = 3, 8, torch.float32, HALVES, True  # holds every other one exactly

    def __init__(self, number: int, bits: int, scale_dtype: torch.dtype, num_scales: int, has_minimums: bool) -> None:
        self.number, self.bits = number, bits  # as native.cpp numbers them
        self.scale_dtype, self.num_scales, self.has_minimums = scale_dtype, num_scales, has_minimums
        self.num_headers = num_scales * (2 if has_minimums else 1)
        self.header_bytes = self.num_headers * OUTPUTS * scale_dtype.itemsize
        self.block_bytes = self.header_bytes + OUTPUTS * BLOCK * bits // 8


@dataclass(frozen=True, slots=True)
class Blocks:
    """The numbers of some rows of a weight, and the scales and minimums of each block or of its halves."""

    numbers_OKi: Integer[Tensor, "O K i"]  # of 0 to 15 in 4 bits
    scales_OKh: Float[Tensor, "O K h"]
    minimums_OKh: Float[Tensor, "O K h"] | None = None

    @classmethod
    def rounded(cls, weight_OI: Float[Tensor, "O I"], bits: int) -> Blocks:
        """Rounds a weight. In 8 bits the largest number of each block becomes 127 or -127, in 4 bits the smallest and
        the largest become 0 and 15.
        """
        padded_OKi = F.pad(weight_OI.detach().float(), (0, -weight_OI.shape[1] % BLOCK)).unflatten(1, (-1, BLOCK))
        if bits == 8:
            scales_OK1 = (padded_OKi.abs().amax(dim=2, keepdim=True) / LARGEST).half().float()
            minimums_OK1, least, most = None, -LARGEST, LARGEST
            offset_OKi = padded_OKi
        else:
            minimums_OK1 = padded_OKi.amin(dim=2, keepdim=True).half().float()
            offset_OKi = padded_OKi - minimums_OK1
            scales_OK1, least, most = (offset_OKi.amax(dim=2, keepdim=True) / 15).half().float(), 0, 15
        divisors_OK1 = scales_OK1.masked_fill(scales_OK1 == 0, 1)
        numbers_OKi = (offset_OKi / divisors_OK1).round().clamp(least, most).to(torch.int8)
        return cls(numbers_OKi, scales_OK1, minimums_OK1)

    def to_dense(self) -> Float[Tensor, "O I"]:
        """Returns the numbers that the blocks stand for, in float32."""
        dense_OKhi = self.numbers_OKi.unflatten(2, (self.scales_OKh.shape[2], -1)) * self.scales_OKh[..., None]
        if self.minimums_OKh is not None:
            dense_OKhi += self.minimums_OKh[..., None]
        return dense_OKhi.flatten(1)

    def widened(self, layout: Layout) -> Blocks:
        """The same with as many scales and minimums of a block as a layout has."""
        scales_OKh = self.scales_OKh.expand(-1, -1, layout.num_scales)
        if not layout.has_minimums:
            return Blocks(self.numbers_OKi.to(torch.int8), scales_OKh)
        minimums_OKh = torch.zeros_like(scales_OKh) if self.minimums_OKh is None else self.minimums_OKh
        return Blocks(self.numbers_OKi.to(torch.int8), scales_OKh, minimums_OKh.expand(-1, -1, layout.num_scales))

    def packed(self, layout: Layout) -> UInt8[Tensor, "P K B"]:
        """Returns panels. The last one is filled up with zeros."""
        missing = -len(self.numbers_OKi) % OUTPUTS
        wide = self.widened(layout)
        parts = [wide.scales_OKh] if wide.minimums_OKh is None else [wide.scales_OKh, wide.minimums_OKh]
        headers_PKho = F.pad(torch.cat(parts, dim=2), (0, 0, 0, 0, 0, missing)).unflatten(0, (-1, OUTPUTS))
        headers_PKho = headers_PKho.permute(0, 2, 3, 1).to(layout.scale_dtype).contiguous()
        numbers = F.pad(self.numbers_OKi, (0, 0, 0, 0, 0, missing)).unflatten(2, (HALVES, GROUPS, GROUP))
        grouped_PKhgoi = numbers.unflatten(0, (-1, OUTPUTS)).permute(0, 2, 3, 4, 1, 5)
        if layout.bits == 4:
            words_PKhoi = sum((grouped_PKhgoi[..., g, :, :].short() << (4 * g) for g in range(GROUPS)), start=0)
            grouped_PKhgoi = words_PKhoi
        header = headers_PKho.flatten(2).view(torch.uint8)
        return torch.cat([header, grouped_PKhgoi.flatten(2).contiguous().view(torch.uint8)], dim=2)


@dataclass(frozen=True, slots=True)
class PanelWeight(ABC):
    """A matrix of a linear layer, in panels of 8 outputs and blocks of 32 inputs. `kind` names its numbers: int8, int4,
    float16, bfloat16, or a type of GGUF's.
    """

    panels_PKB: UInt8[Tensor, "P K B"]
    kind: str
    out_features: int
    in_features: int

    @property
    def num_bytes(self) -> int:
        return self.panels_PKB.numel()

    @property
    @abstractmethod
    def layout_number(self) -> int:
        """The layout, as native.cpp numbers them."""

    @abstractmethod
    def to_dense(self) -> Float[Tensor, "O I"]:
        """Returns the weight in float32."""


@dataclass(frozen=True, slots=True)
class PlainWeight(PanelWeight):
    """A matrix in float16 or bfloat16, for products in float32. A block has the 8 outputs of each of its 32 inputs."""

    dtype: torch.dtype

    @classmethod
    def of(cls, weight_OI: Tensor) -> PlainWeight:
        """Lays a weight out, as exact as it is. The last panel and the last block are filled up with zeros."""
        O, I = weight_OI.shape
        padded = F.pad(weight_OI.detach(), (0, -I % BLOCK, 0, -O % OUTPUTS))
        panels = padded.unflatten(0, (-1, OUTPUTS)).unflatten(2, (-1, BLOCK)).permute(0, 2, 3, 1).flatten(2)
        return cls(
            panels.contiguous().view(torch.uint8), str(weight_OI.dtype).removeprefix("torch."), O, I, weight_OI.dtype
        )

    @property
    def layout_number(self) -> int:
        return len(Layout) + PLAIN_DTYPES.index(self.dtype)

    def to_dense(self) -> Float[Tensor, "O I"]:
        """Returns the weight in float32."""
        blocks_PKio = self.panels_PKB.view(self.dtype).unflatten(2, (BLOCK, OUTPUTS))
        return blocks_PKio.permute(0, 3, 1, 2).flatten(0, 1).flatten(1)[: self.out_features, : self.in_features].float()


@dataclass(frozen=True, slots=True)
class BlockWeight(PanelWeight):
    """A matrix whose blocks have scales, and minimums in some layouts."""

    layout: Layout

    @classmethod
    def empty(cls, layout: Layout, kind: str, out_features: int, in_features: int) -> BlockWeight:
        """Returns a weight whose numbers are not set."""
        shape = -(-out_features // OUTPUTS), -(-in_features // BLOCK), layout.block_bytes
        return cls(torch.empty(shape, dtype=torch.uint8), kind, out_features, in_features, layout)

    @classmethod
    def rounded(cls, weight_OI: Float[Tensor, "O I"], bits: int = 8) -> BlockWeight:
        """Rounds a weight to 8 or 4 bits."""
        layout = Layout.INT8 if bits == 8 else Layout.INT4
        O, I = weight_OI.shape
        return cls(Blocks.rounded(weight_OI, bits).packed(layout), f"int{bits}", O, I, layout)

    @property
    def layout_number(self) -> int:
        return self.layout.number

    def blocks(self) -> Blocks:
        """Returns the numbers, scales and minimums of all rows, those of the last panel's padding included."""
        layout = self.layout
        header, numbers = self.panels_PKB.split([layout.header_bytes, layout.block_bytes - layout.header_bytes], dim=2)
        headers_PKho = header.contiguous().view(layout.scale_dtype).float().unflatten(2, (-1, OUTPUTS))
        headers_OKh = headers_PKho.permute(0, 3, 1, 2).flatten(0, 1)
        if layout.bits == 4:
            words_PKhoi = numbers.contiguous().view(torch.int16).unflatten(2, (HALVES, OUTPUTS, GROUP))
            grouped = torch.stack([words_PKhoi >> (4 * g) & 15 for g in range(GROUPS)], dim=3)
        else:
            grouped = numbers.contiguous().view(torch.int8).unflatten(2, (HALVES, GROUPS, OUTPUTS, GROUP))
        numbers_OKi = grouped.permute(0, 4, 1, 2, 3, 5).flatten(0, 1).flatten(2)
        scales_OKh, *minimums = headers_OKh.split(layout.num_scales, dim=2)
        return Blocks(numbers_OKi, scales_OKh, *minimums)

    def to_dense(self) -> Float[Tensor, "O I"]:
        """Returns the weight in float32."""
        return self.blocks().to_dense()[: self.out_features, : self.in_features]

    def multiply(self, x_RI: Float[Tensor, "R I"]) -> Float[Tensor, "R O"]:
        """Returns x W' as the native product computes it: `x` in blocks of 16 bits, sums of integers, then scales."""
        values_RKi, units_RK = quantize_rows(x_RI)
        blocks = self.blocks()
        values_RKhi = values_RKi.double().unflatten(2, (blocks.scales_OKh.shape[2], -1))
        numbers_OKhi = blocks.numbers_OKi.double().unflatten(2, (blocks.scales_OKh.shape[2], -1))
        products_ROKh = torch.einsum("rkhi,okhi->rokh", values_RKhi, numbers_OKhi) * blocks.scales_OKh.double()
        if blocks.minimums_OKh is not None:
            products_ROKh += values_RKhi.sum(dim=3)[:, None] * blocks.minimums_OKh.double()
        products_RO = (products_ROKh.sum(dim=3) * units_RK.double()[:, None]).sum(dim=2)
        return products_RO[:, : self.out_features].float()


def quantize_rows(x_RI: Float[Tensor, "R I"]) -> tuple[Float[Tensor, "R K i"], Float[Tensor, "R K"]]:
    """Rounds each block of a row to multiples of a 32,767th of its largest number. Returns multiples and units."""
    blocks_RKi = F.pad(x_RI.float(), (0, -x_RI.shape[1] % BLOCK)).unflatten(1, (-1, BLOCK))
    largest_RK = blocks_RKi.abs().amax(dim=2)
    inverses_RK = torch.where(largest_RK > LEAST_INPUT, torch.full_like(largest_RK, LARGEST_INPUT) / largest_RK, 0)
    return (blocks_RKi * inverses_RK[..., None]).round(), largest_RK / LARGEST_INPUT
