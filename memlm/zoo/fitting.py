"""A short loop that trains models of other shapes, which `memlm train` does not know."""

from __future__ import annotations

import math
import time
from collections.abc import Callable

import torch
from torch import Tensor, nn

from memlm.base.progress import Progress, silent


def fit(
    model: nn.Module,
    loss_at: Callable[[int], Tensor],
    *,
    steps: int,
    seconds: float = math.inf,
    learning_rate: float = 3e-3,
    warmup: int = 20,
    grad_clip: float = 1.0,
    progress: Progress = silent,
) -> list[float]:
    """Takes up to `steps` steps of AdamW (arXiv 1711.05101) in about `seconds`, and returns the loss of each.

    `loss_at` computes the loss of a step by the number of the step, from 0. The rate rises to `learning_rate` over
    `warmup` steps and stays there. Gradients are scaled to a norm of `grad_clip` at most.
    """
    optimizer = torch.optim.AdamW(model.parameters(), lr=learning_rate, weight_decay=0.0)
    losses, begin = list[float](), time.perf_counter()
    model.train()
    while len(losses) < steps and time.perf_counter() - begin < seconds:
        for group in optimizer.param_groups:
            group["lr"] = learning_rate * min(1.0, (len(losses) + 1) / max(warmup, 1))
        loss = loss_at(len(losses))
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), grad_clip)
        optimizer.step()
        losses.append(loss.item())
        progress("train", len(losses), steps, f"loss {losses[-1]:.3f}")
    model.eval()
    return losses
