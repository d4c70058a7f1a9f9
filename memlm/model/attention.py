"""Causal attention: to the latest tokens, to compressed memories, and to the nearest pairs of the document's past.

Shapes: B batch, T new tokens, S places, H query heads, G key-value heads, d width of a head, D width, K neighbors.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import NamedTuple, TypeAlias

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from memlm.model.config import ModelConfig
from memlm.model.forward import ForwardContext
from memlm.model.knn_attention import KnnAttention, KnnResult, exact, unit
from memlm.model.linear import UPCAST_BYTES, Linear, is_emulated, upcast_buffer
from memlm.model.positions import SCORES, ScorePositions, apply_rope
from memlm.model.state import DecoderState

QUERY_BLOCK = 256

Run: TypeAlias = tuple[slice, int]  # neighboring rows, and the places that they attend to: see `ForwardContext.runs`


class Heads(NamedTuple):
    """Some tokens before any rotation: queries and keys (A = H + G of them) side by side, and values."""

    query_key_BATd: Float[Tensor, "B A T d"]
    value_BGTd: Float[Tensor, "B G T d"]
    num_queries: int

    @property
    def query_BHTd(self) -> Float[Tensor, "B H T d"]:
        """The queries."""
        return self.query_key_BATd[:, : self.num_queries]

    @property
    def key_BGTd(self) -> Float[Tensor, "B G T d"]:
        """The keys."""
        return self.query_key_BATd[:, self.num_queries :]


class Attention(nn.Module):
    """Self-attention with grouped queries. What the state holds is attended to, and what is new joins it."""

    def __init__(self, config: ModelConfig, layer: int) -> None:
        """One fused projection for queries, keys and values."""
        super().__init__()
        self.config, self.layer, self.window = config, layer, config.window_of(layer)
        self.repeats = config.num_heads // config.num_kv_heads
        self.query_key_heads = [config.num_heads, config.num_kv_heads]
        self.sizes = [sum(self.query_key_heads), config.num_kv_heads]
        self.qkv = Linear(config.dim, sum(self.sizes) * config.head_dim, bias=config.qkv_bias)
        self.out = Linear(config.num_heads * config.head_dim, config.dim, bias=config.out_bias)
        self.query_norm = nn.RMSNorm(config.head_dim, eps=config.norm_eps) if config.qk_norm else None
        self.key_norm = nn.RMSNorm(config.head_dim, eps=config.norm_eps) if config.qk_norm else None
        self.positions: ScorePositions | None = SCORES[config.positions](config) if config.positions in SCORES else None
        self.knn: KnnAttention | None = None
        if config.memorizing and config.memorizes(layer):
            self.knn = KnnAttention(config, config.memorizing)
        compression = config.compression
        self.counts_use = compression is not None and compression.kind == "most_used"

    def forward(self, hidden_BTD: Float[Tensor, "B T D"], context: ForwardContext) -> Float[Tensor, "B T D"]:
        """What each new token reads from all it may see; its key and value go into the state."""
        heads = self.project(hidden_BTD)
        query_BHTd, key_BGSd = self._rotated(heads, context)
        value_BGSd = heads.value_BGTd
        if context.state is not None:
            key_BGSd, value_BGSd = self._write(hidden_BTD, key_BGSd, value_BGSd, context.state, context)
        found = self._search_knn(heads, context)
        if found is not None and self.knn and self.knn.is_joint:
            mixed_BHTd = self._attend_explicitly(query_BHTd, heads, key_BGSd, value_BGSd, context, found)
        elif self.positions or self.counts_use or (context.mask.sink_cap and context.rotary):
            mixed_BHTd = self._attend_explicitly(query_BHTd, heads, key_BGSd, value_BGSd, context)
        else:
            mixed_BHTd = self._attend(query_BHTd, key_BGSd, value_BGSd, context)
        if found is not None and self.knn and not self.knn.is_joint:
            mixed_BHTd = self.knn.gate(mixed_BHTd, found)
        return self.out(mixed_BHTd.transpose(1, 2).flatten(2))

    def keep(self, hidden_BTD: Float[Tensor, "B T D"], context: ForwardContext) -> None:
        """Puts keys and values of new tokens into the state, and reads nothing."""
        if context.state is None:
            return
        heads = self.project(hidden_BTD)
        self._write(hidden_BTD, self._rotated(heads, context)[1], heads.value_BGTd, context.state, context)

    def project(self, hidden_BTD: Float[Tensor, "B T D"]) -> Heads:
        """Queries, keys and values. Keys of a memorizing layer that normalizes have unit length."""
        B, T, _ = hidden_BTD.shape
        heads = self.qkv(hidden_BTD).view(B, T, sum(self.sizes), self.config.head_dim).transpose(1, 2)
        query_key_BATd, value_BGTd = heads.split(self.sizes, dim=1)
        if self.query_norm is not None or (self.knn and self.knn.normalizes_all):
            query_BHTd, key_BGTd = query_key_BATd.split(self.query_key_heads, dim=1)
            if self.query_norm is not None and self.key_norm is not None:
                query_BHTd, key_BGTd = self.query_norm(query_BHTd), self.key_norm(key_BGTd)
            if self.knn and self.knn.normalizes_all:
                query_BHTd, key_BGTd = self.knn.normalize(query_BHTd), unit(key_BGTd)
            query_key_BATd = torch.cat([query_BHTd, key_BGTd], dim=1)
        return Heads(query_key_BATd, value_BGTd, self.config.num_heads)

    def _rotated(
        self, heads: Heads, context: ForwardContext
    ) -> tuple[Float[Tensor, "B H T d"], Float[Tensor, "B G T d"]]:
        """Queries and keys, turned to where they stand."""
        cos_sin, query_key_BATd = context.query_rope, heads.query_key_BATd
        if cos_sin is not None:
            query_key_BATd = apply_rope(query_key_BATd, cos_sin)
        query_BHTd, key_BGTd = query_key_BATd.split(self.query_key_heads, dim=1)
        return query_BHTd, key_BGTd

    def reconstruction_loss(
        self,
        query_BTD: Float[Tensor, "B T D"],
        old_BND: Float[Tensor, "B N D"],
        compressed_BCD: Float[Tensor, "B C D"],
    ) -> Float[Tensor, ""]:
        """How differently old states and compressed ones are read (arXiv 1911.05507, algorithm 2): without positions,
        and with all held fixed but the compression, which alone learns from it.
        """
        with frozen(self):
            query_BHTd = self.project(query_BTD.detach()).query_BHTd
            read = []
            for states_BND in (old_BND.detach(), compressed_BCD):
                heads = self.project(states_BND)
                keys_and_values = (heads.key_BGTd, heads.value_BGTd)
                read.append(F.scaled_dot_product_attention(query_BHTd, *keys_and_values, enable_gqa=self.repeats != 1))
        return F.mse_loss(read[1], read[0])

    def _write(
        self, hidden_BTD: Tensor, key_BGTd: Tensor, value_BGTd: Tensor, state: DecoderState, context: ForwardContext
    ) -> tuple[Float[Tensor, "B G S d"], Float[Tensor, "B G S d"]]:
        """Keys and values of all places, the new ones last, which the state now holds."""
        S = context.mask.num_places
        learning = torch.is_grad_enabled() and key_BGTd.requires_grad
        past = self._past(state, S - context.mask.num_new, context) if learning else None
        state.write(self.layer, key_BGTd, value_BGTd, context.new_B, context.ends)
        state.write_inputs(self.layer, hidden_BTD, context.new_B)
        if past is None:
            key_BGSd, value_BGSd = state.cache_L2BGSd[self.layer].narrow(3, 0, S).unbind(0)
            return key_BGSd, value_BGSd
        return torch.cat([past[0], key_BGTd], dim=2), torch.cat([past[1], value_BGTd], dim=2)

    def _past(self, state: DecoderState, S: int, context: ForwardContext) -> tuple[Tensor, Tensor]:
        """Keys and values of the places before the new tokens, to learn with: projected anew from the layer's inputs
        where these were kept, so that the projections learn from them; no gradient goes further back.
        """
        if state.inputs_LBSD is None or not state.training:
            past = state.cache_L2BGSd[self.layer, :, :, :, :S].clone()
            return past[0], past[1]
        heads = self.project(state.inputs_LBSD[self.layer, :, :S].clone())
        cos_sin = context.key_rope
        return heads.key_BGTd if cos_sin is None else apply_rope(heads.key_BGTd, cos_sin[..., :S, :]), heads.value_BGTd

    def _search_knn(self, heads: Heads, context: ForwardContext) -> KnnResult | None:
        if self.knn is None or context.state is None:
            return None
        return self.knn.search(heads.query_BHTd, context.state.knn_caches[self.layer], context)

    def _attend(
        self, query_BHTd: Tensor, key_BGSd: Tensor, value_BGSd: Tensor, context: ForwardContext
    ) -> Float[Tensor, "B H T d"]:
        """The fast way: no score depends on more than query, key, and a number for their distance."""
        if len(context.runs) == 1:
            return self._attend_run(query_BHTd, key_BGSd, value_BGSd, context)
        mixed = [
            self._attend_run(query_BHTd[rows], key_BGSd[rows, :, :S], value_BGSd[rows, :, :S], context, (rows, S))
            for rows, S in context.runs
        ]
        return torch.cat(mixed)

    def _attend_run(
        self, query_BHTd: Tensor, key_BGSd: Tensor, value_BGSd: Tensor, context: ForwardContext, run: Run | None = None
    ) -> Float[Tensor, "B H T d"]:
        """Attention of the rows of a run, of all of them where none is given, to the run's places."""
        if not torch.is_grad_enabled() and query_BHTd.shape[2] > 1 and is_emulated(query_BHTd):
            mixed_BHTd = self._attend_run(query_BHTd.float(), key_BGSd.float(), value_BGSd.float(), context)
            return mixed_BHTd.to(query_BHTd.dtype)
        if not torch.is_grad_enabled() and _products_are_faster(query_BHTd):
            return self._attend_in_blocks(query_BHTd, key_BGSd, value_BGSd, context, run)
        mask = context.mask.for_window(self.window)
        if context.bias_RHTS is not None:
            seen = context.mask.visible(self.window)
            mask = context.bias_RHTS.to(query_BHTd.dtype).masked_fill(~seen, -torch.inf)
        if not isinstance(mask, str) and mask is not None:
            mask = _of_run(mask, run)
        return F.scaled_dot_product_attention(
            query_BHTd,
            key_BGSd,
            value_BGSd,
            attn_mask=None if isinstance(mask, str) else mask,
            is_causal=isinstance(mask, str),
            enable_gqa=self.repeats != 1,
        )

    def _attend_in_blocks(
        self, query_BHTd: Tensor, key_BGSd: Tensor, value_BGSd: Tensor, context: ForwardContext, run: Run | None = None
    ) -> Float[Tensor, "B H T d"]:
        """The same by plain products, a block of queries at a time, the heads that share keys side by side. A block
        leaves out the places that are later than all of it.
        """
        B, H, T, d = query_BHTd.shape
        if T == 1:
            return self._attend_once(query_BHTd, key_BGSd, value_BGSd, context, run)
        S, groups = key_BGSd.shape[2], (self.config.num_kv_heads, self.repeats)
        query_BGrTd = query_BHTd.unflatten(1, groups) / math.sqrt(d)
        mixed = []
        for begin in range(0, T, QUERY_BLOCK):
            end = min(begin + QUERY_BLOCK, T)
            size, seen = end - begin, S - T + end
            rows_BGQd = query_BGrTd[:, :, :, begin:end].reshape(B, groups[0], -1, d)
            scores = (rows_BGQd @ key_BGSd[:, :, :seen].mT).unflatten(2, (self.repeats, size))
            if context.bias_RHTS is not None:
                scores = scores + context.bias_RHTS[:, :, begin:end, :seen].unflatten(1, groups).to(scores.dtype)
            scores = context.mask.hide(scores, self.window, begin, end)
            weights_BGQS = scores.softmax(dim=-1).flatten(2, 3)
            mixed.append((weights_BGQS @ value_BGSd[:, :, :seen]).view(B, H, size, d))
        return mixed[0] if len(mixed) == 1 else torch.cat(mixed, dim=2)

    def _attend_once(
        self, query_BH1d: Tensor, key_BGSd: Tensor, value_BGSd: Tensor, context: ForwardContext, run: Run | None = None
    ) -> Float[Tensor, "B H 1 d"]:
        """The same for a single query of each row. Products of bfloat16 would copy the keys and values that they read;
        these are upcast instead, as many heads (N = B G) at a time as stay in the processor's cache.
        """
        B, H, _, d = query_BH1d.shape
        S, groups = key_BGSd.shape[2], (self.config.num_kv_heads, self.repeats)
        wide = torch.promote_types(query_BH1d.dtype, torch.float32)
        query_Nrd = query_BH1d.reshape(-1, self.repeats, d).to(wide) * (1 / math.sqrt(d))
        key_NSd, value_NSd = key_BGSd.flatten(0, 1), value_BGSd.flatten(0, 1)
        size = max(1, UPCAST_BYTES // (S * d * wide.itemsize))
        blocks = [slice(begin, begin + size) for begin in range(0, len(query_Nrd), size)]
        scores_NrS, mixed_Nrd = query_Nrd.new_empty(*query_Nrd.shape[:2], S), torch.empty_like(query_Nrd)
        for heads in blocks:
            torch.bmm(query_Nrd[heads], upcast_buffer(key_NSd[heads], wide).mT, out=scores_NrS[heads])
        scores_BGrS = scores_NrS.view(B, *groups, S)
        if context.bias_RHTS is not None:
            scores_BGrS += _of_run(context.bias_RHTS, run).to(wide).reshape(-1, *groups, S)
        if (hidden_RS := context.mask.hidden_from_last(self.window)) is not None:
            scores_BGrS.masked_fill_(_of_run(hidden_RS, run)[:, None, None], -torch.inf)
        weights_NrS = scores_NrS.softmax(dim=2)
        for heads in blocks:
            torch.bmm(weights_NrS[heads], upcast_buffer(value_NSd[heads], wide), out=mixed_Nrd[heads])
        return mixed_Nrd.to(query_BH1d.dtype).view(B, H, 1, d)

    def _attend_explicitly(
        self,
        query_BHTd: Tensor,
        heads: Heads,
        key_BGSd: Tensor,
        value_BGSd: Tensor,
        context: ForwardContext,
        found: KnnResult | None = None,
    ) -> Float[Tensor, "B H T d"]:
        """The way that spells out the scores. `found` joins the softmax."""
        key_BHSd, value_BHSd = (each.repeat_interleave(self.repeats, dim=1) for each in (key_BGSd, value_BGSd))
        scores_BHTS = exact(self._scores(query_BHTd, heads, key_BHSd, context))
        scores_BHTS = scores_BHTS.masked_fill(~context.mask.visible(self.window), -torch.inf)
        S = scores_BHTS.shape[3]
        joint = scores_BHTS if found is None else torch.cat([scores_BHTS, exact(found.scores_BHTK)], dim=3)
        joint_BHTE = joint.softmax(dim=3).to(value_BHSd.dtype)
        weights_BHTS = joint_BHTE[..., :S]
        if self.counts_use:
            self._count_use(weights_BHTS, context)
        mixed_BHTd = weights_BHTS @ value_BHSd
        if found is not None:
            mixed_BHTd = mixed_BHTd + found.read(joint_BHTE[..., S:])
        extra = self.positions.values(weights_BHTS, context.mask) if self.positions else None
        return mixed_BHTd if extra is None else mixed_BHTd + extra

    def _scores(
        self, query_BHTd: Tensor, heads: Heads, key_BHSd: Tensor, context: ForwardContext
    ) -> Float[Tensor, "B H T S"]:
        if self.positions:
            return self.positions(query_BHTd, key_BHSd, context.mask)
        scores_BHTS = query_BHTd @ key_BHSd.mT
        if context.mask.sink_cap and context.sink_rope is not None:
            front = context.mask.num_front
            near_BHTF = apply_rope(heads.query_BHTd, context.sink_rope) @ key_BHSd[:, :, :front].mT
            scores_BHTS = torch.cat([near_BHTF, scores_BHTS[..., front:]], dim=3)
        scores_BHTS = scores_BHTS / math.sqrt(self.config.head_dim)
        return scores_BHTS if context.bias_RHTS is None else scores_BHTS + context.bias_RHTS

    def _count_use(self, weights_BHTS: Tensor, context: ForwardContext) -> None:
        """Adds up how much attention each place received: by that, compression keeps the most used."""
        state, S = context.state, weights_BHTS.shape[3]
        if state is None or state.usage_LBS is None:
            return
        for row, count in enumerate(context.new_B):
            state.usage_LBS[self.layer, row, :S] += weights_BHTS[row, :, :count].detach().float().sum(dim=(0, 1))


def _of_run(each: Tensor, run: Run | None) -> Tensor:
    """The part of a tensor, whose first axis is rows and whose last is places, that a run is about."""
    return each if run is None else each[run[0], ..., : run[1]]


@contextmanager
def frozen(module: nn.Module) -> Iterator[None]:
    """What is computed in here teaches the module's own parameters nothing."""
    learning = [parameter for parameter in module.parameters() if parameter.requires_grad]
    for parameter in learning:
        parameter.requires_grad_(False)
    try:
        yield
    finally:
        for parameter in learning:
            parameter.requires_grad_(True)


def _products_are_faster(query: Tensor) -> bool:
    """Without matrix units the fused kernel takes two to five times as long in bfloat16; with them, products by
    themselves do, since they first copy what they read (docs/log, 2026-11-21 and 22).
    """
    return query.dtype == torch.bfloat16 and query.device.type == "cpu" and not _has_matrix_units()


@cache
def _has_matrix_units() -> bool:
    return hasattr(torch.cpu, "get_capabilities") and bool(torch.cpu.get_capabilities().get("amx_bf16"))
