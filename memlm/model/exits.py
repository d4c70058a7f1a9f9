"""Exits that learn: the decoder predicts from earlier layers too, and learns where a token may stop (Depth-Adaptive
Transformer, arXiv 1910.10073). `memlm.model.early_exit` leaves at them.

Shapes: B batch, T new tokens, D width, E exits, S the exits that a token has reached, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, NamedTuple

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor, nn

from memlm.errors import InvalidInput, check_choice, check_range
from memlm.model.attention.knn_attention import exact
from memlm.model.draws import drawn
from memlm.model.norms import make_norm
from memlm.model.parts import Part

if TYPE_CHECKING:
    from memlm.model.config import ModelConfig
    from memlm.model.decoder import Decoder
    from memlm.model.forward import ForwardContext
    from memlm.model.layers import Block

WEIGHTINGS = {"uniform": 0.0, "sqrt": 0.5, "linear": 1.0}  # powers of the layer's number
TRAININGS = ("aligned", "mixed")
HALTS = ("none", "multinomial", "geometric")
ORACLES = ("likelihood", "correctness")
NO_TARGET = -100  # as `cross_entropy` has it


@dataclass(frozen=True, slots=True)
class Exits(Part):
    """A stack whose `layers`, counted from 1, predict the next token through norms of their own and the model's head.
    The last layer is always among them, and () are all layers.

    `aligned` training minimizes sum(w_n CE_n) / sum(w_n) over the exits, where w_n is 1, n or the root of n by
    `weighting` and n the layer (section 2.1). `mixed` training draws an exit for each token, whose state stands in for
    it in later layers (section 2.2).

    With a `halt`, the model learns q(n), the exit of a token: `multinomial` from the first layer's state, `geometric`
    as the product of probabilities to go on at each exit (section 3). Its cross-entropy with the exit of the greatest
    score has the weight `halt_weight`. The score is the log-likelihood of the next token, or 1 where the exit predicts
    it, summed over neighbors t' by exp(-(t - t')^2 / `smoothing`), less `depth_cost` a layer.
    """

    seam: ClassVar[str] = "stack"
    kind: ClassVar[str] = "exits"

    layers: tuple[int, ...] = ()
    training: str = "aligned"
    weighting: str = "uniform"
    halt: str = "none"
    oracle: str = "likelihood"
    halt_weight: float = 0.1
    depth_cost: float = 0.05
    smoothing: float = 0.0

    def __post_init__(self) -> None:
        check_choice("training", self.training, TRAININGS)
        check_choice("weighting", self.weighting, tuple(WEIGHTINGS))
        check_choice("halt", self.halt, HALTS)
        check_choice("oracle", self.oracle, ORACLES)
        check_range("halt_weight", self.halt_weight, least=0)
        check_range("depth_cost", self.depth_cost, least=0)
        check_range("smoothing", self.smoothing, least=0)
        if self.training == "mixed" and self.halt != "none":
            raise InvalidInput(
                "halt compares all exits of a token, and mixed training has one; choose aligned training or no halt",
                field="halt",
            )

    def all_layers(self, config: ModelConfig) -> tuple[int, ...]:
        """Returns the layers with exits, counted from 1, the last one of the model included."""
        return tuple(sorted({*(self.layers or range(1, config.num_layers)), config.num_layers}))

    def build(self, config: ModelConfig, layer: int, sublayer: str = "") -> ExitStack:
        """Returns the norms of the exits, and the halting of tokens."""
        return ExitStack(config, self)

    def check(self, config: ModelConfig) -> None:
        """Refuses exits behind layers that the model does not have."""
        for layer in self.layers:
            check_range("stack.layers", layer, least=1, most=config.num_layers, whole=True)
        if list(self.layers) != sorted({*self.layers}):
            raise InvalidInput(
                f"exits are behind the layers {list(self.layers)}; expected each once, in order", field="stack.layers"
            )


def refuse_exits(name: str, config: ModelConfig) -> None:
    """Raises InvalidInput for a model with exits. For models whose loss is not the decoder's: no exit would learn."""
    if isinstance(config.stack, Exits):
        raise InvalidInput(
            f"{name} has a stack of exits, which learn by the loss of next tokens alone; leave the stack out",
            field=f"{name}.stack",
        )


class Pass(NamedTuple):
    """The parts of a learning pass that its loss needs: the streams behind the first layer and behind each exit, and
    the exits that mixed training drew, as layers.
    """

    first_BTD: Float[Tensor, "B T D"]
    streams_EBTD: list[Float[Tensor, "B T D"]]
    depth_BT: Int[Tensor, "B T"] | None


class ExitStack(nn.Module):
    """The plain loop over the layers, with a norm for each exit but the last, which has the decoder's own."""

    def __init__(self, config: ModelConfig, part: Exits) -> None:
        super().__init__()
        self.part, self.layers = part, part.all_layers(config)
        self.norms = nn.ModuleDict({str(layer): make_norm(config) for layer in self.layers[:-1]})
        num_scores = {"none": 0, "multinomial": len(self.layers), "geometric": len(self.layers) - 1}[part.halt]
        # Few numbers that decide much. They are not quantized, and have the model's dtype.
        self.halt = nn.Linear(config.dim, num_scores) if num_scores else None
        self._passes = list[Pass]()

    def begin_pass(self) -> None:
        """Forgets the streams of the pass before."""
        self._passes = []

    def read(
        self, blocks: Sequence[Block], hidden_BTD: Float[Tensor, "B T D"], context: ForwardContext, *, finishes: bool
    ) -> tuple[Float[Tensor, "B T D"], Float[Tensor, "B T D"]]:
        """Returns the stream behind the last layer, and its keys. Keeps the streams of the exits where it learns."""
        learns, streams_EBTD, first_BTD = context.losses is not None, list[Tensor](), hidden_BTD
        is_mixed = learns and self.training and self.part.training == "mixed"
        depth_BT = self.draw_depths(context) if is_mixed else None
        for number, block in enumerate(blocks, start=1):
            attended_BTD, key_BTD = block.attend(hidden_BTD, context)
            if number == len(blocks) and not finishes:
                return attended_BTD, key_BTD
            made_BTD = block.finish(attended_BTD, key_BTD, context)
            goes_on_BT1 = None if depth_BT is None else depth_BT[..., None] >= number
            hidden_BTD = made_BTD if goes_on_BT1 is None else torch.where(goes_on_BT1, made_BTD, hidden_BTD)
            first_BTD = hidden_BTD if number == 1 else first_BTD
            if learns and number in self.layers:
                streams_EBTD.append(hidden_BTD)
        if learns:
            self._passes.append(Pass(first_BTD, streams_EBTD, depth_BT))
        return hidden_BTD, key_BTD

    def draw_depths(self, context: ForwardContext) -> Int[Tensor, "B T"]:
        """Draws an exit for each token, as a layer. The draws follow from the texts, so that a resumed run repeats
        them.
        """
        tokens_BT = context.tokens_BT
        if tokens_BT is None:
            raise InvalidInput("mixed training draws exits by tokens, and vectors were read", field="stack")
        places_T = torch.arange(tokens_BT.shape[1], device=tokens_BT.device)
        text_B1 = drawn(tokens_BT, places_T).sum(dim=1, keepdim=True)
        layers_E = torch.tensor(self.layers, device=tokens_BT.device)
        return layers_E[drawn(text_B1, places_T) % len(self.layers)]

    def norm_behind(self, layer: int, decoder: Decoder) -> nn.Module:
        """Returns the norm of an exit."""
        return decoder.norm if layer == self.layers[-1] else self.norms[str(layer)]

    def loss(self, decoder: Decoder, targets_BT: Int[Tensor, "B T"]) -> Float[Tensor, ""]:
        """Returns the loss of the latest pass, in nats a target, with that of the halting. A target of -100 is none."""
        passes, self._passes = self._passes, []
        streams_EBTD = [torch.cat(pieces, dim=1) for pieces in zip(*(p.streams_EBTD for p in passes), strict=True)]
        norms_E = [self.norm_behind(layer, decoder) for layer in self.layers]
        if depths := [each.depth_BT for each in passes if each.depth_BT is not None]:
            depth_BT1, state_BTD = torch.cat(depths, dim=1)[..., None], torch.zeros_like(streams_EBTD[-1])
            for layer, norm in zip(self.layers, norms_E, strict=True):  # the last stream is that of each token's exit
                state_BTD = torch.where(depth_BT1 == layer, norm(streams_EBTD[-1]), state_BTD)
            return F.cross_entropy(exact(decoder.logits(state_BTD)).flatten(0, 1), targets_BT.flatten())
        weights, losses, scores = [n ** WEIGHTINGS[self.part.weighting] for n in self.layers], [], list[Tensor]()
        for weight, norm, stream_BTD in zip(weights, norms_E, streams_EBTD, strict=True):
            logits_BTV = exact(decoder.logits(norm(stream_BTD)))
            nats_BT = F.cross_entropy(logits_BTV.movedim(-1, 1), targets_BT, reduction="none")
            losses.append(weight * nats_BT.sum() / (targets_BT != NO_TARGET).sum())
            is_right_BT = (logits_BTV.argmax(dim=-1) == targets_BT).to(nats_BT.dtype)
            scores.append(is_right_BT if self.part.oracle == "correctness" else -nats_BT.detach())
        total = torch.stack(losses).sum() / sum(weights)
        if self.halt is None:
            return total
        best_BT = self.oracle(torch.stack(scores, dim=-1)).masked_fill(targets_BT == NO_TARGET, NO_TARGET)
        log_q_BTE = self.log_depths(torch.cat([each.first_BTD for each in passes], dim=1), streams_EBTD)
        return total + self.part.halt_weight * F.nll_loss(log_q_BTE.movedim(-1, 1), best_BT, ignore_index=NO_TARGET)

    def oracle(self, scores_BTE: Float[Tensor, "B T E"]) -> Int[Tensor, "B T"]:
        """Returns the number of the best exit of each token, 0 for the first, by smoothed scores less their layers'
        cost. Of equal ones it is the first.
        """
        if self.part.smoothing:
            places_T = torch.arange(scores_BTE.shape[1], device=scores_BTE.device, dtype=scores_BTE.dtype)
            kernel_TT = (-((places_T[:, None] - places_T) ** 2) / self.part.smoothing).exp()
            scores_BTE = torch.einsum("ts,bse->bte", kernel_TT, scores_BTE)
        layers_E = torch.tensor(self.layers, device=scores_BTE.device, dtype=scores_BTE.dtype)
        return (scores_BTE - self.part.depth_cost * layers_E).argmax(dim=-1)

    def log_depths(
        self, first_BTD: Float[Tensor, "B T D"], streams_SBTD: Sequence[Float[Tensor, "B T D"]]
    ) -> Float[Tensor, "B T S"]:
        """Returns log q of the exits whose streams are given, the first ones. Streams are scaled to length root D."""
        assert self.halt is not None
        with torch.autocast(first_BTD.device.type, enabled=False):
            weight_ED, bias_E = exact(self.halt.weight), exact(self.halt.bias)
            if self.part.halt == "multinomial":
                return F.linear(_scaled(first_BTD), weight_ED, bias_E).log_softmax(dim=-1)[..., : len(streams_SBTD)]
            log_on_BT, log_q = torch.zeros_like(exact(first_BTD[..., 0])), list[Tensor]()
            for number, stream_BTD in enumerate(streams_SBTD):
                if number == len(self.layers) - 1:
                    log_q.append(log_on_BT)
                    break
                score_BT = _scaled(stream_BTD) @ weight_ED[number] + bias_E[number]
                log_q.append(log_on_BT + F.logsigmoid(score_BT))
                log_on_BT = log_on_BT + F.logsigmoid(-score_BT)
            return torch.stack(log_q, dim=-1)


def _scaled(stream_BTD: Float[Tensor, "B T D"]) -> Float[Tensor, "B T D"]:
    wide_BTD = exact(stream_BTD)
    return F.rms_norm(wide_BTD, wide_BTD.shape[-1:])
