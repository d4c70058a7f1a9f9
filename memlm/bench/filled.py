"""Decoding behind a long text that nobody reads: states filled with random numbers to a length."""

from __future__ import annotations

import statistics
import time
from dataclasses import replace

import torch

from memlm.model import Decoder, DecoderState, ModelConfig

STEPS = 20
READ = 32  # tokens that sums begin from
KINDS = 8  # integers in a field with places, such as the numbers of buckets


def room_for(config: ModelConfig, length: int) -> ModelConfig:
    """Returns the config with a context for a text of a length and the steps behind it."""
    needed = length + STEPS + READ
    return config if config.is_segmented or config.context_length >= needed else replace(config, context_length=needed)


@torch.inference_mode()
def filled_state(decoder: Decoder, length: int) -> DecoderState:
    """Returns the state of one row as it is after `length` tokens, but for its numbers, which are random.

    A state whose bytes are bounded has read real tokens until its places and memories were full.
    """
    config = decoder.config
    state = decoder.new_state(capacity=length + STEPS + READ)
    is_bounded = config.is_segmented or state.is_rolling
    full = 4 * config.context_length + 1 if config.is_segmented else 2 * state.num_local
    tokens_1T = torch.randint(1, config.vocab_size, (1, min(length, full) if is_bounded else READ))
    decoder(tokens_1T, state)
    if not is_bounded:
        state.cache_L2BGSd.normal_()
        for name, field in ({} if state.fields is None else state.fields.fields).items():
            if field.place_axis is not None:
                held = state.field(name)
                held.normal_() if held.is_floating_point() else held.random_(KINDS)
        state.rows[0].length = length
    for (cache,) in state.knn_caches.values():
        pairs = torch.randn(2, config.num_kv_heads, length - cache.count, config.head_dim, device=decoder.device)
        cache.add(*pairs)
    return state


@torch.inference_mode()
def decode_speed(decoder: Decoder, state: DecoderState, seconds: float) -> float:
    """Returns tokens/s of one row: the median of up to STEPS steps in about some seconds, behind two that warm up."""
    token_11, times = torch.ones(1, 1, dtype=torch.int64), list[float]()
    while len(times) < STEPS and sum(times) < seconds:
        begin = time.perf_counter()
        # To the processor at each step, which waits for the device.
        token_11 = decoder.logits(decoder(token_11, state)[0]).argmax(dim=-1).cpu()
        times.append(time.perf_counter() - begin)
    return 1 / statistics.median(times[2:] or times)
