"""Final states and neighbours -> gated states: the trained gate of a model, read and applied (arXiv 2102.02557)."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from jaxtyping import Float
from safetensors import SafetensorError
from safetensors.torch import load
from torch import Tensor

from memlm.errors import Corrupt, NotFound
from memlm.index.neighbours import Neighbours
from memlm.model import Decoder
from memlm.model.spalm import MemoryGate

GATE_FILE = "spalm.safetensors"


def load_gate(folder: Path) -> MemoryGate:
    """A model's gate. Raises NotFound where it has none, Corrupt for a file that is none."""
    path = folder / GATE_FILE
    if not path.is_file():
        raise NotFound(
            f"{folder} has no gate to its datastore; train one with `memlm index spalm`", kind="gate", name=str(folder)
        )
    try:
        weights = load(path.read_bytes())
        gate = MemoryGate(len(weights["gate.bias"]))
        gate.load_state_dict(weights)
    except (SafetensorError, KeyError, RuntimeError) as error:
        raise Corrupt(f"{path} is no gate ({error}); train it anew with `memlm index spalm`") from error
    return gate.eval()


def gated(
    decoder: Decoder, gate: MemoryGate, hidden_QD: Float[Tensor, "Q D"], found: Neighbours
) -> Float[Tensor, "Q D"]:
    """Final states after the gate, given what was found for each."""
    there_QK = torch.from_numpy(found.ids_QK >= 0)
    values_QK = torch.from_numpy(np.where(found.ids_QK >= 0, found.values_QK, 0).astype(np.int64))
    neighbors_QKD = decoder.output_embedding_VD[values_QK].float()
    return gate(hidden_QD.float(), neighbors_QKD, there_QK).to(hidden_QD.dtype)
