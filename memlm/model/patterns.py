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
from typing import TYPE_CHECKING, ClassVar

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from memlm.errors import check_choice, check_range
from memlm.model.attention import Heads, MaskedAttention
from memlm.model.draws import drawn
from memlm.model.forward import ForwardContext
from memlm.model.parts import Part

if TYPE_CHECKING:
    from memlm.model.config import ModelConfig

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
        blocks_back_R1TS = query_R1T1 // self.block - key_R1TS // self.block
        is_even = head_H11 % 2 == 0
        if self.rule == "strided":
            seen = torch.where(is_even, away_R1TS < self.stride, away_R1TS % self.stride == 0)
        elif self.rule == "fixed":
            seen = torch.where(is_even, blocks_back_R1TS == 0, key_R1TS % self.block >= self.block - self.summary)
        elif self.rule == "dilated":
            seen = (away_R1TS < self.window * self.dilation) & (away_R1TS % self.dilation == 0)
        elif self.rule == "blocks":
            seen = blocks_back_R1TS == head_H11
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


class PatternAttention(MaskedAttention):
    """Attention that sees the places of a pattern."""

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
