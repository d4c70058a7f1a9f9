"""The architectures of GGUF files: tables of the tensors' names, and the settings of each.

The names are those of github.com/ggml-org/llama.cpp, gguf-py/gguf/constants.py.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from memlm.errors import Corrupt, Incompatible, InvalidInput
from memlm.model.config import ModelConfig
from memlm.model.files.family import Family, Source, Table, same
from memlm.model.files.gguf import GgufFile
from memlm.model.mechanisms import RopeScaling

LLAMA3_LENGTH, LLAMA3_LOW, LLAMA3_HIGH = 8192, 1.0, 4.0  # how Llama 3.1 and 3.2 stretch; a file holds the result only


def architecture_of(file: GgufFile) -> Family:
    """How a file's settings and tensors are read. Raises Incompatible for an unknown architecture."""
    if file.architecture not in ARCHITECTURES:
        raise Incompatible(
            f"{file.path} is a model of the architecture {file.architecture!r}; this version reads GGUF files of"
            f" {', '.join(ARCHITECTURES)}"
        )
    return ARCHITECTURES[file.architecture]


def config_of(file: GgufFile) -> ModelConfig:
    """The model's shape. Raises Incompatible for a setting that this version does not have."""
    prefix = f"{file.architecture}."
    settings = {key.removeprefix(prefix): value for key, value in file.metadata.items() if key.startswith(prefix)}
    try:
        return ModelConfig(**architecture_of(file).config({**settings, "file": file}))
    except KeyError as error:
        raise Corrupt(f"{file.path} lacks the setting {prefix}{error.args[0]}; fetch the file again") from error
    except (InvalidInput, TypeError, ValueError) as error:
        raise Incompatible(f"the settings of {file.path} do not fit together: {error}") from error


def _paired_to_halves(num_heads_of: Callable[[ModelConfig], Sequence[int]]) -> Callable[[Tensor, ModelConfig], Tensor]:
    """Undoes the order of Llama's GGUF files, in which the two numbers that rotate together are neighbors. Here, as in
    Hugging Face checkpoints, they are in different halves of a head.
    """

    def rearrange(tensor: Tensor, config: ModelConfig) -> Tensor:
        parts = tensor.split([heads * config.head_dim for heads in num_heads_of(config)])
        query, key, value = (part.unflatten(0, (-1, config.head_dim // 2, 2)) for part in parts)
        return torch.cat([query.transpose(1, 2).flatten(0, 2), key.transpose(1, 2).flatten(0, 2), value.flatten(0, 2)])

    return rearrange


def _by_kind(config: ModelConfig) -> tuple[int, int, int]:
    return config.num_heads, config.num_kv_heads, config.num_kv_heads


QKV = ("blk.{}.attn_q", "blk.{}.attn_k", "blk.{}.attn_v")
SEPARATE_QKV: Table = {
    f"blocks.{{}}.attention.qkv.{kind}": same(*(f"{name}.{kind}" for name in QKV)) for kind in ("weight", "bias")
}
LLAMA_QKV: Table = {name: Source(source.names, _paired_to_halves(_by_kind)) for name, source in SEPARATE_QKV.items()}
FUSED_QKV: Table = {
    f"blocks.{{}}.attention.qkv.{kind}": same(f"blk.{{}}.attn_qkv.{kind}") for kind in ("weight", "bias")
}
COMMON: Table = {
    "embedding.weight": same("token_embd.weight"),
    "positions.weight": same("position_embd.weight"),
    "norm.weight": same("output_norm.weight"),
    "norm.bias": same("output_norm.bias"),
    "head.weight": same("output.weight"),
    **{
        f"blocks.{{}}.{ours}.{kind}": same(f"blk.{{}}.{theirs}.{kind}")
        for ours, theirs in {
            "attention_norm": "attn_norm",
            "attention.out": "attn_output",
            "attention.query_norm": "attn_q_norm",
            "attention.key_norm": "attn_k_norm",
            "ff_norm": "ffn_norm",
            "ff.up": "ffn_up",
            "ff.down": "ffn_down",
        }.items()
        for kind in ("weight", "bias")
    },
}
GATED: Table = {
    f"blocks.{{}}.ff.gate_up.{kind}": same(f"blk.{{}}.ffn_gate.{kind}", f"blk.{{}}.ffn_up.{kind}")
    for kind in ("weight", "bias")
}
LLAMA: Table = {**COMMON, **LLAMA_QKV, **GATED}
QWEN: Table = {**COMMON, **SEPARATE_QKV, **GATED}
GPT: Table = {**COMMON, **FUSED_QKV}
PHI3: Table = {**COMMON, **FUSED_QKV, "blocks.{}.ff.gate_up.weight": same("blk.{}.ffn_up.weight")}
OLMO2: Table = {
    **QWEN,
    "blocks.{}.attention_norm.weight": same("blk.{}.post_attention_norm.weight"),
    "blocks.{}.ff_norm.weight": same("blk.{}.post_ffw_norm.weight"),
}


def _less_one(name: str) -> Source:
    """The weight of a norm of Gemma's, to which the file has added the one that the norm adds."""
    return Source((name,), lambda tensor, _: tensor - 1)


GEMMA3: Table = {
    **QWEN,
    "norm.weight": _less_one("output_norm.weight"),
    **{
        f"blocks.{{}}.{ours}.weight": _less_one(f"blk.{{}}.{theirs}.weight")
        for ours, theirs in {
            "attention_norm": "attn_norm",
            "attention.query_norm": "attn_q_norm",
            "attention.key_norm": "attn_k_norm",
            "attention_out_norm": "post_attention_norm",
            "ff_norm": "ffn_norm",
            "ff_out_norm": "post_ffw_norm",
        }.items()
    },
}
ROPE_FACTORS = "rope_freqs.weight"  # computed from the settings
SHORT_FACTORS, LONG_FACTORS = "rope_factors_short.weight", "rope_factors_long.weight"
# What a file does not say: the programs that read it know it by heart.
GEMMA3_PATTERN, GEMMA3_LOCAL_THETA, GEMMA3_27B_LAYERS = 6, 10_000.0, 62
SMOLLM3_NO_ROPE = 4

Settings = Mapping[str, Any]


def _shape(c: Settings) -> dict[str, Any]:
    file: GgufFile = c["file"]
    heads = int(c["attention.head_count"])
    if int(c["block_count"]) > len(file.tensors):
        raise Corrupt(f"{file.path} has {c['block_count']:,} layers, and fewer tensors; fetch the file again")
    return {
        "vocab_size": file.shape("token_embd.weight")[0] if "token_embd.weight" in file.names else 0,
        "dim": int(c["embedding_length"]),
        "num_layers": int(c["block_count"]),
        "num_heads": heads,
        "num_kv_heads": int(c.get("attention.head_count_kv", heads)),
        "head_dim": int(c.get("attention.key_length", 0)),
        "ff_dim": int(c["feed_forward_length"]),
        "context_length": int(c["context_length"]),
        "tied_embeddings": "output.weight" not in file.names,
    }


def _llama(c: Settings) -> dict[str, Any]:
    file: GgufFile = c["file"]
    if c.get("expert_count"):
        raise Incompatible(f"{file.path} has {c['expert_count']} experts a layer; this version reads none")
    return {
        **_shape(c),
        **_rotary(c),
        "norm_eps": float(c["attention.layer_norm_rms_epsilon"]),
        "qkv_bias": "blk.0.attn_q.bias" in file.names,
        "out_bias": "blk.0.attn_output.bias" in file.names,
        "ff_bias": "blk.0.ffn_up.bias" in file.names,
    }


def _qwen3(c: Settings) -> dict[str, Any]:
    return {**_llama(c), "qk_norm": True}


def _olmo2(c: Settings) -> dict[str, Any]:
    return {**_llama(c), "norm_order": "output", "qk_norm": True, "qk_norm_over": "projection"}


def _smollm3(c: Settings) -> dict[str, Any]:
    layers = range(int(c["block_count"]))
    return {**_llama(c), "no_rope_layers": tuple(n for n in layers if (n + 1) % SMOLLM3_NO_ROPE == 0)}


def _phi3(c: Settings) -> dict[str, Any]:
    """Phi-3. A file with factors for short and long texts is read up to the length of the short ones."""
    file: GgufFile = c["file"]
    llama = {**_llama(c), "windows": (int(c.get("attention.sliding_window", 0)),) * int(c["block_count"])}
    if SHORT_FACTORS not in file.names:
        return llama
    if (factors := file.view(SHORT_FACTORS)) is None:
        raise Incompatible(f"{file.path}: the tensor {SHORT_FACTORS} lies in blocks; this version reads plain numbers")
    length, original = int(c["context_length"]), int(c["rope.scaling.original_context_length"])
    scaling = RopeScaling(
        "longrope", length / original, original, attention_factor=float(c["rope.scaling.attn_factor"]),
        factors=tuple(factors.tolist()),
    )  # fmt: skip
    return {**llama, "rope_scaling": scaling, "context_length": min(original, length)}


def _gemma3(c: Settings) -> dict[str, Any]:
    llama, layers, window = _llama(c), int(c["block_count"]), int(c.get("attention.sliding_window", 0))
    pattern = c.get("attention.sliding_window_pattern", GEMMA3_PATTERN)
    if isinstance(pattern, int):
        pattern = [(layer + 1) % pattern != 0 for layer in range(layers)]
    head_dim = llama["head_dim"] or llama["dim"] // llama["num_heads"]
    scaled_by = llama["dim"] // llama["num_heads"] if layers == GEMMA3_27B_LAYERS else head_dim
    return {
        **llama,
        "windows": tuple(window if is_local else 0 for is_local in list(pattern)[:layers]),
        "local_rope_theta": float(c.get("rope.freq_base_swa", GEMMA3_LOCAL_THETA)),
        "norm": "rms_offset",
        "norm_order": "sandwich",
        "qk_norm": True,
        "activation": "geglu",
        "embedding_scale": math.sqrt(llama["dim"]),
        "query_scale": math.sqrt(head_dim / scaled_by),
    }


def _gpt2(c: Settings) -> dict[str, Any]:
    return {**_gpt(c), "positions": "learned", "activation": "gelu_tanh"}


def _neox(c: Settings) -> dict[str, Any]:
    return {**_gpt(c), **_rotary(c), "activation": "gelu", "parallel_residual": bool(c["use_parallel_residual"])}


def _gpt(c: Settings) -> dict[str, Any]:
    return {
        **_shape(c),
        "norm": "layer",
        "norm_eps": float(c["attention.layer_norm_epsilon"]),
        "qkv_bias": True,
        "out_bias": True,
        "ff_bias": True,
    }


def _rotary(c: Settings) -> dict[str, Any]:
    return {
        "rope_theta": float(c.get("rope.freq_base", 10_000.0)),
        "rotary_dim": int(c.get("rope.dimension_count", 0)),
        "rope_scaling": _rope_scaling(c),
    }


def _rope_scaling(c: Settings) -> RopeScaling | None:
    file: GgufFile = c["file"]
    kind = c.get("rope.scaling.type", "none")
    original = int(c.get("rope.scaling.original_context_length", c["context_length"]))
    if ROPE_FACTORS in file.names:
        return _llama3(file, c)
    if kind == "none" or float(c.get("rope.scaling.factor", 1.0)) == 1.0:
        return None
    factor = float(c["rope.scaling.factor"])
    if kind == "yarn":
        attention_factor = 0.1 * float(np.log(factor)) + 1.0
        return RopeScaling("yarn", factor, original, attention_factor=attention_factor)
    return RopeScaling(kind, factor, original)


def _llama3(file: GgufFile, c: Settings) -> RopeScaling:
    """The scaling whose factors the file holds. Raises Incompatible where Llama 3's settings do not give them."""
    if (factors := file.view(ROPE_FACTORS)) is None:
        raise Incompatible(f"{file.path}: the tensor {ROPE_FACTORS} lies in blocks; this version reads plain numbers")
    theta, dim, factor = float(c["rope.freq_base"]), int(c["rope.dimension_count"]), float(factors.max())
    wavelengths = 2 * torch.pi * theta ** (torch.arange(0, dim, 2) / dim)
    smooth = (LLAMA3_LENGTH / wavelengths - LLAMA3_LOW) / (LLAMA3_HIGH - LLAMA3_LOW)
    blended = 1 / ((1 - smooth.clamp(0, 1)) / factor + smooth.clamp(0, 1))
    if factors.shape != blended.shape or not torch.allclose(factors, blended, rtol=1e-3):
        raise Incompatible(f"{file.path} stretches its rotary positions in a way that this version does not know")
    return RopeScaling("llama3", factor, LLAMA3_LENGTH, LLAMA3_LOW, LLAMA3_HIGH)


ARCHITECTURES: Mapping[str, Family] = {
    "llama": Family(_llama, LLAMA, "", (ROPE_FACTORS,)),
    "qwen2": Family(_llama, QWEN, ""),
    "qwen3": Family(_qwen3, QWEN, ""),
    "gpt2": Family(_gpt2, GPT, ""),
    "gptneox": Family(_neox, GPT, ""),
    "gemma3": Family(_gemma3, GEMMA3, ""),
    "olmo2": Family(_olmo2, OLMO2, ""),
    "phi3": Family(_phi3, PHI3, "", (SHORT_FACTORS, LONG_FACTORS)),
    "smollm3": Family(_smollm3, LLAMA, "", (ROPE_FACTORS,)),
}
