"""The training loop of a decoder, with its optimizers, its KV caches and its checkpoints.

Matrix products are in bfloat16 where the processor has instructions for it. A resumed run reaches the same losses as
one that was not interrupted.
"""

from __future__ import annotations

import pickle
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import astuple
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from memlm.base.files import move, sync_file
from memlm.base.progress import Progress, silent
from memlm.errors import Corrupt
from memlm.model import Decoder, DecoderState
from memlm.model.adapters import Adapter
from memlm.model.kernels.cpu import has_fast_bfloat16
from memlm.training.config import TrainConfig, learning_rate_at
from memlm.training.data import TrainingBatch, TrainingData
from memlm.training.distributed import ProcessGroup
from memlm.training.metrics import MetricsWriter, Record, flops_per_token, peak_flops
from memlm.training.optimizers import optimizers_for

CHECKPOINT_FILE = "checkpoint.pt"
RECENT = 20
SETTLED = 3  # steps before the pace is steady


class Trainer:
    """Trains a decoder on `data`, or only the `adapter` that is attached to it. `score` returns the loss on held-out
    text, in nats per token.
    """

    def __init__(
        self,
        config: TrainConfig,
        decoder: Decoder,
        data: TrainingData,
        group: ProcessGroup,
        score: Callable[[Decoder], float] | None = None,
        adapter: Adapter | None = None,
    ) -> None:
        self.config, self.decoder, self.data, self.group, self.score = config, decoder, data, group, score
        self.learning: Decoder | Adapter = decoder if adapter is None else adapter
        self.optimizers = optimizers_for(config, self.learning)
        self.states: list[DecoderState | None] = [None] * config.accumulate
        self.records: list[Record] = []
        self.num_steps = 0
        self.best: tuple[float, dict[str, Tensor]] | None = None
        self._last_score: float | None = None
        self.bfloat16 = config.dtype == "bfloat16" or (
            config.dtype == "auto" and (decoder.device.type == "cuda" or has_fast_bfloat16())
        )
        self._forward: Callable[..., Any] = torch.compile(decoder) if config.compile else decoder

    @cached_property
    def _peak_flops(self) -> float:
        return peak_flops(self.decoder.device, bfloat16=self.bfloat16)

    @property
    def losses(self) -> list[float]:
        """The loss of every step so far."""
        return [record.loss for record in self.records]

    @property
    def is_over(self) -> bool:
        """Whether all steps are taken, or the latest scores on held-out text have not improved."""
        if len(self.records) >= self.num_steps:
            return True
        if not self.config.patience or not self.records or self.records[-1].valid_loss is None:
            return False
        scores = [record.valid_loss for record in self.records if record.valid_loss is not None]
        return len(scores) - 1 - scores.index(min(scores)) >= self.config.patience

    @property
    def valid_loss(self) -> float | None:
        """The score of the final weights, or None if none was taken."""
        if self.best is not None:
            return self.best[0]
        return self.records[-1].valid_loss if self.records else None

    def run(self, work: Path, progress: Progress = silent) -> float:
        """Takes all remaining steps, with a checkpoint now and then, and returns the tokens read per second.

        Ends with the best weights if there is a `patience`, else with the last.
        """
        if (work / CHECKPOINT_FILE).exists():
            self.restore(work)
        self.num_steps = self.num_steps or int(self.group.broadcast(self._planned_steps()))
        board = work.parent / "tensorboard" if self.config.tensorboard else None
        metrics = MetricsWriter(work / "metrics.csv", self.records, tensorboard=board) if self.group.is_main else None
        begin, first = time.perf_counter(), len(self.records)
        with metrics or nullcontext():
            while not self.is_over:
                record = self.step()
                if metrics:
                    metrics.add(record)
                if len(self.records) % self.config.checkpoint_every == 0:
                    self.save(work)
                progress("train", len(self.records), self.num_steps, self._note())
        if self.best is not None:
            self.learning.load_state_dict(self.best[1])
        return (len(self.records) - first) * self.tokens_per_step / max(time.perf_counter() - begin, 1e-9)

    @property
    def tokens_per_step(self) -> int:
        """Tokens per step, of all processes together."""
        return self.config.batch_size * self.config.accumulate * self.decoder.config.training_length

    def step(self) -> Record:
        """Takes one optimizer step, from as many batches as are accumulated."""
        begin, number = time.perf_counter(), len(self.records)
        rate = learning_rate_at(number, self.num_steps, self.config)
        for group in (group for optimizer in self.optimizers for group in optimizer.param_groups):
            group["lr"] = rate * group.get("rate", 1.0)
        loss = 0.0
        for part in range(self.config.accumulate):
            shared = self._loss(number, part) / self.config.accumulate
            shared.backward()
            loss += shared.item()
        self.group.average_gradients(self.learning.parameters())
        torch.nn.utils.clip_grad_norm_(self.learning.parameters(), self.config.grad_clip)
        for optimizer in self.optimizers:
            optimizer.step()
        self.learning.zero_grad()
        pace = self.tokens_per_step / (time.perf_counter() - begin)
        record = Record(number, self.group.mean(loss), rate, pace, self._score(number))
        self.records.append(record)
        return record

    def save(self, work: Path) -> None:
        """Writes a checkpoint, under temporary names first.

        The KV caches of each process are in a file of their own, which counts once the checkpoint names its step.
        """
        step = len(self.records)
        states = [None if state is None else state.save() for state in self.states]
        _write(work / f"state-{self.group.rank}-{step}.pt", states)
        self.group.barrier()
        if self.group.is_main:
            _write(
                work / CHECKPOINT_FILE,
                {
                    "decoder": self.learning.state_dict(),
                    "optimizers": [optimizer.state_dict() for optimizer in self.optimizers],
                    "records": [astuple(record) for record in self.records],
                    "num_steps": self.num_steps,
                    "best": self.best,
                },
            )
        self.group.barrier()
        for old in work.glob(f"state-{self.group.rank}-*.pt"):
            if old.name != f"state-{self.group.rank}-{step}.pt":
                old.unlink()

    def restore(self, work: Path) -> None:
        """Loads the files of `save`. Raises Corrupt for other files."""
        path = work / CHECKPOINT_FILE
        try:
            saved = torch.load(path, weights_only=True, map_location="cpu")
            self.learning.load_state_dict(saved["decoder"])
            for optimizer, state in zip(self.optimizers, saved["optimizers"], strict=True):
                optimizer.load_state_dict(state)
            self.records = [Record(*record) for record in saved["records"]]
            self.num_steps, self.best = saved["num_steps"], saved["best"]
            path = work / f"state-{self.group.rank}-{len(self.records)}.pt"
            states = torch.load(path, weights_only=True)
            shape = self.decoder.config
            self.states = [None if state is None else DecoderState.restore(state, shape) for state in states]
        except (RuntimeError, KeyError, ValueError, TypeError, OSError, EOFError, pickle.UnpicklingError) as error:
            raise Corrupt(
                f"{path} is not a checkpoint of this run ({error}); remove the folder and train anew"
            ) from error

    def _loss(self, number: int, part: int) -> Tensor:
        """Returns the loss of one batch. A model with memory continues with its rows' KV caches."""
        size = self.config.batch_size
        rows = self.group.shard(range(part * size, (part + 1) * size))
        batch = _on(self.data.at(number, rows), self.decoder.device)
        state = self._state_for(batch, part)
        with torch.autocast(self.decoder.device.type, torch.bfloat16, enabled=self.bfloat16):
            hidden_BTD, _ = self._forward(batch.inputs_BT, state, starts_BT=batch.starts_BT)
            loss = self.decoder.loss(hidden_BTD, batch.targets_BT)
        if state is not None and state.compression_loss is not None:
            loss = loss + self.config.compression_loss_weight * state.compression_loss
            state.compression_loss = None
        if (told := self.decoder.take_losses()) is not None:  # parts weight their own
            loss = loss + told
        return loss

    def _state_for(self, batch: TrainingBatch, part: int) -> DecoderState | None:
        """Returns the state of the rows of a model with memory. Fields that a batch gives are set in it, or else in a
        state of this batch alone.
        """
        state, (rows, length) = self.states[part], batch.inputs_BT.shape
        if state is None and self.decoder.config.is_segmented:
            state = self.states[part] = self.decoder.new_state(batch_size=rows, training=True)
        if batch.given:
            state = state or self.decoder.new_state(batch_size=rows, capacity=length, training=True)
            for name, value_B in batch.given.items():
                state.field(name).copy_(value_B)
        return state

    def _score(self, number: int) -> float | None:
        """Returns the loss on held-out text if it is due, and keeps the best weights if there is a patience."""
        every = self.config.valid_every
        is_time = number + 1 == self.num_steps or (every and (number + 1) % every == 0)
        if self.score is None or not is_time:
            return None
        self._last_score = score = self.score(self.decoder)
        if self.config.patience and (self.best is None or score < self.best[0]):
            self.best = (score, {name: tensor.clone() for name, tensor in self.learning.state_dict().items()})
        return score

    def _note(self) -> str:
        recent = self.records[-RECENT:]
        note = f"loss {sum(record.loss for record in recent) / len(recent):.3f}"
        if self._last_score is not None:
            note += f", valid {self._last_score:.3f}"
        if len(self.records) < SETTLED:
            return note
        pace = sorted(record.tokens_per_s for record in recent)[len(recent) // 2]
        share = pace / self.group.size * flops_per_token(self.decoder) / self._peak_flops
        return f"{note}, {pace:,.0f} tokens/s, {share:.0%} of peak"

    def _planned_steps(self) -> int:
        config = self.config
        if config.steps is not None:
            return config.steps
        if config.minutes is not None:
            return max(1, int(config.minutes * 60 / self._seconds_per_step()))
        return max(1, round((config.epochs or 1) * self.data.steps_per_epoch))

    def _seconds_per_step(self, tries: int = 4) -> float:
        """Measures steps without updates. The first only warms up."""
        seconds = []
        for _ in range(tries):
            begin = time.perf_counter()
            for part in range(self.config.accumulate):
                self._loss(0, part).backward()
            self.learning.zero_grad()
            seconds.append(time.perf_counter() - begin)
        self.states = [None] * self.config.accumulate
        return sum(seconds[1:]) / (tries - 1)


def _on(batch: TrainingBatch, device: torch.device) -> TrainingBatch:
    if device.type == "cpu":
        return batch
    starts_BT = None if batch.starts_BT is None else batch.starts_BT.to(device)
    return TrainingBatch(batch.inputs_BT.to(device), batch.targets_BT.to(device), starts_BT, batch.given)


def _write(path: Path, value: Any) -> None:
    temporary = path.with_suffix(".tmp")
    torch.save(value, temporary)
    sync_file(temporary)
    move(temporary, path)
