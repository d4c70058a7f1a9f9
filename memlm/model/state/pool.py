"""The KV caches of sequences that come and go, side by side in one state.

Rows are appended, and the last row fills a gap. Twice as many rows, or places in each, are reserved whenever they run
out. All rows have the places of the longest, but a row takes RAM only for the places that it has written
(memlm/model/state/pages.py), and a step reads only the rows in use.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from memlm.model.decoder import Decoder
from memlm.model.state.decoder_state import DecoderState
from memlm.model.state.pages import Pages

UNBOUNDED = 1 << 40  # tokens of a row whose places older ones make free
FIRST_PLACES = 128
SETTLED_BYTES = 32 << 20  # some 13 ms of processor time


class StatePool:
    """Rows of `capacity` tokens each, of which `most_rows` are reserved ahead. `state` holds those in use, at first
    none.
    """

    def __init__(self, decoder: Decoder, *, most_rows: int, capacity: int) -> None:
        self._decoder, self.most_rows, self.capacity = decoder, most_rows, capacity
        # States with windows or segments have all of their places from the beginning.
        self._grows = not (decoder.config.is_windowed or decoder.config.is_segmented)
        self._begin()

    def _begin(self) -> None:
        self._allocate(1, min(self.capacity, FIRST_PLACES) if self._grows else self.capacity)

    def _allocate(self, rows: int, places: int) -> None:
        self._pages = list[Pages]()
        self._num_huge = list[int]()  # of each row in use, how many of its parts have huge pages
        self.state = self._decoder.new_state(batch_size=rows, capacity=places, allocate=self._allocate_tensor)
        self.shape = rows, self.state.num_front + self.state.num_local  # rows and places that are reserved
        self.state.use_rows(0)

    def _allocate_tensor(self, shape: Sequence[int], dtype: torch.dtype, device: torch.device, row_axis: int) -> Tensor:
        self._pages.append(Pages(shape, dtype, device, row_axis=row_axis))
        return self._pages[-1].tensor

    @property
    def num_rows(self) -> int:
        """Rows in use."""
        return self.state.batch_size

    @torch.inference_mode()
    def add_row(self, source: DecoderState, row: int = 0) -> int:
        """Takes over a row of another state and returns its number here. The other must not be used afterwards.

        Later tokens need places of their own: see `grow`.
        """
        self.grow(1, source.places_B()[row])
        return self._append(source, row)

    @torch.inference_mode()
    def remove_row(self, row: int) -> None:
        """Frees a row and its RAM. The last row takes its number."""
        last = self.num_rows - 1
        if row != last:
            self._release(row)
            if self._num_huge[last]:
                self._use_huge(row)
            self.state.copy_row(row, self.state, last)
        self._release(last)
        self._num_huge.pop()
        self.state.use_rows(last)

    @torch.inference_mode()
    def grow(self, more: int, num_tokens: int) -> None:
        """Makes room for `more` rows, and for `num_tokens` tokens in each. The rows in use are copied."""
        rows, places = self.shape
        if self.num_rows + more > rows:
            rows = max(self.num_rows + more, min(self.most_rows, 2 * rows))
        if self._grows and num_tokens > places:
            places = min(self.capacity, max(num_tokens, 2 * places))
        if (rows, places) != self.shape:
            before = self.state
            self._allocate(rows, places if self._grows else self.capacity)
            for row in range(before.batch_size):
                self._append(before, row)

    def _append(self, source: DecoderState, source_row: int) -> int:
        row = self.num_rows
        self.state.use_rows(row + 1)
        self._num_huge.append(0)
        if self._is_full(source.places_B()[source_row]):
            self._use_huge(row)
        self.state.copy_row(row, source, source_row)
        return row

    def shrink(self) -> None:
        """Frees everything reserved since the beginning, if no row is in use."""
        if not self.num_rows:
            self._begin()

    def settle(self) -> None:
        """Moves parts of a row that has become mostly full into huge pages, `SETTLED_BYTES` at a time.

        The next token of all rows waits meanwhile.
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
        """Whether huge pages of a row's places would hold no more than twice the places in use."""
        return 2 * used >= self.shape[1]

    def _use_huge(self, row: int) -> None:
        """Asks for huge pages for a row that is not written yet."""
        for pages, begin, end in self._parts(row):
            pages.use_huge(begin, end)
        self._num_huge[row] = self._num_parts

    def _release(self, row: int) -> None:
        for pages, begin, end in self._parts(row):
            pages.release(begin, end)
            if self._num_huge[row]:
                pages.use_small(begin, end)
        self._num_huge[row] = 0

    @property
    def _num_parts(self) -> int:
        return sum(pages.num_parts for pages in self._pages)

    def _parts(self, row: int) -> list[tuple[Pages, int, int]]:
        """The byte ranges of a row, one for each layer and kind of tensor."""
        return [(pages, begin, end) for pages in self._pages for begin, end in pages.parts_of_row(row)]
