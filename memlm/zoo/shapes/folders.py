"""Folders of models of other shapes: config.json and model.safetensors.

The files are written as those of `memlm.model.files.checkpoint`: under temporary names, weights first and config.json
last.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import nn

from memlm.base.files import write_atomic
from memlm.errors import Corrupt, Incompatible, InvalidInput
from memlm.model.files.checkpoint import CONFIG_FILE, Undrawn, read_config_file
from memlm.model.files.tensor_bytes import safetensors_pieces
from memlm.model.files.weight_files import WEIGHTS_FILE, WeightFiles

FORMAT_VERSION = 1
M = TypeVar("M", bound=nn.Module)


def save_folder(folder: str | Path, model: nn.Module, model_type: str, config: Mapping[str, Any]) -> None:
    """Writes the parameters of a model and its config, in JSON's types, into a folder, which is made if needed."""
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    # A tied head is the embedding, and stands once among named parameters.
    weights = {name: parameter.detach() for name, parameter in model.named_parameters()}
    write_atomic(folder / WEIGHTS_FILE, *safetensors_pieces(weights, {}))
    described = {"model_type": model_type, "format_version": FORMAT_VERSION, **config}
    write_atomic(folder / CONFIG_FILE, (json.dumps(described, indent=2) + "\n").encode())


def load_folder(folder: str | Path, model_type: str, build: Callable[[dict[str, Any]], M]) -> M:
    """Reads a folder of `save_folder`. `build` makes the model, whose parameters are then overwritten, of a config.

    Returns the model in the type of its parameters in the file. Raises NotFound if there is no model, Incompatible for
    one of another type or format, and Corrupt for files that do not belong together.
    """
    folder = Path(folder)
    given = read_config_file(folder)
    found, version = given.pop("model_type", None), given.pop("format_version", None)
    if (found, version) != (model_type, FORMAT_VERSION):
        raise Incompatible(
            f"{folder} holds a model of type {found!r}, format {version}; expected {model_type!r}, format"
            f" {FORMAT_VERSION}"
        )
    try:
        with Undrawn():
            model = build(given)
    except (InvalidInput, TypeError, KeyError, AttributeError) as error:
        raise Corrupt(f"{folder / CONFIG_FILE}: {error}; restore the file") from error
    files = WeightFiles(folder)
    parameters = dict(model.named_parameters())
    if differing := sorted(parameters.keys() ^ files.names):
        raise Corrupt(f"{folder}: its config and its weights do not have the same tensors: {differing[:4]}; restore it")
    for name, parameter in parameters.items():
        if tuple(parameter.shape) != files.shape(name):
            raise Corrupt(f"{folder}: {name} should be {tuple(parameter.shape)}; got {files.shape(name)}; restore it")
    model = model.to(files.view(next(iter(parameters))).dtype)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            files.copy(name, parameter)
    return model.eval()
