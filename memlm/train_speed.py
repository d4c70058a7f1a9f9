"""How much of what the hardware can do a training run uses."""

from __future__ import annotations

import time

import torch

from memlm.model import Decoder

TRIES = 4


def flops_per_token(decoder: Decoder) -> float:
    """Additions and multiplications of a forward and a backward pass: six a parameter that is multiplied, and twelve
    a layer, dimension and token that is attended to (arXiv 2204.02311, appendix B). A token sees half of its segment
    on average, and all that is remembered behind it. What is looked up in kNN memory is not counted.
    """
    config = decoder.config
    embedded = 0 if config.tied_embeddings else decoder.embedding.weight.numel()
    compressed = config.compression.length if config.compression else 0
    seen = config.context_length / 2 + config.xl_length + compressed
    return 6 * (decoder.num_parameters - embedded) + 12 * config.num_layers * config.num_heads * config.head_dim * seen


def measured_peak(device: torch.device, *, bfloat16: bool) -> float:
    """Operations a second of large products, the best of a few tries: what training is held against.

    An accelerator is given larger products, and several before it is waited for, so that starting them costs nothing.
    """
    size, products = (8192, 8) if device.type == "cuda" else (1024, 1)
    a = torch.randn(size, size, device=device, dtype=torch.bfloat16 if bfloat16 else torch.float32)
    best = 0.0
    for _ in range(TRIES):
        begin = time.perf_counter()
        for _ in range(products):
            product = a @ a
        float(product[0, 0])  # waits for all
        best = max(best, products * 2 * size**3 / (time.perf_counter() - begin))
    return best
