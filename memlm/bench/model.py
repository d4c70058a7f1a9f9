"""Cost of the model: decoding, prefill and training.

Each is compared with the physical bound (bytes of weights over measured bandwidth, operations over measured peak) and,
if installed, with `transformers` of one shape in one run. The weights are random, because speed does not depend on
them.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from memlm.base.progress import Progress
from memlm.bench.machine import measured_bandwidth, measured_peak, multiplied_dtypes, seconds
from memlm.bench.texts import alternately, median_ratio
from memlm.model import Decoder, ModelConfig

GPT2_SMALL = ModelConfig(
    vocab_size=50_257, dim=768, num_layers=12, num_heads=12, num_kv_heads=12, ff_dim=3072, context_length=1024,
    positions="learned", norm="layer", activation="gelu_tanh", qkv_bias=True, out_bias=True, ff_bias=True,
)  # fmt: skip
TRAINING = ModelConfig(
    vocab_size=8192, dim=512, num_layers=8, num_heads=8, num_kv_heads=8, ff_dim=2048, context_length=512,
    norm="layer", activation="gelu", qkv_bias=True, out_bias=True, ff_bias=True,
)  # fmt: skip
PROMPT, DRAWN, PREFILL = 64, 32, 512
PARTS = ("decode", "prefill", "training")


def bench_model(parts: tuple[str, ...], *, repeats: int, progress: Progress) -> dict[str, Any]:
    """The figures of some parts, by name."""
    benches: dict[str, Callable[[], dict[str, Any]]] = {
        "decode": lambda: _decode(repeats, progress),
        "prefill": lambda: _prefill(repeats, progress),
        "training": lambda: _training(repeats),
    }
    figures: dict[str, Any] = {"gigabytes_per_s": measured_bandwidth() / 1e9}
    figures |= {f"peak_gigaflops_{name}": measured_peak(dtype) / 1e9 for name, dtype in multiplied_dtypes().items()}
    for part in parts:
        figures |= benches[part]()
    return figures


def _decode(repeats: int, progress: Progress) -> dict[str, Any]:
    """Tokens/s after a prompt, at batch 1 and 16."""
    figures: dict[str, Any] = {}
    bandwidth = measured_bandwidth()
    for name, dtype in multiplied_dtypes().items():
        decoder, reference = _pair(GPT2_SMALL, dtype)
        for batch in (1, 16):
            prompts = torch.randint(1, 50_000, (batch, PROMPT))
            works = [lambda p=prompts, d=decoder: _decoding(d, p)]
            if reference is not None:
                works.append(lambda p=prompts, m=reference: _transformers_decoding(m, p))
            results = alternately(repeats, *works)
            key = f"decode_{name}_{batch}"
            figures[f"{key}_tokens_per_s"] = statistics.median(results[0])
            steps_per_s = statistics.median(results[0]) / batch
            figures[f"{key}_share_of_bandwidth"] = steps_per_s * decoder.num_bytes / bandwidth
            figures |= _against(key, results)
            progress(f"decode {name}", batch, 16)
    return figures


def _prefill(repeats: int, progress: Progress) -> dict[str, Any]:
    """Tokens/s of reading a prompt, logits of every position included."""
    figures: dict[str, Any] = {}
    tokens = torch.randint(1, 50_000, (1, PREFILL))
    for name, dtype in multiplied_dtypes().items():
        decoder, reference = _pair(GPT2_SMALL, dtype)
        works = [lambda d=decoder: _reading(lambda: d.logits(d(tokens)[0]))]
        if reference is not None:
            works.append(lambda m=reference: _reading(lambda: m(tokens).logits))
        results = alternately(repeats + 1, *works)
        results = [result[1:] for result in results]
        key = f"prefill_{name}"
        figures[f"{key}_tokens_per_s"] = statistics.median(results[0])
        peak = measured_peak(dtype)
        figures[f"{key}_share_of_peak"] = statistics.median(results[0]) * 2 * decoder.num_parameters / peak
        figures |= _against(key, results)
        progress(f"prefill {name}", 1, 1)
    return figures


def _training(repeats: int) -> dict[str, Any]:
    """Tokens/s of forward and backward passes against a bare stack of PyTorch's own layers."""
    decoder, bare = Decoder(TRAINING), _Bare(TRAINING)
    tokens = torch.randint(1, TRAINING.vocab_size, (4, TRAINING.context_length + 1))
    dtype = list(multiplied_dtypes().values())[-1]  # as `memlm train` chooses

    def pace(module: nn.Module, logits: Callable[[Tensor], Tensor]) -> float:
        begin = time.perf_counter()
        with torch.autocast("cpu", torch.bfloat16, enabled=dtype == torch.bfloat16):
            scores = logits(tokens[:, :-1])
        F.cross_entropy(scores.float().flatten(0, 1), tokens[:, 1:].flatten()).backward()
        module.zero_grad()
        return tokens[:, 1:].numel() / (time.perf_counter() - begin)

    results = alternately(
        repeats + 1, lambda: pace(decoder, lambda t: decoder.logits(decoder(t)[0])), lambda: pace(bare, bare)
    )
    results = [result[1:] for result in results]
    ratio, least, most = median_ratio(*results)
    speed = statistics.median(results[0])
    return {
        "training_tokens_per_s": speed,
        "training_over_bare_layers": ratio,
        "training_over_bare_layers_least": least,
        "training_over_bare_layers_most": most,
        "training_share_of_peak": speed * 6 * decoder.num_parameters / measured_peak(dtype),
    }


def _pair(config: ModelConfig, dtype: torch.dtype) -> tuple[Decoder, Any]:
    """Our decoder of GPT-2's shape, and that of `transformers` if installed."""
    torch.manual_seed(0)
    decoder = Decoder(config).to(dtype).eval().pack()
    if find_spec("transformers") is None:
        return decoder, None
    import transformers

    transformers.logging.set_verbosity_error()
    reference: Any = transformers.GPT2LMHeadModel(transformers.GPT2Config())
    return decoder, reference.to(dtype).eval()


def _decoding(decoder: Decoder, prompts_BT: Tensor) -> float:
    with torch.inference_mode():
        state = decoder.new_state(batch_size=len(prompts_BT), capacity=PROMPT + DRAWN)
        next_B1 = decoder.logits(decoder(prompts_BT, state)[0][:, -1:]).argmax(dim=-1)
        begin = time.perf_counter()
        for _ in range(DRAWN - 1):
            next_B1 = decoder.logits(decoder(next_B1, state)[0]).argmax(dim=-1)
        return len(prompts_BT) * (DRAWN - 1) / (time.perf_counter() - begin)


def _transformers_decoding(model: Any, prompts_BT: Tensor) -> float:
    """Tokens/s of `generate`, less the time of the prompt and the first token."""

    def generate(count: int) -> None:
        options = {"min_new_tokens": count, "max_new_tokens": count, "do_sample": False, "pad_token_id": 0}
        model.generate(prompts_BT, attention_mask=torch.ones_like(prompts_BT), **options)

    with torch.inference_mode():
        first = seconds(lambda: generate(1))
        return len(prompts_BT) * (DRAWN - 1) / (seconds(lambda: generate(DRAWN)) - first)


def _reading(read: Callable[[], object]) -> float:
    with torch.inference_mode():
        return PREFILL / seconds(read)


class _Bare(nn.Module):
    """PyTorch's own layers around an embedding and a head, causal."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.embedding = nn.Embedding(config.vocab_size, config.dim)
        layer = nn.TransformerEncoderLayer(
            config.dim, config.num_heads, config.ff_dim, dropout=0.0, activation="gelu", batch_first=True,
            norm_first=True,
        )  # fmt: skip
        self.layers = nn.TransformerEncoder(layer, config.num_layers, enable_nested_tensor=False)
        self.register_buffer("mask", nn.Transformer.generate_square_subsequent_mask(config.context_length))

    def forward(self, tokens_BT: Tensor) -> Tensor:
        hidden_BTD = self.layers(self.embedding(tokens_BT), mask=self.mask, is_causal=True)
        return F.linear(hidden_BTD, self.embedding.weight)


def _against(key: str, results: list[list[float]]) -> dict[str, Any]:
    """The ratio to the other library of the run, if there was one."""
    if len(results) == 1:
        return {}
    ratio, least, most = median_ratio(*results)
    return {
        f"{key}_over_transformers": ratio,
        f"{key}_over_transformers_least": least,
        f"{key}_over_transformers_most": most,
    }
