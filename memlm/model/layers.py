"""One layer: attention and feed-forward around the residual stream, in the orders that models use."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from memlm.model.attention.attention import Attention
from memlm.model.attention.compression import Compressor
from memlm.model.config import ModelConfig
from memlm.model.forward import ForwardContext
from memlm.model.kernels.linear import Linear
from memlm.model.norms import make_norm

# The activation of a gate, where one multiplies the inner layer. GeGLU's is GELU by its approximation with tanh.
GATES: dict[str, Callable[[Tensor], Tensor]] = {"swiglu": F.silu, "geglu": partial(F.gelu, approximate="tanh")}


class FeedForward(nn.Module):
    """SwiGLU or GeGLU (arXiv 2002.05202), or two products around GELU or ReLU."""

    def __init__(self, config: ModelConfig, ff_dim: int | None = None) -> None:
        super().__init__()
        self.activation, ff_dim = config.activation, ff_dim or config.ff_dim
        if self.activation in GATES:
            self.gate_up = Linear(config.dim, 2 * ff_dim, bias=config.ff_bias)
        else:
            self.up = Linear(config.dim, ff_dim, bias=config.ff_bias)
        self.down = Linear(ff_dim, config.dim, bias=config.ff_bias)

    @property
    def inner(self) -> Linear:
        """The product before the activation."""
        return self.gate_up if self.activation in GATES else self.up

    def forward(self, hidden: Float[Tensor, "*P D"], context: ForwardContext | None = None) -> Float[Tensor, "*P D"]:
        """Returns down(activation(up x)), or down(activation(gate x) * up x), the same in every context."""
        if (activation := GATES.get(self.activation)) is not None:
            gate, up = self.gate_up(hidden).chunk(2, dim=-1)
            return self.down(activation(gate) * up)
        return self.down(self.up(hidden, self.activation))


class Block(nn.Module):
    """Attention and feed-forward, or the parts in their place, on the residual stream, with norms in one of the orders
    of `ModelConfig.norm_order`, or both in parallel.
    """

    def __init__(self, config: ModelConfig, layer: int) -> None:
        super().__init__()
        self.order, self.is_parallel = config.norm_order, config.parallel_residual
        self.has_input_norm = config.norm_order in ("pre", "sandwich")
        parts, join, cross = config.layer_at(layer), config.join, config.cross
        self.attention_norm = make_norm(config)
        self.attention: Any = Attention(config, layer) if parts.mixer is None else parts.mixer.build(config, layer)
        self.cross: nn.Module | None = None if cross is None else cross.build(config, layer)
        self.ff_norm = make_norm(config)
        self.ff: Any = FeedForward(config) if parts.channel is None else parts.channel.build(config, layer)
        self.attention_join = None if join is None else join.build(config, layer, "attention")
        self.ff_join = None if join is None else join.build(config, layer, "ff")
        if config.norm_order == "sandwich":
            self.attention_out_norm, self.ff_out_norm = make_norm(config), make_norm(config)
        self.compressor = Compressor(config, config.compression) if config.compression else None

    def attend(
        self, hidden_BTD: Float[Tensor, "B T D"], context: ForwardContext
    ) -> tuple[Float[Tensor, "B T D"], Float[Tensor, "B T D"]]:
        """Returns the residual stream after attention and the cross part, and the input of the feed-forward: the
        layer's *key*.
        """
        mixed_BTD = self.attention(self.attention_norm(hidden_BTD) if self.has_input_norm else hidden_BTD, context)
        if self.order == "sandwich":
            mixed_BTD = self.attention_out_norm(mixed_BTD)
        elif self.order == "output":
            mixed_BTD = self.attention_norm(mixed_BTD)
        join = self.attention_join
        attended_BTD = hidden_BTD + mixed_BTD if join is None else join(hidden_BTD, mixed_BTD)
        if self.cross is not None:
            attended_BTD = attended_BTD + self.cross(attended_BTD, context)
        if self.order == "post":
            attended_BTD = self.attention_norm(attended_BTD)
        if self.has_input_norm:
            return attended_BTD, self.ff_norm(hidden_BTD if self.is_parallel else attended_BTD)
        return attended_BTD, attended_BTD

    def keep(self, hidden_BTD: Float[Tensor, "B T D"], context: ForwardContext) -> None:
        """Writes keys and values of tokens that skip this layer, as if `hidden_BTD` were its input."""
        self.attention.keep(self.attention_norm(hidden_BTD) if self.has_input_norm else hidden_BTD, context)
        if (keep := getattr(self.cross, "keep", None)) is not None:
            keep(hidden_BTD, context)

    def finish(
        self,
        attended_BTD: Float[Tensor, "B T D"],
        key_BTD: Float[Tensor, "B T D"],
        context: ForwardContext | None = None,
    ) -> Float[Tensor, "B T D"]:
        """Returns the residual stream after the feed-forward. Vectors that are of no step have no context."""
        change_BTD = self.ff(key_BTD, context)
        if self.order == "sandwich":
            change_BTD = self.ff_out_norm(change_BTD)
        elif self.order == "output":
            change_BTD = self.ff_norm(change_BTD)
        join = self.ff_join
        hidden_BTD = attended_BTD + change_BTD if join is None else join(attended_BTD, change_BTD)
        return self.ff_norm(hidden_BTD) if self.order == "post" else hidden_BTD
