"""Early exit: a token skips the later layers once an earlier one is confident (CALM, arXiv 2207.07061).

Skipped layers still write keys and values for later tokens, projected from the state at the exit (section 3.2), so
attention finds every place written.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor

from memlm.errors import InvalidInput
from memlm.model.decoder import Decoder
from memlm.model.forward import ForwardContext
from memlm.model.state import DecoderState, check_room

MEASURES = ("softmax", "state")


@dataclass(frozen=True, slots=True)
class ExitRule:
    """The confidence at which a token skips the later layers.

    `softmax` measures the probability of the likeliest token minus that of the second, at the cost of one product with
    the vocabulary per layer. `state` measures half of 1 + the cosine between the states before and after a layer.
    Raises InvalidInput for another measure or a threshold outside 0 to 1.
    """

    measure: str
    threshold: float
    first_layer: int = 1

    def __post_init__(self) -> None:
        if self.measure not in MEASURES:
            raise InvalidInput(f"measure is {self.measure!r}; expected one of {', '.join(MEASURES)}", field="measure")
        if not 0 <= self.threshold <= 1 or not math.isfinite(self.threshold):
            raise InvalidInput(f"threshold is {self.threshold}; expected 0 to 1", field="threshold")
        if self.first_layer < 1:
            raise InvalidInput(f"first_layer is {self.first_layer}; expected at least 1", field="first_layer")

    def confidence(
        self, decoder: Decoder, before_BTD: Float[Tensor, "B T D"], after_BTD: Float[Tensor, "B T D"]
    ) -> float:
        """Returns the confidence of one token's state after a layer, 0 to 1."""
        if self.measure == "state":
            return (1 + float(F.cosine_similarity(before_BTD, after_BTD, dim=-1))) / 2
        best = decoder.logits(decoder.norm(after_BTD)).float().softmax(dim=-1).flatten().topk(2).values
        return float(best[0] - best[1])


def forward_early_exit(
    decoder: Decoder, token_11: Int[Tensor, "1 1"], state: DecoderState, rule: ExitRule
) -> tuple[Float[Tensor, "1 1 D"], int]:
    """Reads one token of one sequence. Returns the final hidden state, and the number of layers computed.

    With a threshold of 1 the result equals the whole model's, bit for bit, unless a confidence of exactly 1 is reached.
    Raises InvalidInput for a model with a stack of its own.
    """
    if decoder.stack is not None:
        raise InvalidInput("early exit leaves out layers, and this model's stack reads them all", field="early_exit")
    check_room(state, 1)
    if decoder.border is not None:
        decoder.border.begin(decoder, state)
    state.make_room(1)
    mask, token_11 = state.attention_mask([1], 1, None), token_11.to(decoder.device)
    context = ForwardContext(mask, [1], decoder.dtype, state, decoder.rotary, decoder.relative_bias, tokens_BT=token_11)
    decoder.begin_step(context)
    hidden_BTD, used = decoder.embed(token_11, mask), 0
    for block in decoder.blocks:
        before_BTD, used = hidden_BTD, used + 1
        hidden_BTD = block.finish(*block.attend(before_BTD, context), context)
        last = used == decoder.config.num_layers
        if not last and used >= rule.first_layer and rule.confidence(decoder, before_BTD, hidden_BTD) > rule.threshold:
            break
    for block in list(decoder.blocks)[used:]:
        block.keep(hidden_BTD, context)
    state.advance([1])
    decoder.end_piece(state)
    return decoder.norm(hidden_BTD), used


def hoeffding_bentkus(risk: float, allowed: float, count: int) -> float:
    """Returns a p-value of "the true risk exceeds `allowed`", from the mean risk of `count` samples.

    Samples are independent and in 0 to 1 (Learn then Test, arXiv 2110.01052, equation 7).
    """
    if risk >= allowed:
        return 1.0
    hoeffding = math.exp(-count * _divergence(risk, allowed))
    hits = math.ceil(count * risk)
    tail = sum(math.comb(count, n) * allowed**n * (1 - allowed) ** (count - n) for n in range(hits + 1))
    return min(1.0, hoeffding, math.e * tail)


def _divergence(a: float, b: float) -> float:
    """The Kullback-Leibler divergence of two Bernoulli distributions."""
    first = a * math.log(a / b) if a > 0 else 0.0
    return first + ((1 - a) * math.log((1 - a) / (1 - b)) if a < 1 else 0.0)
