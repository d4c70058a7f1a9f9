"""Blocks of GGUF's commonest formats -> numbers, by a few torch operations on many blocks at a time.

A block of 32 numbers has a scale d, a minimum m in Q4_1, and a byte for each number, or four bits: the low halves of 16
bytes hold the first 16 numbers. The results equal those of the `gguf` package bit for bit.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from jaxtyping import Float32, UInt8
from torch import Tensor

LOW_BITS = 0x0F


def _q8_0(blocks_NB: UInt8[Tensor, "N B"], out_N32: Float32[Tensor, "N 32"]) -> None:
    torch.mul(blocks_NB[:, 2:].view(torch.int8), _float16(blocks_NB[:, :2]), out=out_N32)


def _q4_0(blocks_NB: UInt8[Tensor, "N B"], out_N32: Float32[Tensor, "N 32"]) -> None:
    numbers_N32 = _halves(blocks_NB[:, 2:]).view(torch.int8).sub_(8)
    torch.mul(numbers_N32, _float16(blocks_NB[:, :2]), out=out_N32)


def _q4_1(blocks_NB: UInt8[Tensor, "N B"], out_N32: Float32[Tensor, "N 32"]) -> None:
    scales_N2 = _float16(blocks_NB[:, :4])
    torch.mul(_halves(blocks_NB[:, 4:]), scales_N2[:, :1], out=out_N32)
    out_N32.add_(scales_N2[:, 1:])


def _float16(bytes_NB: UInt8[Tensor, "N B"]) -> Float32[Tensor, "N S"]:
    return bytes_NB.contiguous().view(torch.float16).float()


def _halves(bytes_NB: UInt8[Tensor, "N 16"]) -> UInt8[Tensor, "N 32"]:
    halves_N32 = torch.empty(len(bytes_NB), 32, dtype=torch.uint8)
    torch.bitwise_and(bytes_NB, LOW_BITS, out=halves_N32[:, :16])
    torch.bitwise_right_shift(bytes_NB, 4, out=halves_N32[:, 16:])
    return halves_N32


UNPACKED: Mapping[str, Callable[[Tensor, Tensor], None]] = {"Q8_0": _q8_0, "Q4_0": _q4_0, "Q4_1": _q4_1}
