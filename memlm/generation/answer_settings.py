"""How a model is asked with passages: by its size, or as `memlm tune --answers` found on questions of its user."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Self

from memlm.api.passages import FEW_PASSAGES, LARGE_MODEL, MORE_PASSAGES, check_num_passages
from memlm.base.files import write_atomic
from memlm.errors import Corrupt, InvalidInput
from memlm.model.files.checkpoint import Checkpoint
from memlm.model.files.gguf import companion

SETTINGS_FILE = "answers.json"


@dataclass(frozen=True, slots=True)
class AnswerSettings:
    """How many passages stand in a prompt by default, and whether one that is alone has its sentence once more behind
    it. `gain` is the share of questions that were answered rightly beyond those by the defaults of the model's size, on
    questions that the settings were not chosen on, and `gain_error` its standard error over documents.
    """

    num_passages: int
    points_out: bool
    tuned_on: str = ""
    gain: float = 0.0
    gain_error: float = 0.0

    def __post_init__(self) -> None:
        """Raises InvalidInput for a number of passages out of range."""
        check_num_passages(self.num_passages)

    @classmethod
    def of_size(cls, num_parameters: int) -> Self:
        """The defaults. Further passages distract a small model. From its passage it answers 41 % of the questions,
        and 54 % where the sentence is pointed out (benchmarks/log/2026-11-28-sentences.md).
        """
        is_large = num_parameters >= LARGE_MODEL
        return cls(MORE_PASSAGES if is_large else FEW_PASSAGES, points_out=not is_large)

    @classmethod
    def of(cls, checkpoint: Checkpoint) -> Self:
        """Those that were saved with a model, or the defaults of its size. Raises Corrupt."""
        path = companion(checkpoint.path, SETTINGS_FILE)
        if not path.is_file():
            return cls.of_size(checkpoint.decoder.num_parameters)
        try:
            return cls(**json.loads(path.read_text(encoding="utf-8")))
        except (ValueError, TypeError, InvalidInput) as error:
            raise Corrupt(f"{path} holds no settings ({error}); run `memlm tune --answers` again") from error

    def save(self, model: Path) -> None:
        """Writes them beside a model."""
        write_atomic(companion(model, SETTINGS_FILE), (json.dumps(asdict(self), indent=2) + "\n").encode())
