"""Tensors in safetensors files, read one at a time: mapped into memory, and let go once they are copied.

A file may be one `model.safetensors`, or shards named by `model.safetensors.index.json`.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from torch import Tensor

from memlm.errors import Corrupt

WEIGHTS_FILE, INDEX_FILE = "model.safetensors", "model.safetensors.index.json"


class WeightFiles:
    """The tensors of a model's folder by name. Raises Corrupt for files that are missing, broken or incomplete."""

    def __init__(self, folder: Path) -> None:
        """Reads the headers of all files, and no tensor."""
        self.folder = folder
        self.files = _files_of(folder)
        self._home: dict[str, Path] = {}
        self._shapes: dict[str, tuple[int, ...]] = {}
        for path in self.files:
            try:
                with safe_open(path, framework="pt") as file:
                    for name in file.keys():  # noqa: SIM118  it is no dict
                        self._home[name] = path
                        self._shapes[name] = tuple(file.get_slice(name).get_shape())
            except (SafetensorError, OSError) as error:
                raise Corrupt(f"{path} cannot be read as safetensors ({error}); restore the file") from error

    @property
    def names(self) -> set[str]:
        """All tensors."""
        return set(self._home)

    def shape(self, name: str) -> tuple[int, ...]:
        """The shape of one."""
        return self._shapes[name]

    def read(self, names: Sequence[str]) -> list[Tensor]:
        """Some tensors, as views of the mapped files: these stay mapped as long as a tensor of this call lives."""
        with ExitStack() as stack:
            opened: dict[Path, Any] = {}
            for name in names:
                path = self._home[name]
                if path not in opened:
                    opened[path] = stack.enter_context(safe_open(path, framework="pt"))
            return [opened[self._home[name]].get_tensor(name) for name in names]


def _files_of(folder: Path) -> list[Path]:
    if (folder / WEIGHTS_FILE).is_file():
        return [folder / WEIGHTS_FILE]
    index = folder / INDEX_FILE
    if not index.is_file():
        raise Corrupt(f"{folder / WEIGHTS_FILE} is missing; restore the file")
    try:
        files = sorted({folder / name for name in json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()})
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise Corrupt(f"{index} is no index of safetensors files ({error}); restore the file") from error
    for path in files:
        if path.parent != folder or not path.is_file():
            raise Corrupt(f"{index} names {path.name}, which is missing; restore the file")
    return files
