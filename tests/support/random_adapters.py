"""Adapters of every kind with random numbers."""

from __future__ import annotations

from pathlib import Path

import torch

from memlm.model import Decoder
from memlm.model.adapters import Adapter, AdapterSpec, Bottleneck, LoRA, new_adapter
from memlm.model.files.adapter_files import AdapterNames, save_adapter
from memlm.model.files.checkpoint import Checkpoint

SPECS: dict[str, AdapterSpec] = {
    "lora": LoRA(rank=3, alpha=5.0),
    "lora of a part": LoRA(rank=2, alpha=2.0, targets=("q_proj", "v_proj", "down_proj")),
    "bottleneck": Bottleneck(width=5),
}


def random_adapter(spec: AdapterSpec, decoder: Decoder, names: AdapterNames | None = None, seed: int = 3) -> Adapter:
    """An adapter of which every matrix has random numbers."""
    torch.manual_seed(seed)
    adapter = new_adapter(spec, decoder, (names or AdapterNames(decoder)).parts).to(decoder.dtype)
    for parameter in adapter.parameters():
        parameter.data.normal_(std=0.3)
    return adapter


def save_random_adapter(folder: Path, checkpoint: Checkpoint, spec: AdapterSpec, seed: int = 3) -> Path:
    """The folder of a random adapter of a model."""
    save_adapter(folder, random_adapter(spec, checkpoint.decoder, AdapterNames.of(checkpoint), seed), checkpoint)
    return folder
