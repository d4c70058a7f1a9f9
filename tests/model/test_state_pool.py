"""Rows of a pool take memory by their own length, give it back when they leave, and are read as if they were alone."""

import re
import sys
from pathlib import Path

import pytest
import torch
from batch_helpers import KINDS
from conftest import SHAPE
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from memlm.model import Decoder, DecoderState, ModelConfig
from memlm.model.kernels import cpu
from memlm.model.state import pool as state_pool
from memlm.model.state.pages import Pages
from memlm.model.state.pool import StatePool
from memlm.model.state.size import row_bytes

LONG, SHORT, ROWS = 3000, 40, 8
PLACE_BYTES = 2 * 2 * 4 * 64 * 4  # layers, keys and values, heads, their width, float32
HEADS, PAGE = 2 * 2 * 4, 4096

on_linux = pytest.mark.skipif(sys.platform != "linux", reason="pages are counted in /proc/self/smaps")


def resident(tensor: Tensor, field: str = "Anonymous") -> int:
    """Bytes of the mapping that holds a tensor, as the system counts them."""
    begin, total, counts = tensor.data_ptr(), 0, False
    end = begin + tensor.untyped_storage().nbytes()
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if found := re.match(r"([0-9a-f]+)-([0-9a-f]+) ", line):
            counts = int(found[1], 16) < end and int(found[2], 16) > begin
        elif counts and line.startswith(f"{field}:"):
            total += 1024 * int(line.split()[1])
    return total


@pytest.fixture(scope="module")
def decoder() -> Decoder:
    torch.manual_seed(3)
    config = ModelConfig(
        vocab_size=50, dim=256, num_layers=2, num_heads=4, num_kv_heads=4, ff_dim=64, context_length=4096
    )
    return Decoder(config).eval()


def read(decoder: Decoder, length: int, seed: int) -> DecoderState:
    """A state as after reading so many tokens, its keys and values drawn at random."""
    state = decoder.new_state(capacity=length + 20)
    state.cache_L2BGSd.normal_(generator=torch.Generator().manual_seed(seed))
    state.rows[0].length = length
    return state


@torch.inference_mode()
def steps(decoder: Decoder, state: DecoderState, count: int) -> Tensor:
    token = torch.full((state.batch_size, 1), 7)
    return torch.cat([decoder(token, state)[0] for _ in range(count)], dim=1)


def filled(decoder: Decoder, lengths: list[int], places: int = LONG + 20) -> StatePool:
    pool = StatePool(decoder, most_rows=ROWS, capacity=4096)
    pool.grow(len(lengths), places)
    for seed, length in enumerate(lengths):
        pool.add_row(read(decoder, length, seed))
    return pool


@on_linux
def test_a_long_row_does_not_multiply_the_memory_of_short_ones(decoder):
    pool = filled(decoder, [SHORT] * 4 + [LONG] + [SHORT] * 3)
    steps(decoder, pool.state, 3)
    own = PLACE_BYTES * (LONG + (ROWS - 1) * SHORT)
    partly_used = ROWS * HEADS * 2 * PAGE + 2 * HEADS * (2 << 20) // 4
    assert own <= resident(pool.state.cache_L2BGSd) <= own + partly_used
    assert resident(pool.state.cache_L2BGSd) < pool.state.cache_L2BGSd.numel() * 4 // 2


@on_linux
@pytest.mark.parametrize("place", [0, 3, ROWS - 1])
def test_a_row_that_leaves_gives_its_memory_back(decoder, place):
    lengths = [SHORT] * (ROWS - 1)
    lengths.insert(place, LONG)
    pool = filled(decoder, lengths)
    pool.remove_row(place)
    left = PLACE_BYTES * (ROWS - 1) * SHORT
    assert resident(pool.state.cache_L2BGSd) < left + ROWS * HEADS * 2 * PAGE + (2 << 20)


@pytest.mark.parametrize("by_products", [False, True])
def test_rows_of_very_different_lengths_are_read_as_if_they_were_alone(decoder, by_products, monkeypatch):
    if by_products:
        monkeypatch.setattr(cpu, "choose_sdpa", lambda query: cpu.sdpa_of_one)
    lengths = [SHORT, LONG, SHORT + 100, 5, 900, 700]
    pool = filled(decoder, lengths)
    pool.remove_row(2)
    lengths[2] = lengths.pop()
    seeds = [0, 1, 5, 3, 4]
    together = steps(decoder, pool.state, 4)
    for row, (length, seed) in enumerate(zip(lengths, seeds, strict=True)):
        alone = steps(decoder, read(decoder, length, seed), 4)
        torch.testing.assert_close(together[row], alone[0], atol=1e-5, rtol=1e-4)


@on_linux
def test_a_row_that_becomes_full_keeps_what_it_holds(decoder):
    pool = filled(decoder, [2040, SHORT, SHORT], places=4096)
    before = pool.state.cache_L2BGSd.clone()
    pool.settle()
    assert pool._num_huge == [0] * 3
    steps(decoder, pool.state, 10)
    for _ in range(10):
        pool.settle()
    assert pool._num_huge == [4, 0, 0]
    after = pool.state.cache_L2BGSd
    assert torch.equal(after[:, :, 0, :, :2040], before[:, :, 0, :, :2040])
    assert torch.equal(after[:, :, 1:, :, :SHORT], before[:, :, 1:, :, :SHORT])
    own = PLACE_BYTES * (2050 + 2 * (SHORT + 10))
    assert resident(pool.state.cache_L2BGSd) < 2.1 * own + ROWS * HEADS * 2 * PAGE


@on_linux
def test_a_long_row_moves_into_huge_pages_a_part_at_a_time(decoder, monkeypatch):
    monkeypatch.setattr(state_pool, "SETTLED_BYTES", 1)
    pool = filled(decoder, [SHORT, 2100], places=4096)
    assert pool._num_huge == [0, 4], "it was full when it came"
    pool = filled(decoder, [2040, 2040], places=4096)
    steps(decoder, pool.state, 10)
    seen = []
    for _ in range(9):
        pool.settle()
        seen.append([*pool._num_huge])
    assert seen == [[count, 0] for count in (1, 2, 3, 4)] + [[4, count] for count in (1, 2, 3, 4, 4)]
    pool.remove_row(0)
    assert pool._num_huge == [4]


@settings(max_examples=20)
@given(st.integers(0, 1 << 21), st.integers(0, 1 << 21))
def test_only_what_lies_between_two_bytes_is_released(first, second):
    pages = Pages((1 << 21,), torch.uint8)
    pages.tensor.fill_(1)
    begin, end = sorted((first, second))
    pages.release(begin, end)
    assert bool((pages.tensor[:begin] == 1).all())
    assert bool((pages.tensor[end:] == 1).all())
    pages.collapse(begin, end)
    assert bool((pages.tensor[:begin] == 1).all())
    assert bool((pages.tensor[end:] == 1).all())
    pages.tensor.fill_(1)


@pytest.mark.parametrize("kind", sorted(KINDS))
@pytest.mark.parametrize("num_tokens", [3, 40])
def test_what_a_row_is_counted_as_is_what_its_state_takes(kind, num_tokens):
    config = ModelConfig.from_dict({**SHAPE, "vocab_size": 50, **KINDS[kind]})
    state = Decoder(config).new_state(capacity=num_tokens)
    remembering = 1 if config.memorizing else config.num_layers if config.extended_attention else 0
    remembered = remembering * 2 * config.num_kv_heads * config.head_dim * 2 * num_tokens
    assert row_bytes(config, num_tokens, torch.float32) == state.num_bytes + remembered
