"""The KV cache of the sequences in a batch.

Each layer has *local* places for the keys and values of the latest tokens. Before them are attention sinks or
compressed memories. Memorizing layers also have a kNN cache of the document's past, and with extended attention each
layer has one of all tokens. Rows are independent of each other.

Bytes of one row, for L layers, G key-value heads of width d, item size w and P = front + local places: `2 L G d w P`,
plus `L D w P` for a model with compression, plus `2 G d 2 min(tokens, capacity)` for each memorizing layer with exact
search, plus `2 L G d 2 tokens` for extended attention (docs/memories.md has the local places and an example).
What parts of the decoder remember beside is in `fields` (memlm/model/state/fields.py). Layers whose parts keep no
tokens have no cache.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, replace
from typing import Any

import torch
from jaxtyping import Float, Shaped
from torch import Tensor

from memlm.errors import Corrupt, Incompatible, InvalidInput
from memlm.model.attention.knn_memory import KnnCache, all_positions
from memlm.model.attention.mask import AttentionMask
from memlm.model.config import ModelConfig
from memlm.model.files.tensor_bytes import safetensors_pieces
from memlm.model.state.fields import FieldTensors, fields_of
from memlm.model.state.pages import Allocate, zeros
from memlm.model.state.rows import LastPass, Row
from memlm.model.state.size import local_places
from memlm.model.state.source import RowSources, Source

FORMAT = 2


class DecoderState:
    """The KV cache of a batch: attention keys and values of the latest tokens, and the memories of the layers.

    `capacity` is the number of tokens per row, for configs that do not bound it. In training, the inputs of the layers
    are kept too, so that the Transformer-XL memory is projected anew at every segment and the projections learn from
    it.
    """

    def __init__(
        self,
        config: ModelConfig,
        *,
        batch_size: int = 1,
        capacity: int | None = None,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
        training: bool = False,
        allocate: Allocate = zeros,
    ) -> None:
        self.config, self.dtype, self.device, self.training = config, dtype, torch.device(device), training
        self.num_front = config.num_front  # before local places
        self.num_local, self.is_rolling = local_places(config, capacity or config.context_length)
        L, G, d, S = config.num_layers, config.num_kv_heads, config.head_dim, self.num_front + self.num_local
        self.cache_places = {layer: place for place, layer in enumerate(config.caching_layers)}
        cache = allocate((len(self.cache_places), 2, batch_size, G, S, d), dtype, self.device, 2)
        inputs, usage = None, None
        if config.keeps_inputs or (training and config.xl_length):
            inputs = allocate((L, batch_size, S, config.dim), dtype, self.device, 1)
        if config.compression and config.compression.kind == "most_used":
            usage = allocate((L, batch_size, S), torch.float32, self.device, 1)
        self._reserved: tuple[Tensor, Tensor | None, Tensor | None] = cache, inputs, usage
        self.fields: FieldTensors | None = None  # the plain decoder has none, and its steps make no calls for them
        if fields := fields_of(config):
            self.fields = FieldTensors(fields, batch_size, S, dtype, self.device, allocate)
        self.rows: list[Row] = []
        remembering = range(L) if config.extended_attention else config.memorizing.layers if config.memorizing else ()
        self.knn_caches: dict[int, list[KnnCache]] = {layer: [] for layer in remembering}
        self.sources = RowSources() if config.reads_source else None
        self.compression_loss: Tensor | None = None
        # With their gradients: keys and values of the first places of each layer (2 B G S d), and what else a border
        # names. None where a pass learns nothing from earlier segments.
        self.live: dict[int | str, Tensor] | None = None
        self._last_pass = LastPass()
        self.use_rows(batch_size)

    def use_rows(self, count: int) -> None:
        """Uses the first `count` of the reserved rows. New ones are empty."""
        cache, inputs, usage = self._reserved
        self.cache_L2BGSd = cache.narrow(2, 0, count)
        self.inputs_LBSD = None if inputs is None else inputs.narrow(1, 0, count)
        self.usage_LBS = None if usage is None else usage.narrow(1, 0, count)
        self._numbers_B = torch.arange(count, device=self.device)
        if self.fields is not None:
            self.fields.use_rows(count)
        del self.rows[count:]
        self.rows += [Row(base=self.config.num_sinks) for _ in range(count - len(self.rows))]
        if self.sources is not None:
            self.sources.use_rows(count)
        for caches in self.knn_caches.values():
            del caches[count:]
            caches += [self._new_knn_cache() for _ in range(count - len(caches))]

    def copy_row(self, row: int, source: DecoderState, source_row: int) -> None:
        """Overwrites a row with one of a state of the same config. Both share its kNN caches and source afterwards."""
        self._copy_row(row, source, source_row, source.rows[source_row])

    def _copy_row(self, row: int, source: DecoderState, source_row: int, marks: Row) -> None:
        """Copies the places that the source's row used when it had read as far as `marks`."""
        used = self.num_front + marks.length - marks.base
        for target_BS, source_BS in zip(self._by_row(), source._by_row(), strict=True):
            target_BS[row, :used].copy_(source_BS[source_row, :used])
        if self.fields is not None and source.fields is not None:
            self.fields.copy_row(row, source.fields, source_row, used)
        if self.sources is not None and source.sources is not None:
            self.sources[row] = source.sources[source_row]
        self.rows[row] = replace(marks)
        for layer, caches in self.knn_caches.items():
            caches[row] = source.knn_caches[layer][source_row]

    def extract_row(self, row: int, *, capacity: int | None = None) -> DecoderState:
        """Returns an independent copy of a row, with room for `capacity` tokens or for none more."""
        twin = self._like(1, self.places_B()[row] if capacity is None else capacity)
        twin.copy_row(0, self, row)
        twin.knn_caches = {layer: [caches[row].fork()] for layer, caches in self.knn_caches.items()}
        return twin

    def start_of(self, row: int, length: int) -> Row | None:
        """The marks of a row as it was after its first `length` tokens. None where later tokens have changed what those
        left behind: they moved it out of the window or into a memory, or they added to its use, or to sums.
        """
        marks = self.rows[row]
        if length < marks.length and (self.usage_LBS is not None or self.has_sums):
            return None
        return marks.earlier(length, self.config)

    def copy_start(self, row: int, source: DecoderState, source_row: int, length: int) -> bool:
        """Overwrites a row with another state's as it was after its first `length` tokens, and shares nothing with it
        but its source. Returns False, and changes nothing, where `start_of` gives None.
        """
        if (earlier := source.start_of(source_row, length)) is None:
            return False
        self._copy_row(row, source, source_row, earlier)
        for layer, caches in self.knn_caches.items():
            caches[row] = source.knn_caches[layer][source_row].fork()
            if self.config.extended_attention:  # nothing finds the later pairs, and no file may hold them
                caches[row].crop(length)
        return True

    def extract_start(self, row: int, length: int, *, capacity: int | None = None) -> DecoderState | None:
        """Returns an independent copy of a row as it was after its first `length` tokens, with room for `capacity`.
        None where `start_of` gives None.
        """
        if self.start_of(row, length) is None:
            return None
        twin = self._like(1, capacity or length)
        twin.copy_start(0, self, row, length)
        return twin

    def fork(self) -> DecoderState:
        """Returns an independent copy. It shares the sources, which nothing changes."""
        twin = self._like(self.batch_size, self.num_front + self.num_local)
        for row in range(self.batch_size):
            twin.copy_row(row, self, row)
        twin.knn_caches = {layer: [cache.fork() for cache in caches] for layer, caches in self.knn_caches.items()}
        return twin

    def _like(self, batch_size: int, capacity: int) -> DecoderState:
        return DecoderState(
            self.config, batch_size=batch_size, capacity=capacity, dtype=self.dtype, device=self.device,
            training=self.training,
        )  # fmt: skip

    def _by_row(self) -> list[Tensor]:
        """The tensors as views whose first axes are rows and places."""
        views = [self.cache_L2BGSd.permute(2, 4, 0, 1, 3, 5)]
        if self.inputs_LBSD is not None:
            views.append(self.inputs_LBSD.permute(1, 2, 0, 3))
        if self.usage_LBS is not None:
            views.append(self.usage_LBS.permute(1, 2, 0))
        return views

    def _new_knn_cache(self) -> KnnCache:
        memorizing, heads = self.config.memorizing, (self.config.num_kv_heads, self.config.head_dim)
        if memorizing is None:
            return all_positions(*heads, self.device)
        return KnnCache(
            *heads, capacity=memorizing.capacity, search=memorizing.search,
            dtype=self.dtype if memorizing.storage == "model" else torch.float16, device=self.device,
        )  # fmt: skip

    @property
    def batch_size(self) -> int:
        """Rows in use."""
        return len(self.rows)

    @property
    def length(self) -> int:
        """Tokens of the row that has read most."""
        return max(row.length for row in self.rows)

    @property
    def num_bytes(self) -> int:
        """Bytes of all rows in use, as reserved."""
        tensors = [tensor for tensor in (self.cache_L2BGSd, self.inputs_LBSD, self.usage_LBS) if tensor is not None]
        reserved = sum(tensor.numel() * tensor.itemsize for tensor in tensors)
        reserved += 0 if self.fields is None else self.fields.num_bytes
        reserved += 0 if self.sources is None else self.sources.num_bytes
        return reserved + sum(cache.num_bytes for caches in self.knn_caches.values() for cache in caches)

    @property
    def is_uniform(self) -> bool:
        """Whether all rows have read alike."""
        return all(row == self.rows[0] for row in self.rows)

    @property
    def has_sums(self) -> bool:
        """Whether a pass changes the numbers of earlier tokens, beside the use of compressible places."""
        return self.fields is not None and self.fields.have_sums

    def field(self, name: str) -> Shaped[Tensor, "B ..."]:
        """A field of the rows in use, as `fields_of` names it."""
        assert self.fields is not None
        return self.fields.tensors[name]

    def give_sources(self, sources_B: Sequence[Source]) -> None:
        """Sets what each row reads by cross attention. Raises InvalidInput for another number or shape of sources, and
        for a model that reads none.
        """
        if self.sources is None:
            raise InvalidInput("the model reads no source; leave the sources out", field="source")
        self.sources.give(sources_B, self.batch_size, self.config)

    def write_field(self, name: str, new: Shaped[Tensor, "B ..."], new_B: list[int]) -> None:
        """Writes the new tokens' values of a field with places."""
        assert self.fields is not None
        self._write([self.fields.pair(name, new)], new_B)

    def room(self) -> int | None:
        """How many more tokens fit, or None if old tokens make room for new ones."""
        limits = [] if self.is_rolling else [self.num_front + self.num_local]
        if self.config.max_length is not None:
            limits.append(self.config.max_length)
        return min(limits) - self.length if limits else None

    def draft_room_B(self) -> list[int]:
        """How many tokens of each row one pass may read so that `crop` can take them back: none that fills a segment,
        for which memories would change, and no more than one piece.
        """
        room = self.room()
        piece = self.next_piece(self.num_local if room is None else room)
        if not self.config.is_segmented:
            return [piece] * self.batch_size
        L = self.config.context_length
        return [min(piece, L - 1 - row.length % L) for row in self.rows]

    def begin_pass(self, inputs_BT: Shaped[Tensor, "B T ..."]) -> None:
        """Begins a pass, whose tokens `crop` can take back."""
        self._last_pass.begin(self.rows)
        self.live = None
        if self.fields is not None and self.fields.have_sums:
            self.fields.begin_pass()
            self._last_pass.inputs_BT = inputs_BT

    def crop(self, length_B: Sequence[int]) -> tuple[Shaped[Tensor, "B T ..."], list[int]] | None:
        """Takes back the tokens of each row from a length on, as if they had never been read.

        They must be of the last pass, which read no more than `draft_room_B` of them. Raises ValueError for others.
        Returns None, or for states with sums the inputs that are to be read again, with how many in each row:
        `Decoder.crop` does so.
        """
        lengths = [row.length for row in self.rows]
        self._last_pass.crop(self.rows, length_B)
        if self.fields is None or not self.fields.have_sums:
            return None
        cropped = [row for row, length in enumerate(lengths) if length_B[row] != length]
        self.fields.take_back(cropped)
        return self._last_pass.again(self.rows, cropped)

    def next_piece(self, num_tokens: int) -> int:
        """How many of the next tokens to read in one step, so that none crosses a segment's boundary."""
        if self.config.is_segmented:
            L = self.config.context_length
            return min(num_tokens, *(L - row.length % L for row in self.rows))
        return min(num_tokens, self.num_local - max(self.config.windows) + 1) if self.is_rolling else num_tokens

    def make_room(self, num_new: int) -> None:
        """Moves the window of each row whose places are used up. No later token sees the places that it drops."""
        if self.config.is_segmented or not self.is_rolling:
            return
        keep = max(self.config.windows) - 1
        for number, row in enumerate(self.rows):
            used = row.length - row.base
            if used + num_new > self.num_local and used > keep:
                self._move(number, used - keep)
                row.base += used - keep

    def advance(self, new_B: list[int]) -> None:
        """Counts the tokens that each row has read."""
        for row, new in zip(self.rows, new_B, strict=True):
            row.length += new

    def begin_documents(self, start_B: list[int | None]) -> None:
        """Sets where the current document of a row began, and drops older tokens."""
        for number, (row, start) in enumerate(zip(self.rows, start_B, strict=True)):
            if start is not None:
                row.start, row.floor = start, max(row.floor, start)
                if self.fields is not None:
                    self.fields.begin_document(number)
                if self.config.is_segmented:  # extended attention knows pairs by their position, and masks documents
                    self._forget(number)

    def reset(self, row: int) -> None:
        """Empties a row: its next token is the first of a new text. Its adapter and its source stay."""
        self.rows[row] = Row(base=self.config.num_sinks, adapter=self.rows[row].adapter)
        self._forget(row)
        if self.fields is not None:
            self.fields.reset(row)

    def compact(self) -> None:
        """Moves local tokens to the front of their places, after a memory took over the oldest."""
        floors = [row.floor for row in self.rows]
        if len({row.length for row in self.rows}) == 1:
            floors = [min(floors)] * len(floors)
        for number, (row, base) in enumerate(zip(self.rows, floors, strict=True)):
            if base > row.base:
                self._move(number, base - row.base)
                row.base = base

    def attention_mask(self, new_B: list[int], num_new: int, document_BT: Tensor | None) -> AttentionMask:
        """Returns the mask of the next `num_new` tokens. `document_BT` is the position at which each one's document
        begins.
        """
        device, F = self.cache_L2BGSd.device, self.num_front
        uniform = document_BT is None and self.is_uniform and len(set(new_B)) == 1
        rows = self.rows[:1] if uniform else self.rows
        places = F + max(row.length - row.base for row in rows) + num_new
        lengths, bases, floors, starts, compressed = torch.tensor(
            [[row.length, row.base, row.floor, row.start, row.compressed] for row in rows], device=device
        ).unbind(1)
        place_S = torch.arange(places, device=device)
        query_RT = lengths[:, None] + place_S[:num_new]
        key_RS = bases[:, None] + place_S - F if F or rows[0].base or not uniform else place_S[None]
        if F:
            is_memory = not self.config.num_sinks
            front_RS = floors[:, None] - F + place_S if is_memory else place_S.expand_as(key_RS)
            key_RS = torch.where(place_S < F, front_RS, key_RS)
        start_RT = starts[:, None].expand_as(query_RT)
        last = max(row.length for row in rows) + num_new
        fronts = [0 if self.config.num_sinks else row.floor - F for row in rows if F]
        first = min(*fronts, *(row.base for row in rows)) if F else min(row.base for row in rows)
        started = rows[0].floor <= rows[0].base and rows[0].start <= rows[0].floor
        return AttentionMask(
            query_RT=query_RT,
            key_RS=key_RS,
            query_span=(min(row.length for row in rows), last),
            key_span=(first, max(row.base for row in rows) + places - F),
            document_RT=start_RT if document_BT is None else document_BT,
            floor_R=floors,
            num_front=min(F, places),
            front_begin_R=F - compressed if self.config.compression else None,
            segment_R=None if self.config.border is None else lengths - lengths % self.config.context_length,
            sink_cap=self.config.num_sinks + max(self.config.windows) - 1 if self.config.num_sinks else 0,
            causal_only=uniform and started and not F,
            continues_RT=None if document_BT is None else document_BT == start_RT,
        )

    def write(
        self,
        layer: int,
        key_BGTd: Float[Tensor, "B G T d"],
        value_BGTd: Float[Tensor, "B G T d"],
        new_B: list[int],
    ) -> None:
        """Writes a layer's keys and values of the new tokens."""
        keys_BGSd, values_BGSd = self.cache_L2BGSd[self.cache_places[layer]].unbind(0)
        self._write([(keys_BGSd, key_BGTd), (values_BGSd, value_BGTd)], new_B)

    def write_inputs(self, layer: int, inputs_BTD: Float[Tensor, "B T D"], new_B: list[int]) -> None:
        """Writes a layer's inputs of the new tokens, in states that keep them, and sets their use to zero."""
        if self.inputs_LBSD is not None:
            self._write([(self.inputs_LBSD[layer][:, None], inputs_BTD[:, None])], new_B)
        if self.usage_LBS is not None:
            used_BT = self.usage_LBS.new_zeros(inputs_BTD.shape[:2])
            self._write([(self.usage_LBS[layer][:, None, :, None], used_BT[:, None, :, None])], new_B)

    def count_use(self, layer: int, weights_BHTS: Float[Tensor, "B H T S"], new_B: list[int]) -> None:
        """Adds up the attention that each place received. Compression keeps the most used."""
        if self.usage_LBS is None:
            return
        for row, count in enumerate(new_B):
            used_S = self.usage_LBS[layer, row, : weights_BHTS.shape[3]]
            weights_TS = weights_BHTS[row, :, :count].detach().float().sum(dim=0)
            if count and not self.training:
                self._last_pass.count_use(row, self.rows[row].length, used_S, weights_TS)
            used_S += weights_TS.sum(dim=0)

    def save(self) -> bytes:
        """Returns the state as bytes for `restore` with an equal config."""
        return b"".join(self.pieces())

    def pieces(self) -> Sequence[bytes | memoryview]:
        """The bytes of `save` in order, mostly as views of the state, which must not change meanwhile."""
        named = {"cache": self.cache_L2BGSd, "inputs": self.inputs_LBSD, "usage": self.usage_LBS}
        tensors = {name: tensor for name, tensor in named.items() if tensor is not None}
        if self.fields is not None:
            tensors |= {f"field.{name}": tensor for name, tensor in self.fields.tensors.items()}
        if self.sources is not None:
            tensors |= self.sources.tensors()
        for layer, caches in self.knn_caches.items():
            for row, cache in enumerate(caches):
                tensors |= {f"knn.{layer}.{row}.{name}": tensor for name, tensor in cache.state().items()}
        rows = [{name: mark for name, mark in asdict(row).items() if mark is not None} for row in self.rows]
        header = {"format": FORMAT, "config": self.config.as_dict(), "training": self.training, "rows": rows}
        return safetensors_pieces(tensors, {"state": json.dumps(header)})

    @classmethod
    def restore(
        cls, data: bytes, config: ModelConfig, *, dtype: torch.dtype | None = None, device: torch.device | str = "cpu"
    ) -> DecoderState:
        """Loads the bytes of `save`, as of a model of a `dtype` (by default the saved one) on a device.

        Raises Incompatible for the state of another model, Corrupt for other bytes.
        """
        header, tensors = _read_state(data)
        if header.get("format") != FORMAT or ModelConfig.from_dict(header["config"]) != config:
            raise Incompatible("the state was saved by a model of another shape; restore it into that one")
        tensors = {name: tensor if ".index." in name else tensor.to(device) for name, tensor in tensors.items()}
        cache = tensors["cache"].to(dtype)
        inputs = tensors["inputs"].to(dtype) if "inputs" in tensors else None
        rows = [Row(**row) for row in header["rows"]]
        state = cls(
            config, batch_size=len(rows), capacity=cache.shape[4], dtype=cache.dtype, device=device,
            training=header["training"],
        )  # fmt: skip
        state._reserved = cache, inputs, tensors.get("usage")
        if state.fields is not None:
            state.fields.replace({name: tensors[f"field.{name}"] for name in state.fields.fields}, cache.dtype)
        state.use_rows(len(rows))
        state.rows = rows
        if state.sources is not None:
            state.sources.replace(tensors, cache.dtype)
        for layer, caches in state.knn_caches.items():
            for row, knn_cache in enumerate(caches):
                prefix = f"knn.{layer}.{row}."
                parts = {name.removeprefix(prefix): t for name, t in tensors.items() if name.startswith(prefix)}
                knn_cache.restore(parts)
        return state

    def places_B(self, num_new: int = 0) -> list[int]:
        """The places that each row uses after `num_new` more tokens: its front and its latest tokens."""
        front = self.num_front + num_new
        return [front + row.length - row.base for row in self.rows]

    def _write(self, pairs: Sequence[tuple[Tensor, Tensor]], new_B: list[int]) -> None:
        """Writes new values (B x g x T x n) into places (B x g x S x n), behind those that each row uses."""
        begins, T = self.places_B(), pairs[0][1].shape[2]
        if len(set(begins)) == 1 and set(new_B) == {T}:
            for places, new in pairs:
                places[:, :, begins[0] : begins[0] + T] = new.detach()
        elif T == 1 and 0 not in new_B:
            ends_B = torch.tensor(begins, device=self.device)
            for places, new in pairs:
                places[self._numbers_B, :, ends_B] = new[:, :, 0].detach()
        else:
            for places, new in pairs:
                for row, (begin, count) in enumerate(zip(begins, new_B, strict=True)):
                    places[row, :, begin : begin + count] = new[row, :, :count].detach()

    def _move(self, row: int, by: int) -> None:
        F = self.num_front
        for tensor in (self.cache_L2BGSd, None if self.inputs_LBSD is None else self.inputs_LBSD[:, None, :, None]):
            if tensor is not None:
                kept = tensor[:, :, row, :, F + by :].clone()
                tensor[:, :, row, :, F : F + kept.shape[3]] = kept
        if self.fields is not None:
            self.fields.move(row, F, by)
        if self.usage_LBS is not None:
            kept = self.usage_LBS[:, row, F + by :].clone()
            self.usage_LBS[:, row, F : F + kept.shape[1]] = kept

    def _forget(self, row: int) -> None:
        self.rows[row].compressed = 0
        for caches in self.knn_caches.values():
            caches[row].clear()


def _read_state(data: bytes) -> tuple[dict[str, Any], dict[str, Tensor]]:
    from safetensors import SafetensorError
    from safetensors.torch import load

    try:
        size = int.from_bytes(data[:8], "little")
        header = json.loads(json.loads(data[8 : 8 + size])["__metadata__"]["state"])
        return header, load(data)
    except (SafetensorError, ValueError, KeyError, TypeError) as error:
        raise Corrupt(f"this is no saved state ({error}); read the text anew") from error


def check_room(state: DecoderState, num_new: int) -> None:
    """Raises InvalidInput if `num_new` tokens do not fit."""
    room = state.room()
    if room is not None and num_new > room:
        raise InvalidInput(f"{num_new} tokens do not fit into the {room} places left; shorten the text", field="prompt")
