"""What a training run tells of itself: a CSV file that grows as it goes, and TensorBoard for whoever wants it."""

from __future__ import annotations

import csv
from dataclasses import astuple, dataclass, fields
from pathlib import Path
from types import TracebackType
from typing import Any

from memlm.errors import InvalidInput


@dataclass(frozen=True, slots=True)
class Record:
    """One step. `valid_loss` where held-out text was scored after it. Losses are nats per token."""

    step: int
    loss: float
    learning_rate: float
    tokens_per_s: float
    valid_loss: float | None = None


class Metrics:
    """Writes records as they come. Starting over a file, it keeps what the run had already told."""

    def __init__(self, path: Path, past: list[Record], *, tensorboard: Path | None) -> None:
        """Opens the file anew with what is past; TensorBoard is told to drop what a killed run had told beyond it.
        Raises InvalidInput where TensorBoard is wanted and not installed.
        """
        self._board = board_writer()(str(tensorboard), purge_step=len(past)) if tensorboard else None
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

    def __enter__(self) -> Metrics:
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


def board_writer() -> Any:
    """What writes for TensorBoard. Raises InvalidInput, naming the extra, where it is not installed."""
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError as error:
        raise InvalidInput(
            "tensorboard is not installed; install memlm[tensorboard], or leave --tensorboard out", field="tensorboard"
        ) from error
    return SummaryWriter
