"""Experts that share the tokens of a batch evenly, without a loss for it (BASE layers, arXiv 2103.16716).

Shapes: B batch, T new tokens, N tokens of all rows, D width, E experts.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, ClassVar

import numpy as np
import torch
import torch.nn.functional as F
from jaxtyping import Float, Float64, Int64
from torch import Tensor, nn

from memlm.errors import check_range
from memlm.model.attention.knn_attention import exact
from memlm.model.experts import ExpertFeedForwards
from memlm.model.parts import Part

if TYPE_CHECKING:
    from memlm.model.config import ModelConfig
    from memlm.model.forward import ForwardContext

TOLERANCE = 1e-12  # a chain of moves gains more than this, or rounding made it


@dataclass(frozen=True, slots=True)
class Base(Part):
    """One expert a token, y = x + sigmoid(h w_a) E_a(h), where expert a has the vector w_a.

    While learning, the tokens of a pass are assigned so that sum(h w_a) is greatest and all experts have equally many
    tokens, or one more. In prediction a token takes the expert of the greatest h w_a, so that it depends on no other
    token. `expert_dim` is the inner width of one expert, 0 for the model's `ff_dim`.
    """

    seam: ClassVar[str] = "channel"
    kind: ClassVar[str] = "base"
    is_exact: ClassVar[bool] = False  # a product over other tokens rounds otherwise

    experts: int = 8
    expert_dim: int = 0

    def __post_init__(self) -> None:
        check_range("experts", self.experts, least=1, whole=True)
        check_range("expert_dim", self.expert_dim, least=0, whole=True)

    def build(self, config: ModelConfig, layer: int, sublayer: str = "") -> BaseExperts:
        """Returns the feed-forwards and their vectors."""
        return BaseExperts(config, self)


class BaseExperts(ExpertFeedForwards):
    """The feed-forwards and their vectors. Scores are computed in float32. The vectors have the model's dtype, also
    where its matrices are quantized.
    """

    def __init__(self, config: ModelConfig, part: Base) -> None:
        super().__init__(config, part.experts, part.expert_dim, top=1)
        self.router = nn.Linear(config.dim, part.experts, bias=False)

    def forward(self, key_BTD: Float[Tensor, "B T D"], context: ForwardContext | None) -> Float[Tensor, "B T D"]:
        """Returns the output of each token's expert times its gate."""
        key_ND = key_BTD.flatten(0, 1)
        with torch.autocast(key_BTD.device.type, enabled=False):
            scores_NE = F.linear(exact(key_ND), exact(self.router.weight))
        expert_N = scores_NE.argmax(dim=1)
        if self.training and context is not None and context.losses is not None:
            is_real_N = context.is_real_BT.flatten()
            shared_n = balanced(scores_NE[is_real_N].detach().double().cpu().numpy())
            expert_N[is_real_N] = torch.from_numpy(shared_n).to(expert_N.device)
        expert_N1 = expert_N[:, None]
        return self.read(key_ND, expert_N1, scores_NE.gather(1, expert_N1).sigmoid()).view_as(key_BTD)


def balanced(scores_NE: Float64[np.ndarray, "N E"]) -> Int64[np.ndarray, " N"]:
    """Returns the expert of each token, so that the sum of their scores is greatest among all assignments that give
    each expert N / E tokens, rounded down or up.

    Starts from the best expert of each token. The cheapest chain of moves then takes a token from an expert with too
    many to one that has room, over and over (successive shortest paths). The paper's auction reaches the same sum up to
    a tolerance. Each chain takes some E^2 + N steps. Where a score is not finite, each token keeps its best expert.
    """
    if not np.isfinite(scores_NE).all():
        return scores_NE.argmax(axis=1)
    N, E = scores_NE.shape
    least, most, expert_N = N // E, -(-N // E), scores_NE.argmax(axis=1)
    cost_EE, token_EE = np.full((E, E), np.inf), np.zeros((E, E), dtype=np.int64)
    changed = list(range(E))
    while True:
        count_E = np.bincount(expert_N, minlength=E)
        if count_E.max() > most:
            gives_E, takes_E = count_E > most, count_E < most
        elif count_E.min() < least:
            gives_E, takes_E = count_E > least, count_E < least
        else:
            return expert_N
        for giver in changed:
            token_n = np.flatnonzero(expert_N == giver)
            if not len(token_n):
                cost_EE[giver] = np.inf
                continue
            cost_nE = scores_NE[token_n, giver][:, None] - scores_NE[token_n]
            best_E = cost_nE.argmin(axis=0)
            cost_EE[giver], token_EE[giver] = cost_nE[best_E, np.arange(E)], token_n[best_E]
        changed = _cheapest_chain(cost_EE, gives_E, takes_E)
        if len(changed) == 1:  # all moves cost too much for a float
            return expert_N
        for giver, taker in pairwise(changed):
            expert_N[token_EE[giver, taker]] = taker


def _cheapest_chain(cost_EE: np.ndarray, gives_E: np.ndarray, takes_E: np.ndarray) -> list[int]:
    """Returns the experts of the cheapest chain of moves from one that gives to one that takes (Bellman-Ford)."""
    cost_E, before_E = np.where(gives_E, 0.0, np.inf), np.full(len(gives_E), -1)
    for _ in range(len(gives_E) - 1):
        through_EE = cost_E[:, None] + cost_EE
        best_E = through_EE.argmin(axis=0)
        found_E = through_EE[best_E, np.arange(len(best_E))]
        is_cheaper_E = found_E < cost_E - TOLERANCE
        if not is_cheaper_E.any():
            break
        cost_E, before_E = np.where(is_cheaper_E, found_E, cost_E), np.where(is_cheaper_E, best_E, before_E)
    chain = [int(np.where(takes_E, cost_E, np.inf).argmin())]
    while before_E[chain[0]] >= 0:
        chain.insert(0, int(before_E[chain[0]]))
    return chain
