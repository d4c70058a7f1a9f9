"""Training of encoder-decoders on pairs of source and answer, as span corruption or a task makes them.

Shapes: B batch, T tokens of an answer, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeAlias

import numpy as np
import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor

from memlm.model.files.encoder_files import padded
from memlm.training.validation import PADDING
from memlm.zoo.shapes.encoder_decoder import EncoderDecoder
from memlm.zoo.shapes.fitting import fit

Pair: TypeAlias = tuple[Sequence[int], Sequence[int]]


def answer_logits(
    model: EncoderDecoder, pairs: Sequence[Pair], *, start_id: int
) -> tuple[Float[Tensor, "B T V"], Int[Tensor, "B T"]]:
    """Returns the scores of each token of the answers after those before it, and the answers, padded with PADDING."""
    sources_BN, length_B = padded([source for source, _ in pairs])
    answers_BT, answer_length_B = padded([answer for _, answer in pairs])
    is_answer_BT = torch.arange(answers_BT.shape[1]) < torch.tensor(answer_length_B)[:, None]
    inputs_BT = F.pad(answers_BT[:, :-1], (1, 0), value=start_id)
    state = model.new_state(
        batch_size=len(pairs), capacity=inputs_BT.shape[1], sources_B=model.encode(sources_BN, length_B)
    )
    hidden_BTD, _ = model(inputs_BT, state)
    return model.logits(hidden_BTD), answers_BT.masked_fill(~is_answer_BT, PADDING).to(hidden_BTD.device)


def answer_loss(model: EncoderDecoder, pairs: Sequence[Pair], *, start_id: int) -> Float[Tensor, ""]:
    """Returns the mean of -log p of the tokens of the answers, in nats."""
    logits_BTV, answers_BT = answer_logits(model, pairs, start_id=start_id)
    return F.cross_entropy(logits_BTV.flatten(0, 1).float(), answers_BT.flatten(), ignore_index=PADDING)


def learn_answers(
    model: EncoderDecoder,
    draw: Callable[[np.random.Generator], Sequence[Pair]],
    *,
    start_id: int,
    num_steps: int,
    learning_rate: float = 1e-3,
    seed: int = 0,
) -> list[float]:
    """Trains an encoder-decoder on the pairs of ids that `draw` makes for each step. Returns the loss of each step.

    Answers should hold the token that ends them. The optimizer is that of `fit`. For the span corruption of T5, draw
    texts and call `memlm.zoo.shapes.span_corruption.corrupt_spans`.
    """
    generator = np.random.default_rng(seed)
    return fit(
        model, lambda step: answer_loss(model, draw(generator), start_id=start_id), num_steps=num_steps,
        learning_rate=learning_rate,
    )  # fmt: skip
