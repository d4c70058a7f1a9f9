"""Tensors -> the bytes of a safetensors file, without a copy of the tensors.

`safetensors.torch.save` copies every byte twice with the interpreter locked, which holds up all other threads.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

_NAMES = {
    torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16", torch.int64: "I64",
    torch.int32: "I32", torch.int16: "I16", torch.int8: "I8", torch.uint8: "U8", torch.bool: "BOOL",
}  # fmt: skip
ALIGNMENT = 8


def safetensors_pieces(tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> Sequence[bytes | memoryview]:
    """The file's bytes in order: the header, then a view of each tensor, the widest elements first."""
    names = sorted(tensors, key=lambda name: (-tensors[name].itemsize, name))
    header: dict[str, object] = {"__metadata__": dict(metadata)}
    pieces, end = list[bytes | memoryview](), 0
    for name in names:
        tensor = tensors[name].detach().cpu().contiguous()
        begin, end = end, end + tensor.numel() * tensor.itemsize
        header[name] = {"dtype": _NAMES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [begin, end]}
        if end > begin:
            pieces.append(tensor.reshape(-1).view(torch.uint8).numpy().data)
    head = json.dumps(header).encode()
    head += b" " * (-len(head) % ALIGNMENT)
    return [len(head).to_bytes(8, "little"), head, *pieces]
