"""A family of models: where its files keep each of memlm's tensors, and how its settings are read."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from memlm.errors import Incompatible
from memlm.model.config import ModelConfig

JsonDict = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Source:
    """The tensors of a file that make one of memlm's: stacked in this order, then rearranged if needed."""

    names: tuple[str, ...]
    rearrange: Callable[[Tensor, ModelConfig], Tensor] | None = None

    def make(self, parts: list[Tensor], config: ModelConfig) -> Tensor:
        tensor = parts[0] if len(parts) == 1 else torch.cat(parts)
        return tensor if self.rearrange is None else self.rearrange(tensor, config)


def same(*names: str) -> Source:
    """A tensor under another name, or several stacked."""
    return Source(names)


Table = Mapping[str, Source]


@dataclass(frozen=True, slots=True)
class Family:
    """How the configs and tensors of a family are read.

    `prefix` precedes all names but the head's, though some files leave it out. `buffers` are endings of names that are
    no parameters, and are skipped.
    """

    config: Callable[[JsonDict], dict[str, Any]]
    table: Table
    prefix: str
    buffers: tuple[str, ...] = ()

    def sources(self, names: list[str], present: set[str]) -> dict[str, Source]:
        """Returns the source of each of memlm's tensors, with the names that this file uses.

        Raises Incompatible for a tensor that the family does not have.
        """
        sources = {}
        for name in names:
            numbers, pattern = _pattern(name)
            if pattern not in self.table:
                raise Incompatible(f"the tensor {name} has no counterpart in this family's files")
            source = self.table[pattern]
            parts = tuple(self._spelling(part.format(*numbers), present) for part in source.names)
            sources[name] = Source(parts, source.rearrange)
        return sources

    def is_buffer(self, name: str) -> bool:
        """Whether a tensor of the file is not a parameter."""
        return name.endswith(self.buffers) if self.buffers else False

    def _spelling(self, name: str, present: set[str]) -> str:
        """The name that a file uses. Files of TensorFlow's time call the parameters of norms gamma and beta."""
        full = self.prefix + name
        spellings = (name, full, *(old for each in (name, full) if (old := _old_norm(each)) != each))
        return next((each for each in spellings if each in present), full)


def _old_norm(name: str) -> str:
    return name.replace("LayerNorm.weight", "LayerNorm.gamma").replace("LayerNorm.bias", "LayerNorm.beta")


def _pattern(name: str) -> tuple[list[str], str]:
    """`blocks.3.ff.up.weight` as its layer, and of experts their number too, and the pattern in the table."""
    parts = name.split(".")
    return [part for part in parts if part.isdigit()], ".".join("{}" if part.isdigit() else part for part in parts)
