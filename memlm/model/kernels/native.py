"""The library of native kernels, from memlm/model/kernels/csrc: built with the package where a C++ compiler is.

Without it, torch computes the same, slower.
"""

from __future__ import annotations

import ctypes
import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from ctypes import POINTER, Structure, byref, c_char_p, c_int32, c_void_p
from functools import cache
from pathlib import Path
from typing import ClassVar

import torch
from jaxtyping import Float, UInt8
from torch import Tensor

from memlm.model.kernels.quantized import BlockWeight, Layout, PanelWeight

VERSION = 4  # of the calls and structures in native.cpp
FASTEST = -1
PACKED_KINDS = ("Q8_0", "Q4_0", "Q4_1")  # as native.cpp numbers them

log = logging.getLogger("memlm.native")


class Matrix(Structure):
    """A weight, as the library takes it. It lives as long as the tensors that it points to."""

    _fields_: ClassVar[Sequence[tuple[str, type]]] = [
        ("panels", c_void_p),
        ("bias", c_void_p),
        ("out_features", c_int32),
        ("in_features", c_int32),
        ("layout", c_int32),
    ]

    @classmethod
    def of(cls, weight: PanelWeight, bias_O: Float[Tensor, " O"] | None) -> Matrix:
        bias = None if bias_O is None else bias_O.data_ptr()
        return cls(weight.panels_PKB.data_ptr(), bias, weight.out_features, weight.in_features, weight.layout_number)


@cache
def library() -> ctypes.CDLL | None:
    """The kernels, or None where they were not built, do not load, or were built from other sources than these."""
    for path in Path(__file__).parent.glob("_native*.so"):
        try:
            found = ctypes.CDLL(str(path))
        except OSError:  # of another system
            continue
        if not hasattr(found, "memlm_version") or found.memlm_version() != VERSION:
            log.warning(
                "%s was built from another version of its sources and is not used, so models are slow; install memlm"
                " again",
                path,
            )
            continue
        found.memlm_kernels_name.restype = c_char_p
        found.memlm_quantize.argtypes = [c_void_p, POINTER(Matrix), c_void_p, c_int32]
        found.memlm_pack.argtypes = [c_int32, c_void_p, POINTER(Matrix), c_void_p, c_int32]
        found.memlm_multiply.argtypes = [POINTER(Matrix), c_void_p, c_int32, c_void_p, c_int32]
        return found
    return None


def instruction_sets() -> list[str]:
    """The names of the kernels that run on this processor, the fastest last."""
    if (kernels := library()) is None:
        return []
    numbers = [number for number in range(kernels.memlm_num_kernels()) if kernels.memlm_runs_here(number)]
    return [kernels.memlm_kernels_name(number).decode() for number in numbers]


def is_fast() -> bool:
    """Whether there are kernels for this processor that are written for it. The portable ones are for its memory."""
    return len(instruction_sets()) > 1


@contextmanager
def using(instruction_set: str) -> Iterator[None]:
    """Computes with the kernels of one instruction set, in all threads. For tests and measurements."""
    kernels = library()
    assert kernels is not None
    names = [kernels.memlm_kernels_name(number).decode() for number in range(kernels.memlm_num_kernels())]
    kernels.memlm_choose(names.index(instruction_set))
    try:
        yield
    finally:
        kernels.memlm_choose(FASTEST)


def quantize(weight_OI: Float[Tensor, "O I"]) -> BlockWeight | None:
    """Returns the weight rounded to 8 bits as `BlockWeight.rounded` does, in a tenth of its time, or None without the
    library.
    """
    if (kernels := library()) is None:
        return None
    dense_OI = weight_OI.detach().float().contiguous()
    rounded = BlockWeight.empty(Layout.INT8, "int8", *dense_OI.shape)
    matrix = Matrix.of(rounded, None)
    kernels.memlm_quantize(dense_OI.data_ptr(), byref(matrix), rounded.panels_PKB.data_ptr(), torch.get_num_threads())
    return rounded


def pack(rows_OB: UInt8[Tensor, "O B"], kind: str, weight: BlockWeight) -> bool:
    """Writes a weight's panels from rows of a GGUF type, as `gguf_blocks` does. Returns whether it did."""
    if (kernels := library()) is None or kind not in PACKED_KINDS:
        return False
    rows_OB = rows_OB.contiguous()
    matrix, panels = Matrix.of(weight, None), weight.panels_PKB.data_ptr()
    kernels.memlm_pack(PACKED_KINDS.index(kind), rows_OB.data_ptr(), byref(matrix), panels, torch.get_num_threads())
    return True


def multiply(x: Float[Tensor, "*P I"], weight: PanelWeight, bias_O: Float[Tensor, " O"] | None) -> Tensor | None:
    """Returns x W' + b in the type of `x`, or None without the library. Beside a weight in blocks, `x` is rounded to 16
    bits in blocks of 32.
    """
    if (kernels := library()) is None:
        return None
    rows_RI = x.reshape(-1, weight.in_features).float().contiguous()
    y_RO = torch.empty(len(rows_RI), weight.out_features)
    bias_O = None if bias_O is None else bias_O.float()
    kernels.memlm_multiply(
        byref(Matrix.of(weight, bias_O)), rows_RI.data_ptr(), len(rows_RI), y_RO.data_ptr(), torch.get_num_threads()
    )
    return y_RO.to(x.dtype).view(*x.shape[:-1], weight.out_features)
