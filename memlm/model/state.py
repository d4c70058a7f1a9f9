"""All that a decoder remembers of the sequences in a batch.

Each layer has a *local* memory (keys and values of the latest tokens, in places reserved once), in front of it
attention sinks or compressed memories, and in some layers the (key, value) pairs of the document's past. Each row
stands on its own: `length` tokens were read since its reset, the current document began at `start`, memory has taken
over all before `floor`, and place 0 behind the front holds the token at `base`.

Bytes of one row, for L layers, G key-value heads of width d, item size w and P = front + local places:
`2 L G d w P`, plus `L D w P` for a model with compression, plus `2 G d 2 min(tokens, capacity)` for each memorizing
layer whose memory is exact (docs/model.md has the local places and an example).
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from typing import Any, TypeAlias

import numpy as np
import torch
from jaxtyping import Float, Int64
from torch import Tensor

from memlm.errors import Corrupt, Incompatible, InvalidInput
from memlm.model.compression import group_size
from memlm.model.config import ModelConfig
from memlm.model.knn_memory import KnnCache
from memlm.model.mask import AttentionMask
from memlm.model.pages import LAZY_BYTES
from memlm.model.tensor_bytes import safetensors_pieces

SPARE_PLACES = 64  # at least so many tokens behind a window are written before the window moves
FORMAT = 1

# Where the new tokens of a step go: see `DecoderState.ends`.
Ends: TypeAlias = slice | tuple[Int64[Tensor, " B"], Int64[Tensor, " B"]] | None


class DecoderState:
    """The memory of a batch. `config` says what there is room for."""

    def __init__(
        self,
        config: ModelConfig,
        *,
        batch_size: int = 1,
        capacity: int | None = None,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
        training: bool = False,
    ) -> None:
        """Reserves the places. `capacity` is how many tokens each row may hold where nothing bounds them by itself.

        In training what the Transformer-XL memory holds is projected anew at every segment, so that the projections
        learn from it; that takes a copy of the layers' inputs.
        """
        self.config, self.dtype, self.batch_size = config, dtype, batch_size
        self.training = training
        self.num_local, self.is_rolling = local_places(config, capacity or config.context_length)
        places = self.num_front + self.num_local
        L, G, d = config.num_layers, config.num_kv_heads, config.head_dim
        self.cache_L2BGSd = zeros((L, 2, batch_size, G, places, d), dtype, device)
        self.inputs_LBSD: Tensor | None = None
        self.usage_LBS: Tensor | None = None
        if config.compression or (training and config.xl_length):
            self.inputs_LBSD = zeros((L, batch_size, places, config.dim), dtype, device)
        if config.compression and config.compression.kind == "most_used":
            self.usage_LBS = torch.zeros(L, batch_size, places, device=device)
        self.length_B, self.start_B, self.floor_B = ([0] * batch_size for _ in range(3))
        self.base_B = [config.num_sinks] * batch_size
        self.compressed_B = [0] * batch_size  # compressed memories in use, right before the local ones
        self.knn_caches: dict[int, list[KnnCache]] = {}
        if memorizing := config.memorizing:
            storage = dtype if memorizing.storage == "model" else torch.float16
            for layer in memorizing.layers:
                self.knn_caches[layer] = [
                    KnnCache(
                        G, d, capacity=memorizing.capacity, dtype=storage, search=memorizing.search,
                        device=torch.device(device),
                    )
                    for _ in range(batch_size)
                ]  # fmt: skip
        self.compression_loss: Tensor | None = None

    @property
    def num_front(self) -> int:
        """Places before the local ones: attention sinks, or compressed memories."""
        return self.config.compression.length if self.config.compression else self.config.num_sinks

    @property
    def length(self) -> int:
        """Tokens read by the row that read most."""
        return max(self.length_B)

    @property
    def num_bytes(self) -> int:
        """Bytes reserved for all rows."""
        tensors = [each for each in (self.cache_L2BGSd, self.inputs_LBSD, self.usage_LBS) if each is not None]
        reserved = sum(each.numel() * each.itemsize for each in tensors)
        return reserved + sum(row.num_bytes for rows in self.knn_caches.values() for row in rows)

    @property
    def is_uniform(self) -> bool:
        """Whether all rows stand at the same place."""
        rows = zip(self.length_B, self.start_B, self.floor_B, self.base_B, self.compressed_B, strict=True)
        return self.batch_size == 1 or len(set(rows)) == 1

    def room(self) -> int | None:
        """How many more tokens fit; None where older ones make room."""
        limits = [] if self.is_rolling else [self.num_front + self.num_local]
        if self.config.max_length is not None:
            limits.append(self.config.max_length)
        return min(limits) - self.length if limits else None

    def next_piece(self, wanted: int) -> int:
        """How many of the next tokens may be read in one step: none crosses a segment's border."""
        if self.config.is_segmented:
            L = self.config.context_length
            return min(wanted, *(L - length % L for length in self.length_B))
        return min(wanted, self.num_local - max(self.config.windows) + 1) if self.is_rolling else wanted

    def make_room(self, num_new: int) -> None:
        """Moves the window of each row whose places are used up; what leaves it nobody sees any more."""
        if self.config.is_segmented or not self.is_rolling:
            return
        keep = max(self.config.windows) - 1
        for row in range(self.batch_size):
            used = self.length_B[row] - self.base_B[row]
            if used + num_new > self.num_local and used > keep:
                self._move(row, used - keep)
                self.base_B[row] += used - keep

    def advance(self, new_B: list[int]) -> None:
        """Counts what each row has read."""
        self.length_B = [length + new for length, new in zip(self.length_B, new_B, strict=True)]

    def begin_documents(self, start_B: list[int | None]) -> None:
        """Notes where a row's current document began; all that is older is forgotten."""
        for row, start in enumerate(start_B):
            if start is not None:
                self.start_B[row] = start
                self.floor_B[row] = max(self.floor_B[row], start)
                self._forget(row)

    def reset(self, row: int) -> None:
        """Empties a row: its next token is the first of a new text."""
        self.length_B[row] = self.start_B[row] = self.floor_B[row] = 0
        self.base_B[row] = self.config.num_sinks
        self._forget(row)

    def compact(self) -> None:
        """Moves local tokens to the front of their places, after some were taken over."""
        bases = [min(self.floor_B)] * self.batch_size if len(set(self.length_B)) == 1 else self.floor_B
        for row, base in enumerate(bases):
            if base > self.base_B[row]:
                self._move(row, base - self.base_B[row])
                self.base_B[row] = base

    def attention_mask(self, new_B: list[int], num_new: int, document_BT: Tensor | None) -> AttentionMask:
        """What the next `num_new` tokens of each row see. `document_BT`: where each one's document begins."""
        device = self.cache_L2BGSd.device
        uniform = document_BT is None and self.is_uniform and len(set(new_B)) == 1
        rows = range(1 if uniform else self.batch_size)
        F = self.num_front
        places = F + max(self.length_B[row] - self.base_B[row] for row in rows) + num_new
        marks = (self.length_B, self.base_B, self.floor_B, self.start_B, self.compressed_B)
        lengths, bases, floors, starts, compressed = torch.tensor(
            [[each[row] for row in rows] for each in marks], device=device
        )
        place_S = torch.arange(places, device=device)
        query_RT = lengths[:, None] + place_S[:num_new]
        key_RS = bases[:, None] + place_S - F if F or self.base_B[0] or not uniform else place_S[None]
        if F:
            front_RS = floors[:, None] - F + place_S if self.config.compression else place_S.expand_as(key_RS)
            key_RS = torch.where(place_S < F, front_RS, key_RS)
        start_RT = starts[:, None].expand_as(query_RT)
        begun = self.floor_B[0] <= self.base_B[0] and self.start_B[0] <= self.floor_B[0]
        return AttentionMask(
            query_RT=query_RT,
            key_RS=key_RS,
            document_RT=start_RT if document_BT is None else document_BT,
            floor_R=floors,
            num_front=min(F, places),
            front_begin_R=F - compressed if self.config.compression else None,
            sink_cap=self.config.num_sinks + max(self.config.windows) - 1 if self.config.num_sinks else 0,
            causal_only=uniform and begun and not F,
            continues_RT=None if document_BT is None else document_BT == start_RT,
        )

    def ends(self, new_B: list[int], num_new: int) -> Ends:
        """Where new tokens go: the same places of all rows, where they do; rows, and where each one's only token goes;
        None where that is to be told row by row.
        """
        begins = self._begins()
        if len(set(begins)) == 1 and min(new_B) == num_new:
            return slice(begins[0], begins[0] + num_new)
        if num_new > 1 or 0 in new_B:
            return None
        device = self.cache_L2BGSd.device
        return torch.arange(len(begins), device=device), torch.tensor(begins, device=device)

    def write(
        self,
        layer: int,
        key_BGTd: Tensor,
        value_BGTd: Tensor,
        new_B: list[int],
        ends: Ends = None,
    ) -> None:
        """Keeps the keys and values of new tokens. Their `ends` are the same for all layers."""
        cache_2BGSd = self.cache_L2BGSd[layer]
        for kind, new_BGTd in enumerate((key_BGTd, value_BGTd)):
            if isinstance(ends, slice):
                cache_2BGSd[kind, :, :, ends] = new_BGTd.detach()
            elif ends is None:
                self._write(cache_2BGSd[kind], new_BGTd, new_B, dim=2)
            else:
                cache_2BGSd[kind][ends[0], :, ends[1]] = new_BGTd[:, :, 0].detach()

    def write_inputs(self, layer: int, inputs_BTD: Float[Tensor, "B T D"], new_B: list[int]) -> None:
        """Keeps a layer's inputs, where they are kept."""
        if self.inputs_LBSD is not None:
            self._write(self.inputs_LBSD[layer][:, None], inputs_BTD[:, None], new_B, dim=2)
        if self.usage_LBS is not None:
            used = self.usage_LBS.new_zeros(inputs_BTD.shape[0], 1, inputs_BTD.shape[1], 1)
            self._write(self.usage_LBS[layer][:, None, :, None], used, new_B, dim=2)

    def fork(self) -> DecoderState:
        """A copy that goes its own way from here."""
        twin = object.__new__(DecoderState)
        twin.__dict__.update(self.__dict__)
        for name in ("cache_L2BGSd", "inputs_LBSD", "usage_LBS"):
            tensor = getattr(self, name)
            setattr(twin, name, None if tensor is None else tensor.clone())
        for name in ("length_B", "start_B", "floor_B", "base_B", "compressed_B"):
            setattr(twin, name, [*getattr(self, name)])
        twin.knn_caches = {layer: [row.fork() for row in rows] for layer, rows in self.knn_caches.items()}
        twin.compression_loss = None
        return twin

    def save(self) -> bytes:
        """All of it, as bytes that `restore` of an equal config takes."""
        return b"".join(self.pieces())

    def pieces(self) -> Sequence[bytes | memoryview]:
        """The bytes of `save` in order, mostly as views of the state, which must not change meanwhile."""
        tensors = {
            name: tensor
            for name in ("cache_L2BGSd", "inputs_LBSD", "usage_LBS")
            if (tensor := getattr(self, name)) is not None
        }
        for layer, rows in self.knn_caches.items():
            for number, row in enumerate(rows):
                tensors |= {f"memory.{layer}.{number}.{name}": tensor for name, tensor in row.state().items()}
        marks = {name: getattr(self, name) for name in ("length_B", "start_B", "floor_B", "base_B", "compressed_B")}
        told = {"format": FORMAT, "config": self.config.as_dict(), "training": self.training, **marks}
        return safetensors_pieces(tensors, {"state": json.dumps(told)})

    @classmethod
    def restore(cls, data: bytes, config: ModelConfig) -> DecoderState:
        """The state that `save` told of. Raises Incompatible for another model's, Corrupt for what it did not write."""
        told, tensors = _read_state(data)
        if told.get("format") != FORMAT or ModelConfig.from_dict(told["config"]) != config:
            raise Incompatible("the state was saved by a model of another shape; restore it into that one")
        cache = tensors["cache_L2BGSd"]
        state = cls(config, batch_size=cache.shape[2], capacity=1, dtype=cache.dtype, training=told["training"])
        state.num_local = cache.shape[4] - state.num_front
        for name in ("cache_L2BGSd", "inputs_LBSD", "usage_LBS"):
            setattr(state, name, tensors.get(name))
        for name in ("length_B", "start_B", "floor_B", "base_B", "compressed_B"):
            setattr(state, name, told[name])
        for layer, rows in state.knn_caches.items():
            for number, row in enumerate(rows):
                prefix = f"memory.{layer}.{number}."
                row.restore({name.removeprefix(prefix): t for name, t in tensors.items() if name.startswith(prefix)})
        return state

    def places_B(self, num_new: int = 0) -> list[int]:
        """The places that each row takes once `num_new` more tokens are written: its front and its latest tokens."""
        return [begin + num_new for begin in self._begins()]

    def _begins(self) -> list[int]:
        """The place of each row's next token."""
        return [self.num_front + length - base for length, base in zip(self.length_B, self.base_B, strict=True)]

    def _write(self, places: Tensor, new: Tensor, new_B: list[int], *, dim: int) -> None:
        """Writes B x g x T x n behind what each row holds."""
        T, begins = new.shape[dim], self._begins()
        if len(set(begins)) == 1 and set(new_B) == {T}:
            places[:, :, begins[0] : begins[0] + T] = new.detach()
            return
        if T == 1:
            rows = [row for row, count in enumerate(new_B) if count]
            ends = torch.tensor([begins[row] for row in rows])
            places[torch.tensor(rows), :, ends] = new[rows, :, 0].detach()
            return
        for row, (begin, count) in enumerate(zip(begins, new_B, strict=True)):
            places[row, :, begin : begin + count] = new[row, :, :count].detach()

    def _move(self, row: int, by: int) -> None:
        F = self.num_front
        for tensor in (self.cache_L2BGSd, None if self.inputs_LBSD is None else self.inputs_LBSD[:, None, :, None]):
            if tensor is not None:
                kept = tensor[:, :, row, :, F + by :].clone()
                tensor[:, :, row, :, F : F + kept.shape[3]] = kept
        if self.usage_LBS is not None:
            kept = self.usage_LBS[:, row, F + by :].clone()
            self.usage_LBS[:, row, F : F + kept.shape[1]] = kept

    def _forget(self, row: int) -> None:
        self.compressed_B[row] = 0
        for rows in self.knn_caches.values():
            rows[row].clear()


def local_places(config: ModelConfig, capacity: int) -> tuple[int, bool]:
    """How many of the latest tokens a row has places for, and whether older ones make room for newer."""
    if config.is_segmented:
        return config.xl_length + config.context_length + group_size(config.compression) - 1, True
    if config.is_windowed:
        widest = max(config.windows)
        rolling = widest - 1 + max(SPARE_PLACES, widest // 4)
        if rolling < capacity - config.num_sinks:
            return rolling, True
    return max(1, capacity - config.num_sinks), False


def row_bytes(config: ModelConfig, num_tokens: int, dtype: torch.dtype) -> int:
    """Bytes that a row of a batch takes once it has read `num_tokens` tokens, without what searching by Faiss adds."""
    front = config.compression.length if config.compression else config.num_sinks
    places = front + local_places(config, num_tokens)[0]
    pair = 2 * config.num_kv_heads * config.head_dim
    size = config.num_layers * places * pair * dtype.itemsize
    if config.compression:
        usage_bytes = 4 if config.compression.kind == "most_used" else 0
        size += config.num_layers * places * (config.dim * dtype.itemsize + usage_bytes)
    if memorizing := config.memorizing:
        stored = dtype if memorizing.storage == "model" else torch.float16
        size += len(memorizing.layers) * min(num_tokens, memorizing.capacity) * pair * stored.itemsize
    return size


def _read_state(data: bytes) -> tuple[dict[str, Any], dict[str, Tensor]]:
    from safetensors import SafetensorError
    from safetensors.torch import load

    try:
        size = int.from_bytes(data[:8], "little")
        told = json.loads(json.loads(data[8 : 8 + size])["__metadata__"]["state"])
        return told, load(data)
    except (SafetensorError, ValueError, KeyError, TypeError) as error:
        raise Corrupt(f"this is no saved state ({error}); read the text anew") from error


def zeros(shape: Sequence[int], dtype: torch.dtype, device: torch.device | str) -> Tensor:
    """Returns zeros whose pages the system makes as they are first written to, where it can. numpy asks for huge
    pages, which are faster to read, but of which a token of each layer and head may touch a whole one: this is for
    states that are filled (for rows of a batch, see memlm/model/pages.py).
    """
    size = math.prod(shape) * dtype.itemsize
    if torch.device(device).type != "cpu" or size < LAZY_BYTES:
        return torch.zeros(tuple(shape), dtype=dtype, device=device)
    return torch.from_numpy(np.zeros(size, np.uint8)).view(dtype).view(tuple(shape))


def check_room(state: DecoderState, num_new: int) -> None:
    """Raises InvalidInput where that many tokens do not fit."""
    room = state.room()
    if room is not None and num_new > room:
        raise InvalidInput(f"{num_new} tokens do not fit into the {room} places left; shorten the text", field="prompt")
