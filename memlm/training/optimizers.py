"""The optimizers of a training run.

Muon for the matrices inside the blocks (Keller Jordan, 2024, scaled as in arXiv 2502.16982) and AdamW (1711.05101) for
the rest, or AdamW for everything.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from memlm.model.kernels.cpu import has_fast_bfloat16
from memlm.training.config import TrainConfig

KNN_RATE = 20.0  # a head's gate and scale are single numbers that must move by about one; weights, by hundredths


def optimizers_for(config: TrainConfig, learning: nn.Module) -> tuple[torch.optim.Optimizer, ...]:
    """Returns Muon for the matrices inside the blocks of a decoder, or of an adapter, and AdamW for the rest. Or AdamW
    twice. A LoRA has only matrices.

    The `rate` of a parameter group is a factor on the run's learning rate.
    """
    named, inside = list(learning.named_parameters()), ("blocks.", "layers.")
    # Muon makes all singular values alike. Those of tables and of weights over places have a meaning of their own.
    own = (".positions.", ".places_rn")
    is_matrix = {n: n.startswith(inside) and p.dim() == 2 and not any(each in n for each in own) for n, p in named}
    matrices = [p for n, p in named if is_matrix[n]]
    of_knn = [p for n, p in named if ".knn." in n]
    others = [p for n, p in named if not is_matrix[n] and ".knn." not in n]
    rate, decay = config.learning_rate, config.weight_decay
    rest = [_adamw(others, rate, 0.0)] if others else []
    if of_knn:
        rest[0].add_param_group({"params": of_knn, "weight_decay": 0.0, "rate": KNN_RATE})
    if config.optimizer == "adamw":
        return _adamw(matrices, rate, decay), *rest
    kind = torch.optim.Muon if matrices[0].device.type != "cpu" or has_fast_bfloat16() else Float32Muon
    return kind(matrices, lr=rate, weight_decay=decay, adjust_lr_fn="match_rms_adamw"), *rest


class Float32Muon(torch.optim.Muon):
    """torch's Muon with products in float32, scaled as for AdamW.

    torch multiplies in bfloat16, which takes about forty times as long on processors without instructions for it.
    """

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Updates the matrices by their gradients, with torch's own optimizer state."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for matrix in group["params"]:
                if matrix.grad is not None:
                    self._move(matrix, matrix.grad, group)
        return loss

    def _move(self, matrix: nn.Parameter, grad: Tensor, group: dict[str, Any]) -> None:
        state, rate, momentum = self.state[matrix], group["lr"], group["momentum"]
        if "momentum_buffer" not in state:
            state["momentum_buffer"] = torch.zeros_like(grad)
        mean = state["momentum_buffer"].lerp_(grad, 1 - momentum)
        update = newton_schulz(grad.lerp(mean, momentum), group["ns_coefficients"], group["ns_steps"], group["eps"])
        matrix.mul_(1 - rate * group["weight_decay"])
        matrix.add_(update, alpha=-0.2 * rate * max(matrix.shape) ** 0.5)


def newton_schulz(matrix: Tensor, coefficients: tuple[float, float, float], steps: int, eps: float) -> Tensor:
    """Returns about the nearest matrix whose singular values are all one.

    Newton-Schulz iteration with the coefficients of Keller Jordan (2024). Singular values end between 0.7 and 1.2.
    """
    a, b, c = coefficients
    is_tall = matrix.shape[0] > matrix.shape[1]
    x = matrix.T if is_tall else matrix
    x = x / x.norm().clamp(min=eps)
    for _ in range(steps):
        gram = x @ x.T
        x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.T if is_tall else x


def _adamw(parameters: list[nn.Parameter], rate: float, decay: float) -> torch.optim.Optimizer:
    fused = parameters[0].device.type in ("cpu", "cuda")
    return torch.optim.AdamW(parameters, lr=rate, betas=(0.9, 0.95), weight_decay=decay, fused=fused)
