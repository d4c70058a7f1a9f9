"""The names of devices and of types of numbers to compute with, which the command line and the server check early."""

from __future__ import annotations

from memlm.errors import InvalidInput, check_choice, check_kind

AUTO = "auto"
GGUF = "gguf"  # weights as they lie in a GGUF file
BITS = {"int8": 8, "int4": 4}  # of weights. As with gguf, the rest is computed in float32
DTYPE_NAMES = (AUTO, "float32", "bfloat16", "float16", *BITS, GGUF)


def check_device(given: str) -> None:
    """Raises InvalidInput for what names no device. Whether the machine has it, the process that loads finds out."""
    check_kind("device", given, str, "auto, cpu, cuda, cuda:N or mps")
    kind, _, number = given.partition(":")
    if given not in (AUTO, "cpu", "cuda", "mps") and not (kind == "cuda" and number.isdecimal()):
        raise InvalidInput(f"device is {given!r}; expected auto, cpu, cuda, cuda:N or mps", field="device")


def check_dtype(given: str) -> None:
    """Raises InvalidInput for a name of no type."""
    check_choice("dtype", given, DTYPE_NAMES)
