"""What each query of a step may see, and how far away it is: computed once, used by every layer.

Positions count the tokens of a row from its reset. A row's places for keys are a *front* (attention sinks, or
compressed memories) and then its latest tokens in order. What a query sees follows from positions alone, so text
means the same in whatever pieces it is read: its own document, not the future, not further back than the row's
floor (the oldest token that memory has not taken over), and within the layer's window.

Shapes: R rows, 1 where all rows of the batch stand alike; T new tokens; S places.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

import torch
from jaxtyping import Bool, Int
from torch import Tensor


@dataclass
class AttentionMask:
    """Positions of queries and keys. `causal_only`: every place is visible, but for causality among the new tokens."""

    query_RT: Int[Tensor, "R T"]
    key_RS: Int[Tensor, "R S"]
    document_RT: Int[Tensor, "R T"]  # where each query's document starts
    floor_R: Int[Tensor, " R"]
    num_front: int = 0
    front_begin_R: Int[Tensor, " R"] | None = None  # the first place of the front that is in use
    sink_cap: int = 0  # a sink is never further away than this; 0: there are no sinks
    causal_only: bool = False
    continues_RT: Bool[Tensor, "R T"] | None = None  # whether a query's document began before this step; None: all
    _masks: dict[int, Tensor | None] = field(default_factory=dict)
    _hidden: dict[int, Tensor] = field(default_factory=dict)

    @property
    def num_new(self) -> int:
        """T."""
        return self.query_RT.shape[1]

    @property
    def num_places(self) -> int:
        """S."""
        return self.key_RS.shape[1]

    def part(self, rows: slice, num_places: int) -> AttentionMask:
        """Returns the mask of some rows and their first places. Needs a mask with a row for each of the batch."""
        continues_RT, begin_R = self.continues_RT, self.front_begin_R
        return AttentionMask(
            query_RT=self.query_RT[rows],
            key_RS=self.key_RS[rows, :num_places],
            document_RT=self.document_RT[rows],
            floor_R=self.floor_R[rows],
            num_front=min(self.num_front, num_places),
            front_begin_R=None if begin_R is None else begin_R[rows],
            sink_cap=self.sink_cap,
            continues_RT=None if continues_RT is None else continues_RT[rows],
        )

    def for_window(self, window: int) -> Bool[Tensor, "R 1 T S"] | Literal["causal"] | None:
        """True where a query may look; None where it may look everywhere, "causal" where only order matters."""
        if self.is_causal_only(window):
            if self.num_new == 1:
                return None
            if self.num_new == self.num_places:
                return "causal"
        if window not in self._masks:
            self._masks[window] = self._mask(window)[:, None]
        return self._masks[window]

    def is_causal_only(self, window: int) -> bool:
        """Whether a query sees all places but those of later tokens."""
        return self.causal_only and not (window and int(self.query_RT.max()) - int(self.key_RS.min()) >= window)

    def hide(self, scores: Tensor, window: int, begin: int, end: int) -> Tensor:
        """Sets to -inf, in place, the scores (B, G, r, Q, S') of the queries from `begin` to `end` at places they do
        not see; S' ends with the last of these queries' own.
        """
        size, seen = end - begin, scores.shape[-1]
        if not self.is_causal_only(window):
            mask_R1QS = self.visible(window)[:, :, begin:end, :seen]
            return scores.masked_fill_(~mask_R1QS[:, :, None], -torch.inf)
        if size > 1:
            later_QQ = torch.ones(size, size, dtype=torch.bool, device=scores.device).triu(1)
            scores[..., seen - size :].masked_fill_(later_QQ, -torch.inf)
        return scores

    def hidden_from_last(self, window: int) -> Bool[Tensor, "R S"] | None:
        """True where the last query may not look; None where it may look everywhere."""
        if self.is_causal_only(window):
            return None
        if window not in self._hidden:
            self._hidden[window] = ~self.visible(window)[:, 0, -1]
        return self._hidden[window]

    def visible(self, window: int) -> Bool[Tensor, "R 1 T S"]:
        """The same, always spelt out."""
        mask = self.for_window(window)
        return self._mask(window)[:, None] if mask is None or isinstance(mask, str) else mask

    def distances(self) -> Int[Tensor, "R T S"]:
        """How far back each place is; 0 for what lies ahead, which nobody sees."""
        ahead_RTS = self.query_RT[:, :, None] - self.key_RS[:, None]
        if self.sink_cap:
            capped_RT = self.query_RT.clamp(max=self.sink_cap)
            ahead_RTS[:, :, : self.num_front] = capped_RT[:, :, None] - self.key_RS[:, None, : self.num_front]
        return ahead_RTS.clamp(min=0)

    def _mask(self, window: int) -> Bool[Tensor, "R T S"]:
        query_RT1, key_R1S = self.query_RT[:, :, None], self.key_RS[:, None]
        seen_RTS = (key_R1S <= query_RT1) & (key_R1S >= self.document_RT[:, :, None])
        near_RTS = key_R1S >= self.floor_R[:, None, None]
        if window:
            near_RTS = near_RTS & (query_RT1 - key_R1S < window)
        if self.num_front:
            places_S = torch.arange(self.num_places, device=key_R1S.device)
            front_S = places_S < self.num_front
            begin_R = torch.zeros_like(self.floor_R) if self.front_begin_R is None else self.front_begin_R
            near_RTS = near_RTS & ~front_S | (front_S & (places_S >= begin_R[:, None]))[:, None]
        return seen_RTS & near_RTS
