"""Stacks that read a few blocks again and again: Universal Transformers, which halt by token, and looped ones.

A round has places of its own in a state, as if it were other layers. So `num_layers` of the config counts the blocks of
all rounds, and a state takes as many bytes as that of a plain model of the depth.

Shapes: B batch, T new tokens, D width.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float
from torch import Tensor, nn

from memlm.errors import InvalidInput, check_range
from memlm.model.attention.knn_attention import exact
from memlm.model.parts import Part

if TYPE_CHECKING:
    from memlm.model.config import ModelConfig
    from memlm.model.forward import ForwardContext
    from memlm.model.layers import Block


@dataclass(frozen=True, slots=True)
class Rounds(Part):
    """A stack of `blocks` blocks, which are read again in each round."""

    seam: ClassVar[str] = "stack"

    blocks: int = 1

    def __post_init__(self) -> None:
        check_range("blocks", self.blocks, least=1, whole=True)

    def num_blocks(self, config: ModelConfig) -> int:
        """How many blocks have weights."""
        return self.blocks

    def check(self, config: ModelConfig) -> None:
        """Refuses layers that are not alike in all rounds, and memories of single layers."""
        if config.num_layers % self.blocks:
            raise InvalidInput(
                f"{self.blocks} blocks do not repeat evenly through a depth of {config.num_layers}", field="stack"
            )
        layers = range(config.num_layers)
        windows = config.windows or (0,) * config.num_layers
        if any(windows[n] != windows[n % self.blocks] for n in layers if n < len(windows)):
            raise InvalidInput(f"windows are {windows}; expected equal ones in each round", field="windows")
        if {n for n in layers if n % self.blocks in config.no_rope_layers} != set(config.no_rope_layers):
            raise InvalidInput("no_rope_layers differ between rounds, which read equal blocks", field="no_rope_layers")
        for name in ("memorizing", "compression", "extended_attention"):
            if getattr(config, name):
                raise InvalidInput(f"{self.kind} has rounds, which share no {name}; leave one of both out", field=name)


@dataclass(frozen=True, slots=True)
class Universal(Rounds):
    """Each token halts after as many rounds as it needs (Universal Transformer, arXiv 1807.03819; ACT, 1603.08983).

    Behind round n a token halts with probability p_n = sigmoid(w x_n + b). It takes its last round N where the sum of
    p reaches 1 - `epsilon`, or where the depth ends. Its result is sum(p_n x_n) + (1 - sum(p_n)) x_N over n < N. Rounds
    after N read x_N, so that later tokens find it. `ponder` is the weight of the loss N + (1 - sum(p_n)). With
    `signals`, a learned vector of the round is added to its input.
    """

    kind: ClassVar[str] = "universal"

    ponder: float = 0.01
    epsilon: float = 0.01
    signals: bool = True

    def __post_init__(self) -> None:
        Rounds.__post_init__(self)
        check_range("ponder", self.ponder, least=0)
        check_range("epsilon", self.epsilon, above=0, most=0.5)

    def build(self, config: ModelConfig, layer: int, sublayer: str = "") -> UniversalStack:
        """Returns the halting unit."""
        return UniversalStack(config, self)


@dataclass(frozen=True, slots=True)
class Looped(Rounds):
    """All tokens take all rounds, z = f(z + x) from z = 0 with x the embedding (arXiv 2301.13196, 2311.12424).

    Without `injects`, x is the first z alone.
    """

    kind: ClassVar[str] = "looped"

    injects: bool = True

    def build(self, config: ModelConfig, layer: int, sublayer: str = "") -> LoopedStack:
        """Returns the loop. Has no parameters."""
        return LoopedStack(config.num_layers // self.blocks, self)


def read_round(
    blocks: Sequence[Block], hidden_BTD: Tensor, running_BT1: Tensor | None, context: ForwardContext, finishes: bool
) -> tuple[Float[Tensor, "B T D"], Float[Tensor, "B T D"]]:
    """Returns the stream and the keys behind the blocks. Tokens that are not running keep the stream as it is."""
    for block in blocks:
        attended_BTD, key_BTD = block.attend(hidden_BTD, context)
        is_whole = finishes or block is not blocks[-1]
        after_BTD = block.finish(attended_BTD, key_BTD, context) if is_whole else attended_BTD
        hidden_BTD = after_BTD if running_BT1 is None else torch.where(running_BT1, after_BTD, hidden_BTD)
    return hidden_BTD, key_BTD


class LoopedStack(nn.Module):
    """The loop over the rounds."""

    def __init__(self, num_rounds: int, part: Looped) -> None:
        super().__init__()
        self.num_rounds, self.part = num_rounds, part

    def read(
        self, blocks: Sequence[Block], hidden_BTD: Float[Tensor, "B T D"], context: ForwardContext, *, finishes: bool
    ) -> tuple[Float[Tensor, "B T D"], Float[Tensor, "B T D"]]:
        """Returns the stream behind the last round, and its keys."""
        first_BTD = hidden_BTD
        for number in range(self.num_rounds):
            context.layer_offset, is_last = number * len(blocks), number == self.num_rounds - 1
            if number and self.part.injects:
                hidden_BTD = hidden_BTD + first_BTD
            hidden_BTD, key_BTD = read_round(blocks, hidden_BTD, None, context, finishes or not is_last)
        context.layer_offset = 0
        return hidden_BTD, key_BTD


class UniversalStack(nn.Module):
    """The loop over the rounds, with the halting of each token."""

    def __init__(self, config: ModelConfig, part: Universal) -> None:
        super().__init__()
        self.num_rounds, self.part = config.num_layers // part.blocks, part
        self.halt = nn.Linear(config.dim, 1)  # few numbers that decide much, and are not quantized
        self.signals = nn.Embedding(self.num_rounds, config.dim) if part.signals else None

    def initialize(self) -> None:
        """Starts with a bias of 1, by which two rounds suffice."""
        nn.init.ones_(self.halt.bias)

    def read(
        self, blocks: Sequence[Block], hidden_BTD: Float[Tensor, "B T D"], context: ForwardContext, *, finishes: bool
    ) -> tuple[Float[Tensor, "B T D"], Float[Tensor, "B T D"]]:
        """Returns each token's mean over its rounds, of the stream and of the keys. Tells the loss `ponder`."""
        mean = Halting(hidden_BTD, context.is_real_BT, 1 - self.part.epsilon)
        for number in range(self.num_rounds):
            context.layer_offset, is_last = number * len(blocks), number == self.num_rounds - 1
            input_BTD = hidden_BTD if self.signals is None else hidden_BTD + self.signals.weight[number]
            if mean.is_over:  # later tokens find the keys of the other rounds nevertheless
                for block in blocks:
                    block.keep(input_BTD, context)
                continue
            running_BT1 = mean.running_BT[..., None]
            made_BTD, key_BTD = read_round(blocks, input_BTD, running_BT1, context, finishes or not is_last)
            hidden_BTD = torch.where(running_BT1, made_BTD, hidden_BTD)
            mean.add(self.halts(hidden_BTD), hidden_BTD, key_BTD, is_last)
        context.layer_offset = 0
        if self.part.ponder and context.losses is not None:
            context.tell("ponder", self.part.ponder * mean.cost_BT[context.is_real_BT].mean())
        return mean.stream_BTD, mean.key_BTD

    def halts(self, hidden_BTD: Float[Tensor, "B T D"]) -> Float[Tensor, "B T"]:
        """Returns the probability of each token to halt behind a round, in float32 or wider."""
        with torch.autocast(hidden_BTD.device.type, enabled=False):
            score_BT1 = F.linear(exact(hidden_BTD), exact(self.halt.weight), exact(self.halt.bias))
        return torch.sigmoid(score_BT1[..., 0])


class Halting:
    """The rounds of each token so far: which tokens go on, and the weighted means of their streams and keys."""

    def __init__(self, like_BTD: Tensor, is_real_BT: Bool[Tensor, "B T"], enough: float) -> None:
        self.running_BT, self.enough = is_real_BT, enough
        self.total_BT = torch.zeros_like(exact(like_BTD[..., 0]))  # the sum of p
        self.cost_BT = torch.zeros_like(self.total_BT)  # rounds and remainder
        self.stream_BTD, self.key_BTD = torch.zeros_like(like_BTD), torch.zeros_like(like_BTD)

    @property
    def is_over(self) -> bool:
        """Whether all real tokens have halted."""
        return not bool(self.running_BT.any())

    def add(self, p_BT: Tensor, hidden_BTD: Tensor, key_BTD: Tensor, is_last: bool) -> None:
        """Adds a round of the tokens that still run. It is the last one of those whose p suffices."""
        halts_BT = self.running_BT & ((self.total_BT + p_BT >= self.enough) | is_last)
        remainder_BT = 1 - self.total_BT
        weight_BT = torch.where(halts_BT, remainder_BT, p_BT) * self.running_BT
        self.stream_BTD = self.stream_BTD + weight_BT[..., None].to(hidden_BTD.dtype) * hidden_BTD
        self.key_BTD = self.key_BTD + weight_BT[..., None].to(key_BTD.dtype) * key_BTD
        self.cost_BT = self.cost_BT + self.running_BT + remainder_BT * halts_BT
        self.total_BT = self.total_BT + p_BT * self.running_BT
        self.running_BT = self.running_BT & ~halts_BT
