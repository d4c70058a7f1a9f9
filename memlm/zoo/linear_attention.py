"""Attention by features, read from sums instead of from each earlier token.

    out_t = sum_s w_ts f(q_t)·f(k_s) v_s / sum_s w_ts f(q_t)·f(k_s),    w_ts = exp(F_t - F_s + i_s),  s <= t

F is the sum of the logarithms that a gate keeps up to a token, and i_s the logarithm that a key enters with. A state
has the sums over s, so a token costs the same behind any text. They are kept times exp(-M), where M is the greatest
logarithm of a weight so far: no weight overflows, and no later token changes what an earlier one reads.

Tokens are read in chunks: among the new ones of a chunk by products of all pairs, and before it by the sums.

Shapes: B batch, T new tokens, H query heads, G key-value heads, r = H / G, m features, d width of a head, e = d + 1
(values, and a one that counts), D width.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar, NamedTuple

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float
from torch import Tensor

from memlm.model.attention.attention import Attention, Heads
from memlm.model.attention.knn_attention import exact
from memlm.model.forward import ForwardContext
from memlm.model.parts import Part
from memlm.model.state.fields import Field

if TYPE_CHECKING:
    from memlm.model.config import ModelConfig

CHUNK = 128  # tokens whose pairs are spelled out


class Features(NamedTuple):
    """Features of queries and keys, the logarithms that keys enter with, and those that a gate keeps (None: all)."""

    query_BGrTm: Float[Tensor, "B G r T m"]
    key_BGTm: Float[Tensor, "B G T m"]
    enters_BGT: Float[Tensor, "B G T"]
    keeps_BGT: Float[Tensor, "B G T"] | None = None


class Chunk(NamedTuple):
    """Some new tokens: features, values with a one, and where documents begin."""

    query_BGrTm: Float[Tensor, "B G r T m"]
    key_BGTm: Float[Tensor, "B G T m"]
    enters_BGT: Float[Tensor, "B G T"]
    keeps_BGT: Float[Tensor, "B G T"]
    value_BGTe: Float[Tensor, "B G T e"]
    begins_BT: Bool[Tensor, "B T"]


class Sums(NamedTuple):
    """What is remembered of all tokens so far: sums of features times values, and M."""

    sums_BGme: Float[Tensor, "B G m e"]
    top_BG: Float[Tensor, "B G"]


class Drawn:
    """Random numbers in float64 on the processor, and a copy of them as last used.

    They are no buffer: the loader builds decoders without memory, and no file has these numbers.
    """

    def __init__(self, numbers: Tensor) -> None:
        self.numbers = self._used = numbers

    def like(self, tensor: Tensor) -> Tensor:
        """Returns the numbers in the type and on the device of a tensor."""
        if self._used.dtype != tensor.dtype or self._used.device != tensor.device:
            self._used = self.numbers.to(tensor)
        return self._used


class LinearPart(Part):
    """What linear mixers have in common: sums in the place of a cache."""

    __slots__ = ()

    seam: ClassVar[str] = "mixer"
    caches: ClassVar[bool] = False
    has_scores: ClassVar[bool] = False

    @property
    def num_features(self) -> int:
        """Features of a query or key."""
        raise NotImplementedError

    def fields(self, config: ModelConfig) -> tuple[Field, ...]:
        """The sums: `4 G (features (d + 1) + 1)` bytes a layer in float32, for a text of any length."""
        G = config.num_kv_heads
        return Field("sums", (G, self.num_features, config.head_dim + 1), wide=True), Field("top", (G,), wide=True)


class LinearAttention(Attention):
    """A mixer that reads sums of features, which a subclass makes. Query heads of one key-value head share them."""

    least = 0.0  # divisor, as a part of the greatest weight

    def features(self, heads: Heads, hidden_BTD: Float[Tensor, "B T D"]) -> Features:
        """Returns the features of rotated queries and keys, in float32 or wider."""
        raise NotImplementedError

    def forward(self, hidden_BTD: Float[Tensor, "B T D"], context: ForwardContext) -> Float[Tensor, "B T D"]:
        """Returns each new token's mixture of values, and adds its key and value to the sums."""
        heads = self.project(hidden_BTD).rotated(context.document_rope(self.layer))
        with torch.autocast(hidden_BTD.device.type, enabled=False):  # sums are long
            mixed_BHTd = self._read(self._whole(heads, hidden_BTD, context), context)
        if context.watch is not None:
            mixed_BHTd = context.watch.heads(self.layer, mixed_BHTd)
        return self.out(mixed_BHTd.to(heads.value_BGTd.dtype).transpose(1, 2).flatten(2))

    def keep(self, hidden_BTD: Float[Tensor, "B T D"], context: ForwardContext) -> None:
        """Adds tokens that skip the layer to the sums."""
        self(hidden_BTD, context)

    def _whole(self, heads: Heads, hidden_BTD: Tensor, context: ForwardContext) -> Chunk:
        """All new tokens. Padding enters with nothing, keeps everything and begins no document."""
        query_BGrTm, key_BGTm, enters_BGT, keeps_BGT = self.features(heads, hidden_BTD)
        is_real_BT = context.is_real_BT
        enters_BGT = enters_BGT.masked_fill(~is_real_BT[:, None], -torch.inf)
        keeps_BGT = torch.zeros_like(enters_BGT) if keeps_BGT is None else keeps_BGT * is_real_BT[:, None]
        value_BGTe = F.pad(exact(heads.value_BGTd), (0, 1), value=1.0)
        return Chunk(query_BGrTm, key_BGTm, enters_BGT, keeps_BGT, value_BGTe, context.begins_BT & is_real_BT)

    def _read(self, whole: Chunk, context: ForwardContext) -> Float[Tensor, "B H T d"]:
        field_BGme, field_BG = context.field(self.layer, "sums"), context.field(self.layer, "top")
        sums, mixed, T = Sums(field_BGme.clone(), field_BG.clone()), [], whole.begins_BT.shape[1]
        size = CHUNK if context.watch is None else T  # a watch sees all pairs at once
        for begin in range(0, T, size):
            pairs_BGrTS, read_BGrTe, sums = read_chunk(_part(whole, slice(begin, begin + size)), sums)
            divisor_BGrT1 = read_BGrTe[..., -1:].clamp(min=self.least or torch.finfo(read_BGrTe.dtype).tiny)
            mixed.append((read_BGrTe[..., :-1] / divisor_BGrT1).flatten(1, 2))
            if context.watch is not None:  # nothing tells what lies in the sums of a pass before
                weights_BHTS = (pairs_BGrTS / divisor_BGrT1).flatten(1, 2)
                past = context.mask.num_places - T
                context.watch.weights(self.layer, F.pad(weights_BHTS, (past, 0)), context.mask)
        field_BGme.copy_(sums.sums_BGme.detach())
        field_BG.copy_(sums.top_BG.detach())
        return torch.cat(mixed, dim=2)


def read_chunk(chunk: Chunk, before: Sums) -> tuple[Float[Tensor, "B G r T T"], Float[Tensor, "B G r T e"], Sums]:
    """Returns the weighted products of all pairs, the sums that each query reads, and the sums behind the chunk.

    The first two are times exp(-M) of their query.
    """
    kept_BGT, number_BT = chunk.keeps_BGT.cumsum(dim=2), chunk.begins_BT.cumsum(dim=1)
    logs_BGTS = kept_BGT[..., :, None] - kept_BGT[..., None, :] + chunk.enters_BGT[..., None, :]
    is_seen_BTS = (number_BT[:, :, None] == number_BT[:, None]).tril()
    logs_BGTS = logs_BGTS.masked_fill(~is_seen_BTS[:, None], -torch.inf)
    before_BGT = (before.top_BG[..., None] + kept_BGT).masked_fill(number_BT[:, None] > 0, -torch.inf)
    top_BGT = torch.maximum(logs_BGTS.amax(dim=3), before_BGT)
    weights_BGTS, before_BGT = (logs_BGTS - top_BGT[..., None]).exp(), (before_BGT - top_BGT).exp()
    pairs_BGrTS = chunk.query_BGrTm @ chunk.key_BGTm.mT[:, :, None] * weights_BGTS[:, :, None]
    past_BGrTe = before_BGT[:, :, None, :, None] * (chunk.query_BGrTm @ before.sums_BGme[:, :, None])
    read_BGrTe = pairs_BGrTS @ chunk.value_BGTe[:, :, None] + past_BGrTe
    new_BGme = (chunk.key_BGTm * weights_BGTS[:, :, -1, :, None]).mT @ chunk.value_BGTe
    sums_BGme = before.sums_BGme * before_BGT[:, :, -1, None, None] + new_BGme
    return pairs_BGrTS, read_BGrTe, Sums(sums_BGme, top_BGT[..., -1])


def _part(chunk: Chunk, tokens: slice) -> Chunk:
    query_BGrTm, key_BGTm, enters_BGT, keeps_BGT, value_BGTe, begins_BT = chunk
    return Chunk(
        query_BGrTm[..., tokens, :], key_BGTm[..., tokens, :], enters_BGT[..., tokens], keeps_BGT[..., tokens],
        value_BGTe[..., tokens, :], begins_BT[:, tokens],
    )  # fmt: skip
