"""A model with experts that learned text -> its loss, and how evenly the experts share the tokens.

Shapes: B rows, T positions, E experts.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor

from memlm.bench.effect import Figures, bits
from memlm.bench.learning import TEST_STEP, Learned
from memlm.model import Decoder
from memlm.model.experts import ExpertFeedForwards

TEXTS = 16


def bits_and_load(learned: Learned) -> Figures:
    """Returns `bits`, and the tokens of the busiest expert over those of an even share, as a mean over the layers: of
    a step of learning (`busiest_learning`) and of a prediction (`busiest_predicting`), both on held-out texts.
    """
    task, generator = learned.task.held_out, np.random.default_rng([learned.seed, TEST_STEP])
    inputs_BT = torch.from_numpy(task.draw(generator, TEXTS, task.stages[-1]).inputs_BT)
    figures = bits(learned)
    if any(isinstance(module, ExpertFeedForwards) for module in learned.decoder.modules()):
        for name, learns in (("learning", True), ("predicting", False)):
            figures[f"busiest_{name}"] = busiest(learned.decoder, inputs_BT, learns=learns)
    return figures


def busiest(decoder: Decoder, inputs_BT: Tensor, *, learns: bool) -> float:
    """Returns the greatest number of tokens of an expert over the mean, as a mean over the layers, of one pass."""
    was_training = decoder.training
    with _counts(decoder) as counts, torch.set_grad_enabled(learns):
        decoder.train(learns)(inputs_BT)
    decoder.take_losses()
    decoder.train(was_training)
    return float(np.mean([max(count_E) / np.mean(count_E) for count_E in counts]))


@contextmanager
def _counts(decoder: Decoder) -> Iterator[list[list[int]]]:
    """Gives the tokens of each expert of each layer that has some, counted until the end."""
    layers = [module for module in decoder.modules() if isinstance(module, ExpertFeedForwards)]
    counts, handles = [[0] * len(layer.experts) for layer in layers], []
    for layer, count_E in zip(layers, counts, strict=True):
        for number, expert in enumerate(layer.experts):

            def count(_: Any, inputs: tuple[Tensor, ...], number: int = number, count_E: list[int] = count_E) -> None:
                count_E[number] += inputs[0].shape[0]

            handles.append(expert.register_forward_pre_hook(count))
    try:
        yield counts
    finally:
        for handle in handles:
            handle.remove()
