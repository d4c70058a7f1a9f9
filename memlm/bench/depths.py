"""A model that learned text -> its loss by the number of layers that its tokens are read with.

Shapes: B rows, T positions.
"""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import torch
import torch.nn.functional as F
from jaxtyping import Int64
from torch import Tensor

from memlm.bench.learning import TEST_STEP, Learned, score_texts
from memlm.model import Decoder
from memlm.model.early_exit import ExitRule, forward_early_exit, learned_to_halt, norm_behind

TEXTS, TEXTS_BY_RULE = 128, 6
THRESHOLDS = {"softmax": (0.8, 0.4, 0.15), "halt": (0.7, 0.5)}


@torch.inference_mode()
def bits_by_depth(learned: Learned) -> dict[str, float]:
    """Returns `bits_N`: bits an answer where all tokens leave behind layer N. For rules by confidence, such as
    `softmax_0.4`, `_layers` is the mean number of layers, and `_more_bits` are those above the whole model's on the
    same texts, which are few.
    """
    decoder, task = learned.decoder.eval(), learned.task.held_out
    generator = np.random.default_rng([learned.seed, TEST_STEP])
    inputs_BT, targets_BT = (torch.from_numpy(each) for each in task.draw(generator, TEXTS, task.stages[-1]))
    figures = dict[str, float]()
    for layer in range(1, decoder.config.num_layers + 1):
        _, nats = score_texts(cut_behind(decoder, layer), inputs_BT, targets_BT)
        figures[f"bits_{layer}"] = nats / math.log(2)
    inputs_BT, targets_BT = inputs_BT[:TEXTS_BY_RULE], targets_BT[:TEXTS_BY_RULE]
    whole = score_texts(decoder, inputs_BT, targets_BT)[1] / math.log(2)
    for measure, thresholds in THRESHOLDS.items():
        for threshold in () if measure == "halt" and not learned_to_halt(decoder) else thresholds:
            bits, layers = _read(decoder, inputs_BT, targets_BT, ExitRule(measure, threshold))
            figures[f"{measure}_{threshold}_layers"] = layers
            figures[f"{measure}_{threshold}_more_bits"] = bits - whole
    return figures


def cut_behind(decoder: Decoder, layer: int) -> Decoder:
    """Returns the model that all tokens leave behind a layer: its first layers, and the norm of the exit."""
    cut = Decoder(replace(decoder.config, num_layers=layer, stack=None)).eval()
    norm = {f"norm.{name}": tensor for name, tensor in norm_behind(layer, decoder).state_dict().items()}
    cut.load_state_dict({**decoder.state_dict(), **norm}, strict=False)
    return cut


def _read(
    decoder: Decoder, inputs_BT: Int64[Tensor, "B T"], targets_BT: Int64[Tensor, "B T"], rule: ExitRule
) -> tuple[float, float]:
    """Returns bits an answer and layers a token of texts that are read token by token with a rule."""
    nats, layers = 0.0, 0
    for inputs_T, targets_T in zip(inputs_BT, targets_BT, strict=True):
        state, hidden = decoder.new_state(capacity=len(inputs_T)), []
        for token_1 in inputs_T.split(1):
            hidden_11D, used = forward_early_exit(decoder, token_1[None], state, rule)
            hidden.append(hidden_11D[0])
            layers += used
        logits_TV = decoder.logits(torch.cat(hidden)).float()
        nats += float(F.cross_entropy(logits_TV, targets_T.to(logits_TV.device)))
    return nats / len(inputs_BT) / math.log(2), layers / inputs_BT.numel()
