"""Documents -> batches for training: one file of token ids, read in windows or, for models with memory or neighbors, by
document.

The tokens of a step are a function of seed and step alone, so a resumed run reads the same ones.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Protocol

import numpy as np
import torch
from jaxtyping import Bool, Int, Int64
from torch import Tensor

from memlm.base.figures import counted
from memlm.base.progress import Progress, silent
from memlm.data.corpus import Document
from memlm.data.tokenizer import Tokenizer
from memlm.data.windows import blocks_of
from memlm.errors import InvalidInput

TOKEN_DTYPE = np.dtype("<u4")
KEPT_EPOCHS = 4  # rows are seldom more than one apart


def write_tokens(
    documents: Iterable[Document], tokenizer: Tokenizer, path: Path, *, num_bytes: int, progress: Progress = silent
) -> None:
    """Writes a corpus as a flat file of token ids, with the end-of-text token before each document and at the end."""
    done, temporary = 0, path.with_suffix(".tmp")
    with temporary.open("wb") as file:
        for block in blocks_of(documents, 64):
            for tokens_N in tokenizer.encode_batch([document.text for document in block]):
                np.concatenate([[tokenizer.end_id], tokens_N]).astype(TOKEN_DTYPE).tofile(file)
            done += sum(document.num_bytes for document in block)
            progress("tokenize", done, max(done, num_bytes))
        np.array([tokenizer.end_id], dtype=TOKEN_DTYPE).tofile(file)
    temporary.replace(path)


@dataclass(frozen=True)
class TrainingBatch:
    """The inputs of a step, the tokens that follow them, for models with memory where documents begin, and the values
    of fields that states are given (`Field.is_given`), by their names, for each row.
    """

    inputs_BT: Int[Tensor, "B T"]
    targets_BT: Int[Tensor, "B T"]
    starts_BT: Bool[Tensor, "B T"] | None = None
    given: Mapping[str, Tensor] = field(default_factory=dict)


class TrainingData(Protocol):
    """Batches by step, for the trainer."""

    @property
    def steps_per_epoch(self) -> float:
        """Steps that read everything once."""

    def at(self, step: int, rows: range | None = None) -> TrainingBatch:
        """Returns the batch of a step, or some of its rows. Equal steps give equal batches. A target of -100 is
        none.
        """


@dataclass(frozen=True)
class Batches:
    """The windows of a token file, `batch_size` per step, in another order in every epoch.

    Every epoch cuts the file at another offset, so that no place is always the first of a window. Raises InvalidInput
    for a file shorter than two windows.
    """

    path: Path
    context_length: int
    batch_size: int
    seed: int

    def __post_init__(self) -> None:
        if self.windows_per_epoch < 1:
            raise InvalidInput(
                f"the corpus has {self.num_tokens} tokens; training needs at least {2 * self.context_length + 1}:"
                " give more text, or a smaller context_length",
                field="corpus",
            )

    @property
    def num_tokens(self) -> int:
        """Tokens in the file."""
        return self.path.stat().st_size // TOKEN_DTYPE.itemsize

    @property
    def windows_per_epoch(self) -> int:
        """Whole windows at any offset."""
        return (self.num_tokens - 1) // self.context_length - 1

    def at(self, step: int, rows: range | None = None) -> TrainingBatch:
        """Returns the batch of a step, or some of its rows."""
        tokens_N = np.memmap(self.path, dtype=TOKEN_DTYPE, mode="r")
        rows = range(self.batch_size) if rows is None else rows
        begins = [self._begin_of(step * self.batch_size + row) for row in rows]
        windows = np.stack([tokens_N[begin : begin + self.context_length + 1] for begin in begins])
        both = torch.from_numpy(windows.astype(np.int64))
        return TrainingBatch(both[:, :-1], both[:, 1:])

    @property
    def steps_per_epoch(self) -> float:
        """Steps that read every window once."""
        return self.windows_per_epoch / self.batch_size

    def _begin_of(self, window: int) -> int:
        epoch, place = divmod(window, self.windows_per_epoch)
        order, offset = _order_of(self.seed, epoch, self.windows_per_epoch, self.context_length)
        return offset + int(order[place]) * self.context_length


@lru_cache(maxsize=2)
def _order_of(seed: int, epoch: int, num_windows: int, context_length: int) -> tuple[Int64[np.ndarray, " W"], int]:
    generator = np.random.default_rng([seed, epoch])
    return generator.permutation(num_windows), int(generator.integers(context_length))


@dataclass(frozen=True)
class DocumentStreams:
    """Rows of whole documents for a model with memory or neighbors. Each row reads one document after another,
    `context_length` tokens per step.

    Every document of an epoch is in one row, in an order of the epoch, and every token is read once. A row that ends
    its epoch continues with the next one, so nothing is padded or skipped. Raises InvalidInput for a file with fewer
    documents than rows.
    """

    path: Path
    context_length: int
    batch_size: int
    seed: int
    start_id: int
    end_id: int

    def __post_init__(self) -> None:
        if len(self._bounds) - 1 < self.batch_size:
            raise InvalidInput(
                f"the corpus has {counted(len(self._bounds) - 1, 'document')}, and a model with memory or neighbors"
                f" reads {self.batch_size} side by side: cut it into more, of which each file and each line of a .jsonl"
                " file is one, or give a smaller --batch-size",
                field="corpus",
            )

    @cached_property
    def _bounds(self) -> Int64[np.ndarray, " E"]:
        """The places of the tokens that precede documents, and of the last token."""
        return np.flatnonzero(np.memmap(self.path, dtype=TOKEN_DTYPE, mode="r") == self.end_id)

    @property
    def steps_per_epoch(self) -> float:
        """Steps that read as many tokens as the file has."""
        return int(self._bounds[-1] - self._bounds[0]) / (self.batch_size * self.context_length)

    def at(self, step: int, rows: range | None = None) -> TrainingBatch:
        """Returns the batch of a step, or some of its rows."""
        rows = range(self.batch_size) if rows is None else rows
        parts = [self._read(row, step * self.context_length, self.context_length) for row in rows]
        inputs, targets, starts = (torch.from_numpy(np.stack(each)) for each in zip(*parts, strict=True))
        return TrainingBatch(inputs, targets, starts)

    def _read(self, row: int, begin: int, count: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Returns `count` positions of a row's endless text, from the `begin`-th on."""
        tokens_N, epoch = np.memmap(self.path, dtype=TOKEN_DTYPE, mode="r"), 0
        inputs, targets, starts, read = [], [], [], 0
        while begin >= self._length(row, epoch):
            begin, epoch = begin - self._length(row, epoch), epoch + 1
        while read < count:
            documents, ends = self._row(row, epoch)
            place = int(np.searchsorted(ends, begin, side="right"))
            if place == len(documents):
                begin, epoch = 0, epoch + 1
                continue
            offset = begin - (int(ends[place - 1]) if place else 0)
            size = min(count - read, int(ends[place]) - begin)
            first = int(self._bounds[documents[place]]) + offset
            piece = np.asarray(tokens_N[first : first + size + 1]).astype(np.int64)
            is_start = np.zeros(size, dtype=np.bool_)
            if offset == 0:
                is_start[0], piece[0] = True, self.start_id
            inputs.append(piece[:-1])
            targets.append(piece[1:])
            starts.append(is_start)
            begin, read = begin + size, read + size
        return np.concatenate(inputs), np.concatenate(targets), np.concatenate(starts)

    def _row(self, row: int, epoch: int) -> tuple[list[int], Int64[np.ndarray, " E"]]:
        """Returns the documents of a row in an epoch, and the position at which each of them ends."""
        return self._assign(epoch)[row]

    def _length(self, row: int, epoch: int) -> int:
        """Returns the number of positions of a row in an epoch."""
        if epoch not in self._lengths:
            self._lengths[epoch] = [int(ends[-1]) for _, ends in self._assign(epoch)]
        return self._lengths[epoch][row]

    def _assign(self, epoch: int) -> list[tuple[list[int], Int64[np.ndarray, " E"]]]:
        """Assigns each document of an epoch, in random order, to the row with the fewest tokens so far."""
        if epoch in self._assignments:
            return self._assignments[epoch]
        sizes = np.diff(self._bounds)
        rows: list[list[int]] = [[] for _ in range(self.batch_size)]
        loads = [(0, row) for row in range(self.batch_size)]
        for document in np.random.default_rng([self.seed, epoch]).permutation(len(sizes)).tolist():
            load, row = heapq.heappop(loads)
            rows[row].append(document)
            heapq.heappush(loads, (load + int(sizes[document]), row))
        if len(self._assignments) >= KEPT_EPOCHS:
            del self._assignments[min(self._assignments)]
        self._assignments[epoch] = [(row, np.cumsum(sizes[row])) for row in rows]
        return self._assignments[epoch]

    @cached_property
    def _assignments(self) -> dict[int, list[tuple[list[int], Int64[np.ndarray, " E"]]]]:
        """The assignments of the latest epochs."""
        return {}

    @cached_property
    def _lengths(self) -> dict[int, list[int]]:
        """The lengths of all rows in the epochs so far."""
        return {}
