"""A model's folder: config.json, model.safetensors, tokenizer.json.

Written under temporary names and moved into place, weights first and config.json last, so that a folder with a
config is whole.
"""

from __future__ import annotations

import hashlib
import json
import os
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from memlm.errors import Corrupt, Incompatible, InvalidInput, NotFound
from memlm.model import Decoder, ModelConfig
from memlm.tokenizer import Tokenizer

MODEL_TYPE = "memlm"
FORMAT_VERSION = 1
CONFIG_FILE, WEIGHTS_FILE = "config.json", "model.safetensors"


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A loaded model with its tokenizer, and the fingerprint that its datastores must carry."""

    path: Path
    decoder: Decoder
    tokenizer: Tokenizer
    fingerprint: str


def save_checkpoint(folder: str | Path, decoder: Decoder, tokenizer: Tokenizer) -> None:
    """Writes the three files into `folder`, which is made if needed."""
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(folder)
    weights = {name: tensor.contiguous() for name, tensor in decoder.state_dict().items()}
    _write(folder / WEIGHTS_FILE, lambda path: save_file(weights, path))
    config = {"model_type": MODEL_TYPE, "format_version": FORMAT_VERSION, **asdict(decoder.config)}
    text = json.dumps(config, indent=2) + "\n"
    _write(folder / CONFIG_FILE, lambda path: path.write_text(text, encoding="utf-8"))


def load_checkpoint(folder: str | Path, *, dtype: torch.dtype = torch.float32) -> Checkpoint:
    """Reads a model's folder.

    Raises NotFound where there is none, Incompatible for another kind of model, Corrupt for files that do not
    belong together.
    """
    folder = Path(folder)
    config = _read_config(folder)
    tokenizer = Tokenizer.load(folder)
    if tokenizer.vocab_size > config.vocab_size:
        raise Corrupt(
            f"{folder}: {tokenizer.vocab_size} tokens in the tokenizer, {config.vocab_size} in the model; restore them"
        )
    decoder = Decoder(config)
    _load_weights(decoder, folder / WEIGHTS_FILE)
    return Checkpoint(folder, decoder.to(dtype).eval(), tokenizer, fingerprint_of(folder))


def fingerprint_of(folder: Path) -> str:
    """A hash of configuration and weights: two fine-tunes of one architecture differ in it."""
    digest = hashlib.sha256()
    for name in (CONFIG_FILE, WEIGHTS_FILE):
        with (folder / name).open("rb") as file:
            while chunk := file.read(1 << 20):
                digest.update(chunk)
    return digest.hexdigest()[:32]


def _read_config(folder: Path) -> ModelConfig:
    path = folder / CONFIG_FILE
    if not path.is_file():
        raise NotFound(
            f"no model at {folder}: it has no {CONFIG_FILE}; make one with `memlm train`",
            kind="model",
            name=str(folder),
        )
    try:
        config: Any = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise Corrupt(f"{path} is not JSON ({error}); restore the file") from error
    if not isinstance(config, dict) or config.pop("model_type", None) != MODEL_TYPE:
        raise Incompatible(f"{path} is not of model_type {MODEL_TYPE!r}; this version reads what `memlm train` makes")
    if (version := config.pop("format_version", None)) != FORMAT_VERSION:
        raise Incompatible(f"{path} is of format {version}; this version reads format {FORMAT_VERSION}")
    known = {field.name for field in fields(ModelConfig)}
    if config.keys() != known:
        raise Corrupt(
            f"{path} should hold just the fields {sorted(known)}; it differs in {sorted(config.keys() ^ known)}"
        )
    try:
        return ModelConfig(**config)
    except (InvalidInput, TypeError) as error:
        raise Corrupt(f"{path}: {error}; restore the file") from error


def _load_weights(decoder: Decoder, path: Path) -> None:
    if not path.is_file():
        raise Corrupt(f"{path} is missing; restore the file")
    try:
        weights = load_file(path)
    except SafetensorError as error:
        raise Corrupt(f"{path} cannot be read as safetensors ({error}); restore the file") from error
    expected = decoder.state_dict()
    if difference := sorted(weights.keys() ^ expected.keys()):
        raise Corrupt(f"{path} and the model's shape differ in the tensors {difference[:4]}; restore the file")
    for name, tensor in expected.items():
        if weights[name].shape != tensor.shape:
            raise Corrupt(
                f"{path}: {name} is {tuple(weights[name].shape)}, expected {tuple(tensor.shape)}; restore the file"
            )
    decoder.load_state_dict(weights)


def _write(path: Path, write: Any) -> None:
    temporary = path.with_name(path.name + ".tmp")
    write(temporary)
    with temporary.open("rb") as file:
        os.fsync(file.fileno())
    temporary.replace(path)
