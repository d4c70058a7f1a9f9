"""What moves the parameters.

Muon for the matrices inside the blocks (Keller Jordan, 2024; scaled as in arXiv 2502.16982), AdamW (1711.05101) for
the rest; or AdamW for everything.
"""

from __future__ import annotations

import torch
from torch import nn

from memlm.model import Decoder
from memlm.train_config import TrainConfig


def optimizers_for(config: TrainConfig, decoder: Decoder) -> tuple[torch.optim.Optimizer, ...]:
    """Matrices inside the blocks go to Muon, tables and all else to AdamW; or everything to AdamW."""
    named = list(decoder.named_parameters())
    is_matrix = {n: n.startswith("blocks.") and p.dim() == 2 and ".positions." not in n for n, p in named}
    matrices, others = ([p for n, p in named if is_matrix[n] is wanted] for wanted in (True, False))
    rate, decay = config.learning_rate, config.weight_decay
    if config.optimizer == "adamw":
        return _adamw(matrices, rate, decay), _adamw(others, rate, 0.0)
    muon = torch.optim.Muon(matrices, lr=rate, weight_decay=decay, adjust_lr_fn="match_rms_adamw")
    return muon, _adamw(others, rate, 0.0)


def _adamw(parameters: list[nn.Parameter], rate: float, decay: float) -> torch.optim.Optimizer:
    fused = parameters[0].device.type in ("cpu", "cuda")
    return torch.optim.AdamW(parameters, lr=rate, betas=(0.9, 0.95), weight_decay=decay, fused=fused)
