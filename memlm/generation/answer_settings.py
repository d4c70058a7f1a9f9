"""How a model is asked with passages: by its size, or as `memlm tune --answers` found on questions of its user."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Self

from memlm.api.passages import FEW_PASSAGES, LARGE_MODEL, MAX_PASSAGES, MORE_PASSAGES
from memlm.base.files import write_atomic
from memlm.errors import Corrupt, InvalidInput, check_kind, check_range
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
        """Raises InvalidInput for other types, and for numbers out of range."""
        check_kind("points_out", self.points_out, bool, "true or false")
        check_kind("tuned_on", self.tuned_on, str, "a text")
        if type(self.num_passages) is not int:  # nor a bool
            raise InvalidInput(f"num_passages is {self.num_passages}; expected a number", field="num_passages")
        check_range("num_passages", self.num_passages, least=1, most=MAX_PASSAGES, whole=True)
        for name in ("gain", "gain_error"):
            check_range(name, getattr(self, name), least=-1, most=1)

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
            saved = json.loads(path.read_text(encoding="utf-8"))
            return cls(**{each.name: saved[each.name] for each in fields(cls)})
        except (ValueError, TypeError, KeyError, RecursionError, OSError, InvalidInput) as error:
            raise Corrupt(
                f"{path} holds no settings ({error}); remove it, or run `memlm tune --answers` again"
            ) from error

    def asks_as(self, other: AnswerSettings) -> bool:
        """Whether both make the same prompts."""
        return (self.num_passages, self.points_out) == (other.num_passages, other.points_out)

    def save(self, model: Path) -> None:
        """Writes them beside a model."""
        write_atomic(companion(model, SETTINGS_FILE), (json.dumps(asdict(self), indent=2) + "\n").encode())

    @staticmethod
    def remove(model: Path) -> None:
        """Leaves a model to the defaults of its size."""
        companion(model, SETTINGS_FILE).unlink(missing_ok=True)
