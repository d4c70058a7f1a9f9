"""Performer: softmax attention by positive orthogonal random features (FAVOR+, arXiv 2009.14794).

    f(x) = exp(W x - |x|² / 2) / √m,  x = q or k over the fourth root of d,  so that E f(q)·f(k) = exp(q·k / √d)

The rows of W are Gaussian, and orthogonal within each d of them. They are drawn once, from the seed, layer and head.
The paper may draw them anew while it learns. Ports subtract the greatest exponent of all keys, which shows an earlier
query the later keys. Here each query and key has its own, which cancels or goes into the weight of the key.

Shapes: as memlm/zoo/linear_attention.py.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import torch
from jaxtyping import Float
from torch import Tensor

from memlm.errors import check_range
from memlm.model.attention.attention import Heads
from memlm.model.attention.knn_attention import exact
from memlm.model.draws import normals
from memlm.zoo.linear_attention import Drawn, Features, LinearAttention, LinearPart

if TYPE_CHECKING:
    from memlm.model.config import ModelConfig


@dataclass(frozen=True, slots=True)
class Performer(LinearPart):
    """Attention by `features` positive random features (arXiv 2009.14794)."""

    kind: ClassVar[str] = "performer"

    features: int = 128
    seed: int = 0

    def __post_init__(self) -> None:
        check_range("features", self.features, least=1, whole=True)
        check_range("seed", self.seed, least=0, whole=True)

    @property
    def num_features(self) -> int:
        """Features of a query or key."""
        return self.features

    def build(self, config: ModelConfig, layer: int, sublayer: str = "") -> PerformerAttention:
        """Returns the mixer. It has the parameters of attention."""
        return PerformerAttention(config, layer, self)


class PerformerAttention(LinearAttention):
    """Attention that reads sums of positive features."""

    def __init__(self, config: ModelConfig, layer: int, part: Performer) -> None:
        super().__init__(config, layer)
        heads, m, d = range(config.num_kv_heads), part.features, config.head_dim
        self.drawn_Gmd = Drawn(torch.stack([orthogonal(part.seed, layer, head, m, d) for head in heads]))

    def features(self, heads: Heads, hidden_BTD: Float[Tensor, "B T D"]) -> Features:
        """Returns features of which the greatest of each query and key is 1. Keys enter with theirs."""
        directions_Gmd = self.drawn_Gmd.like(exact(heads.key_BGTd))
        key_BGTm = log_features(exact(heads.key_BGTd), directions_Gmd)
        query_BGrTd = exact(heads.query_BHTd).unflatten(1, (self.config.num_kv_heads, -1))
        query_BGrTm = log_features(query_BGrTd, directions_Gmd[:, None])
        enters_BGT, top_BGrT1 = key_BGTm.amax(dim=3).detach(), query_BGrTm.amax(dim=4, keepdim=True).detach()
        return Features((query_BGrTm - top_BGrT1).exp(), (key_BGTm - enters_BGT[..., None]).exp(), enters_BGT)


def log_features(x: Float[Tensor, "*P T d"], directions: Float[Tensor, "*G m d"]) -> Float[Tensor, "*P T m"]:
    """Returns the logarithms of √m f(x), for queries or keys x that are not scaled."""
    x = x / x.shape[-1] ** 0.25
    return x @ directions.mT - x.square().sum(dim=-1, keepdim=True) / 2


def orthogonal(seed: int, layer: int, head: int, count: int, width: int) -> Float[Tensor, "count width"]:
    """Returns Gaussian directions, of which each block of `width` is orthogonal, in float64 on the processor."""
    blocks, rows, columns = (torch.arange(n, device="cpu") for n in (-(-count // width), width, 2 * width))
    drawn_Nww, lengths_Nww = normals(seed, layer, head, blocks[:, None, None], rows[:, None], columns).chunk(2, dim=2)
    q_Nww, r_Nww = torch.linalg.qr(drawn_Nww.mT)
    # The signs make it the basis that Gram and Schmidt's steps give, whatever the library's choice.
    basis_Nww = (q_Nww * r_Nww.diagonal(dim1=1, dim2=2).sign()[:, None]).mT
    return (basis_Nww * lengths_Nww.norm(dim=2, keepdim=True)).flatten(0, 1)[:count]
