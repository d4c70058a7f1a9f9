"""Sets the weights of a decoder from a model's files, each in the form that it is used in."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from math import prod
from typing import TypeAlias

import torch
from torch import Tensor, nn

import memlm.model.kernels.cpu as cpu
import memlm.model.kernels.native as native
from memlm.model.config import ModelConfig
from memlm.model.decoder import Decoder
from memlm.model.embedding import Embedding, FileTable
from memlm.model.files.family import Source
from memlm.model.files.gguf import GgufFile
from memlm.model.files.gguf_blocks import FORMATS, blocks_of, layout_of
from memlm.model.files.weight_files import Weights
from memlm.model.kernels.linear import Linear
from memlm.model.kernels.quantized import OUTPUTS, PLAIN_DTYPES, Blocks, BlockWeight, PanelWeight, PlainWeight
from memlm.model.text_encoder import TextEncoder

Model: TypeAlias = Decoder | TextEncoder

PACKED_AT_ONCE = 1 << 20  # numbers of a weight, whose copies stay in the processor's cache


@dataclass(frozen=True, slots=True)
class Form:
    """How a decoder's weights are kept.

    `dtype` and `device` are those of the computation. With `trainable` the weights are plain and its own. Otherwise
    they are packed for prediction: rounded to some `bits`, or with `keeps_blocks` in the blocks of a GGUF file, and in
    float16 and bfloat16 as they are there.
    """

    dtype: torch.dtype
    device: torch.device
    trainable: bool = False
    bits: int | None = None
    keeps_blocks: bool = False

    @property
    def packs(self) -> bool:
        """Whether linear layers take a copy of their weights."""
        is_packable = cpu.can_pack(torch.empty(0, dtype=self.dtype, device=self.device))
        return self.bits is not None or (is_packable and not self.trainable)


def fill(model: Model, files: Weights, sources: dict[str, Source], form: Form) -> None:
    """Sets the model's weights, a module at a time. What was read of the files is given back after each."""
    loader = _Loader(model.config, files, sources, form)
    modules = dict(model.named_modules())
    by_module = _by_module(sources)
    if model.config.tied_embeddings and model.head is not None:
        del by_module["embedding"]
        loader.fill_tied(model.embedding, model.head)
    for prefix, names in by_module.items():
        loader.fill(modules[prefix], prefix, names)


class _Loader:
    """Reads tensors. Those that are packed for prediction pass through one buffer, because the system clears new
    memory at every use. The others stay in the file where they have the type that is wanted, or are converted.
    """

    def __init__(self, config: ModelConfig, files: Weights, sources: dict[str, Source], form: Form) -> None:
        self._config, self._files, self._sources, self._form = config, files, sources, form
        self._packs = form.packs
        self._buffer = torch.empty(0, dtype=form.dtype)

    def fill(self, module: nn.Module, prefix: str, names: list[str]) -> None:
        """Sets the weights of a module, and packs a linear one."""
        blocks = None
        for name in names:
            full = f"{prefix}.{name}".lstrip(".")
            if isinstance(module, Embedding) and self._may_stay(full):
                self._leave(module, full)
                continue
            is_weight = isinstance(module, Linear) and name == "weight"
            if is_weight and (blocks := self._panels(full)) is not None:
                continue
            tensor = self._read(full, transient=is_weight and self._packs)
            self._set(module, name, tensor)
        if isinstance(module, Linear):
            self._pack(module, blocks)
        self._files.release()

    def fill_tied(self, embedding: Embedding, head: Linear) -> None:
        """Sets the table that embedding and head share. A packed head has a copy, the embedding then needs few rows."""
        name = "embedding.weight"
        stays = self._may_stay(name)
        blocks = self._panels(name) if stays else None
        is_packed = blocks is not None or (self._packs and stays)
        if blocks is None:
            self._set(head, "weight", self._read(name, transient=is_packed))
        if not is_packed:
            embedding.weight = head.weight
        if is_packed or self._form.bits is not None:
            self._pack(head, blocks)
        if is_packed:
            self._buffer = self._buffer.new_empty(0)  # no other tensor is as large
            self._leave(embedding, name)
        self._files.release()

    def _set(self, module: nn.Module, name: str, tensor: Tensor) -> None:
        parameter = nn.Parameter(tensor.to(self._form.device), requires_grad=self._form.trainable)
        setattr(module, name, parameter)

    def _pack(self, linear: Linear, blocks: PanelWeight | None) -> None:
        if blocks is not None:
            linear.weight = nn.Parameter(torch.empty(0, dtype=self._form.dtype), requires_grad=False)
            linear.predict_from(blocks)
        elif not self._form.trainable:
            linear.pack(bits=self._form.bits)

    def _panels(self, name: str) -> PanelWeight | None:
        """Returns a weight in the file's own numbers, or None where it has others, or is to have another form."""
        if not self._form.keeps_blocks:
            return None
        names = self._sources[name].names
        views = [view for part in names if (view := self._files.view(part)) is not None]
        if views and len(views) == len(names) and views[0].dtype in PLAIN_DTYPES:
            if any(view.dtype != views[0].dtype for view in views):
                return None
            return PlainWeight.of(self._rearranged(name, views[0] if len(views) == 1 else torch.cat(views)))
        if not isinstance(self._files, GgufFile):
            return None
        kinds = [self._files.tensors[part].kind for part in names]
        if not all(kind in FORMATS for kind in kinds):
            return None
        rows = [self._files.rows_of_blocks(part) for part in names]
        if len(set(kinds)) == 1:
            rows_OB = self._rearranged(name, rows[0] if len(rows) == 1 else torch.cat(rows))
            return self._packed(rows_OB, kinds[0], self._files.shape(names[0])[1])
        return self._mixed(name, kinds, rows)

    def _packed(self, rows_OB: Tensor, kind: str, in_features: int) -> BlockWeight:
        """Packs rows of one type, some panels at a time."""
        weight = BlockWeight.empty(layout_of([kind]), kind, len(rows_OB), in_features)
        if native.pack(rows_OB, kind, weight):
            return weight
        step = max(1, PACKED_AT_ONCE // in_features // OUTPUTS)
        for begin in range(0, len(weight.panels_PKB), step):
            some = rows_OB[begin * OUTPUTS : (begin + step) * OUTPUTS]
            weight.panels_PKB[begin : begin + step] = blocks_of(some, kind).packed(weight.layout)
        return weight

    def _mixed(self, name: str, kinds: Sequence[str], rows: Sequence[Tensor]) -> BlockWeight:
        """Packs rows of several types, one after the other."""
        layout = layout_of(kinds)
        parts = [blocks_of(part, kind).widened(layout) for part, kind in zip(rows, kinds, strict=True)]
        K = parts[0].numbers_OKi.shape[1]

        def joined(fields: Sequence[Tensor]) -> Tensor:
            return self._rearranged(name, torch.cat([field.flatten(1) for field in fields])).unflatten(1, (K, -1))

        numbers_OKi = joined([part.numbers_OKi for part in parts])
        scales_OKh = joined([part.scales_OKh for part in parts])
        minimums = [part.minimums_OKh for part in parts if part.minimums_OKh is not None]
        blocks = Blocks(numbers_OKi, scales_OKh, joined(minimums) if minimums else None)
        O, I = len(numbers_OKi), numbers_OKi[0].numel()
        return BlockWeight(blocks.packed(layout), max(kinds, key=kinds.count), O, I, layout)

    def _rearranged(self, name: str, tensor: Tensor) -> Tensor:
        """Rearranges numbers, or blocks: the families of GGUF files move whole rows."""
        rearrange = self._sources[name].rearrange
        return tensor if rearrange is None else rearrange(tensor, self._config)

    def _may_stay(self, name: str) -> bool:
        """Whether rows of a table may be looked up in the file."""
        source = self._sources[name]
        on_host = self._form.device.type == "cpu"
        return on_host and not self._form.trainable and len(source.names) == 1 and source.rearrange is None

    def _leave(self, embedding: Embedding, name: str) -> None:
        (part,) = self._sources[name].names
        view = self._files.view(part)
        if view is not None and view.dtype == self._form.dtype:
            embedding.weight = nn.Parameter(view, requires_grad=False)
        else:
            table = FileTable(partial(self._files.rows, part), self._files.shape(part)[0])
            embedding.leave_in_file(table, self._form.dtype)

    def _read(self, name: str, *, transient: bool) -> Tensor:
        """Returns a tensor in the wanted type. A transient one may be a part of the buffer, or of the file."""
        source = self._sources[name]
        view = self._files.view(source.names[0]) if len(source.names) == 1 else None
        if view is not None and view.dtype == self._form.dtype:
            tensor = view.clone() if self._form.trainable else view
        else:
            tensor = self._stacked(source.names, transient=transient)
        return tensor if source.rearrange is None else source.rearrange(tensor, self._config)

    def _stacked(self, names: tuple[str, ...], *, transient: bool) -> Tensor:
        shapes = [self._files.shape(name) for name in names]
        shape = sum(shape[0] for shape in shapes), *shapes[0][1:]
        if transient and (size := prod(shape)) >= cpu.SMALL_WEIGHT:
            if size > self._buffer.numel():
                self._buffer = self._buffer.new_empty(size)
            stacked = self._buffer[:size].view(shape)
        else:
            stacked = torch.empty(shape, dtype=self._form.dtype)
        for name, out in zip(names, stacked.split([shape[0] for shape in shapes]), strict=True):
            self._files.copy(name, out)
        return stacked


def _by_module(sources: dict[str, Source]) -> dict[str, list[str]]:
    modules: dict[str, list[str]] = {}
    for name in sources:
        prefix, _, field = name.rpartition(".")
        modules.setdefault(prefix, []).append(field)
    return modules
