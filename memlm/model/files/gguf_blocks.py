"""The block formats of GGUF files as numbers, scales and minimums, without rounding.

Shapes: O outputs, K blocks of 32 inputs, S super-blocks of 256, h scales of a block, B bytes of a row. The formats are
those of github.com/ggml-org/ggml, src/ggml-common.h and src/ggml-quants.c.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from jaxtyping import UInt8
from torch import Tensor

from memlm.model.kernels.quantized import HALVES, Blocks, Layout

K_SCALES = 12  # bytes of the 8 scales and 8 minimums of a super-block, 6 bits each


def _parts(rows_OB: UInt8[Tensor, "O B"], *sizes: int) -> tuple[Tensor, ...]:
    """Splits each block of a row into its fields of some bytes."""
    return rows_OB.unflatten(1, (-1, sum(sizes))).split(sizes, dim=2)


def _floats(field: UInt8[Tensor, "O K b"]) -> Tensor:
    return field.contiguous().view(torch.float16).float()


def _nibbles(field: UInt8[Tensor, "O K b"]) -> Tensor:
    """The low halves of all bytes, then the high ones."""
    return torch.cat([field & 15, field >> 4], dim=2)


def _bits(field: UInt8[Tensor, "O K b"]) -> Tensor:
    """The bits of each byte, the lowest first."""
    return (field[..., None] >> torch.arange(8, dtype=torch.uint8) & 1).flatten(2)


def _q4_0(rows_OB: Tensor) -> Blocks:
    scales, nibbles = _parts(rows_OB, 2, 16)
    return Blocks(_nibbles(nibbles), _floats(scales), -8 * _floats(scales))


def _q4_1(rows_OB: Tensor) -> Blocks:
    scales, minimums, nibbles = _parts(rows_OB, 2, 2, 16)
    return Blocks(_nibbles(nibbles), _floats(scales), _floats(minimums))


def _q5_0(rows_OB: Tensor) -> Blocks:
    scales, high, nibbles = _parts(rows_OB, 2, 4, 16)
    return Blocks((_nibbles(nibbles) | _bits(high) << 4).to(torch.int8) - 16, _floats(scales))


def _q5_1(rows_OB: Tensor) -> Blocks:
    scales, minimums, high, nibbles = _parts(rows_OB, 2, 2, 4, 16)
    return Blocks(_nibbles(nibbles) | _bits(high) << 4, _floats(scales), _floats(minimums))


def _q8_0(rows_OB: Tensor) -> Blocks:
    scales, numbers = _parts(rows_OB, 2, 32)
    return Blocks(numbers.contiguous().view(torch.int8), _floats(scales))


def _k_scales(scale: Tensor, minimum: Tensor, packed: Tensor) -> tuple[Tensor, Tensor]:
    """The scale and the minimum of each block of a super-block."""
    low, middle, high = packed.split(4, dim=2)
    scales = torch.cat([low & 63, high & 15 | low >> 6 << 4], dim=2)
    minimums = torch.cat([middle & 63, high >> 4 | middle >> 6 << 4], dim=2)
    return _per_block(_floats(scale) * scales), _per_block(-(_floats(minimum) * minimums))


def _per_block(of_super_blocks: Tensor) -> Tensor:
    return of_super_blocks.flatten(1)[..., None]


def _k_numbers(nibbles: Tensor) -> Tensor:
    """The numbers of a super-block. Neighboring blocks share bytes."""
    return _nibbles(nibbles.unflatten(2, (4, 32)).flatten(1, 2)).unflatten(2, (2, 32)).flatten(1, 2)


def _q4_k(rows_OB: Tensor) -> Blocks:
    scale, minimum, scales, nibbles = _parts(rows_OB, 2, 2, K_SCALES, 128)
    return Blocks(_k_numbers(nibbles), *_k_scales(scale, minimum, scales))


def _q5_k(rows_OB: Tensor) -> Blocks:
    scale, minimum, scales, high, nibbles = _parts(rows_OB, 2, 2, K_SCALES, 32, 128)
    bits = _bits(high).unflatten(2, (32, 8)).transpose(2, 3).flatten(1, 2)
    return Blocks(_k_numbers(nibbles) | bits << 4, *_k_scales(scale, minimum, scales))


def _q6_k(rows_OB: Tensor) -> Blocks:
    low, high, scales, scale = _parts(rows_OB, 128, 64, 16, 2)
    nibbles = _nibbles(low.unflatten(2, (2, 64)).flatten(1, 2))  # of 128 numbers
    pairs = high.unflatten(2, (2, 32)).flatten(1, 2)
    bits = torch.cat([pairs >> shift & 3 for shift in (0, 2, 4, 6)], dim=2)
    numbers = (nibbles | bits << 4).to(torch.int8) - 32
    of_halves = _floats(scale) * scales.contiguous().view(torch.int8)
    return Blocks(numbers.unflatten(2, (4, 32)).flatten(1, 2), of_halves.flatten(1).unflatten(1, (-1, HALVES)))


# How each format is read, and the smallest layout that holds it exactly.
FORMATS: Mapping[str, tuple[Callable[[Tensor], Blocks], Layout]] = {
    "Q4_0": (_q4_0, Layout.INT4),
    "Q4_1": (_q4_1, Layout.INT4),
    "Q5_0": (_q5_0, Layout.INT8),
    "Q5_1": (_q5_1, Layout.INT8_WIDE),
    "Q8_0": (_q8_0, Layout.INT8),
    "Q4_K": (_q4_k, Layout.INT4_WIDE),
    "Q5_K": (_q5_k, Layout.INT8_WIDE),
    "Q6_K": (_q6_k, Layout.INT8_WIDE),
}


def blocks_of(rows_OB: UInt8[Tensor, "O B"], kind: str) -> Blocks:
    """Returns the blocks of some rows of a tensor of a GGUF type."""
    return FORMATS[kind][0](rows_OB)


def layout_of(kinds: Sequence[str]) -> Layout:
    """Returns the layout that holds tensors of these GGUF types side by side."""
    layouts = {FORMATS[kind][1] for kind in kinds}
    return layouts.pop() if len(layouts) == 1 else Layout.INT8_WIDE
