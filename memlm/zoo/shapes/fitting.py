"""A short loop for models that the trainer of decoders does not take."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

WARMUP = 0.1  # of the steps, in which the learning rate rises


def fit(module: nn.Module, loss_of: Callable[[int], Tensor], *, num_steps: int, learning_rate: float) -> list[float]:
    """Trains a module on the loss that `loss_of` computes for each step. Returns the losses.

    Uses AdamW, a rate that rises and then falls to zero, and gradients of norm 1 at most.
    """
    optimizer = torch.optim.AdamW(module.parameters(), lr=learning_rate, betas=(0.9, 0.98), weight_decay=0.01)
    losses = list[float]()
    module.train()
    for step in range(num_steps):
        done = step / num_steps
        rate = learning_rate * min((step + 1) / max(1.0, WARMUP * num_steps), (1 - done) / (1 - WARMUP))
        for group in optimizer.param_groups:
            group["lr"] = rate
        loss = loss_of(step)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(module.parameters(), 1.0)
        optimizer.step()
        losses.append(loss.item())
    module.eval()
    return losses
