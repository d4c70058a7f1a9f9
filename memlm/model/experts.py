"""Mixtures of experts: a token is read by some of several feed-forwards.

No expert has a capacity, so no token is dropped and none depends on its company, as with the papers' batches. While
learning, a loss keeps the experts in use evenly.

Shapes: B batch, T new tokens, N tokens of all rows, D width, E experts, K experts of a token.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor, nn

from memlm.errors import InvalidInput, check_range
from memlm.model.attention.knn_attention import exact
from memlm.model.draws import drawn
from memlm.model.forward import ForwardContext
from memlm.model.layers import FeedForward
from memlm.model.parts import Part

if TYPE_CHECKING:
    from memlm.model.config import ModelConfig


@dataclass(frozen=True, slots=True)
class Experts(Part):
    """The `top` likeliest of some experts by a learned router (arXiv 1701.06538, Mixtral 2401.04088).

    Their weights are the router's probabilities, which `normalize` divides by their sum. `balance` is the weight of the
    loss E sum(f p) of the share of tokens f and the mean probability p of each expert (Switch, 2101.03961, equation 4),
    which is 1 for even use. `expert_dim` is the inner width of one expert, 0 for the model's `ff_dim`.
    """

    seam: ClassVar[str] = "channel"
    kind: ClassVar[str] = "experts"
    is_exact: ClassVar[bool] = False  # a product over other tokens rounds otherwise

    experts: int = 8
    top: int = 2
    normalize: bool = True
    balance: float = 0.01
    expert_dim: int = 0

    def __post_init__(self) -> None:
        check_range("experts", self.experts, least=1, whole=True)
        check_range("top", self.top, least=1, whole=True)
        check_range("balance", self.balance, least=0)
        check_range("expert_dim", self.expert_dim, least=0, whole=True)
        if self.top > self.experts:
            raise InvalidInput(f"top is {self.top} of {self.experts} experts; expected at most all", field="top")

    def build(self, config: ModelConfig, layer: int, sublayer: str = "") -> RoutedExperts:
        """Returns the feed-forwards and their router."""
        return RoutedExperts(config, self)


@dataclass(frozen=True, slots=True)
class Switch(Experts):
    """The likeliest expert, times its probability (Switch Transformer, arXiv 2101.03961)."""

    kind: ClassVar[str] = "switch"

    top: int = 1
    normalize: bool = False


@dataclass(frozen=True, slots=True)
class HashExperts(Part):
    """One expert for each token of the vocabulary, by a balanced random table (Hash Layers, arXiv 2106.04426)."""

    seam: ClassVar[str] = "channel"
    kind: ClassVar[str] = "hash"
    is_exact: ClassVar[bool] = False
    needs_tokens: ClassVar[bool] = True

    experts: int = 8
    seed: int = 0
    expert_dim: int = 0

    def __post_init__(self) -> None:
        check_range("experts", self.experts, least=1, whole=True)
        check_range("seed", self.seed, least=0, whole=True)
        check_range("expert_dim", self.expert_dim, least=0, whole=True)

    def build(self, config: ModelConfig, layer: int, sublayer: str = "") -> HashedExperts:
        """Returns the feed-forwards and the layer's table."""
        return HashedExperts(config, self, layer)


class ExpertFeedForwards(nn.Module):
    """Feed-forwards of which each token is read by some."""

    def __init__(self, config: ModelConfig, num_experts: int, expert_dim: int, top: int) -> None:
        super().__init__()
        ff_dim = expert_dim or config.ff_dim
        self.experts: Sequence[FeedForward] = nn.ModuleList(FeedForward(config, ff_dim) for _ in range(num_experts))  # type: ignore[assignment]
        self.top = top

    @property
    def num_idle_parameters(self) -> int:
        """Parameters that a token does not meet."""
        first = self.experts[0]
        return (len(self.experts) - self.top) * (first.inner.num_parameters + first.down.num_parameters)

    def read(
        self, key_ND: Float[Tensor, "N D"], expert_NK: Int[Tensor, "N K"], weight_NK: Float[Tensor, "N K"] | None
    ) -> Float[Tensor, "N D"]:
        """Returns the weighted sum of the outputs of each token's experts."""
        made_ND = torch.zeros_like(key_ND)
        for expert in expert_NK.unique().tolist():
            token_n, slot_n = (expert_NK == expert).nonzero(as_tuple=True)
            change_nD = self.experts[expert](key_ND[token_n])
            if weight_NK is not None:
                change_nD = change_nD * weight_NK[token_n, slot_n, None]
            made_ND.index_add_(0, token_n, change_nD.to(made_ND.dtype))
        return made_ND


class RoutedExperts(ExpertFeedForwards):
    """Experts that a learned router chooses. Scores are computed in float32. The router has the model's dtype, also
    where the model's matrices are quantized.
    """

    def __init__(self, config: ModelConfig, part: Experts) -> None:
        super().__init__(config, part.experts, part.expert_dim, part.top)
        self.part = part
        self.router = nn.Linear(config.dim, part.experts, bias=False)

    def forward(self, key_BTD: Float[Tensor, "B T D"], context: ForwardContext | None) -> Float[Tensor, "B T D"]:
        """Returns the weighted sum of the chosen experts. Tells the loss `balance`."""
        key_ND = key_BTD.flatten(0, 1)
        with torch.autocast(key_BTD.device.type, enabled=False):
            scores_NE = F.linear(exact(key_ND), exact(self.router.weight))
        probability_NE = scores_NE.softmax(dim=1)
        weight_NK, expert_NK = probability_NE.topk(self.top, dim=1)
        if self.part.normalize:
            weight_NK = weight_NK / weight_NK.sum(dim=1, keepdim=True)
        if self.part.balance and context is not None and context.losses is not None:
            context.tell("balance", self.part.balance * imbalance(probability_NE, expert_NK, context))
        return self.read(key_ND, expert_NK, weight_NK).view_as(key_BTD)


class HashedExperts(ExpertFeedForwards):
    """Experts that a table of the vocabulary chooses."""

    def __init__(self, config: ModelConfig, part: HashExperts, layer: int) -> None:
        super().__init__(config, part.experts, part.expert_dim, top=1)
        order_V = drawn(part.seed, layer, torch.arange(config.vocab_size, device="cpu")).argsort()
        # Not a buffer: the loader builds decoders without memory, and no file has this table.
        self.table_V = (order_V.argsort() % part.experts).to("cpu")

    def forward(self, key_BTD: Float[Tensor, "B T D"], context: ForwardContext | None) -> Float[Tensor, "B T D"]:
        """Returns the output of each token's expert. Raises InvalidInput for vectors that are of no token."""
        if context is None or context.tokens_BT is None:
            raise InvalidInput("hash experts are chosen by tokens, and vectors were read", field="channel")
        self.table_V = self.table_V.to(key_BTD.device)
        expert_N1 = self.table_V[context.tokens_BT].reshape(-1, 1)
        return self.read(key_BTD.flatten(0, 1), expert_N1, None).view_as(key_BTD)


def imbalance(
    probability_NE: Float[Tensor, "N E"], expert_NK: Int[Tensor, "N K"], context: ForwardContext
) -> Float[Tensor, ""]:
    """Returns E sum(f p) over the real tokens: 1 for even use, E where one expert has all with certainty."""
    is_real_N = context.is_real_BT.flatten()
    E, probability_NE, expert_NK = probability_NE.shape[1], probability_NE[is_real_N], expert_NK[is_real_N]
    share_E = F.one_hot(expert_NK, E).to(probability_NE.dtype).mean(dim=(0, 1))
    return E * (share_E * probability_NE.mean(dim=0)).sum()
