"""Causal attention: to the latest tokens, to compressed memories, and to the nearest attention keys of the text.

Shapes: B batch, T new tokens, S places, H query heads, G key-value heads, A = H + G, d width of a head, D width,
K neighbors.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float
from torch import Tensor, nn

from memlm.model.attention.extended_attention import ExtendedAttention
from memlm.model.attention.knn_attention import KnnAttention, KnnResult, exact, unit
from memlm.model.config import ModelConfig
from memlm.model.forward import ForwardContext
from memlm.model.kernels.cpu import sdpa
from memlm.model.kernels.linear import Linear
from memlm.model.norms import make_qk_norm
from memlm.model.positions import SCORES, ScorePositions, apply_rope
from memlm.model.state.decoder_state import DecoderState


class Heads(NamedTuple):
    """Queries and keys side by side, and values, before any rotation."""

    query_key_BATd: Float[Tensor, "B A T d"]
    value_BGTd: Float[Tensor, "B G T d"]
    num_queries: int

    @property
    def query_BHTd(self) -> Float[Tensor, "B H T d"]:
        return self.query_key_BATd[:, : self.num_queries]

    @property
    def key_BGTd(self) -> Float[Tensor, "B G T d"]:
        return self.query_key_BATd[:, self.num_queries :]

    def rotated(self, cos_sin: Tensor | None) -> Heads:
        """Turns queries and keys to their positions (arXiv 2104.09864)."""
        return self if cos_sin is None else self._replace(query_key_BATd=apply_rope(self.query_key_BATd, cos_sin))


class Attention(nn.Module):
    """Self-attention with grouped queries (arXiv 2305.13245), over the places of the state and the new tokens.

    A mixer of another kind may override `project`, and with `is_explicit` also `visible`, `scores`, `weigh` and
    `combine`, which are called where the scores are spelled out.
    """

    is_explicit = False

    def __init__(self, config: ModelConfig, layer: int) -> None:
        super().__init__()
        self.config, self.layer, self.window = config, layer, config.window_of(layer)
        self.sizes = [config.num_heads + config.num_kv_heads, config.num_kv_heads]
        self.qkv = Linear(config.dim, sum(self.sizes) * config.head_dim, bias=config.qkv_bias)
        self.out = Linear(config.num_heads * config.head_dim, config.dim, bias=config.out_bias)
        self.query_norm = make_qk_norm(config, config.num_heads) if config.qk_norm else None
        self.key_norm = make_qk_norm(config, config.num_kv_heads) if config.qk_norm else None
        self.positions: ScorePositions | None = SCORES[config.positions](config) if config.positions in SCORES else None
        self.knn: KnnAttention | None = None
        if config.memorizing and config.memorizes(layer):
            self.knn = KnnAttention(config, config.memorizing)
        self.extended = ExtendedAttention(config, layer) if config.extended_attention else None
        self.counts_use = config.compression is not None and config.compression.kind == "most_used"

    def forward(self, hidden_BTD: Float[Tensor, "B T D"], context: ForwardContext) -> Float[Tensor, "B T D"]:
        """Returns each new token's mixture of the values that it may see, and writes its key and value to the state."""
        heads = self.project(hidden_BTD)
        rotated, found = heads.rotated(context.query_rope(self.layer)), None
        key_BGSd, value_BGSd = rotated.key_BGTd, rotated.value_BGTd
        if context.state is not None:
            key_BGSd, value_BGSd = self._write(hidden_BTD, rotated, context.state, context)
            if self.knn is not None:
                found = self.knn.search(heads.query_BHTd, context.state.knn_caches[self.layer], context)
            if self.extended is not None:
                self.extended.remember(heads.key_BGTd, heads.value_BGTd, context)
                found = self.extended.search(heads.query_BHTd, context)
        is_joint = found is not None and (self.knn is None or self.knn.is_joint)
        is_spelled_out = self.is_explicit or self.positions or self.counts_use or context.watch is not None
        if is_joint or is_spelled_out or (context.mask.sink_cap and context.rotary):
            joined = found if is_joint else None
            mixed_BHTd = self._attend_explicitly(rotated.query_BHTd, heads, key_BGSd, value_BGSd, context, joined)
        elif len(context.runs) == 1:
            query_BHTd = rotated.query_BHTd
            mixed_BHTd = sdpa(query_BHTd, key_BGSd, value_BGSd, context.mask, self.window, context.bias_RHTS)
        else:
            mixed = []
            for rows, S, mask, bias_RHTS in context.runs:
                key_RGSd, value_RGSd = key_BGSd[rows, :, :S], value_BGSd[rows, :, :S]
                mixed.append(sdpa(rotated.query_BHTd[rows], key_RGSd, value_RGSd, mask, self.window, bias_RHTS))
            mixed_BHTd = torch.cat(mixed)
        if found is not None and self.knn and not is_joint:
            mixed_BHTd = self.knn.gate(mixed_BHTd, found)
            if context.watch is not None:
                context.watch.gate(self.layer, self.knn.shares_H[:, None] * found.any_B1T1[..., 0])
        if context.watch is not None:
            mixed_BHTd = context.watch.heads(self.layer, mixed_BHTd)
        return self.out(mixed_BHTd.transpose(1, 2).flatten(2))

    def keep(self, hidden_BTD: Float[Tensor, "B T D"], context: ForwardContext) -> None:
        """Writes keys and values of new tokens to the state without attending to anything."""
        if context.state is not None:
            heads = self.project(hidden_BTD)
            self._write(hidden_BTD, heads.rotated(context.query_rope(self.layer)), context.state, context)
            if self.extended is not None:
                self.extended.remember(heads.key_BGTd, heads.value_BGTd, context)

    def project(self, hidden_BTD: Float[Tensor, "B T D"]) -> Heads:
        """Queries, keys and values. Keys of a memorizing layer that normalizes have unit length."""
        heads = self.cut(hidden_BTD)
        normalizes_all = self.knn is not None and self.knn.normalizes_all
        scale = self.config.query_scale
        if self.query_norm is None and scale == 1 and not normalizes_all:
            return heads
        query_BHTd, key_BGTd = heads.query_BHTd, heads.key_BGTd
        if self.query_norm is not None and self.key_norm is not None:
            query_BHTd, key_BGTd = self._normed(query_BHTd, self.query_norm), self._normed(key_BGTd, self.key_norm)
        query_BHTd = query_BHTd if scale == 1 else query_BHTd * scale
        if self.knn is not None and normalizes_all:
            query_BHTd, key_BGTd = self.knn.normalize(query_BHTd), unit(key_BGTd)
        return heads._replace(query_key_BATd=torch.cat([query_BHTd, key_BGTd], dim=1))

    def cut(self, hidden_BTD: Float[Tensor, "B T D"]) -> Heads:
        """Queries, keys and values, before any norm."""
        B, T, _ = hidden_BTD.shape
        heads_BTCd = self.qkv(hidden_BTD).view(B, T, sum(self.sizes), self.config.head_dim)
        query_key_BATd, value_BGTd = heads_BTCd.transpose(1, 2).split(self.sizes, dim=1)
        return Heads(query_key_BATd, value_BGTd, self.config.num_heads)

    def _normed(self, heads_BHTd: Float[Tensor, "B H T d"], norm: nn.Module) -> Float[Tensor, "B H T d"]:
        """Norms each head, or all heads of a token together."""
        if self.config.qk_norm_over == "head":
            return norm(heads_BHTd)
        normed_BTC = norm(heads_BHTd.transpose(1, 2).flatten(2))
        return normed_BTC.unflatten(2, (-1, self.config.head_dim)).transpose(1, 2)

    def _write(
        self, hidden_BTD: Tensor, rotated: Heads, state: DecoderState, context: ForwardContext
    ) -> tuple[Float[Tensor, "B G S d"], Float[Tensor, "B G S d"]]:
        """Writes the new tokens to the state and returns keys and values of all places, the new ones last."""
        S, key_BGTd, value_BGTd = context.mask.num_places, rotated.key_BGTd, rotated.value_BGTd
        learning = torch.is_grad_enabled() and key_BGTd.requires_grad
        past = self._past(state, S - context.mask.num_new, context) if learning else None
        layer = self.layer + context.layer_offset
        state.write(layer, key_BGTd, value_BGTd, context.new_B)
        state.write_inputs(layer, hidden_BTD, context.new_B)
        if past is None:
            key_BGSd, value_BGSd = state.cache_L2BGSd[state.cache_places[layer]].narrow(3, 0, S).unbind(0)
            return key_BGSd, value_BGSd
        joined = torch.cat([past[0], key_BGTd], dim=2), torch.cat([past[1], value_BGTd], dim=2)
        if state.live is not None:
            state.live[layer] = torch.stack(joined)
        return joined

    def _past(self, state: DecoderState, S: int, context: ForwardContext) -> tuple[Tensor, Tensor]:
        """Keys and values of the first S places, to train with. No gradient goes further back, but for places that are
        live.
        """
        live = None if state.live is None else state.live.get(self.layer + context.layer_offset)
        if live is None:
            return self._stored(state, S, context)
        count = live.shape[3]
        if count >= S:
            return live[0, :, :, :S], live[1, :, :, :S]
        stored = self._stored(state, S, context)
        both = [torch.cat([first, rest[:, :, count:]], dim=2) for first, rest in zip(live, stored, strict=True)]
        return both[0], both[1]

    def _stored(self, state: DecoderState, S: int, context: ForwardContext) -> tuple[Tensor, Tensor]:
        """Keys and values of the first S places, without their gradients.

        Where the state has the layer's inputs, they are projected anew, so that the projections learn from them.
        """
        layer = self.layer + context.layer_offset
        if state.inputs_LBSD is None or not state.training:
            past = state.cache_L2BGSd[state.cache_places[layer], :, :, :, :S].clone()
            return past[0], past[1]
        cos_sin = context.key_rope(self.layer)
        cos_sin = None if cos_sin is None else cos_sin[..., :S, :]
        heads = self.project(state.inputs_LBSD[layer, :, :S].clone()).rotated(cos_sin)
        return heads.key_BGTd, heads.value_BGTd

    def _attend_explicitly(
        self,
        query_BHTd: Tensor,
        heads: Heads,
        key_BGSd: Tensor,
        value_BGSd: Tensor,
        context: ForwardContext,
        found: KnnResult | None,
    ) -> Float[Tensor, "B H T d"]:
        """Attention with its scores spelled out. The scores of `found` join the softmax (arXiv 2307.03170)."""
        repeats, S = self.config.num_heads // self.config.num_kv_heads, key_BGSd.shape[2]
        key_BHSd, value_BHSd = (tensor.repeat_interleave(repeats, dim=1) for tensor in (key_BGSd, value_BGSd))
        scores_BHTS = exact(self.scores(query_BHTd, heads, key_BHSd, context))
        scores_BHTS = scores_BHTS.masked_fill(~self.visible(heads, context), -torch.inf)
        joint = scores_BHTS if found is None else torch.cat([scores_BHTS, exact(found.scores_BHTK)], dim=3)
        joint_BHTE = self.weigh(joint.softmax(dim=3), context).to(value_BHSd.dtype)
        weights_BHTS = joint_BHTE[..., :S]
        if context.watch is not None:
            context.watch.weights(self.layer, joint_BHTE, context.mask)
        if self.counts_use and context.state is not None:
            context.state.count_use(self.layer, weights_BHTS, context.new_B)
        mixed_BHTd = weights_BHTS @ value_BHSd
        if found is not None:
            mixed_BHTd = mixed_BHTd + found.read(joint_BHTE[..., S:])
        extra = self.positions.values(weights_BHTS, context.mask) if self.positions else None
        return self.combine(mixed_BHTd if extra is None else mixed_BHTd + extra, context)

    def visible(self, heads: Heads, context: ForwardContext) -> Bool[Tensor, "R|B 1|H T S"]:
        """Returns where each query may look."""
        return context.mask.visible(self.window)

    def weigh(self, weights_BHTE: Float[Tensor, "B H T E"], context: ForwardContext) -> Float[Tensor, "B H T E"]:
        """Returns the weights to use in place of those behind the softmax. Those of kNN attention are last."""
        return weights_BHTE

    def combine(self, mixed_BHTd: Float[Tensor, "B H T d"], context: ForwardContext) -> Float[Tensor, "B H T d"]:
        """Returns the heads that the last projection takes, made of the outputs of the heads."""
        return mixed_BHTd

    def scores(
        self,
        query_BHTd: Float[Tensor, "B H T d"],
        heads: Heads,
        key_BHSd: Float[Tensor, "B H S d"],
        context: ForwardContext,
    ) -> Float[Tensor, "B H T S"]:
        """Returns the scores of rotated queries and keys, before the mask. `heads` are not rotated."""
        if self.positions:
            return self.positions(query_BHTd, key_BHSd, context.mask)
        scores_BHTS = query_BHTd @ key_BHSd.mT
        sink_rope = context.sink_rope(self.layer) if context.mask.sink_cap else None
        if sink_rope is not None:
            front = context.mask.num_front
            near_BHTF = apply_rope(heads.query_BHTd, sink_rope) @ key_BHSd[:, :, :front].mT
            scores_BHTS = torch.cat([near_BHTF, scores_BHTS[..., front:]], dim=3)
        scores_BHTS = scores_BHTS / math.sqrt(self.config.head_dim)
        return scores_BHTS if context.bias_RHTS is None else scores_BHTS + context.bias_RHTS


class MaskedAttention(Attention):
    """Attention with other `visible` places or another `combine`, by torch's fused kernel where scores are plain."""

    is_explicit = True

    def _attend_explicitly(
        self,
        query_BHTd: Tensor,
        heads: Heads,
        key_BGSd: Tensor,
        value_BGSd: Tensor,
        context: ForwardContext,
        found: KnnResult | None,
    ) -> Float[Tensor, "B H T d"]:
        """Attends by torch's fused kernel, unless positions or memories change the scores."""
        has_own_scores = self.positions is not None or context.bias_RHTS is not None or context.mask.sink_cap
        if found is not None or has_own_scores or self.counts_use or context.watch is not None:
            return super()._attend_explicitly(query_BHTd, heads, key_BGSd, value_BGSd, context, found)
        return self.combine(self._attend_masked(query_BHTd, heads, key_BGSd, value_BGSd, context), context)

    def _attend_masked(
        self, query_BHTd: Tensor, heads: Heads, key_BGSd: Tensor, value_BGSd: Tensor, context: ForwardContext
    ) -> Float[Tensor, "B H T d"]:
        """Attends to the visible places, of all that are there."""
        return F.scaled_dot_product_attention(
            query_BHTd, key_BGSd, value_BGSd, attn_mask=self.visible(heads, context),
            enable_gqa=query_BHTd.shape[1] != key_BGSd.shape[1],
        )  # fmt: skip
