"""Layers that sentence-transformers puts behind the pooling of an encoder, each in a folder of its own."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from memlm.data.tokenizer import json_of
from memlm.errors import Corrupt, Incompatible
from memlm.model.files.weight_files import WeightFiles

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {"Tanh": torch.tanh, "Identity": lambda x: x}


@dataclass(frozen=True)
class Dense:
    """activation(x W' + b), in float32."""

    weight_OI: Float[Tensor, "O I"]
    bias_O: Float[Tensor, " O"] | None
    activation: str

    @property
    def in_features(self) -> int:
        """Numbers of a vector before it."""
        return self.weight_OI.shape[1]

    @property
    def out_features(self) -> int:
        """Numbers of a vector behind it."""
        return self.weight_OI.shape[0]

    @cached_property
    def fingerprint(self) -> str:
        """A hash of all that it computes."""
        digest = hashlib.sha256(self.activation.encode())
        for tensor in (self.weight_OI, self.bias_O):
            if tensor is not None:
                digest.update(tensor.cpu().numpy().tobytes())
        return digest.hexdigest()[:32]

    def __call__(self, x_BI: Float[Tensor, "B I"]) -> Float[Tensor, "B O"]:
        return ACTIVATIONS[self.activation](F.linear(x_BI, self.weight_OI, self.bias_O))


def load_dense(folder: Path, device: torch.device) -> Dense:
    """Reads a layer. Raises Incompatible for one of another kind, and Corrupt for damaged files."""
    settings, files = json_of(folder / "config.json"), WeightFiles(folder)
    activation = str(settings.get("activation_function", "Tanh")).rpartition(".")[2]
    if activation not in ACTIVATIONS:
        raise Incompatible(f"{folder} has the activation {activation}; this version computes {', '.join(ACTIVATIONS)}")
    names = {"linear.weight", "linear.bias"} if settings.get("bias", True) else {"linear.weight"}
    for name, plain in (("module_input_name", "sentence_embedding"), ("use_residual", False)):
        if settings.get(name, plain) != plain:
            raise Incompatible(f"{folder} has {name}={settings[name]}; this version reads {name}={plain} only")
    if files.names != names or len(files.shape("linear.weight")) != 2:
        raise Corrupt(f"{folder} holds the tensors {sorted(files.names)}; expected {sorted(names)}: restore the files")
    read = {name: files.view(name).float().clone().to(device) for name in names}
    return Dense(read["linear.weight"], read.get("linear.bias"), activation)
