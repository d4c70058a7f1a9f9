"""Models that learn a task (`memlm.bench.tasks`) by the trainer of `memlm train`.

The batches of a step follow from seed, stage and step, and so does the model, so that a run without a time limit that
cuts it is reproducible on one kind of machine.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

from memlm.bench.tasks import Task
from memlm.model import Decoder, ModelConfig
from memlm.training.config import TrainConfig
from memlm.training.data import TrainingBatch
from memlm.training.distributed import ProcessGroup, device_of
from memlm.training.trainer import Trainer
from memlm.training.validation import PADDING

TRAINING = TrainConfig(
    batch_size=32, learning_rate=3e-3, schedule="constant", warmup=0.0, weight_decay=0.0, dtype="float32", device="cpu"
)
# Heads are wide, because rotary positions leave only half of a head for content.
SHAPE: dict[str, Any] = {"dim": 64, "num_layers": 2, "num_heads": 2, "num_kv_heads": 2, "ff_dim": 128}
TEST_ROWS = 128
TEST_STEP = 1 << 40  # no step of training has this number


@dataclass(frozen=True)
class Learned:
    """The end of a run. `accuracy` and `loss` (nats an answer) are of new texts of the last stage.

    `stage` counts the stages that were passed. `steps` is the number of steps until the last one was learned, or of
    all steps if it was not. `seconds` are those of the processor, on all threads of the process.
    """

    decoder: Decoder
    task: Task
    accuracy: float
    loss: float
    stage: int
    steps: int
    seconds: float
    seed: int

    @property
    def is_learned(self) -> bool:
        """Whether all stages were passed."""
        return self.stage == len(self.task.stages)


class TaskBatches:
    """The texts of a task at a stage, for the trainer. Each row is a document of its own."""

    def __init__(self, task: Task, batch_size: int, seed: int) -> None:
        self.task, self.batch_size, self.seed, self.stage = task, batch_size, seed, 0

    @property
    def steps_per_epoch(self) -> float:
        """A task has no end."""
        return float("inf")

    def at(self, step: int, rows: range | None = None) -> TrainingBatch:
        """Returns the batch of a step, or some of its rows."""
        generator = np.random.default_rng([self.seed, self.stage, step])
        drawn = self.task.draw(generator, self.batch_size, self.task.stages[self.stage])
        inputs_BT, targets_BT = (torch.from_numpy(each) for each in drawn)
        starts_BT = torch.zeros_like(inputs_BT, dtype=torch.bool)
        starts_BT[:, 0] = True
        chosen = slice(None) if rows is None else slice(rows.start, rows.stop)
        return TrainingBatch(inputs_BT[chosen], targets_BT[chosen], starts_BT[chosen])


def config_for(task: Task, **patch: Any) -> ModelConfig:
    """Returns the small shape of the tasks, changed by a patch. Models with memory read the task's segments."""
    shape: dict[str, Any] = {**SHAPE, "vocab_size": task.vocab_size, "context_length": task.num_tokens, **patch}
    config = ModelConfig.from_dict(shape)
    if config.is_segmented and task.segment and "context_length" not in patch:
        return replace(config, context_length=task.segment)
    return config


def learn(
    config: ModelConfig,
    task: Task,
    *,
    steps: int,
    seconds: float = float("inf"),
    seed: int = 0,
    device: str = "cpu",
    training: Mapping[str, Any] | None = None,
    check_every: int = 25,
) -> Learned:
    """Trains a new model until it has learned the task, for at most `steps` steps and about `seconds` seconds.

    The seconds are those of the processor, so that other processes on the machine cut no run.
    A stage ends at the accuracy `task.passed` on new texts, and the run at `task.learnt` in the last one. `training`
    changes fields of `TRAINING`.
    """
    settings = replace(TRAINING, seed=seed, device=device, steps=steps, **(training or {}))
    torch.manual_seed(seed)
    decoder = Decoder(config).to(device_of(settings))
    if (prepare := getattr(task, "prepare", None)) is not None:  # a task may have more than texts
        prepare(decoder)
    batches = TaskBatches(task, settings.batch_size, seed)
    trainer = Trainer(settings, decoder, batches, ProcessGroup())
    trainer.num_steps, begin, passed = steps, time.process_time(), 0
    while len(trainer.records) < steps and time.process_time() - begin < seconds:
        trainer.step()
        if len(trainer.records) % check_every:
            continue
        accuracy, _ = score(decoder, task, stage=batches.stage, seed=seed)
        is_last = batches.stage == len(task.stages) - 1
        if accuracy >= (task.learnt if is_last else task.passed):
            passed = batches.stage + 1
            if is_last:
                break
            batches.stage = passed
    accuracy, loss = score(decoder, task, seed=seed, rows=4 * TEST_ROWS)
    if batches.stage == len(task.stages) - 1 and accuracy >= task.passed:
        passed = len(task.stages)
    return Learned(
        decoder, task, accuracy, loss, passed, len(trainer.records), time.process_time() - begin, seed
    )  # fmt: skip


@torch.no_grad()
def score(
    decoder: Decoder, task: Task, *, stage: int = -1, seed: int = 0, rows: int = TEST_ROWS
) -> tuple[float, float]:
    """Returns the accuracy and the loss, in nats an answer, of texts that no training reads."""
    number = range(len(task.stages))[stage]
    drawn = task.held_out.draw(np.random.default_rng([seed, number, TEST_STEP]), rows, task.stages[stage])
    return score_texts(decoder, torch.from_numpy(drawn.inputs_BT), torch.from_numpy(drawn.targets_BT))


@torch.no_grad()
def score_texts(decoder: Decoder, inputs_BT: torch.Tensor, targets_BT: torch.Tensor) -> tuple[float, float]:
    """Returns the accuracy and the loss of texts with answers."""
    right, nats, count = 0, 0.0, 0
    for inputs_bT, targets_bT in zip(inputs_BT.split(TEST_ROWS), targets_BT.split(TEST_ROWS), strict=True):
        hidden_bTD, _ = decoder(inputs_bT)
        is_asked_bT = targets_bT != PADDING
        answer_N = targets_bT[is_asked_bT].to(decoder.device)
        logits_NV = decoder.logits(hidden_bTD[is_asked_bT.to(decoder.device)]).float()
        right += int((logits_NV.argmax(dim=1) == answer_N).sum())
        nats += float(F.cross_entropy(logits_NV, answer_N, reduction="sum"))
        count += len(answer_N)
    return right / count, nats / count
