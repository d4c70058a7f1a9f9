"""One layer: attention and feed-forward around the residual stream, in the orders that models use."""

from __future__ import annotations

import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from memlm.model.attention import Attention
from memlm.model.compression import Compressor
from memlm.model.config import ModelConfig
from memlm.model.forward import ForwardContext
from memlm.model.linear import Linear


def make_norm(config: ModelConfig) -> nn.Module:
    """RMSNorm (arXiv 1910.07467) or LayerNorm (1607.06450), over the model's width."""
    kind = nn.RMSNorm if config.norm == "rms" else nn.LayerNorm
    return kind(config.dim, eps=config.norm_eps)


class FeedForward(nn.Module):
    """SwiGLU (arXiv 2002.05202), or two products around GELU or ReLU."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.activation = config.activation
        if self.activation == "swiglu":
            self.gate_up = Linear(config.dim, 2 * config.ff_dim, bias=config.ff_bias)
        else:
            self.up = Linear(config.dim, config.ff_dim, bias=config.ff_bias)
        self.down = Linear(config.ff_dim, config.dim, bias=config.ff_bias)

    def forward(self, hidden_BTD: Float[Tensor, "B T D"]) -> Float[Tensor, "B T D"]:
        """Returns down(activation(up x)), or down(silu(gate x) * up x)."""
        if self.activation == "swiglu":
            gate, up = self.gate_up(hidden_BTD).chunk(2, dim=-1)
            return self.down(F.silu(gate) * up)
        return self.down(self.up(hidden_BTD, self.activation))


class Block(nn.Module):
    """Attention, then feed-forward, each after its norm (pre), before it (post), or in parallel."""

    def __init__(self, config: ModelConfig, layer: int) -> None:
        super().__init__()
        self.is_post, self.is_parallel = config.norm_order == "post", config.parallel_residual
        self.attention_norm = make_norm(config)
        self.attention = Attention(config, layer)
        self.ff_norm = make_norm(config)
        self.ff = FeedForward(config)
        self.compressor = Compressor(config, config.compression) if config.compression else None

    def attend(
        self, hidden_BTD: Float[Tensor, "B T D"], context: ForwardContext
    ) -> tuple[Float[Tensor, "B T D"], Float[Tensor, "B T D"]]:
        """Returns the residual stream after attention, and the input of the feed-forward: the layer's *key*."""
        if self.is_post:
            normed_BTD = self.attention_norm(hidden_BTD + self.attention(hidden_BTD, context))
            return normed_BTD, normed_BTD
        attended_BTD = hidden_BTD + self.attention(self.attention_norm(hidden_BTD), context)
        return attended_BTD, self.ff_norm(hidden_BTD if self.is_parallel else attended_BTD)

    def keep(self, hidden_BTD: Float[Tensor, "B T D"], context: ForwardContext) -> None:
        """Writes keys and values of tokens that skip this layer, as if `hidden_BTD` were its input."""
        self.attention.keep(hidden_BTD if self.is_post else self.attention_norm(hidden_BTD), context)

    def finish(self, attended_BTD: Float[Tensor, "B T D"], key_BTD: Float[Tensor, "B T D"]) -> Float[Tensor, "B T D"]:
        """Returns the residual stream after the feed-forward."""
        hidden_BTD = attended_BTD + self.ff(key_BTD)
        return self.ff_norm(hidden_BTD) if self.is_post else hidden_BTD
