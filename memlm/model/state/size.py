"""How many places and bytes a row of the KV cache takes."""

from __future__ import annotations

import torch

from memlm.model.attention.compression import group_size
from memlm.model.config import ModelConfig
from memlm.model.state.fields import fields_of

SPARE_PLACES = 64  # at least so many tokens behind a window are written before the window moves


def local_places(config: ModelConfig, capacity: int) -> tuple[int, bool]:
    """Returns how many of the latest tokens a row has places for, and whether old ones make room for new ones."""
    if config.is_segmented:
        behind = 0 if config.border is None else config.border.num_behind
        return config.xl_length + config.context_length + group_size(config.compression) - 1 + behind, True
    if config.is_windowed:
        widest = max(config.windows)
        rolling = widest - 1 + max(SPARE_PLACES, widest // 4)
        if rolling <= capacity - config.num_sinks:
            return rolling, True
    return max(1, capacity - config.num_sinks), False


def row_bytes(config: ModelConfig, num_tokens: int, dtype: torch.dtype) -> int:
    """Bytes of one row after `num_tokens` tokens, without Faiss' copies of keys."""
    places = config.num_front + local_places(config, num_tokens)[0]
    pair = 2 * config.num_kv_heads * config.head_dim
    size = len(config.caching_layers) * places * pair * dtype.itemsize
    size += sum(field.row_bytes(places, dtype) for field in fields_of(config).values())
    if config.keeps_inputs:
        usage_bytes = 4 if config.compression and config.compression.kind == "most_used" else 0
        size += config.num_layers * places * (config.dim * dtype.itemsize + usage_bytes)
    if memorizing := config.memorizing:
        stored = dtype if memorizing.storage == "model" else torch.float16
        size += len(memorizing.layers) * min(num_tokens, memorizing.capacity) * pair * stored.itemsize
    if config.extended_attention:
        size += config.num_layers * num_tokens * pair * torch.float16.itemsize
    return size
