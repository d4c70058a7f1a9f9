"""A trained gate between the final states of the model and its neighbors (SPALM, arXiv 2102.02557, section 3.3).

Experimental. Off unless a request sets `spalm`.

Shapes: Q positions, K neighbors, D width.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from jaxtyping import Bool, Float
from safetensors import SafetensorError
from safetensors.torch import load
from torch import Tensor, nn

from memlm.errors import Corrupt, NotFound
from memlm.index.neighbors import Neighbors
from memlm.model import Decoder
from memlm.model.files.gguf import companion

OPEN = 4.0  # sigmoid(4) = 0.98: at first the gate hardly changes the model

GATE_FILE = "spalm.safetensors"


class SpalmGate(nn.Module):
    """z = g h + (1 - g) s m. h is the model's final state, m the sum of the embeddings of the neighbors' values,
    weighted by the softmax of their products with h, and g a sigmoid of h for each dimension.

    The paper has no scale s: it trains model and gate together, so that embeddings grow to the size of states. Those of
    a trained model are much shorter.
    """

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))
        self.gate = nn.Linear(dim, dim)
        nn.init.zeros_(self.gate.weight)
        nn.init.constant_(self.gate.bias, OPEN)

    def forward(
        self,
        hidden_QD: Float[Tensor, "Q D"],
        neighbors_QKD: Float[Tensor, "Q K D"],
        found_QK: Bool[Tensor, "Q K"],
    ) -> Float[Tensor, "Q D"]:
        """Returns the gated states. A position without neighbors keeps its state."""
        scores_QK = torch.einsum("qd,qkd->qk", hidden_QD, neighbors_QKD)
        any_Q1 = found_QK.any(dim=1, keepdim=True)
        weights_QK = scores_QK.masked_fill(~found_QK & any_Q1, -torch.inf).softmax(dim=1)
        recalled_QD = torch.einsum("qk,qkd->qd", weights_QK, neighbors_QKD)
        gate_QD = torch.sigmoid(self.gate(hidden_QD))
        return torch.where(any_Q1, gate_QD * hidden_QD + (1 - gate_QD) * self.scale * recalled_QD, hidden_QD)


def load_gate(folder: Path) -> SpalmGate:
    """Loads a model's gate. Raises NotFound if it has none, Corrupt for a damaged file."""
    path = companion(folder, GATE_FILE)
    if not path.is_file():
        raise NotFound(
            f"{folder} has no gate to its datastore; train one with `memlm tune --spalm`", kind="gate", name=str(folder)
        )
    try:
        weights = load(path.read_bytes())
        gate = SpalmGate(len(weights["gate.bias"]))
        gate.load_state_dict(weights)
    except (SafetensorError, KeyError, RuntimeError) as error:
        raise Corrupt(f"{path} is no gate ({error}); train it anew with `memlm tune --spalm`") from error
    return gate.eval()


def gated(decoder: Decoder, gate: SpalmGate, hidden_QD: Float[Tensor, "Q D"], found: Neighbors) -> Float[Tensor, "Q D"]:
    """Returns final hidden states after the gate, given their neighbors, on the decoder's device."""
    device = decoder.device
    found_QK = torch.from_numpy(found.ids_QK >= 0).to(device)
    values_QK = torch.from_numpy(np.where(found.ids_QK >= 0, found.values_QK, 0).astype(np.int64)).to(device)
    neighbors_QKD = decoder.output_embedding_VD[values_QK].float()
    return gate.to(device)(hidden_QD.to(device).float(), neighbors_QKD, found_QK).to(hidden_QD.dtype)
