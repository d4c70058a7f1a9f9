"""A trained gate between the final states of the model and its neighbors (SPALM, arXiv 2102.02557, section 3.3).

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
from memlm.model.gguf import companion

OPEN = 4.0  # sigmoid(4) = 0.98: at first the model is nearly what it was

GATE_FILE = "spalm.safetensors"


class SpalmGate(nn.Module):
    """z = g h + (1 - g) s m: h the model's final state, m the sum of the embeddings of the neighbors' next tokens,
    weighted by how well each fits h, and g a sigmoid of h for each dimension.

    The scale s is ours: the paper trains model and gate together, and lets embeddings grow to the size of states; a
    model that is already trained has embeddings much shorter than its states.
    """

    def __init__(self, dim: int) -> None:
        """Starts nearly open to the model and shut to memory, whatever the state."""
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))
        self.gate = nn.Linear(dim, dim)
        nn.init.zeros_(self.gate.weight)
        nn.init.constant_(self.gate.bias, OPEN)

    def forward(
        self,
        hidden_QD: Float[Tensor, "Q D"],
        neighbors_QKD: Float[Tensor, "Q K D"],
        there_QK: Bool[Tensor, "Q K"],
    ) -> Float[Tensor, "Q D"]:
        """The gated state; a position without neighbors keeps its own."""
        scores_QK = torch.einsum("qd,qkd->qk", hidden_QD, neighbors_QKD)
        any_Q1 = there_QK.any(dim=1, keepdim=True)
        weights_QK = scores_QK.masked_fill(~there_QK & any_Q1, -torch.inf).softmax(dim=1)
        recalled_QD = torch.einsum("qk,qkd->qd", weights_QK, neighbors_QKD)
        own_QD = torch.sigmoid(self.gate(hidden_QD))
        return torch.where(any_Q1, own_QD * hidden_QD + (1 - own_QD) * self.scale * recalled_QD, hidden_QD)


def load_gate(folder: Path) -> SpalmGate:
    """A model's gate. Raises NotFound where it has none, Corrupt for a file that is none."""
    path = companion(folder, GATE_FILE)
    if not path.is_file():
        raise NotFound(
            f"{folder} has no gate to its datastore; train one with `memlm index spalm`", kind="gate", name=str(folder)
        )
    try:
        weights = load(path.read_bytes())
        gate = SpalmGate(len(weights["gate.bias"]))
        gate.load_state_dict(weights)
    except (SafetensorError, KeyError, RuntimeError) as error:
        raise Corrupt(f"{path} is no gate ({error}); train it anew with `memlm index spalm`") from error
    return gate.eval()


def gated(decoder: Decoder, gate: SpalmGate, hidden_QD: Float[Tensor, "Q D"], found: Neighbors) -> Float[Tensor, "Q D"]:
    """Final states after the gate, given what was found for each."""
    there_QK = torch.from_numpy(found.ids_QK >= 0)
    values_QK = torch.from_numpy(np.where(found.ids_QK >= 0, found.values_QK, 0).astype(np.int64))
    neighbors_QKD = decoder.output_embedding_VD[values_QK].float()
    return gate(hidden_QD.float(), neighbors_QKD, there_QK).to(hidden_QD.dtype)
