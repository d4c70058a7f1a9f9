"""What `memlm bench variants --effects` compares: models that learn one task, or a measurement of its own kind."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from memlm.bench.learning import Learned, config_for, learn
from memlm.bench.tasks import Task

SEEDS = 3
PLAIN, AGAIN = "plain", "plain again"

Figures = dict[str, float]


def accuracy(learned: Learned) -> Figures:
    """The share of right answers in the last stage, and the number of stages passed."""
    return {"accuracy": learned.accuracy, "stage": float(learned.stage)}


def bits(learned: Learned) -> Figures:
    """The loss in bits an answer, as for text."""
    return {"bits": learned.loss / math.log(2)}


@dataclass(frozen=True)
class Effect:
    """A comparison of configs that learn one task.

    `configs` are changes of the plain config by name. The key `training` of a change has fields of `TrainConfig` for
    that config alone. `shape` and `training` change all of them. A run ends after `steps`, when the task is learned, or
    after `minutes` on one thread, which cut it on slow machines only. `expects` says what the paper claims.
    """

    part: str
    expects: str
    task: Task
    configs: Mapping[str, Mapping[str, Any]]
    steps: int
    minutes: float
    figures: Callable[[Learned], Figures] = accuracy
    shape: Mapping[str, Any] = field(default_factory=dict)
    training: Mapping[str, Any] = field(default_factory=dict)

    @property
    def rows(self) -> tuple[str, ...]:
        """The configs in order, the plain one first and last."""
        return (PLAIN, *self.configs, AGAIN)

    def run(self, row: str, seed: int, device: str) -> Figures:
        """Trains one config from one seed. The plain one that comes again has seeds of its own."""
        change = dict(self.configs.get(row, {}))
        training = {**self.training, **change.pop("training", {})}
        learned = learn(
            config_for(self.task, **{**self.shape, **change}), self.task, steps=self.steps, seconds=60 * self.minutes,
            seed=seed + (SEEDS if row == AGAIN else 0), device=device, training=training,
        )  # fmt: skip
        return {
            **self.figures(learned),
            "is_learned": float(learned.is_learned),
            "steps": float(learned.steps),
            "seconds": learned.seconds,
        }


@dataclass(frozen=True)
class Measurement:
    """A comparison of its own kind. `measure` takes a seed and returns figures by row. All seeds count."""

    part: str
    expects: str
    measure: Callable[[int], Mapping[str, Figures]]
    minutes: float


def mixer(kind: str, **fields: Any) -> dict[str, Any]:
    """Returns the change of a config that puts a mixer in all layers."""
    return {"layers": [{"mixer": {"kind": kind, **fields}}]}
