"""One step of the decoder: T new tokens of each row, what they see, and what every layer needs to know of it."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property

import torch
from jaxtyping import Float, Int
from torch import Tensor

from memlm.model.mask import AttentionMask
from memlm.model.positions import RelativeBias, Rotary
from memlm.model.state import DecoderState, Ends

ALIKE_PLACES = 128  # up to here, reading places that a row does not have costs less than another product


@dataclass
class ForwardContext:
    """Made once, handed to every layer. `new_B` counts the tokens of each row that are no padding."""

    mask: AttentionMask
    new_B: list[int]
    dtype: torch.dtype
    state: DecoderState | None = None
    rotary: Rotary | None = None
    relative_bias: RelativeBias | None = None
    _ropes: dict[str, Tensor] = field(default_factory=dict)
    _bias: Tensor | None = None

    @cached_property
    def ends(self) -> Ends:
        """See `DecoderState.ends`."""
        return None if self.state is None else self.state.ends(self.new_B, self.mask.num_new)

    @cached_property
    def runs(self) -> list[tuple[slice, int]]:
        """Neighboring rows that hold about as many tokens, with the places of the longest of each run. A single query
        of each row is answered run by run, so that a long row does not make short ones read places that they never
        wrote: that would cost time, and would make the system map those pages.
        """
        everything = [(slice(None), self.mask.num_places)]
        if self.state is None or self.mask.num_new > 1 or self.mask.query_RT.shape[0] == 1:
            return everything
        runs = list[tuple[slice, int]]()
        begin, least, most = 0, 0, 0
        for row, places in enumerate(self.state.places_B(1)):
            if row and max(most, places) > max(2 * min(least, places), ALIKE_PLACES):
                runs.append((slice(begin, row), most))
                begin, least, most = row, places, places
            else:
                least, most = min(least, places) if row else places, max(most, places)
        return [*runs, (slice(begin, self.state.batch_size), most)] if runs else everything

    @property
    def query_rope(self) -> Float[Tensor, "2 *R T r"] | None:
        """The rotations of the new tokens."""
        return self._rope("query", self.mask.query_RT)

    @property
    def key_rope(self) -> Float[Tensor, "2 *R S r"] | None:
        """The rotations of all places."""
        return self._rope("key", self.mask.key_RS)

    @property
    def sink_rope(self) -> Float[Tensor, "2 *R T r"] | None:
        """The rotations of the new tokens as attention sinks see them: never further away than the window's width."""
        return self._rope("sink", self.mask.query_RT.clamp(max=self.mask.sink_cap))

    @property
    def bias_RHTS(self) -> Float[Tensor, "R H T S"] | None:
        """What distances add to the scores, where that depends on nothing else."""
        if self._bias is None and self.relative_bias is not None:
            self._bias = self.relative_bias(self.mask)
        return self._bias

    def _rope(self, name: str, positions: Int[Tensor, "R P"]) -> Tensor | None:
        if self.rotary is None:
            return None
        if name not in self._ropes:
            uniform = positions.shape[0] == 1
            cos_sin = self.rotary.at(positions[0]) if uniform else self.rotary.at(positions)[:, :, None]
            self._ropes[name] = cos_sin.to(self.dtype)
        return self._ropes[name]
