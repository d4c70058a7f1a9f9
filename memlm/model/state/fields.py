"""State that parts of the decoder declare, instead of code for each of them.

A `Field` describes the memory of one row. `FieldTensors` holds the tensors of all rows, and treats every field by
the same rules: room for rows, writes, copies of rows, windows that move, resets, and passes that are taken back.

Shapes: B batch, T new tokens, S places. The rows are the first axis.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING

import torch
from jaxtyping import Shaped
from torch import Tensor

from memlm.model.state.pages import Allocate

if TYPE_CHECKING:
    from memlm.model.config import ModelConfig

PLACES = -1  # stands in a shape for the axis of places


@dataclass(frozen=True, slots=True)
class Field:
    """One tensor that a state remembers of each row, zero at first.

    `shape` is that of one row. With an axis of PLACES it holds a value for each place of the cache, and without one it
    holds sums of all tokens so far. `dtype` None is the type of the state. A `wide` one has at least float32. A field
    `of_segments` is written at the end of segments alone, and forgotten where a document begins. A field with places
    `adds` where later tokens change the values of earlier places. A field that `is_given` is set by a caller, and no
    pass changes it.
    """

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype | None = None
    wide: bool = False
    of_segments: bool = False
    adds: bool = False
    is_given: bool = False

    @property
    def place_axis(self) -> int | None:
        """The axis of places behind the axis of rows, None for sums."""
        return 1 + self.shape.index(PLACES) if PLACES in self.shape else None

    @property
    def changes(self) -> bool:
        """Whether a pass changes the numbers of earlier tokens, so that taking it back needs a copy."""
        return not (self.of_segments or self.is_given) and (self.adds or self.place_axis is None)

    def type_in(self, dtype: torch.dtype) -> torch.dtype:
        """The type of its numbers in a state of `dtype`."""
        own = self.dtype or dtype
        return torch.promote_types(own, torch.float32) if self.wide else own

    def row_bytes(self, num_places: int, dtype: torch.dtype) -> int:
        """Bytes of one row."""
        return prod(self._sized(num_places)) * self.type_in(dtype).itemsize

    def make(self, rows: int, num_places: int, dtype: torch.dtype, device: torch.device, allocate: Allocate) -> Tensor:
        """Returns zeros for some rows."""
        return allocate((rows, *self._sized(num_places)), self.type_in(dtype), device, 0)

    def _sized(self, num_places: int) -> tuple[int, ...]:
        return tuple(num_places if size == PLACES else size for size in self.shape)


def fields_of(config: ModelConfig) -> dict[str, Field]:
    """The fields of all parts of a model: `3.sums` is of layer 3, `model.sums` of the whole model."""
    if config.is_plain:
        return {}
    found = dict[str, Field]()
    for layer in range(config.num_layers):
        for each in config.parts_of(layer):
            found |= {f"{layer}.{field.name}": field for field in each.fields(config)}
    for each in config.parts:
        found |= {f"model.{field.name}": field for field in each.model_fields(config)}
    return found


class FieldTensors:
    """The tensors of `fields` for the rows of a state, at least one field."""

    def __init__(
        self,
        fields: dict[str, Field],
        rows: int,
        num_places: int,
        dtype: torch.dtype,
        device: torch.device,
        allocate: Allocate,
    ) -> None:
        self.fields = fields
        self._reserved = {name: f.make(rows, num_places, dtype, device, allocate) for name, f in fields.items()}
        self.tensors = dict[str, Tensor]()
        self._before = dict[str, Tensor]()
        self.num_rows = 0

    @property
    def have_sums(self) -> bool:
        """Whether a pass that is taken back must be read again as far as it is kept."""
        return any(field.changes for field in self.fields.values())

    @property
    def num_bytes(self) -> int:
        """Bytes of the rows in use."""
        return sum(tensor.numel() * tensor.itemsize for tensor in self.tensors.values())

    def use_rows(self, count: int) -> None:
        """Uses the first `count` of the reserved rows. New ones are zero, but for places that nothing reads yet."""
        before, self.num_rows = self.num_rows, count
        self.tensors = {name: tensor[:count] for name, tensor in self._reserved.items()}
        for row in range(before, count):
            self._clear(row, lambda field: field.place_axis is None)

    def replace(self, tensors: dict[str, Tensor], dtype: torch.dtype) -> None:
        """Takes the tensors of a saved state, by their names, as those of a state of `dtype`."""
        self._reserved = {name: tensors[name].to(field.type_in(dtype)) for name, field in self.fields.items()}

    def copy_row(self, row: int, source: FieldTensors, source_row: int, used: int) -> None:
        """Overwrites a row, as far as `used` places."""
        for name, field in self.fields.items():
            target, given = self.tensors[name][row], source.tensors[name][source_row]
            if field.place_axis is not None:
                target, given = (each.narrow(field.place_axis - 1, 0, used) for each in (target, given))
            target.copy_(given)

    def pair(self, name: str, new: Shaped[Tensor, "B ..."]) -> tuple[Tensor, Tensor]:
        """The places of a field (B x g x S x n) and new values for them (B x g x T x n)."""
        axis = self.fields[name].place_axis
        assert axis is not None, f"{name} has no places"
        return _with_four_axes(self.tensors[name], axis), _with_four_axes(new, axis)

    def move(self, row: int, front: int, by: int) -> None:
        """Moves the places behind the front, as the cache does."""
        for name, field in self.fields.items():
            if field.place_axis is not None:
                tensor = self.tensors[name][row].movedim(field.place_axis - 1, 0)
                kept = tensor[front + by :].clone()
                tensor[front : front + len(kept)] = kept

    def reset(self, row: int) -> None:
        """Empties a row."""
        self._clear(row, lambda field: field.of_segments or field.place_axis is None)

    def begin_document(self, row: int) -> None:
        """Forgets the numbers of segments. Mixers begin their sums anew at the token itself."""
        self._clear(row, lambda field: field.of_segments)

    def begin_pass(self) -> None:
        """Copies the numbers that a pass may change."""
        self._before = {name: self.tensors[name].clone() for name, field in self.fields.items() if field.changes}

    def take_back(self, rows: Iterable[int]) -> None:
        """Undoes the changes of the last pass in some rows."""
        for row in rows:
            for name, before in self._before.items():
                self.tensors[name][row].copy_(before[row])

    def _clear(self, row: int, chosen: Callable[[Field], bool]) -> None:
        for name, field in self.fields.items():
            if chosen(field):
                self.tensors[name][row].zero_()


def _with_four_axes(tensor: Tensor, axis: int) -> Tensor:
    """A view (B x g x S x n) of a tensor with its places at an axis."""
    tensor = tensor.flatten(axis + 1) if tensor.dim() > axis + 1 else tensor[..., None]
    return tensor.flatten(1, axis - 1) if axis > 1 else tensor[:, None]
