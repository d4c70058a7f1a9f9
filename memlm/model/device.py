"""Where a model computes, and in which type of numbers.

Datastores are searched on the host: the keys of a step leave the device together, as do its log-probabilities.
"""

from __future__ import annotations

import torch

import memlm.model.kernels.cpu as cpu
from memlm.base.compute import AUTO, check_device, check_dtype
from memlm.errors import InvalidInput

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def device_of(given: torch.device | str) -> torch.device:
    """Returns the device of a name. `auto` is the first GPU, or else the processor.

    Raises InvalidInput for another name, and for a device that this machine does not have.
    """
    if isinstance(given, torch.device):
        return given
    check_device(given)
    if given == AUTO:
        return fastest_device()
    device = torch.device(given)
    num_devices = {"cuda": torch.cuda.device_count, "mps": lambda: int(torch.backends.mps.is_available())}
    if device.type in num_devices and (count := num_devices[device.type]()) <= (device.index or 0):
        raise InvalidInput(
            f"device is {given}; torch {torch.__version__} finds {count} of that kind on this machine: choose auto or"
            " cpu, or install a torch for the device",
            field="device",
        )
    return device


def dtype_of(given: torch.dtype | str, device: torch.device) -> torch.dtype:
    """Returns the type of a name. `auto` is bfloat16 where the device multiplies it in hardware, else float32.

    Raises InvalidInput for another name.
    """
    if isinstance(given, torch.dtype):
        return given
    check_dtype(given)
    if given != AUTO:
        return DTYPES.get(given, torch.float32)
    return torch.bfloat16 if has_fast_bfloat16(device) else torch.float32


def fastest_device() -> torch.device:
    """The first GPU, or else the processor."""
    if torch.cuda.is_available():
        return torch.device("cuda")
    return torch.device("mps" if torch.backends.mps.is_available() else "cpu")


def has_fast_bfloat16(device: torch.device) -> bool:
    """Whether a device multiplies bfloat16 in hardware."""
    if device.type == "cuda":
        return torch.cuda.is_bf16_supported(including_emulation=False)
    return device.type == "cpu" and cpu.has_fast_bfloat16()
