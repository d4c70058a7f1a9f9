"""The context of one forward step, computed once and shared by all layers.

Shapes: B batch, T new tokens, R rows (1 if all have equal positions), S places.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

import torch
from jaxtyping import Bool, Float, Int, Shaped
from torch import Tensor

from memlm.errors import InvalidInput
from memlm.model.attention.mask import AttentionMask
from memlm.model.attention.watch import Watch
from memlm.model.positions import RelativeBias, Rotary
from memlm.model.state.decoder_state import DecoderState

ALIKE_PLACES = 128  # up to here, reading places that a row does not have costs less than another product


class Run(NamedTuple):
    """Neighboring rows of a batch, the places that they attend to, and their part of the mask and of the bias."""

    rows: slice
    num_places: int
    mask: AttentionMask
    bias_RHTS: Float[Tensor, "R H T S"] | None


@dataclass
class ForwardContext:
    """One step: T new tokens of each row. `new_B` counts the tokens of each row that are not padding."""

    mask: AttentionMask
    new_B: list[int]
    dtype: torch.dtype
    state: DecoderState | None = None
    rotary: Rotary | None = None
    relative_bias: RelativeBias | None = None
    watch: Watch | None = None
    tokens_BT: Int[Tensor, "B T"] | None = None  # None where vectors are read instead
    losses: dict[str, Tensor] | None = None  # None where nothing learns
    share: float = 1.0  # of this step in the tokens of its pass
    cross: Any = None  # what the parts between attention and feed-forward share
    layer_offset: int = 0  # a stack that reads a block again gives it other layers of the state
    shared: dict[Any, Any] = field(default_factory=dict)  # what layers of one kind compute once
    _ropes: dict[tuple[str, int], Tensor] = field(default_factory=dict)

    @cached_property
    def runs(self) -> list[Run]:
        """The batch as runs of neighboring rows with similar numbers of tokens. One run if T > 1.

        With one query per row, attention reads each run by itself. Otherwise a long row would make short ones read
        places that they never wrote, which costs time and makes the system map those pages.
        """
        whole = Run(slice(None), self.mask.num_places, self.mask, self.bias_RHTS)
        if self.state is None or self.mask.num_new > 1 or self.mask.query_RT.shape[0] == 1:
            return [whole]
        bounds = list[tuple[int, int]]()  # first row and most places
        begin, least, most = 0, 0, 0
        for row, places in enumerate(self.state.places_B(1)):
            if row and max(most, places) > max(2 * min(least, places), ALIKE_PLACES):
                bounds.append((begin, most))
                begin, least, most = row, places, places
            else:
                least, most = min(least, places) if row else places, max(most, places)
        if not bounds:
            return [whole]
        bounds.append((begin, most))
        ends = [*(first for first, _ in bounds[1:]), self.state.batch_size]
        return [self._run(slice(first, end), S) for (first, S), end in zip(bounds, ends, strict=True)]

    def _run(self, rows: slice, num_places: int) -> Run:
        bias_RHTS = None if self.bias_RHTS is None else self.bias_RHTS[rows, ..., :num_places]
        return Run(rows, num_places, self.mask.part(rows, num_places), bias_RHTS)

    def query_rope(self, layer: int) -> Float[Tensor, "2 *R T r"] | None:
        """Cosines and sines of the new tokens, None in a layer that does not turn."""
        return self._rope("query", self.mask.query_RT, self.mask.query_span, layer)

    def document_rope(self, layer: int) -> Float[Tensor, "2 *R T r"] | None:
        """Cosines and sines of the new tokens, counted from the begin of their document.

        Random features of turned vectors depend on more than distances. So a document reads alike wherever it stands.
        """
        span = 0, self.mask.query_span[1] + 1  # longer than the tokens: they need not be in order
        return self._rope("document", self.mask.query_RT - self.mask.document_RT, span, layer)

    def key_rope(self, layer: int) -> Float[Tensor, "2 *R S r"] | None:
        """Cosines and sines of all places."""
        return self._rope("key", self.mask.key_RS, self.mask.key_span, layer)

    def sink_rope(self, layer: int) -> Float[Tensor, "2 *R T r"] | None:
        """Cosines and sines of the new tokens for attention sinks, which are never further away than the window."""
        cap, (begin, end) = self.mask.sink_cap, self.mask.query_span
        return self._rope("sink", self.mask.query_RT.clamp(max=cap), (min(begin, cap), min(end, cap + 1)), layer)

    def turn_by(self, distance: int, layer: int) -> Float[Tensor, "2 1 r"] | None:
        """Cosines and sines of a distance, which queries turn by where keys are not turned."""
        positions_11 = torch.full((1, 1), distance, device=self.mask.query_RT.device)
        return self._rope(f"distance {distance}", positions_11, (distance, distance + 1), layer)

    @cached_property
    def source(self) -> tuple[Float[Tensor, "L 2 B G N d"], AttentionMask]:
        """Keys and values of the rows' sources, and the mask that shows each query all of its row's source.

        Raises InvalidInput for a row without one.
        """
        if self.state is None or self.state.sources is None:
            raise InvalidInput("the model reads a source; give `new_state` one for each row", field="source")
        pairs_L2BGNd, length_B = self.state.sources.joined()
        T, N = self.mask.num_new, pairs_L2BGNd.shape[4]
        return pairs_L2BGNd, AttentionMask.bidirectional(length_B, N, pairs_L2BGNd.device, num_queries=T)

    @cached_property
    def is_real_BT(self) -> Bool[Tensor, "B T"]:
        """Whether a new token is text, and not padding behind it."""
        new_B1 = torch.tensor(self.new_B, device=self.mask.query_RT.device)[:, None]
        return torch.arange(self.mask.num_new, device=new_B1.device) < new_B1

    @cached_property
    def begins_BT(self) -> Bool[Tensor, "B T"]:
        """Whether a document begins at a new token. Sums begin anew there."""
        return (self.mask.query_RT == self.mask.document_RT).expand(len(self.new_B), -1)

    def field(self, layer: int, name: str) -> Shaped[Tensor, "B ..."]:
        """A layer's field in the state, which the layer may change in place."""
        assert self.state is not None
        return self.state.field(f"{layer + self.layer_offset}.{name}")

    def write_field(self, layer: int, name: str, new: Shaped[Tensor, "B ..."]) -> Shaped[Tensor, "B ..."]:
        """Writes the new tokens' values of a field with places. Returns those of all places, the new ones last.

        Gradients reach the new ones alone.
        """
        assert self.state is not None
        full = f"{layer + self.layer_offset}.{name}"
        assert self.state.fields is not None
        axis = self.state.fields.fields[full].place_axis
        assert axis is not None
        S, is_learning = self.mask.num_places, torch.is_grad_enabled() and new.requires_grad
        past = self.state.field(full).narrow(axis, 0, S - self.mask.num_new).clone() if is_learning else None
        self.state.write_field(full, new, self.new_B)
        return self.state.field(full).narrow(axis, 0, S) if past is None else torch.cat([past, new], dim=axis)

    def tell(self, name: str, loss: Tensor) -> None:
        """Adds a loss, a mean over the real tokens of this step, to the training loss."""
        if self.losses is not None:
            before = self.losses.get(name)
            self.losses[name] = loss * self.share if before is None else before + loss * self.share

    @cached_property
    def bias_RHTS(self) -> Float[Tensor, "R H T S"] | None:
        """The part of the scores that depends on distance alone, for positions that have one."""
        return None if self.relative_bias is None else self.relative_bias(self.mask)

    def _rope(self, name: str, positions: Int[Tensor, "R P"], span: tuple[int, int], layer: int) -> Tensor | None:
        angles = None if self.rotary is None else self.rotary.of_layer(layer)
        if angles is None:
            return None
        key = name, id(angles)
        if key not in self._ropes:
            uniform = positions.shape[0] == 1
            cos_sin = angles.at(positions[0], span) if uniform else angles.at(positions, span)[:, :, None]
            self._ropes[key] = cos_sin.to(self.dtype)
        return self._ropes[key]
