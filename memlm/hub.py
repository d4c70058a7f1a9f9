"""Where a model is: a folder on this machine, or a repository on the Hugging Face hub, fetched once."""

from __future__ import annotations

import re
from pathlib import Path

from memlm.errors import NotFound

HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")
WANTED = ["*.json", "*.safetensors"]


def find_model(model: str | Path) -> Path:
    """The folder of a model, given its path or its id on the hub (`owner/name`).

    Raises NotFound where there is no such folder, and no such repository within reach.
    """
    folder = Path(model)
    if folder.exists() or not HUB_ID.fullmatch(str(model)):
        return folder
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(str(model), allow_patterns=WANTED))
    except (OSError, ValueError) as error:  # the hub's errors, those of no network included, are OSErrors
        raise NotFound(
            f"no model at {model}: there is no such folder, and it cannot be had from the hub"
            f" ({type(error).__name__}: {str(error).splitlines()[0]}); check the name and the network",
            kind="model",
            name=str(model),
        ) from error
