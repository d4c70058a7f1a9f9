"""The sources of a state's rows: encoded texts that cross attention reads, computed once and shared.

Shapes: L layers that read a source, B rows, G key-value heads, N tokens of a source, d width of a head.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from memlm.errors import InvalidInput

if TYPE_CHECKING:
    from memlm.model.config import ModelConfig

PREFIX = "source."  # of the names of a saved state's tensors


@dataclass(frozen=True, eq=False, slots=True)
class Source:
    """Keys and values of an encoded text for each layer that reads it. They never change, so that rows share them."""

    pairs_L2GNd: Float[Tensor, "L 2 G N d"]

    @property
    def num_tokens(self) -> int:
        """Tokens of the text."""
        return self.pairs_L2GNd.shape[3]

    @property
    def num_bytes(self) -> int:
        return self.pairs_L2GNd.numel() * self.pairs_L2GNd.itemsize


class RowSources:
    """The source of each row in use, None for a row that has none yet."""

    def __init__(self) -> None:
        self._rows: list[Source | None] = []
        self._joined: tuple[list[Source | None], Tensor] | None = None

    def __getitem__(self, row: int) -> Source | None:
        return self._rows[row]

    def __setitem__(self, row: int, source: Source | None) -> None:
        self._rows[row] = source

    @property
    def num_bytes(self) -> int:
        """Bytes of the sources, of which each counts once."""
        return sum(source.num_bytes for source in {id(source): source for source in self._rows if source}.values())

    def use_rows(self, count: int) -> None:
        """Uses the first `count` rows. New ones have no source."""
        del self._rows[count:]
        self._rows += [None] * (count - len(self._rows))

    def give(self, sources_B: Sequence[Source], batch_size: int, config: ModelConfig) -> None:
        """Sets the source of each row. Raises InvalidInput for another number of them, or another shape."""
        if len(sources_B) != batch_size:
            raise InvalidInput(f"{len(sources_B)} sources for {batch_size} rows; give one for each", field="source")
        expected = config.num_blocks, 2, config.num_kv_heads, config.head_dim
        for row, source in enumerate(sources_B):
            L, two, G, N, d = source.pairs_L2GNd.shape
            if (L, two, G, d) != expected or not N:
                raise InvalidInput(
                    f"the source of row {row} is {(L, two, G, N, d)}; expected layers, key and value, heads, at least"
                    f" one token, width: {(*expected[:3], 'N', expected[3])}",
                    field="source",
                )
        self._rows = list(sources_B)

    def joined(self) -> tuple[Float[Tensor, "L 2 B G N d"], list[int]]:
        """Returns the sources of all rows, padded with zeros to the longest, and their lengths.

        They are joined when rows have changed. Rows that share one source share its numbers. Raises InvalidInput for a
        row without a source.
        """
        sources = [source for source in self._rows if source is not None]
        if len(sources) < len(self._rows):
            raise InvalidInput(
                f"row {self._rows.index(None)} has no source to read; give `new_state` one for each row", field="source"
            )
        lengths = [source.num_tokens for source in sources]
        if self._joined is None or not _are_same(self._joined[0], self._rows):
            self._joined = list(self._rows), _join(sources, max(lengths))
        return self._joined[1], lengths

    def tensors(self) -> dict[str, Tensor]:
        """The sources by the names that `replace` reads."""
        return {f"{PREFIX}{row}": source.pairs_L2GNd for row, source in enumerate(self._rows) if source is not None}

    def replace(self, tensors: Mapping[str, Tensor], dtype: torch.dtype) -> None:
        """Takes the sources of a saved state."""
        for row in range(len(self._rows)):
            if (pairs_L2GNd := tensors.get(f"{PREFIX}{row}")) is not None:
                self._rows[row] = Source(pairs_L2GNd.to(dtype))


def _are_same(first: Sequence[object], second: Sequence[object]) -> bool:
    return len(first) == len(second) and all(one is other for one, other in zip(first, second, strict=True))


def _join(sources: Sequence[Source], longest: int) -> Float[Tensor, "L 2 B G N d"]:
    if all(source is sources[0] for source in sources):
        return sources[0].pairs_L2GNd[:, :, None].expand(-1, -1, len(sources), -1, -1, -1)
    padded = [F.pad(source.pairs_L2GNd, (0, 0, 0, longest - source.num_tokens)) for source in sources]
    return torch.stack(padded, dim=2)
