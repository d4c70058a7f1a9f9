"""The tensors of a model's files, mapped: they take RAM where they are read, and none before.

A file that is replaced by renaming another over it stays mapped as it was. One that is overwritten or cut in place
changes the weights that are still mapped, or ends the process when it reads what is gone.
"""

from __future__ import annotations

import json
import mmap
from collections.abc import Sequence
from contextlib import suppress
from math import prod
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor
from torch.nn.functional import embedding

from memlm.base.texts import read_text
from memlm.errors import Corrupt, Incompatible

WEIGHTS_FILE, INDEX_FILE = "model.safetensors", "model.safetensors.index.json"
SAFETENSORS_DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16
}  # fmt: skip


class Weights(Protocol):
    """The tensors of one model by name."""

    @property
    def folder(self) -> Path:
        """The name in errors."""

    @property
    def names(self) -> set[str]:
        """Names of all tensors."""

    def shape(self, name: str) -> tuple[int, ...]:
        """The shape of a tensor."""

    def view(self, name: str) -> Tensor | None:
        """Returns a tensor as it lies in the file, None if it lies there in blocks."""

    def copy(self, name: str, out: Tensor) -> None:
        """Writes a tensor's numbers into `out`, which is contiguous and of any type."""

    def rows(self, name: str, ids: Tensor) -> Tensor:
        """Returns some rows of a matrix, in a type of at least the file's precision."""

    def release(self) -> None:
        """Gives back the RAM of all that was read. It is mapped still, and read anew where it is used."""


class MappedFile:
    """A file of which tensors are views. Raises OSError if it cannot be opened, ValueError if it is empty."""

    def __init__(self, path: Path) -> None:
        with path.open("rb") as file:
            self.bytes = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)

    def view(self, offset: int, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Returns the tensor that begins at a byte. It keeps the file mapped."""
        count = prod(shape)
        if not count:
            return torch.empty(tuple(shape), dtype=dtype)
        if offset % dtype.itemsize:
            content = bytearray(self.bytes[offset : offset + count * dtype.itemsize])
            return torch.frombuffer(content, dtype=dtype).view(tuple(shape))
        return torch.frombuffer(self.bytes, dtype=dtype, count=count, offset=offset).view(tuple(shape))

    def release(self) -> None:
        """Gives back the RAM of the pages that were read."""
        if hasattr(mmap, "MADV_DONTNEED"):
            with suppress(OSError):
                self.bytes.madvise(mmap.MADV_DONTNEED)


class WeightFiles:
    """The tensors of a model's folder by name. The constructor reads only the headers.

    Raises Corrupt for files that are missing, broken or incomplete.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._files = list[MappedFile]()
        self._home: dict[str, tuple[MappedFile, int, dict[str, Any]]] = {}  # the file, where its data begins, the entry
        for path in weight_paths(folder):
            try:
                with safe_open(path, framework="pt"):  # it checks the header's every offset
                    mapped = MappedFile(path)
                begin = 8 + int.from_bytes(mapped.bytes[:8], "little")
                header = json.loads(mapped.bytes[8:begin])
            except (SafetensorError, OSError, ValueError) as error:
                raise Corrupt(f"{path} cannot be read as safetensors ({error}); restore the file") from error
            self._files.append(mapped)
            self._home |= {name: (mapped, begin, entry) for name, entry in header.items() if name != "__metadata__"}

    @property
    def names(self) -> set[str]:
        """Names of all tensors."""
        return set(self._home)

    def shape(self, name: str) -> tuple[int, ...]:
        """The shape of a tensor."""
        return tuple(self._home[name][2]["shape"])

    def view(self, name: str) -> Tensor:
        """Returns a tensor as it lies in its file. Raises Incompatible for a type that is no plain number."""
        mapped, begin, entry = self._home[name]
        if entry["dtype"] not in SAFETENSORS_DTYPES:
            raise Incompatible(
                f"{self.folder}: the tensor {name} is of the type {entry['dtype']}; this version reads"
                f" {', '.join(SAFETENSORS_DTYPES)}"
            )
        return mapped.view(begin + entry["data_offsets"][0], entry["shape"], SAFETENSORS_DTYPES[entry["dtype"]])

    def copy(self, name: str, out: Tensor) -> None:
        """Writes a tensor's numbers into `out`."""
        out.copy_(self.view(name))

    def rows(self, name: str, ids: Tensor) -> Tensor:
        """Returns some rows of a matrix, in the file's type."""
        return embedding(ids, self.view(name))

    def release(self) -> None:
        """Gives back the RAM of all that was read."""
        for mapped in self._files:
            mapped.release()


def weight_paths(folder: Path) -> list[Path]:
    """The files of a folder's weights: one, or the shards that an index names. Raises Corrupt if one is missing."""
    if (folder / WEIGHTS_FILE).is_file():
        return [folder / WEIGHTS_FILE]
    index = folder / INDEX_FILE
    if not index.is_file():
        raise Corrupt(f"{folder / WEIGHTS_FILE} is missing; restore the file")
    try:
        files = sorted({folder / name for name in json.loads(read_text(index))["weight_map"].values()})
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise Corrupt(f"{index} is no index of safetensors files ({error}); restore the file") from error
    for path in files:
        if path.parent != folder or not path.is_file():
            raise Corrupt(f"{index} names {path.name}, which is missing; restore the file")
    return files
