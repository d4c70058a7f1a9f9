"""How far the rows of a KV cache have read, and the last pass over them, whose tokens can be taken back.

Keys and values behind a row's length are never read, so a shorter length takes them back. The use of compressible
places is a sum. It is computed again without the tokens.

Shapes: T tokens, S places.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from jaxtyping import Float, Shaped
from torch import Tensor

from memlm.model.config import ModelConfig


@dataclass(slots=True)
class Row:
    """How far one row of a batch has read. Positions count from the row's last reset."""

    base: int  # position of the token at the first local place
    length: int = 0  # tokens read
    start: int = 0  # where the current document began
    floor: int = 0  # memory has taken over all tokens before
    compressed: int = 0  # compressed memories in use, right before the local places
    adapter: str | None = field(default=None, compare=False)  # the name of the one that the row is read with

    def has_memories_of(self, other: Row) -> bool:
        """Whether the memories, and the begin of the document, are those of another state of the row."""
        return replace(self, base=0, length=0) == replace(other, base=0, length=0)

    def earlier(self, length: int, config: ModelConfig) -> Row | None:
        """The row when it had read `length` tokens of its document. None if later tokens have the places of tokens that
        it saw then, or if memories have taken over tokens since.
        """
        if config.is_segmented:
            is_kept = length >= self.length - self.length % config.context_length
        else:
            first_seen = max(config.num_sinks, length - max(config.windows) + 1) if config.is_windowed else self.base
            is_kept = self.base <= first_seen
        return replace(self, length=length) if is_kept and self.start <= length else None


class _Use(NamedTuple):
    """The attention that a row's places received from tokens from a position on, beside their earlier one."""

    row: int
    position: int
    used_S: Float[Tensor, " S"]  # in the state
    before_S: Float[Tensor, " S"]
    weights_TS: Float[Tensor, "T S"]


class LastPass:
    """The rows before a pass, and the use of places that its tokens added."""

    def __init__(self) -> None:
        self._before = list[Row]()
        self._uses = list[_Use]()
        self.inputs_BT: Shaped[Tensor, "B T ..."] | None = None  # tokens or vectors of a pass over sums

    def begin(self, rows: Sequence[Row]) -> None:
        """Forgets the pass before."""
        self._before = [replace(row) for row in rows]
        self._uses.clear()

    def count_use(self, row: int, position: int, used_S: Float[Tensor, " S"], weights_TS: Tensor) -> None:
        """Remembers the use of a row's places before the tokens from a position on add their weights to it."""
        self._uses.append(_Use(row, position, used_S, used_S.clone(), weights_TS))

    def crop(self, rows: Sequence[Row], length_B: Sequence[int]) -> None:
        """Takes back the tokens of each row from a length on, as `DecoderState.crop` does."""
        cropped = [number for number, row in enumerate(rows) if length_B[number] != row.length]
        for number in cropped:
            row, before, length = rows[number], self._before[number], length_B[number]
            if not (before.length <= length < row.length and row.has_memories_of(before)):
                raise ValueError(
                    f"row {number} has {row.length} tokens and cannot go back to {length}: its last pass began with"
                    f" {before.length}, and must not reach the end of a segment"
                )
            row.length = length
        for use in self._uses:
            if use.row in cropped:
                kept = max(0, length_B[use.row] - use.position)
                use.used_S.copy_(use.before_S + use.weights_TS[:kept].sum(dim=0))

    def again(self, rows: Sequence[Row], cropped: Sequence[int]) -> tuple[Shaped[Tensor, "B T ..."], list[int]]:
        """Takes cropped rows back to the begin of the pass. Returns its inputs, and how many each row reads again."""
        assert self.inputs_BT is not None
        new_B = [0] * len(rows)
        for number in cropped:
            begin = self._before[number].length
            new_B[number], rows[number].length = rows[number].length - begin, begin
        return self.inputs_BT[:, : max(new_B, default=0)], new_B
