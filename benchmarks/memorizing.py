"""kNN attention while its cache grows, beside memorizing-transformers-pytorch if installed, and a session's bytes.

The weights are random, because speed does not depend on them.
"""

from __future__ import annotations

import contextlib
import statistics
import time
from collections.abc import Iterator
from dataclasses import replace
from importlib.util import find_spec
from tempfile import TemporaryDirectory
from typing import Any

import torch

from memlm.base.progress import Progress
from memlm.bench.machine import multiplied_dtypes
from memlm.model import Compression, Decoder, Memorizing, ModelConfig
from memlm.model.state.size import local_places

# The shape of memorizing-transformers-pytorch's own layers: one key-value head, and GELU between two products.
MEMORIZING = ModelConfig(
    vocab_size=1024, dim=512, num_layers=8, num_heads=8, num_kv_heads=1, ff_dim=2048, context_length=512,
    norm="layer", activation="gelu", xl_length=512,
    memorizing=Memorizing(layers=(4,), top_k=32, capacity=262_144, search="faiss"),
)  # fmt: skip
SIZES = (8_192, 131_072, 262_144)


def bench_memorizing(*, largest: int, progress: Progress) -> dict[str, Any]:
    """The figures by name. `largest` is the number of pairs of kNN attention."""
    return _memorizing(largest, progress) | _session()


def _memorizing(largest: int, progress: Progress) -> dict[str, Any]:
    """Tokens/s of reading one document while its kNN cache grows."""
    figures: dict[str, Any] = {}
    for name, dtype in multiplied_dtypes().items():
        torch.manual_seed(0)
        decoder = Decoder(MEMORIZING).to(dtype).eval().pack()
        speeds = dict(_speeds_by_size(decoder, largest, progress, name))
        for size in (size for size in SIZES if size <= largest):
            figures[f"memorizing_{name}_tokens_per_s_at_{size}"] = _speed_near(speeds, size)
        sizes = [size for size in SIZES if size <= largest]
        figures[f"memorizing_{name}_cost_of_largest_over_smallest"] = _speed_near(speeds, sizes[0]) / _speed_near(
            speeds, sizes[-1]
        )
    if (reference := _reference_memorizing(progress)) is not None:
        figures["memorizing_theirs_tokens_per_s"] = reference
        at = max(size for size in SIZES if size <= min(largest, 131_072))
        for name in multiplied_dtypes():
            figures[f"memorizing_{name}_over_theirs"] = figures[f"memorizing_{name}_tokens_per_s_at_{at}"] / reference
    return figures


def _session() -> dict[str, Any]:
    """Bytes of a session after 20,000 tokens, allocated and by the formula in docs/memories.md."""
    shape = replace(
        MEMORIZING, memorizing=None, dim=256, num_layers=4, num_kv_heads=2, head_dim=32, rotary_dim=0, ff_dim=512
    )
    configs = {
        "memorizing": replace(shape, memorizing=Memorizing(layers=(2,), capacity=65_536)),
        "compressive": replace(shape, compression=Compression(length=256, rate=4)),
        "windowed": replace(shape, xl_length=0, windows=(256,) * 4, context_length=32_768),
    }
    figures: dict[str, Any] = {}
    for name, config in configs.items():
        decoder = Decoder(config).eval()
        state = decoder.new_state(capacity=32_768)
        with torch.inference_mode():
            for _ in range(40):
                decoder(torch.randint(1, 1024, (1, 500)), state)
        figures[f"session_{name}_bytes"] = state.num_bytes
        figures[f"session_{name}_bytes_over_formula"] = state.num_bytes / session_bytes(config, 20_000)
    return figures


def session_bytes(config: ModelConfig, tokens: int, *, itemsize: int = 4, capacity: int = 32_768) -> int:
    """Bytes of one sequence's state after some tokens, by the formula of docs/memories.md."""
    front = config.compression.length if config.compression else config.num_sinks
    places = front + local_places(config, capacity)[0]
    G, d = config.num_kv_heads, config.head_dim
    total = 2 * config.num_layers * G * d * itemsize * places
    if config.compression:
        total += config.num_layers * config.dim * itemsize * places
    if memory := config.memorizing:
        left = max(0, tokens - config.xl_length - tokens % config.context_length)
        total += len(memory.layers) * 2 * G * d * 2 * min(left, memory.capacity)
    return total


def _speeds_by_size(decoder: Decoder, largest: int, progress: Progress, name: str) -> Iterator[tuple[int, float]]:
    """Pairs in the kNN cache and tokens/s at that size, every eight segments."""
    state, segment = decoder.new_state(), decoder.config.context_length
    row = state.knn_caches[MEMORIZING.memorizing.layers[0] if MEMORIZING.memorizing else 0][0]
    with torch.inference_mode():
        while row.size < largest - decoder.config.xl_length - segment:
            tokens = torch.randint(1, decoder.config.vocab_size, (8, 1, segment))
            begin = time.perf_counter()
            for tokens_1T in tokens:
                decoder.logits(decoder(tokens_1T, state)[0])
            speed = 8 * segment / (time.perf_counter() - begin)
            yield row.size, speed
            progress(f"memorizing {name}", row.size, largest, f"{speed:,.0f} tokens/s")


def _speed_near(speeds: dict[int, float], size: int) -> float:
    """The median speed of the eight measurements nearest to a size."""
    nearest = sorted(speeds, key=lambda measured: abs(measured - size))[:8]
    return statistics.median(speeds[measured] for measured in nearest)


def _reference_memorizing(progress: Progress) -> float | None:
    """Tokens/s of memorizing-transformers-pytorch in float32, which do not depend on the size of its memory."""
    if find_spec("memorizing_transformers_pytorch") is None:
        return None
    from memorizing_transformers_pytorch import MemorizingTransformer

    with TemporaryDirectory(prefix="memlm-bench-") as folder, contextlib.chdir(folder):  # it writes .tmp/ where it runs
        return _reference_speed(MemorizingTransformer, progress)


def _reference_speed(kind: Any, progress: Progress) -> float:
    model = kind(
        num_tokens=1024, dim=512, depth=8, dim_head=64, heads=8, memorizing_layers=(5,), max_knn_memories=262_144,
        num_retrieved_memories=32, xl_max_memories=512, xl_memory_layers=tuple(range(1, 9)),
    ).eval()  # fmt: skip
    speeds, xl = [], None
    with torch.inference_mode():
        memories = model.create_knn_memories(batch_size=1)
        for number in range(32):
            tokens = torch.randint(1, 1024, (1, 512))
            begin = time.perf_counter()
            _, xl = model(tokens, knn_memories=memories, xl_memories=xl)
            speeds.append(512 / (time.perf_counter() - begin))
            progress("memorizing, reference", number + 1, 32)
    return statistics.median(speeds[8:])
