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

TRIES = 4


def flops_per_token(decoder: Decoder) -> float:
    """Additions and multiplications of a forward and a backward pass: six a parameter that is multiplied, and twelve
    a layer, dimension and token that is attended to (arXiv 2204.02311, appendix B). A token sees half of its segment
    on average, and all that is remembered behind it. What is looked up in kNN memory is not counted.
    """
    config = decoder.config
    embedded = 0 if config.tied_embeddings else decoder.embedding.weight.numel()
    compressed = config.compression.length if config.compression else 0
    seen = config.context_length / 2 + config.xl_length + compressed
    return 6 * (decoder.num_parameters - embedded) + 12 * config.num_layers * config.num_heads * config.head_dim * seen


def peak_flops(device: torch.device, *, bfloat16: bool) -> float:
    """Operations a second of large products, the best of a few tries: what training is held against.

    An accelerator is given larger products, and several before it is waited for, so that starting them costs nothing.
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
    """One step. `valid_loss` where held-out text was scored after it. Losses are nats per token."""

    step: int
    loss: float
    learning_rate: float
    tokens_per_s: float
    valid_loss: float | None = None


class MetricsWriter:
    """Writes records as they come. Starting over a file, it keeps what the run had already told."""

    def __init__(self, path: Path, past: list[Record], *, tensorboard: Path | None) -> None:
        """Opens the file anew with what is past; TensorBoard is told to drop what a killed run had told beyond it.
        Raises InvalidInput where TensorBoard is wanted and not installed.
        """
        self._board = summary_writer()(str(tensorboard), purge_step=len(past)) if tensorboard else None
        self._file = path.open("w", newline="", encoding="utf-8")
        self._csv = csv.writer(self._file)
        self._csv.writerow([field.name for field in fields(Record)])
        for record in past:
            self._write(record)

    def add(self, record: Record) -> None:
        """Tells of one step."""
        self._write(record)
        self._file.flush()
        if self._board:
            for name in ("loss", "learning_rate", "tokens_per_s", "valid_loss"):
                if (value := getattr(record, name)) is not None:
                    self._board.add_scalar(name, value, record.step)

    def __enter__(self) -> MetricsWriter:
        """Closes the files at the end of the block."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Closes the files."""
        self._file.close()
        if self._board:
            self._board.close()

    def _write(self, record: Record) -> None:
        told = [
            "" if value is None else f"{value:.6g}" if isinstance(value, float) else value for value in astuple(record)
        ]
        self._csv.writerow(told)


def summary_writer() -> Any:
    """What writes for TensorBoard. Raises InvalidInput, naming the extra, where it is not installed."""
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError as error:
        raise InvalidInput(
            "tensorboard is not installed; install memlm[tensorboard], or leave --tensorboard out", field="tensorboard"
        ) from error
    return SummaryWriter
