"""The attention mask of a step and the distances between queries and keys, computed once and used by every layer.

Positions count the tokens of a row from its reset. The places of a row are a *front* (attention sinks or compressed
memories) followed by its latest tokens in order. Visibility depends on positions alone, and so not on the pieces in
which a text is read. A query sees its own document, not the future, nothing before the row's floor (older tokens are in
a memory), and nothing outside the layer's window. A bidirectional mask shows each query the whole text of its row.

Shapes: R rows (1 if all rows of the batch have equal positions), T new tokens, S places.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

import torch
from jaxtyping import Bool, Int
from torch import Tensor


@dataclass
class AttentionMask:
    """Positions of queries and keys. `causal_only`: every place is visible except later new tokens.

    Spans are the first position and the one after the last, known on the host: no step waits for a device to tell them.
    """

    query_RT: Int[Tensor, "R T"]
    key_RS: Int[Tensor, "R S"]
    query_span: tuple[int, int]
    key_span: tuple[int, int]
    document_RT: Int[Tensor, "R T"]  # where each query's document starts
    floor_R: Int[Tensor, " R"]
    num_front: int = 0
    front_begin_R: Int[Tensor, " R"] | None = None  # the first place of the front that is in use
    segment_R: Int[Tensor, " R"] | None = None  # where the segment begins in front of which a border's memory stands
    sink_cap: int = 0  # a sink is never further away than this; 0: there are no sinks
    causal_only: bool = False
    continues_RT: Bool[Tensor, "R T"] | None = None  # whether a query's document began before this step; None: all
    ends_R: Int[Tensor, " R"] | None = None  # bidirectional: where the text of each row ends, behind which is padding
    is_padded: bool = True  # whether any of `ends_R` is before the last place
    _masks: dict[int, Tensor | None] = field(default_factory=dict)
    _hidden: dict[int, Tensor] = field(default_factory=dict)

    @classmethod
    def bidirectional(
        cls, new_B: list[int], num_places: int, device: torch.device, *, num_queries: int | None = None
    ) -> AttentionMask:
        """The mask of whole texts of `new_B` tokens with padding up to `num_places`, in which tokens see later ones.

        With `num_queries` the queries are of another text, of which each sees all of its row's.
        """
        places_1S = torch.arange(num_places, device=device)[None]
        queries_1T = places_1S if num_queries is None else torch.arange(num_queries, device=device)[None]
        zero_1 = torch.zeros(1, dtype=torch.int64, device=device)
        return cls(
            queries_1T, places_1S, (0, queries_1T.shape[1]), (0, num_places), torch.zeros_like(queries_1T), zero_1,
            ends_R=torch.tensor(new_B, device=device), is_padded=min(new_B) < num_places,
        )  # fmt: skip

    @property
    def num_new(self) -> int:
        return self.query_RT.shape[1]

    @property
    def num_places(self) -> int:
        return self.key_RS.shape[1]

    def part(self, rows: slice, num_places: int) -> AttentionMask:
        """Returns the mask of some rows and their first places. Needs R = B."""
        continues_RT, begin_R = self.continues_RT, self.front_begin_R
        return AttentionMask(
            query_RT=self.query_RT[rows],
            key_RS=self.key_RS[rows, :num_places],
            query_span=self.query_span,
            key_span=self.key_span,
            document_RT=self.document_RT[rows],
            floor_R=self.floor_R[rows],
            num_front=min(self.num_front, num_places),
            front_begin_R=None if begin_R is None else begin_R[rows],
            segment_R=None if self.segment_R is None else self.segment_R[rows],
            sink_cap=self.sink_cap,
            continues_RT=None if continues_RT is None else continues_RT[rows],
        )

    def for_window(self, window: int) -> Bool[Tensor, "R 1 T S"] | Literal["causal"] | None:
        """Returns the mask for a layer with this window, True where a query sees a place.

        None means that everything is visible, "causal" that only later new tokens are hidden.
        """
        if self.ends_R is not None and not self.is_padded:
            return None
        if self.is_causal_only(window):
            if self.num_new == 1:
                return None
            if self.num_new == self.num_places:
                return "causal"
        if window not in self._masks:
            self._masks[window] = self._mask(window)[:, None]
        return self._masks[window]

    def is_causal_only(self, window: int) -> bool:
        """Whether a query sees all places except those of later tokens."""
        return self.causal_only and not (window and self.max_distance >= window)

    def hide(self, scores: Tensor, window: int, begin: int, end: int) -> Tensor:
        """Sets scores (B, G, r, Q, S') of the queries from `begin` to `end` to -inf, in place, where a place is hidden.

        S' ends with the place of the last of these queries, or has all places where the mask is bidirectional.
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
        """True where a place is hidden from the last query. None if all are visible."""
        if self.is_causal_only(window):
            return None
        if window not in self._hidden:
            self._hidden[window] = ~self.visible(window)[:, 0, -1]
        return self._hidden[window]

    def visible(self, window: int) -> Bool[Tensor, "R 1 T S"]:
        """Returns the mask of `for_window` as a tensor in every case."""
        mask = self.for_window(window)
        return self._mask(window)[:, None] if mask is None or isinstance(mask, str) else mask

    @property
    def max_distance(self) -> int:
        """How far the last query is behind the first place."""
        return max(0, self.query_span[1] - 1 - self.key_span[0])

    def distances(self) -> Int[Tensor, "R T S"]:
        """Returns how far each place is before each query, 0 for later ones."""
        ahead_RTS = self.query_RT[:, :, None] - self.key_RS[:, None]
        if self.sink_cap:
            capped_RT = self.query_RT.clamp(max=self.sink_cap)
            ahead_RTS[:, :, : self.num_front] = capped_RT[:, :, None] - self.key_RS[:, None, : self.num_front]
        return ahead_RTS.clamp(min=0)

    def _mask(self, window: int) -> Bool[Tensor, "R T S"]:
        if self.ends_R is not None:
            is_text_R1S = (self.key_RS < self.ends_R[:, None])[:, None]
            return is_text_R1S.expand(-1, self.num_new, -1)
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
            if self.segment_R is not None:  # it is of no token: documents that began before the segment see it
                seen_RTS = seen_RTS & ~front_S | front_S & (self.document_RT <= self.segment_R[:, None])[:, :, None]
        return seen_RTS & near_RTS
