"""Random feature attention with a gate (arXiv 2103.02143).

    f(x) = [sin W x; cos W x] / √M,  x = q or k over its length,  W = scale ∘ w,  w Gaussian
    S_t = g_t S_{t-1} + (1 - g_t) f(k_t) v_tᵀ,  z_t likewise,  g_t = sigmoid(gate x_t),  out_t = f(q_t) S_t / f(q_t)·z_t

The scales are learned, one for each number of a key-value head. The mean of f(q)·f(k) over draws is the Gaussian kernel
exp(-|scale ∘ (q - k)|² / 2). Products of these features may be negative by chance, so the divisor may come near zero.
Here it is a hundredth of the greatest weight of a token at least. Query heads share the gate of their keys.

Shapes: as memlm/zoo/linear_attention.py.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from memlm.errors import check_range
from memlm.model.attention.attention import Heads
from memlm.model.attention.knn_attention import exact, unit
from memlm.model.draws import normals
from memlm.zoo.linear_attention import Drawn, Features, LinearAttention, LinearPart

if TYPE_CHECKING:
    from memlm.model.config import ModelConfig

LEAST = 0.01  # of the divisor


@dataclass(frozen=True, slots=True)
class RandomFeatureAttention(LinearPart):
    """Attention by sines and cosines of `draws` random directions, with a `gate` or without (arXiv 2103.02143)."""

    kind: ClassVar[str] = "rfa"

    draws: int = 64
    gate: bool = True
    seed: int = 0

    def __post_init__(self) -> None:
        check_range("draws", self.draws, least=1, whole=True)
        check_range("seed", self.seed, least=0, whole=True)

    @property
    def num_features(self) -> int:
        """A sine and a cosine for each draw."""
        return 2 * self.draws

    def build(self, config: ModelConfig, layer: int, sublayer: str = "") -> GatedFeatureAttention:
        """Returns the mixer. It has scales and a gate beside the parameters of attention."""
        return GatedFeatureAttention(config, layer, self)


class GatedFeatureAttention(LinearAttention):
    """Attention that reads gated sums of sines and cosines."""

    least = LEAST

    def __init__(self, config: ModelConfig, layer: int, part: RandomFeatureAttention) -> None:
        super().__init__(config, layer)
        G, d = config.num_kv_heads, config.head_dim
        self.scales_C = nn.Parameter(torch.ones(G * d))  # of one axis: the optimizer turns matrices
        # The gate is computed in float32 and is not quantized: it multiplies once for each token.
        self.gate = nn.Linear(config.dim, G) if part.gate else None
        heads, draws, columns = (torch.arange(count, device="cpu") for count in (G, part.draws, d))
        self.drawn_Gmd = Drawn(normals(part.seed, layer, heads[:, None, None], draws[:, None], columns))

    def features(self, heads: Heads, hidden_BTD: Float[Tensor, "B T D"]) -> Features:
        """Returns sines and cosines, and the logarithms of gate and 1 - gate."""
        G = self.config.num_kv_heads
        key_BGTd = unit(exact(heads.key_BGTd))
        query_BGrTd = unit(exact(heads.query_BHTd)).unflatten(1, (G, -1))
        directions_Gmd = exact(self.scales_C).view(G, 1, -1) * self.drawn_Gmd.like(key_BGTd)
        query_BGrTm, key_BGTm = waves(query_BGrTd, directions_Gmd[:, None]), waves(key_BGTd, directions_Gmd)
        if self.gate is None:
            return Features(query_BGrTm, key_BGTm, torch.zeros_like(key_BGTm[..., 0]))
        gate_BGT = F.linear(exact(hidden_BTD), exact(self.gate.weight), exact(self.gate.bias)).mT
        return Features(query_BGrTm, key_BGTm, F.logsigmoid(-gate_BGT), F.logsigmoid(gate_BGT))


def waves(x: Float[Tensor, "*P T d"], directions: Float[Tensor, "*G M d"]) -> Float[Tensor, "*P T 2M"]:
    """Returns f(x), whose products have the mean exp(-|x - y|² / 2) over Gaussian directions."""
    angles = x @ directions.mT
    return torch.cat([angles.sin(), angles.cos()], dim=-1) / math.sqrt(directions.shape[-2])
