"""The norms of layers and of heads."""

from __future__ import annotations

import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from memlm.model.config import ModelConfig


class OffsetRMSNorm(nn.RMSNorm):
    """RMSNorm times 1 + weight, in float32, as Gemma has it. Near 1, a weight in bfloat16 would lose its last bits."""

    def reset_parameters(self) -> None:
        """Starts as a norm that multiplies by one."""
        nn.init.zeros_(self.weight)

    def forward(self, x: Float[Tensor, "*P D"]) -> Float[Tensor, "*P D"]:
        """Returns x / rms(x) * (1 + weight) in the type of x."""
        wide = x if x.dtype.itemsize >= 4 else x.float()
        return F.rms_norm(wide, self.normalized_shape, 1 + self.weight.to(wide.dtype), self.eps).to(x.dtype)


NORMS: dict[str, type[nn.Module]] = {"rms": nn.RMSNorm, "rms_offset": OffsetRMSNorm, "layer": nn.LayerNorm}


def make_norm(config: ModelConfig) -> nn.Module:
    """RMSNorm (arXiv 1910.07467) or LayerNorm (1607.06450), over the model's width."""
    return NORMS[config.norm](config.dim, eps=config.norm_eps)


def make_qk_norm(config: ModelConfig, num_heads: int) -> nn.Module:
    """RMSNorm over a head, or over the heads of a projection."""
    kind = OffsetRMSNorm if config.norm == "rms_offset" else nn.RMSNorm
    return kind(config.head_dim * (1 if config.qk_norm_over == "head" else num_heads), eps=config.norm_eps)
