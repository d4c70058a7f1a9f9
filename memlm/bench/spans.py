"""The spans that heads learn for a near and for a far task (adaptive attention span, arXiv 1905.07799).

Shapes: B rows, C copies, L symbols of a half, T positions, H heads.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import torch

from memlm.bench.learning import config_for, learn
from memlm.bench.tasks import Drawn, OffsetCopy
from memlm.training.validation import PADDING
from memlm.zoo.adaptive_span import AdaptiveSpanAttention

TOKENS, RAMP, PENALTY = 96, 8, 2e-4
AWAY = (7, 47)  # places back to the token that is the answer
STEPS, SECONDS = 500, 90.0
TRAINING = {"learning_rate": 1e-2, "batch_size": 16}


@dataclass(frozen=True)
class Copies(OffsetCopy):
    """Copies one after another. Learning goes on when it can do them, since spans shrink after that."""

    learnt: ClassVar[float] = float("inf")
    copies: int = 1

    @property
    def num_tokens(self) -> int:
        """Positions of a text."""
        return 2 * self.length * self.copies - 1

    def draw(self, generator: np.random.Generator, rows: int, stage: Any) -> Drawn:
        """Returns texts in which all symbols of second halves are asked for."""
        half_BCL = generator.integers(self.symbols, size=(rows, self.copies, self.length))
        text_BT = np.concatenate([half_BCL, half_BCL], axis=2).reshape(rows, -1)
        is_second_T = np.arange(text_BT.shape[1]) % (2 * self.length) >= self.length
        return Drawn(text_BT[:, :-1], np.where(is_second_T, text_BT, PADDING)[:, 1:])


def learned_spans(seed: int) -> Mapping[str, dict[str, float]]:
    """Trains heads that see the whole text at first. Returns accuracy, and the mean and the widest span of all heads in
    tokens, for a copy from near and one from far in texts of equal length.
    """
    mixer = {"kind": "adaptive_span", "ramp": RAMP, "start": 1.0, "penalty": PENALTY}
    figures = {}
    for away in AWAY:
        task = Copies(length=away + 1, copies=TOKENS // (2 * away + 2))
        config = config_for(task, layers=[{"mixer": mixer}], num_heads=4, num_kv_heads=4)
        learned = learn(
            config, task, steps=STEPS, seconds=SECONDS, seed=seed, training=TRAINING
        )  # fmt: skip
        heads = [block.attention for block in learned.decoder.blocks]
        spans_H = torch.cat([each.spans_H.detach() for each in heads if isinstance(each, AdaptiveSpanAttention)])
        figures[f"copy from {away} back"] = {
            "accuracy": learned.accuracy,
            "mean_span": spans_H.mean().item(),
            "widest_span": spans_H.max().item(),
            "seconds": learned.seconds,
        }
    return figures
