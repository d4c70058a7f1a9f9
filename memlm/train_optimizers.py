"""What moves the parameters.

Muon for the matrices inside the blocks (Keller Jordan, 2024; scaled as in arXiv 2502.16982), AdamW (1711.05101) for
the rest; or AdamW for everything.
"""

from __future__ import annotations

import torch
from torch import nn

from memlm.model import Decoder
from memlm.train_config import TrainConfig

MEMORY_RATE = 20.0  # a head's gate and scale are single numbers that must move by about one; weights, by hundredths


def optimizers_for(config: TrainConfig, decoder: Decoder) -> tuple[torch.optim.Optimizer, ...]:
    """Matrices inside the blocks go to Muon, tables and all else to AdamW; or everything to AdamW. A group's `rate`
    is how many times the rate of the run it learns with.
    """
    named = list(decoder.named_parameters())
    is_matrix = {n: n.startswith("blocks.") and p.dim() == 2 and ".positions." not in n for n, p in named}
    matrices = [p for n, p in named if is_matrix[n]]
    of_memory = [p for n, p in named if ".memory." in n]
    others = [p for n, p in named if not is_matrix[n] and ".memory." not in n]
    rate, decay = config.learning_rate, config.weight_decay
    rest = _adamw(others, rate, 0.0)
    if of_memory:
        rest.add_param_group({"params": of_memory, "weight_decay": 0.0, "rate": MEMORY_RATE})
    if config.optimizer == "adamw":
        return _adamw(matrices, rate, decay), rest
    muon = torch.optim.Muon(matrices, lr=rate, weight_decay=decay, adjust_lr_fn="match_rms_adamw")
    return muon, rest


def _adamw(parameters: list[nn.Parameter], rate: float, decay: float) -> torch.optim.Optimizer:
    fused = parameters[0].device.type in ("cpu", "cuda")
    return torch.optim.AdamW(parameters, lr=rate, betas=(0.9, 0.95), weight_decay=decay, fused=fused)
