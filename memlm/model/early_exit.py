"""Early exit: a token skips the later layers once an earlier one is confident (CALM, arXiv 2207.07061).

Skipped layers still write keys and values for later tokens, projected from the state at the exit (section 3.2), so
attention finds every place written.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor, nn

from memlm.errors import InvalidInput
from memlm.model.decoder import Decoder
from memlm.model.exits import ExitStack
from memlm.model.forward import ForwardContext
from memlm.model.state.decoder_state import DecoderState, check_room

MEASURES = ("softmax", "state", "halt")
HALTING = 0.5  # the confidence of a model's own halting at which a token leaves, where none was calibrated


@dataclass(frozen=True, slots=True)
class ExitRule:
    """The confidence at which a token skips the later layers.

    `softmax` measures the probability of the likeliest token minus that of the second, at the cost of one product with
    the vocabulary per layer. `state` measures half of 1 + the cosine between the states before and after a layer.
    `halt` measures the probability that the token needs no deeper exit, as the model has learned it
    (`memlm.model.exits`). Raises InvalidInput for another measure or a threshold outside 0 to 1.
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

    def confidence(self, decoder: Decoder, streams: Sequence[Float[Tensor, "1 1 D"]]) -> float:
        """Returns the confidence of one token after a layer, 0 to 1. `streams` are its states from the embedding on.

        Raises InvalidInput for `halt` and a model that has not learned to halt.
        """
        before_11D, after_11D = streams[-2:]
        if self.measure == "state":
            return (1 + float(F.cosine_similarity(before_11D, after_11D, dim=-1))) / 2
        if self.measure == "halt":
            stack = decoder.stack
            if not learned_to_halt(decoder):
                raise InvalidInput(
                    "the model has not learned to halt; train one with a stack of exits and a halt, or measure softmax"
                    " or state",
                    field="measure",
                )
            reached = [streams[layer] for layer in stack.layers if layer < len(streams)]
            return min(1.0, float(stack.log_depths(streams[1], reached).exp().sum()))
        norm = norm_behind(len(streams) - 1, decoder)
        best = decoder.logits(norm(after_11D)).float().softmax(dim=-1).flatten().topk(2).values
        return float(best[0] - best[1])


def learned_to_halt(decoder: Decoder) -> bool:
    """Whether a model has learned where its tokens may leave."""
    return isinstance(decoder.stack, ExitStack) and decoder.stack.halt is not None


def norm_behind(layer: int, decoder: Decoder) -> nn.Module:
    """Returns the norm between a layer, counted from 1, and the head: that of an exit, or the decoder's own."""
    return decoder.stack.norm_behind(layer, decoder) if isinstance(decoder.stack, ExitStack) else decoder.norm


def forward_early_exit(
    decoder: Decoder, token_11: Int[Tensor, "1 1"], state: DecoderState, rule: ExitRule
) -> tuple[Float[Tensor, "1 1 D"], int]:
    """Reads one token of one sequence. Returns the final hidden state, and the number of layers computed.

    A token leaves a model with a stack of exits at these alone, and any other model at any layer. With a threshold of 1
    the result equals the whole model's, bit for bit, unless a confidence of exactly 1 is reached. Raises InvalidInput
    for a model with another stack.
    """
    if decoder.stack is not None and not isinstance(decoder.stack, ExitStack):
        raise InvalidInput("early exit leaves out layers, and this model's stack reads them all", field="early_exit")
    num_layers = decoder.config.num_layers
    exits = range(1, num_layers) if decoder.stack is None else decoder.stack.layers
    check_room(state, 1)
    if decoder.border is not None:
        decoder.border.begin(decoder, state)
    state.make_room(1)
    mask, token_11 = state.attention_mask([1], 1, None), token_11.to(decoder.device)
    context = ForwardContext(mask, [1], decoder.dtype, state, decoder.rotary, decoder.relative_bias, tokens_BT=token_11)
    decoder.begin_step(context)
    streams, used = [decoder.embed(token_11, mask)], 0
    for block in decoder.blocks:
        streams.append(block.finish(*block.attend(streams[-1], context), context))
        used += 1
        may_leave = used in exits and rule.first_layer <= used < num_layers
        if may_leave and rule.confidence(decoder, streams) > rule.threshold:
            break
    for block in list(decoder.blocks)[used:]:
        block.keep(streams[-1], context)
    state.advance([1])
    decoder.end_piece(state)
    return norm_behind(used, decoder)(streams[-1]), used


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
