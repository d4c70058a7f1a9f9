"""Attention patterns: places that a head sees, chosen by position alone.

| rule | a head sees token j from token i, j <= i, if |
|---|---|
| `strided` | even heads: i - j < stride; odd heads: i - j is a multiple of stride (Sparse Transformer, 1904.10509) |
| `fixed` | even heads: both in one block; odd heads: j among the last `summary` of a block (the same paper) |
| `dilated` | i - j < window * dilation, and a multiple of dilation (Longformer, arXiv 2004.05150) |
| `global` | i - j < window, or j < num_global (Longformer, ETC 2004.08483; made causal here) |
| `random` | as global, or in one of `num_random` earlier blocks, drawn for a head and block (Big Bird, 2007.14062) |
| `blocks` | head h: j in the block h before that of i (blockwise, arXiv 1911.02972; without its wrap-around) |

A token always sees itself. Positions count from the begin of the document, so that a text reads alike wherever it
stands. Sinks and memories in front stay visible.

Shapes: B batch, T new tokens, S places, H heads, R rows (1 if all have equal positions), d width of a head.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, NamedTuple

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor

from memlm.errors import check_choice, check_range
from memlm.model.attention.attention import Heads, MaskedAttention
from memlm.model.draws import drawn
from memlm.model.forward import ForwardContext
from memlm.model.parts import Part

if TYPE_CHECKING:
    from memlm.model.config import ModelConfig

MANY_PLACES = 2048  # from here on, a copy of the places that are seen costs less than reading all
MOST_COPIED = 0.25  # of the keys that are held; more are read where they are
RULES = ("strided", "fixed", "dilated", "global", "random", "blocks")


@dataclass(frozen=True, slots=True)
class Pattern(Part):
    """A mixer that sees the places of a `rule`. The module's table says which fields each rule reads."""

    seam: ClassVar[str] = "mixer"
    kind: ClassVar[str] = "pattern"

    rule: str = "global"
    window: int = 128
    stride: int = 128
    block: int = 64
    summary: int = 8
    dilation: int = 2
    num_global: int = 4
    num_random: int = 2
    seed: int = 0

    def __post_init__(self) -> None:
        check_choice("rule", self.rule, RULES)
        for name in ("window", "stride", "block", "dilation"):
            check_range(name, getattr(self, name), least=1, whole=True)
        for name in ("num_global", "num_random", "seed"):
            check_range(name, getattr(self, name), least=0, whole=True)
        most = self.block if self.rule == "fixed" else None
        check_range("summary", self.summary, least=1, most=most, whole=True)

    def build(self, config: ModelConfig, layer: int, sublayer: str = "") -> PatternAttention:
        """Returns attention with the pattern. Has no parameters beside attention's."""
        return PatternAttention(config, layer, self)

    def sees(
        self, query_RT1: Int[Tensor, "R T 1"], key_RTS: Int[Tensor, "R T S"], num_heads: int
    ) -> Bool[Tensor, "R H T S"]:
        """Returns where queries look, given positions in the document. It says nothing of places before it or ahead."""
        head_H11 = torch.arange(num_heads, device=key_RTS.device)[:, None, None]
        query_R1T1, key_R1TS = query_RT1[:, None], key_RTS[:, None]
        away_R1TS = query_R1T1 - key_R1TS
        is_even = head_H11 % 2 == 0
        if self.rule == "strided":
            seen = torch.where(is_even, away_R1TS < self.stride, away_R1TS % self.stride == 0)
        elif self.rule == "fixed":
            is_same_R1TS = query_R1T1 // self.block == key_R1TS // self.block
            seen = torch.where(is_even, is_same_R1TS, key_R1TS % self.block >= self.block - self.summary)
        elif self.rule == "dilated":
            seen = (away_R1TS < self.window * self.dilation) & (away_R1TS % self.dilation == 0)
        elif self.rule == "blocks":
            seen = query_R1T1 // self.block - key_R1TS // self.block == head_H11
        else:
            seen = (away_R1TS < self.window) | (key_R1TS < self.num_global)
        if self.rule == "random":
            for number in range(self.num_random):
                seen = seen | self._draw(number, head_H11, query_R1T1 // self.block, key_R1TS // self.block)
        return (seen | (away_R1TS == 0)).expand(-1, num_heads, -1, -1)

    def _draw(self, number: int, head: Tensor, query_block: Tensor, key_block: Tensor) -> Tensor:
        """Whether a key is in the earlier block that is drawn for a head and the query's block. Draws may coincide."""
        block = drawn(self.seed, number, head, query_block) % query_block.clamp(min=1)
        return (key_block == block) & (query_block > 0)


class HeadPlaces(NamedTuple):
    """The places that some heads see from one query. Those that are not `shown` fill rows and heads that see fewer."""

    head_n: Int[Tensor, " n"]
    place_RnK: Int[Tensor, "R n K"]
    shown_Rn1K: Bool[Tensor, "R n 1 K"]


class PatternAttention(MaskedAttention):
    """Attention that sees the places of a pattern. A token that comes alone reads no others, where they are many."""

    def __init__(self, config: ModelConfig, layer: int, pattern: Pattern) -> None:
        super().__init__(config, layer)
        self.pattern = pattern

    def visible(self, heads: Heads, context: ForwardContext) -> Bool[Tensor, "R H T S"]:
        """Returns the places that both mask and pattern show. Layers of one pattern compute it once a step."""
        key = self.pattern, self.window
        if key not in context.shared:
            mask = context.mask
            positions_RTS = mask.key_RS[:, None] - mask.document_RT[:, :, None]
            seen_RHTS = self.pattern.sees(
                (mask.query_RT - mask.document_RT)[:, :, None], positions_RTS, self.config.num_heads
            )
            if mask.num_front:
                seen_RHTS = seen_RHTS | (torch.arange(mask.num_places, device=seen_RHTS.device) < mask.num_front)
            context.shared[key] = seen_RHTS & mask.visible(self.window)
        return context.shared[key]

    def _attend_masked(
        self, query_BHTd: Tensor, heads: Heads, key_BGSd: Tensor, value_BGSd: Tensor, context: ForwardContext
    ) -> Float[Tensor, "B H T d"]:
        """Attends to the places that are seen, and copies them first where they are few of many."""
        is_alone = query_BHTd.shape[2] == 1 and key_BGSd.shape[2] >= MANY_PLACES and not torch.is_grad_enabled()
        key, num_held = ("places", self.pattern, self.window), self.config.num_kv_heads * key_BGSd.shape[2]
        if is_alone and query_BHTd.device.type == "cpu" and key not in context.shared:
            places = seen_places(self.visible(heads, context)[:, :, 0])
            num_copied = sum(len(head_n) * place_RnK.shape[2] for head_n, place_RnK, _ in places)
            context.shared[key] = places if num_copied <= MOST_COPIED * num_held else []
        if not context.shared.get(key):
            return super()._attend_masked(query_BHTd, heads, key_BGSd, value_BGSd, context)
        mixed_BHTd = torch.empty_like(query_BHTd)
        for head_n, place_RnK, shown_Rn1K in context.shared[key]:
            group_n = head_n // (self.config.num_heads // self.config.num_kv_heads)
            key_BnKd, value_BnKd = (_rows_at(each, group_n, place_RnK) for each in (key_BGSd, value_BGSd))
            mixed_BHTd[:, head_n] = F.scaled_dot_product_attention(
                query_BHTd[:, head_n], key_BnKd, value_BnKd, attn_mask=shown_Rn1K
            )
        return mixed_BHTd


def seen_places(visible_RHS: Bool[Tensor, "R H S"]) -> list[HeadPlaces]:
    """Returns the places that one query sees, for heads with similar numbers of them together."""
    size_H = visible_RHS.sum(dim=2).amax(dim=0).clamp(min=1).log2().ceil()
    found = list[HeadPlaces]()
    for size in size_H.unique():
        (head_n,) = (size_H == size).nonzero(as_tuple=True)
        visible_NS = visible_RHS[:, head_n].flatten(0, 1)
        count_N1 = visible_NS.sum(dim=1, keepdim=True)
        row_i, place_i = visible_NS.nonzero(as_tuple=True)  # row by row, so that the first of each are at `first_N`
        first_N = count_N1[:, 0].cumsum(0) - count_N1[:, 0]
        place_NK = place_i.new_zeros(len(visible_NS), int(count_N1.max()))
        place_NK[row_i, torch.arange(len(place_i)) - first_N[row_i]] = place_i
        shown_NK = torch.arange(place_NK.shape[1]) < count_N1
        shape = len(visible_RHS), len(head_n)
        found.append(HeadPlaces(head_n, place_NK.unflatten(0, shape), shown_NK.unflatten(0, shape)[:, :, None]))
    return found


def _rows_at(
    held_BGSd: Float[Tensor, "B G S d"], group_n: Int[Tensor, " n"], place_RnK: Int[Tensor, "R n K"]
) -> Float[Tensor, "B n K d"]:
    """Returns the rows at some places, by one copy of whole rows."""
    B, _, S, d = held_BGSd.shape
    row_stride, group_stride = held_BGSd.stride(0) // d, held_BGSd.stride(1) // d
    row_B11 = torch.arange(B)[:, None, None] * row_stride
    index_BnK = row_B11 + group_n[:, None] * group_stride + place_RnK
    num_rows = (B - 1) * row_stride + (held_BGSd.shape[1] - 1) * group_stride + S
    rows_Nd = held_BGSd.as_strided((num_rows, d), (d, 1))
    return rows_Nd.index_select(0, index_BnK.flatten()).view(*index_BnK.shape, d)
