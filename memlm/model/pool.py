"""Sequences that come and go, side by side in one state: rows are appended, and the last one fills a gap.

Twice as many rows, or places in each, are reserved whenever they run out, so that a context of which little is used
takes little; a step reads the rows in use and no others.
"""

from __future__ import annotations

import torch
from torch import Tensor

from memlm.model.decoder import Decoder
from memlm.model.state import DecoderState, zeros

UNBOUNDED = 1 << 40  # tokens of a row whose places older ones make free
FIRST_PLACES = 128
MARKS = ("length_B", "start_B", "floor_B", "base_B", "compressed_B")
# Of each kept tensor, the axis of its rows and that of its places.
AXES = {"cache_L2BGSd": (2, 4), "inputs_LBSD": (1, 2), "usage_LBS": (1, 2)}


class StatePool:
    """Up to `most_rows` rows of `capacity` tokens each. `state` holds those in use; none at first."""

    def __init__(self, decoder: Decoder, *, most_rows: int, capacity: int) -> None:
        """Reserves one row."""
        self._decoder, self.most_rows, self.capacity = decoder, most_rows, capacity
        self._begin()

    def _begin(self) -> None:
        # What moves on, or is read in segments, has its places from the beginning.
        self._grows = not (self._decoder.config.is_windowed or self._decoder.config.is_segmented)
        first = min(self.capacity, FIRST_PLACES) if self._grows else self.capacity
        self.state = self._decoder.new_state(capacity=first)
        self._reserved: dict[str, Tensor] = {
            name: tensor for name in AXES if (tensor := getattr(self.state, name)) is not None
        }
        for name in MARKS:
            setattr(self.state, name, [])
        for rows in self.state.memories.values():
            rows.clear()
        self._use(0)

    @property
    def num_rows(self) -> int:
        """Rows in use."""
        return self.state.batch_size

    @torch.inference_mode()
    def join(self, other: DecoderState, row: int = 0) -> int:
        """Takes a row of another state over; gives its number here. The other must not be used afterwards. What is to
        come needs a place of its own: see `reserve`.
        """
        mine = self.num_rows
        used = other.num_front + other.length_B[row] - other.base_B[row]
        self.reserve(1, used)
        self._use(mine + 1)
        for name, reserved in self._reserved.items():
            batch, places = AXES[name]
            source = getattr(other, name).select(batch, row).narrow(places - 1, 0, used)
            reserved.select(batch, mine).narrow(places - 1, 0, used).copy_(source)
        for name in MARKS:
            getattr(self.state, name).append(getattr(other, name)[row])
        for layer, rows in self.state.memories.items():
            rows.append(other.memories[layer][row])
        return mine

    @torch.inference_mode()
    def leave(self, row: int) -> None:
        """Frees a row: the last one takes its number."""
        last = self.num_rows - 1
        if row != last:
            for name, reserved in self._reserved.items():
                self._copy_row(reserved, last, reserved, row, name)
        for rows in (*(getattr(self.state, name) for name in MARKS), *self.state.memories.values()):
            rows[row] = rows[last]
            rows.pop()
        self._use(last)

    def _copy_row(self, source: Tensor, row: int, target: Tensor, place: int, name: str) -> None:
        """What is used of a row, from one tensor to another."""
        batch, places = AXES[name]
        used = self.state.num_front + self.state.length_B[row] - self.state.base_B[row]
        part = source.select(batch, row).narrow(places - 1, 0, used)
        target.select(batch, place).narrow(places - 1, 0, used).copy_(part)

    @torch.inference_mode()
    def reserve(self, more: int, num_tokens: int) -> None:
        """Has room for so many more rows, and for so many tokens in each; what is there moves."""
        rows = self.num_rows + more
        for name, reserved in self._reserved.items():
            (batch, places), shape = AXES[name], [*reserved.shape]
            if rows > shape[batch]:
                shape[batch] = min(self.most_rows, max(rows, 2 * shape[batch]))
            if self._grows and num_tokens > shape[places]:
                shape[places] = min(self.capacity, max(num_tokens, 2 * shape[places]))
            if shape != [*reserved.shape]:
                grown = zeros(shape, reserved.dtype, reserved.device)
                for row in range(self.num_rows):
                    self._copy_row(reserved, row, grown, row, name)
                self._reserved[name] = grown
                self.state.num_local = shape[places] - self.state.num_front
        self._use(self.num_rows)

    def shrink(self) -> None:
        """Gives up what was reserved since the beginning; only where no row is in use."""
        if not self.num_rows:
            self._begin()

    def _use(self, rows: int) -> None:
        """Shows the state so many rows."""
        for name, reserved in self._reserved.items():
            setattr(self.state, name, reserved.narrow(AXES[name][0], 0, rows))
        self.state.batch_size = rows


@torch.inference_mode()
def copied(state: DecoderState, row: int, decoder: Decoder, *, capacity: int | None = None) -> DecoderState:
    """A row of a state as a state of its own, which goes its own way: with room for `capacity` tokens, or for no more
    than there are.
    """
    used = state.num_front + state.length_B[row] - state.base_B[row]
    twin = decoder.new_state(capacity=used if capacity is None else capacity)
    for name, (batch, places) in AXES.items():
        if (tensor := getattr(state, name)) is not None:
            source = tensor.select(batch, row).narrow(places - 1, 0, used)
            getattr(twin, name).select(batch, 0).narrow(places - 1, 0, used).copy_(source)
    for name in MARKS:
        setattr(twin, name, [getattr(state, name)[row]])
    twin.memories = {layer: [rows[row].fork()] for layer, rows in state.memories.items()}
    return twin
