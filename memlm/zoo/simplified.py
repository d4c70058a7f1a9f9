"""Transformer blocks without values, projections and skips (Simplifying Transformer Blocks, arXiv 2311.01906).

`{mixer = "shaped"}` in all layers and `join = "skipless"` make the blocks of the paper: SAS, and SAS-P with
`parallel_residual`.

Shapes: B batch, T new tokens, S places, H heads, d width of a head, D width.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import torch
from jaxtyping import Float
from torch import Tensor, nn

from memlm.errors import InvalidInput, check_range
from memlm.model.attention.attention import Attention, Heads
from memlm.model.kernels.linear import Linear
from memlm.model.parts import Part

if TYPE_CHECKING:
    from memlm.model.config import ModelConfig
    from memlm.model.forward import ForwardContext


@dataclass(frozen=True, slots=True)
class Shaped(Part):
    """A mixer that reads its own input by alpha I + beta softmax(q k') - gamma C (arXiv 2311.01906).

    I is the token itself and C the mean of all places that it sees. Values are slices of the input, and the outputs of
    the heads are that of the layer. alpha, beta and gamma are learned for each head and start at 1. Queries start at 0,
    so that a fresh layer returns its input.
    """

    seam: ClassVar[str] = "mixer"
    kind: ClassVar[str] = "shaped"

    def build(self, config: ModelConfig, layer: int, sublayer: str = "") -> ShapedAttention:
        """Returns attention with queries and keys alone."""
        return ShapedAttention(config, layer)

    def check(self, config: ModelConfig) -> None:
        """Refuses heads that do not cut the width into slices, and kNN attention, which mixes other values."""
        if config.num_heads * config.head_dim != config.dim or config.num_kv_heads != config.num_heads:
            raise InvalidInput(
                f"shaped attention cuts the width of {config.dim} into {config.num_heads} heads of keys and values;"
                f" got {config.num_kv_heads} of width {config.head_dim}",
                field="num_kv_heads",
            )
        for name in ("memorizing", "extended_attention"):
            if getattr(config, name):
                raise InvalidInput(f"shaped attention has no weights for the pairs of {name}", field=name)


class ShapedAttention(Attention):
    """Attention to the inputs themselves, less their mean."""

    is_explicit = True

    def __init__(self, config: ModelConfig, layer: int) -> None:
        super().__init__(config, layer)
        self.qkv = Linear(config.dim, 2 * config.dim, bias=config.qkv_bias)  # no values
        self.out = nn.Identity()  # type: ignore[assignment]
        self.alpha_H, self.beta_H, self.gamma_H = (nn.Parameter(torch.empty(config.num_heads)) for _ in range(3))

    def initialize(self) -> None:
        """Starts as the identity."""
        for gain_H in (self.alpha_H, self.beta_H, self.gamma_H):
            nn.init.ones_(gain_H)
        nn.init.zeros_(self.qkv.weight[: self.config.dim])

    def cut(self, hidden_BTD: Float[Tensor, "B T D"]) -> Heads:
        """Queries and keys, and slices of the input as values."""
        H, d = self.config.num_heads, self.config.head_dim
        query_key_BATd = self.qkv(hidden_BTD).unflatten(2, (2 * H, d)).transpose(1, 2)
        return Heads(query_key_BATd, hidden_BTD.unflatten(2, (H, d)).transpose(1, 2), H)

    def weigh(self, weights_BHTE: Float[Tensor, "B H T S"], context: ForwardContext) -> Float[Tensor, "B H T S"]:
        """Returns the shaped weights. Those of a token sum to alpha + beta - gamma."""
        mask = context.mask
        seen_R1TS = mask.visible(self.window).to(weights_BHTE.dtype)
        mean_R1TS = seen_R1TS / seen_R1TS.sum(dim=3, keepdim=True).clamp(min=1)
        itself_R1TS = (mask.key_RS[:, None] == mask.query_RT[:, :, None])[:, None]
        alpha, beta, gamma = (gain_H[:, None, None] for gain_H in (self.alpha_H, self.beta_H, self.gamma_H))
        return alpha * itself_R1TS + beta * weights_BHTE - gamma * mean_R1TS


@dataclass(frozen=True, slots=True)
class Skipless(Part):
    """A join that drops the stream before attention (arXiv 2311.01906, sections 4.1 and 4.3).

    The stream becomes b m with m the output of attention, and then a s + c f with f that of the feed-forward. With a
    `parallel_residual`, which has one sum, a is 1. The learned numbers a and b start at 1, and c at `gain`, for which
    the paper takes about 0.1 at 18 layers.
    """

    seam: ClassVar[str] = "join"
    kind: ClassVar[str] = "skipless"

    gain: float = 0.1

    def __post_init__(self) -> None:
        check_range("gain", self.gain)

    def build(self, config: ModelConfig, layer: int, sublayer: str = "") -> ScaledSum:
        """Returns the gains of one sum."""
        if sublayer == "attention":
            return ScaledSum(None, 1.0)
        return ScaledSum(None if config.parallel_residual else 1.0, self.gain, keeps=True)

    def check(self, config: ModelConfig) -> None:
        """Refuses norms that are not before the sub-layers."""
        if config.norm_order != "pre":
            raise InvalidInput(f"skipless joins need norm_order pre; got {config.norm_order}", field="join")


class ScaledSum(nn.Module):
    """The gains of a stream, or None for no learned one, and of what is added. Only with `keeps` the stream stays."""

    def __init__(self, skip: float | None, gain: float, *, keeps: bool = False) -> None:
        super().__init__()
        self.starts, self.keeps = (skip, gain), keeps
        self.skip_1 = None if skip is None else nn.Parameter(torch.empty(1))
        self.gain_1 = nn.Parameter(torch.empty(1))

    def initialize(self) -> None:
        """Starts with the gains of the paper."""
        skip, gain = self.starts
        nn.init.constant_(self.gain_1, gain)
        if self.skip_1 is not None and skip is not None:
            nn.init.constant_(self.skip_1, skip)

    def forward(self, stream_BTD: Float[Tensor, "B T D"], change_BTD: Float[Tensor, "B T D"]) -> Float[Tensor, "B T D"]:
        """Returns the new stream."""
        scaled_BTD = self.gain_1.to(change_BTD.dtype) * change_BTD
        if not self.keeps:
            return scaled_BTD
        return scaled_BTD + (stream_BTD if self.skip_1 is None else self.skip_1.to(stream_BTD.dtype) * stream_BTD)
