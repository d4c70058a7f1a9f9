"""Documents -> batches for training: one file of token ids, read in windows.

Which windows a step reads is a function of seed and step alone, so that a resumed run sees what it would have seen.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import numpy as np
import torch
from jaxtyping import Int, Int64
from torch import Tensor

from memlm.corpus import Document
from memlm.errors import InvalidInput
from memlm.progress import Progress, silent
from memlm.tokenizer import Tokenizer
from memlm.windows import blocks_of

TOKEN_DTYPE = np.dtype("<u4")


def write_tokens(
    documents: Iterable[Document], tokenizer: Tokenizer, path: Path, *, num_bytes: int, progress: Progress = silent
) -> None:
    """Tokenizes a corpus into a flat file of token ids; each document is preceded by the end-of-text token, and so is
    the end.
    """
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
class Batches:
    """The windows of a token file, `batch_size` at each step, epoch after epoch in an order of their own.

    Every epoch cuts the file at another offset, so that no place is always a window's first. Raises InvalidInput
    for a file that is shorter than two windows.
    """

    path: Path
    context_length: int
    batch_size: int
    seed: int

    def __post_init__(self) -> None:
        """Checks that there is a window to read at any offset."""
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
        """Whole windows, whatever the epoch's offset."""
        return (self.num_tokens - 1) // self.context_length - 1

    def at(self, step: int) -> tuple[Int[Tensor, "B T"], Int[Tensor, "B T"]]:
        """The inputs and the targets, one token further, of a step."""
        tokens_N = np.memmap(self.path, dtype=TOKEN_DTYPE, mode="r")
        begins = [self._begin_of(step * self.batch_size + row) for row in range(self.batch_size)]
        rows = np.stack([tokens_N[begin : begin + self.context_length + 1] for begin in begins])
        both = torch.from_numpy(rows.astype(np.int64))
        return both[:, :-1], both[:, 1:]

    def _begin_of(self, window: int) -> int:
        epoch, place = divmod(window, self.windows_per_epoch)
        order, offset = _order_of(self.seed, epoch, self.windows_per_epoch, self.context_length)
        return offset + int(order[place]) * self.context_length


@lru_cache(maxsize=2)
def _order_of(seed: int, epoch: int, num_windows: int, context_length: int) -> tuple[Int64[np.ndarray, " W"], int]:
    generator = np.random.default_rng([seed, epoch])
    return generator.permutation(num_windows), int(generator.integers(context_length))
