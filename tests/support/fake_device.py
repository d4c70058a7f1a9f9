"""A GPU that no machine needs to have: tensors with shapes and devices and without numbers.

torch's FakeTensorMode fails where an operation mixes devices, and where the host asks a tensor for its numbers. The
device has a name of its own, because a torch without CUDA cannot index a tensor of "cuda". Numbers that have come to
the host grow from place to place here.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.overrides import TorchFunctionMode
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

from memlm.model import Decoder

NAME = "fakegpu"
NUMPY_DTYPES = {
    torch.float16: np.float16, torch.float32: np.float32, torch.float64: np.float64, torch.int64: np.int64,
    torch.uint8: np.uint8, torch.bool: np.bool_,
}  # fmt: skip
SCALARS = {Tensor.__bool__: True, Tensor.__float__: 0.0, Tensor.__int__: 0, Tensor.item: 0.0}


@cache
def fake_gpu() -> torch.device:
    _setup_privateuseone_for_python_backend(NAME)
    return torch.device(NAME, 0)


class NumbersOnTheHost(TorchFunctionMode):
    """Gives the numbers of a fake tensor, if it is on the host."""

    def __init__(self) -> None:
        self.crossings = list[tuple[int, ...]]()  # the shapes of what came from the device
        super().__init__()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = dict(kwargs or {})
        if func is Tensor.numpy and isinstance(args[0], FakeTensor):
            assert args[0].device.type == "cpu", "numpy reads a tensor that is on the device"
            size = args[0].numel()
            return (np.arange(size) / size).reshape(args[0].shape).astype(NUMPY_DTYPES[args[0].dtype])
        if func in SCALARS and isinstance(args[0], FakeTensor):
            assert args[0].device.type == "cpu", "the host waits for a number that is on the device"
            return SCALARS[func]
        if func is Tensor.cpu and args[0].device.type != "cpu":
            self.crossings.append(tuple(args[0].shape))
        if func is Tensor.new_tensor:
            return torch.empty(np.shape(args[1]), dtype=args[0].dtype, device=args[0].device)
        if func is torch.tensor and given.get("device") is not None:  # the fake device cannot fill a tensor
            made = torch.tensor(*args, **given | {"device": "cpu"})
            return torch.empty(made.shape, dtype=made.dtype, device=given["device"])
        if func is Tensor.to:
            wanted = [*args[1:], *given.values()]
            devices = [torch.device(each) for each in wanted if isinstance(each, torch.device | str)]
            if devices and devices[0].type == NAME and args[0].device.type == "cpu":
                dtype = next((each for each in wanted if isinstance(each, torch.dtype)), args[0].dtype)
                return torch.empty(args[0].shape, dtype=dtype, device=devices[0])
        return func(*args, **given)


@contextmanager
def fake_device() -> Iterator[NumbersOnTheHost]:
    with FakeTensorMode(allow_non_fake_inputs=True), NumbersOnTheHost() as host:
        yield host


def on_fake_gpu(decoder: Decoder) -> Decoder:
    """The decoder with parameters of its shapes on a device."""
    for module in decoder.modules():
        for name, parameter in list(module.named_parameters(recurse=False)):
            on_device = torch.empty(parameter.shape, dtype=torch.bfloat16, device=fake_gpu())
            setattr(module, name, nn.Parameter(on_device, requires_grad=False))
    if decoder.config.tied_embeddings:
        decoder.head.weight = decoder.embedding.weight
    return decoder.eval()
