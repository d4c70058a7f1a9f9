"""The metrics of a training run, and the share of the processor's peak speed that it reaches."""

from __future__ import annotations

import csv
import time
from dataclasses import astuple, dataclass, fields
from pathlib import Path
from types import TracebackType
from typing import Any

import torch

from memlm.errors import InvalidInput
from memlm.model import Decoder
from memlm.model.experts import ExpertFeedForwards

TRIES = 4


def flops_per_token(decoder: Decoder) -> float:
    """Operations of a forward and a backward pass (arXiv 2204.02311, appendix B).

    Six for each parameter that is multiplied, and twelve for each layer, dimension and attended token. Experts that a
    token does not meet multiply nothing. On average a token attends to half of its segment, and to all of its memories.
    kNN attention is not counted.
    """
    config = decoder.config
    embedded = 0 if config.tied_embeddings else decoder.embedding.weight.numel()
    compressed = config.compression.length if config.compression else 0
    seen = config.context_length / 2 + config.xl_length + compressed
    idle = sum(module.num_idle_parameters for module in decoder.modules() if isinstance(module, ExpertFeedForwards))
    return (
        6 * (decoder.num_parameters - embedded - idle)
        + 12 * config.num_layers * config.num_heads * config.head_dim * seen
    )


def peak_flops(device: torch.device, *, bfloat16: bool) -> float:
    """Measures operations per second of large matrix products, the best of a few tries.

    On an accelerator the products are larger, and several run before the host waits, so that launching costs nothing.
    """
    size, products = (8192, 8) if device.type == "cuda" else (1024, 1)
    a = torch.randn(size, size, device=device, dtype=torch.bfloat16 if bfloat16 else torch.float32)
    best = 0.0
    for _ in range(TRIES):
        begin = time.perf_counter()
        for _ in range(products):
            product = a @ a
        float(product[0, 0])  # waits for all
        best = max(best, products * 2 * size**3 / (time.perf_counter() - begin))
    return best


@dataclass(frozen=True, slots=True)
class Record:
    """The metrics of a step. `valid_loss` is set if held-out text was scored after it. Losses are in nats per token."""

    step: int
    loss: float
    learning_rate: float
    tokens_per_s: float
    valid_loss: float | None = None


class MetricsWriter:
    """Writes records to a CSV file and to TensorBoard. The file starts with the records of `past`.

    TensorBoard drops the steps that a killed run wrote after its last checkpoint. Raises InvalidInput if TensorBoard is
    asked for and not installed.
    """

    def __init__(self, path: Path, past: list[Record], *, tensorboard: Path | None) -> None:
        self._board = summary_writer()(str(tensorboard), purge_step=len(past)) if tensorboard else None
        self._file = path.open("w", newline="", encoding="utf-8")
        self._csv = csv.writer(self._file)
        self._csv.writerow([field.name for field in fields(Record)])
        for record in past:
            self._write(record)

    def add(self, record: Record) -> None:
        """Writes one step."""
        self._write(record)
        self._file.flush()
        if self._board:
            for name in ("loss", "learning_rate", "tokens_per_s", "valid_loss"):
                if (value := getattr(record, name)) is not None:
                    self._board.add_scalar(name, value, record.step)

    def __enter__(self) -> MetricsWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._file.close()
        if self._board:
            self._board.close()

    def _write(self, record: Record) -> None:
        row = [
            "" if value is None else f"{value:.6g}" if isinstance(value, float) else value for value in astuple(record)
        ]
        self._csv.writerow(row)


def summary_writer() -> Any:
    """Returns TensorBoard's writer class. Raises InvalidInput, with the extra's name, if it is not installed."""
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError as error:
        raise InvalidInput(
            "tensorboard is not installed; install memlm[tensorboard], or leave tensorboard out", field="tensorboard"
        ) from error
    return SummaryWriter
