"""Sequences that come and go, side by side in one state: rows are appended, and the last one fills a gap.

Twice as many rows, or places in each, are reserved whenever they run out. All rows have the places of the longest, but
a row takes memory for the places that it has written alone (memlm/model/pages.py), and a step reads the rows in use and
no others.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch import Tensor

from memlm.model.decoder import Decoder
from memlm.model.pages import Pages
from memlm.model.state import DecoderState

UNBOUNDED = 1 << 40  # tokens of a row whose places older ones make free
FIRST_PLACES = 128
SETTLED_BYTES = 32 << 20  # some 13 ms of processor time
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
        self._reserved = {
            name: Pages(tensor.shape, tensor.dtype, tensor.device)
            for name in AXES
            if (tensor := getattr(self.state, name)) is not None
        }
        shapes = {name: pages.tensor.shape for name, pages in self._reserved.items()}
        self._num_parts = sum(math.prod(shape[: AXES[name][0]]) for name, shape in shapes.items())
        self._num_huge: list[int] = []  # of each row in use, how many of its parts have huge pages
        for name in MARKS:
            setattr(self.state, name, [])
        for rows in self.state.knn_caches.values():
            rows.clear()
        self._use(0)

    @property
    def num_rows(self) -> int:
        """Rows in use."""
        return self.state.batch_size

    @property
    def shape(self) -> tuple[int, int]:
        """Rows and places that are reserved."""
        tensor = self._reserved["cache_L2BGSd"].tensor
        return tensor.shape[2], tensor.shape[4]

    @torch.inference_mode()
    def add_row(self, other: DecoderState, row: int = 0) -> int:
        """Takes a row of another state over; gives its number here. The other must not be used afterwards. What is to
        come needs a place of its own: see `grow`.
        """
        mine = self.num_rows
        used = other.places_B()[row]
        self.grow(1, used)
        self._use(mine + 1)
        self._num_huge.append(0)
        if self._is_full(used):
            self._use_huge(mine)
        for name, pages in self._reserved.items():
            batch, places = AXES[name]
            source = getattr(other, name).select(batch, row).narrow(places - 1, 0, used)
            pages.tensor.select(batch, mine).narrow(places - 1, 0, used).copy_(source)
        for name in MARKS:
            getattr(self.state, name).append(getattr(other, name)[row])
        for layer, rows in self.state.knn_caches.items():
            rows.append(other.knn_caches[layer][row])
        return mine

    @torch.inference_mode()
    def remove_row(self, row: int) -> None:
        """Frees a row, and gives its memory back: the last one takes its number."""
        last = self.num_rows - 1
        if row != last:
            self._release(row)
            if self._num_huge[last]:
                self._use_huge(row)
            for name, pages in self._reserved.items():
                self._copy_row(pages.tensor, last, pages.tensor, row, name)
        self._release(last)
        for rows in (*(getattr(self.state, name) for name in MARKS), *self.state.knn_caches.values()):
            rows[row] = rows[last]
            rows.pop()
        self._num_huge.pop()
        self._use(last)

    def _copy_row(self, source: Tensor, row: int, target: Tensor, place: int, name: str) -> None:
        """What is used of a row, from one tensor to another."""
        batch, places = AXES[name]
        used = self.state.places_B()[row]
        part = source.select(batch, row).narrow(places - 1, 0, used)
        target.select(batch, place).narrow(places - 1, 0, used).copy_(part)

    @torch.inference_mode()
    def grow(self, more: int, num_tokens: int) -> None:
        """Has room for so many more rows, and for so many tokens in each; what is there moves."""
        rows, places = before = self.shape
        if self.num_rows + more > rows:
            rows = min(self.most_rows, max(self.num_rows + more, 2 * rows))
        if self._grows and num_tokens > places:
            places = min(self.capacity, max(num_tokens, 2 * places))
        if (rows, places) != before:
            self._move_to(rows, places)
        self._use(self.num_rows)

    def _move_to(self, rows: int, places: int) -> None:
        moving = {name: pages.tensor for name, pages in self._reserved.items()}
        for name, tensor in moving.items():
            shape = [*tensor.shape]
            shape[AXES[name][0]], shape[AXES[name][1]] = rows, places
            self._reserved[name] = Pages(shape, tensor.dtype, tensor.device)
        self.state.num_local = places - self.state.num_front
        self._num_huge = [0] * self.num_rows
        for row, used in enumerate(self.state.places_B()):
            if self._is_full(used):
                self._use_huge(row)
            for name, tensor in moving.items():
                self._copy_row(tensor, row, self._reserved[name].tensor, row, name)

    def settle(self) -> None:
        """Moves parts of a row that has become mostly full into huge pages, no more at a time than `SETTLED_BYTES`: the
        next token of all rows waits meanwhile.
        """
        for row, used in enumerate(self.state.places_B()):
            if self._num_huge[row] < self._num_parts and self._is_full(used):
                moved, shares = 0, row > 0 and self._num_huge[row - 1] > 0
                for pages, begin, end in self._parts(row)[self._num_huge[row] :]:
                    size = end - begin
                    pages.collapse(begin - size if shares else begin, end)  # a huge page may hold both rows' ends
                    self._num_huge[row] += 1
                    moved += size
                    if moved >= SETTLED_BYTES:
                        break
                return

    def _is_full(self, used: int) -> bool:
        """Whether huge pages of a row's places would hold no more than twice what is used."""
        return 2 * used >= self.shape[1]

    def _use_huge(self, row: int) -> None:
        """Asks for huge pages for a row that is still to be written."""
        for pages, begin, end in self._parts(row):
            pages.use_huge(begin, end)
        self._num_huge[row] = self._num_parts

    def _release(self, row: int) -> None:
        for pages, begin, end in self._parts(row):
            pages.release(begin, end)
            if self._num_huge[row]:
                pages.use_small(begin, end)
        self._num_huge[row] = 0

    def _parts(self, row: int) -> list[tuple[Pages, int, int]]:
        """The parts of a row, one for each layer and kind of tensor: where they are, and their first and last bytes."""
        return [
            (pages, begin, end)
            for name, pages in self._reserved.items()
            for begin, end in _ranges(pages.tensor, AXES[name][0], row)
        ]

    def shrink(self) -> None:
        """Gives up what was reserved since the beginning; only where no row is in use."""
        if not self.num_rows:
            self._begin()

    def _use(self, rows: int) -> None:
        """Shows the state so many rows."""
        for name, pages in self._reserved.items():
            setattr(self.state, name, pages.tensor.narrow(AXES[name][0], 0, rows))
        self.state.batch_size = rows


def _ranges(tensor: Tensor, batch: int, row: int) -> Iterator[tuple[int, int]]:
    """The first and last bytes of a row in each layer; `batch` is the axis of rows."""
    rows, row_bytes = tensor.shape[batch], math.prod(tensor.shape[batch + 1 :]) * tensor.itemsize
    for layer in range(math.prod(tensor.shape[:batch])):
        yield (layer * rows + row) * row_bytes, (layer * rows + row + 1) * row_bytes


@torch.inference_mode()
def copied(state: DecoderState, row: int, decoder: Decoder, *, capacity: int | None = None) -> DecoderState:
    """A row of a state as a state of its own, which goes its own way: with room for `capacity` tokens, or for no more
    than there are.
    """
    used = state.places_B()[row]
    twin = decoder.new_state(capacity=used if capacity is None else capacity)
    for name, (batch, places) in AXES.items():
        if (tensor := getattr(state, name)) is not None:
            source = tensor.select(batch, row).narrow(places - 1, 0, used)
            getattr(twin, name).select(batch, 0).narrow(places - 1, 0, used).copy_(source)
    for name in MARKS:
        setattr(twin, name, [getattr(state, name)[row]])
    twin.knn_caches = {layer: [rows[row].fork()] for layer, rows in state.knn_caches.items()}
    return twin
