"""GGUF files of tiny models, written with the `gguf` package as converters of the field do."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from gguf.quants import dequantize, quantize
from transformers import PreTrainedModel

ARCHITECTURES = {"gpt_neox": "gptneox", "gemma3_text": "gemma3"}  # where the name is not that of `transformers`
K_QUANTS = ("Q4_K", "Q5_K", "Q6_K")  # the package reads these, and does not write them


def write_gguf(
    path: Path,
    model: PreTrainedModel,
    tokenizer: dict[str, Any],
    kind: str = "F32",
    other_kinds: Mapping[str, str] | None = None,
    part_tensors: int = 0,
) -> PreTrainedModel:
    """Writes a model with its matrices in blocks of a kind, and gives the model the weights that the file holds.

    `other_kinds` are those of the tensors whose names contain a key. With `part_tensors` the file is split into parts
    of so many tensors.
    """
    config = model.config
    architecture = ARCHITECTURES.get(config.model_type, config.model_type)
    writer = gguf.GGUFWriter(path, architecture, split_max_tensors=part_tensors)
    _add_settings(writer, config)
    for key, value in tokenizer.items():
        writer.add_key_value(f"tokenizer.ggml.{key}", value, *_type_of(value))
    names = gguf.get_tensor_name_map(_model_arch(architecture), config.num_hidden_layers)
    weights = {}
    for name, tensor in model.state_dict().items():
        if name in getattr(model, "_tied_weights_keys", {}) and config.tie_word_embeddings:
            continue
        is_transposed = config.model_type == "gpt2" and name.endswith(("c_attn.weight", "c_proj.weight", "c_fc.weight"))
        rows = np.ascontiguousarray(tensor.float().T if is_transposed else tensor.float())
        rows = rows + _norm_offset(name, config)
        kinds = [other for part, other in (other_kinds or {}).items() if part in name]
        kind_here = kinds[0] if kinds else kind if rows.ndim == 2 else "F32"
        blocks, exact = _blocks(rows, kind_here)
        exact = exact - _norm_offset(name, config)
        weights[name] = torch.from_numpy(exact.T.copy() if is_transposed else exact)
        written = names.get_name(name, try_suffixes=(".weight", ".bias"))
        raw = gguf.GGMLQuantizationType[kind_here]
        writer.add_tensor(written, _reordered(name, blocks, config), raw_dtype=raw)
    if (factors := _rope_factors(config)) is not None:
        writer.add_tensor("rope_freqs.weight", factors)
    for factors in ("short", "long") if (rope := _rope(config)).get("rope_type") == "longrope" else ():
        writer.add_tensor(f"rope_factors_{factors}.weight", np.array(rope[f"{factors}_factor"], np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    model.load_state_dict(weights, strict=False)
    return model


def read_gguf(path: Path, model: PreTrainedModel) -> PreTrainedModel:
    """Gives a model of the Llama family the weights of a file, which the package's own reader reads."""
    config = model.config
    names = gguf.get_tensor_name_map(_model_arch(config.model_type), config.num_hidden_layers)
    tensors = {tensor.name: dequantize(tensor.data, tensor.tensor_type) for tensor in gguf.GGUFReader(path).tensors}
    weights = {}
    for name in model.state_dict():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        rows = tensors[names.get_name(name, try_suffixes=(".weight", ".bias"))]
        if "q_proj" in name or "k_proj" in name:  # the rotating pairs are together in the file
            heads = config.num_attention_heads if "q_proj" in name else config.num_key_value_heads
            rows = rows.reshape(heads, -1, 2, *rows.shape[1:]).swapaxes(1, 2).reshape(rows.shape)
        weights[name] = torch.from_numpy(rows.copy())
    model.load_state_dict(weights, strict=False)
    model.tie_weights()
    return model


def _model_arch(name: str) -> gguf.MODEL_ARCH:
    return next(arch for arch, spelled in gguf.MODEL_ARCH_NAMES.items() if spelled == name)


def _type_of(value: Any) -> tuple[Any, Any]:
    kind = gguf.GGUFValueType.get_type(value)
    if kind != gguf.GGUFValueType.ARRAY:
        return kind if kind != gguf.GGUFValueType.INT32 else gguf.GGUFValueType.UINT32, None
    return kind, gguf.GGUFValueType.get_type(value[0])


def _add_settings(writer: gguf.GGUFWriter, config: Any) -> None:
    heads = config.num_attention_heads
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_head_count(heads)
    writer.add_feed_forward_length(getattr(config, "intermediate_size", None) or 4 * config.hidden_size)
    if config.model_type in ("gpt2", "gpt_neox"):
        writer.add_layer_norm_eps(getattr(config, "layer_norm_eps", None) or config.layer_norm_epsilon)
    else:
        writer.add_head_count_kv(config.num_key_value_heads)
        writer.add_layer_norm_rms_eps(config.rms_norm_eps)
        head_dim = getattr(config, "head_dim", None) or config.hidden_size // heads
        writer.add_key_length(head_dim)
        writer.add_rope_dimension_count(head_dim)
    if config.model_type in ("gemma3_text", "phi3"):
        writer.add_sliding_window(config.sliding_window or 0)
    if config.model_type == "gpt_neox":
        writer.add_rope_dimension_count(
            int(config.rope_parameters["partial_rotary_factor"] * config.hidden_size // heads)
        )
        writer.add_parallel_residual(config.use_parallel_residual)
    if rope := _rope(config):
        writer.add_rope_freq_base(rope["rope_theta"])
        if rope["rope_type"] == "longrope":
            writer.add_rope_scaling_orig_ctx_len(original := config.original_max_position_embeddings)
            stretch = math.log(config.max_position_embeddings / original) / math.log(original)
            writer.add_rope_scaling_attn_factors(math.sqrt(1 + stretch))
        if rope["rope_type"] in ("linear", "yarn"):
            writer.add_rope_scaling_type(gguf.RopeScalingType(rope["rope_type"]))
            writer.add_rope_scaling_factor(rope["factor"])
            writer.add_rope_scaling_orig_ctx_len(
                rope.get("original_max_position_embeddings", config.max_position_embeddings)
            )


def _rope(config: Any) -> dict[str, Any]:
    """The settings of rotary positions; of a model with local layers too, those of the others."""
    rope = getattr(config, "rope_parameters", None) or {}
    return rope.get("full_attention", rope)


def _norm_offset(name: str, config: Any) -> int:
    """What Gemma's converter adds to the weight of a norm."""
    return int(config.model_type == "gemma3_text" and name.endswith("norm.weight"))


def _blocks(rows: np.ndarray, kind: str) -> tuple[np.ndarray, np.ndarray]:
    """The rows in blocks of a kind, and the float32 numbers that those stand for."""
    raw = gguf.GGMLQuantizationType[kind]
    if kind not in K_QUANTS:
        blocks = quantize(rows, raw)
        return blocks, rows if kind == "F32" else dequantize(blocks, raw)
    size, num_bytes = gguf.GGML_QUANT_SIZES[raw]
    generator = np.random.default_rng(abs(hash(rows.shape)) % 1000)
    blocks = generator.integers(0, 256, (len(rows), rows.shape[1] // size, num_bytes), dtype=np.uint8)
    scale = np.frombuffer(np.float16(1e-4 if kind == "Q6_K" else 1e-3).tobytes(), np.uint8)
    blocks[:, :, :2] = blocks[:, :, 2:4] = scale  # Q6_K ends with its one scale
    if kind == "Q6_K":
        blocks[:, :, -2:] = scale
    blocks = blocks.reshape(len(rows), -1)
    return blocks, dequantize(blocks, raw)


def _reordered(name: str, blocks: np.ndarray, config: Any) -> np.ndarray:
    """Rows in the order of the format: rotating pairs of Llama together, queries, keys and values of NeoX apart."""
    if config.model_type in ("llama", "smollm3") and ("q_proj" in name or "k_proj" in name):
        heads = config.num_attention_heads if "q_proj" in name else config.num_key_value_heads
        return blocks.reshape(heads, 2, -1, *blocks.shape[1:]).swapaxes(1, 2).reshape(blocks.shape)
    if config.model_type == "gpt_neox" and "query_key_value" in name:
        by_head = blocks.reshape(config.num_attention_heads, 3, -1, *blocks.shape[1:])
        return by_head.swapaxes(0, 1).reshape(blocks.shape)
    return blocks


def _rope_factors(config: Any) -> np.ndarray | None:
    """How many times longer each wave becomes, as Llama 3's converter writes it."""
    rope = _rope(config)
    if rope.get("rope_type") != "llama3":
        return None
    head_dim = config.hidden_size // config.num_attention_heads
    factors = []
    for pair in range(head_dim // 2):
        wavelength = 2 * np.pi * rope["rope_theta"] ** (2 * pair / head_dim)
        original = rope["original_max_position_embeddings"]
        if wavelength < original / rope["high_freq_factor"]:
            factors.append(1.0)
        elif wavelength > original / rope["low_freq_factor"]:
            factors.append(rope["factor"])
        else:
            spread = rope["high_freq_factor"] - rope["low_freq_factor"]
            smooth = (original / wavelength - rope["low_freq_factor"]) / spread
            factors.append(1 / ((1 - smooth) / rope["factor"] + smooth))
    return np.array(factors, np.float32)
