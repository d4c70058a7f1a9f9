"""Models of other families in the Hugging Face layout: tables that translate their configs and weights.

`memlm.model.files.huggingface_tables` has one table of names for each family. Unknown families are refused by name,
and so are settings that would change the model and that this version lacks.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch

from memlm.errors import Incompatible, InvalidInput
from memlm.model.config import ModelConfig
from memlm.model.files.family import Family, JsonDict
from memlm.model.files.huggingface_tables import (
    BERT,
    GEMMA3,
    GPT2,
    GPT_NEOX,
    LLAMA,
    LLAMA_BIASES,
    MIXTRAL,
    OLMO2,
    PHI3,
    QWEN3,
    QWEN3_MOE,
    T5,
)
from memlm.model.mechanisms import RopeScaling


def _gpt2_config(c: JsonDict) -> dict[str, Any]:
    _refuse(c, "gpt2", scale_attn_by_inverse_layer_idx=False, scale_attn_weights=True, add_cross_attention=False)
    return {
        **_shape(c, dim="n_embd", num_layers="n_layer", num_heads="n_head", context_length="n_positions"),
        "num_kv_heads": c["n_head"],
        "ff_dim": c.get("n_inner") or 4 * c["n_embd"],
        "positions": "learned",
        "norm": "layer",
        "norm_eps": c.get("layer_norm_epsilon", 1e-5),
        "activation": _activation(c.get("activation_function", "gelu_new")),
        "qkv_bias": True,
        "out_bias": True,
        "ff_bias": True,
        "tied_embeddings": c.get("tie_word_embeddings", True),
    }


def _neox_config(c: JsonDict) -> dict[str, Any]:
    shape = _shape(c)
    head_dim = c["hidden_size"] // c["num_attention_heads"]
    fraction = _rope(c).get("partial_rotary_factor", c.get("rotary_pct", 0.25))
    return {
        **shape,
        "num_kv_heads": c["num_attention_heads"],
        **_rotary(c, theta=c.get("rotary_emb_base", 10_000.0)),
        "rotary_dim": int(head_dim * fraction),
        "norm": "layer",
        "norm_eps": c.get("layer_norm_eps", 1e-5),
        "activation": _activation(c.get("hidden_act", "gelu")),
        "parallel_residual": c.get("use_parallel_residual", True),
        "qkv_bias": c.get("attention_bias", True),
        "out_bias": c.get("attention_bias", True),
        "ff_bias": True,
        "tied_embeddings": c.get("tie_word_embeddings", False),
    }


def _llama_config(c: JsonDict) -> dict[str, Any]:
    if c.get("hidden_act", "silu") != "silu":
        raise Incompatible(f"hidden_act is {c['hidden_act']!r}; this family is read with silu only")
    bias = bool(c.get("attention_bias", False))
    return {
        **_shape(c),
        "num_kv_heads": c.get("num_key_value_heads") or c["num_attention_heads"],
        "head_dim": c.get("head_dim") or 0,
        **_rotary(c, theta=10_000.0),
        "norm_eps": c.get("rms_norm_eps", 1e-6),
        "qkv_bias": bias,
        "out_bias": bias,
        "ff_bias": bool(c.get("mlp_bias", False)),
        "tied_embeddings": c.get("tie_word_embeddings", False),
    }


def _mistral_config(c: JsonDict) -> dict[str, Any]:
    window = c.get("sliding_window") or 0
    return {**_llama_config(c), "windows": (window,) * c["num_hidden_layers"]}


def _qwen2_config(c: JsonDict) -> dict[str, Any]:
    return {**_llama_config(c), "qkv_bias": True, "out_bias": False, "windows": _qwen_windows(c)}


def _qwen3_config(c: JsonDict) -> dict[str, Any]:
    return {**_llama_config(c), "head_dim": c.get("head_dim") or 128, "qk_norm": True, "windows": _qwen_windows(c)}


def _olmo2_config(c: JsonDict) -> dict[str, Any]:
    llama = _llama_config({"rms_norm_eps": 1e-5, **c})
    return {**llama, "norm_order": "output", "qk_norm": True, "qk_norm_over": "projection"}


def _smollm3_config(c: JsonDict) -> dict[str, Any]:
    layers, every = c["num_hidden_layers"], c.get("no_rope_layer_interval", 4)
    turns = c.get("no_rope_layers") or [(layer + 1) % every for layer in range(layers)]
    rotary = _rotary(c, theta=2_000_000.0)
    unturned = tuple(layer for layer, turn in enumerate(turns[:layers]) if not turn)
    window = (c.get("sliding_window") or 0) if c.get("use_sliding_window", False) else 0
    kinds = c.get("layer_types") or ["full_attention" if turn else "sliding_attention" for turn in turns[:layers]]
    windows = tuple(window if kind == "sliding_attention" else 0 for kind in kinds)
    tied = {"tied_embeddings": c.get("tie_word_embeddings", True)}
    return {**_llama_config(c), **rotary, **tied, "no_rope_layers": unturned, "windows": windows}


def _phi3_config(c: JsonDict) -> dict[str, Any]:
    fraction = _rope(c).get("partial_rotary_factor", c.get("partial_rotary_factor", 1.0))
    theta = _rope(c).get("rope_theta", c.get("rope_theta", 10_000.0))
    llama = _mistral_config({"rms_norm_eps": 1e-5, **c, "rope_parameters": {"rope_theta": theta}})
    head_dim = llama["head_dim"] or c["hidden_size"] // c["num_attention_heads"]
    return {**llama, "rotary_dim": int(head_dim * fraction), **_longrope(c)}


def _longrope(c: JsonDict) -> dict[str, Any]:
    """Phi-3's scaling for short texts, and the length up to which it holds.

    Beyond, other factors would hold for the whole text, and predictions would depend on how much of it is read.
    """
    rope = _rope(c)
    if (kind := rope.get("rope_type", rope.get("type", "default"))) == "default":
        return {}
    if kind not in ("longrope", "su", "yarn"):
        raise Incompatible(
            f"this phi3 model scales its positions by {kind!r}; this version reads longrope, su and yarn"
        )
    original = int(c.get("original_max_position_embeddings") or rope["original_max_position_embeddings"])
    factor = float(rope.get("factor") or c["max_position_embeddings"] / original)
    stretch = math.sqrt(1 + math.log(factor) / math.log(original)) if factor > 1 else 1.0
    scaling = RopeScaling(
        "longrope", factor, original, attention_factor=float(rope.get("attention_factor") or stretch),
        factors=tuple(map(float, rope["short_factor"])),
    )  # fmt: skip
    return {"rope_scaling": scaling, "context_length": min(original, c["max_position_embeddings"])}


def _gemma3_config(c: JsonDict) -> dict[str, Any]:
    _refuse(
        c, "gemma3", attn_logit_softcapping=None, final_logit_softcapping=None, use_bidirectional_attention=False,
        hidden_activation="gelu_pytorch_tanh",
    )  # fmt: skip
    layers, rope = c["num_hidden_layers"], c.get("rope_parameters") or {}
    full = rope.get("full_attention") or {"rope_theta": c.get("rope_theta", 1e6), **(c.get("rope_scaling") or {})}
    local = rope.get("sliding_attention") or {"rope_theta": c.get("rope_local_base_freq", 10_000.0)}
    if local.get("rope_type", "default") != "default":
        raise Incompatible(f"local layers scale their positions by {local['rope_type']!r}; this version scales none")
    pattern, head_dim = c.get("sliding_window_pattern") or 6, c.get("head_dim") or 256
    kinds = c.get("layer_types") or ["sliding_attention" if (n + 1) % pattern else "" for n in range(layers)]
    return {
        **_llama_config({**c, "head_dim": head_dim, "rope_parameters": full}),
        "local_rope_theta": float(local.get("rope_theta", 10_000.0)),
        "windows": tuple((c.get("sliding_window") or 0) if kind == "sliding_attention" else 0 for kind in kinds),
        "norm": "rms_offset",
        "norm_order": "sandwich",
        "qk_norm": True,
        "activation": "geglu",
        "embedding_scale": math.sqrt(c["hidden_size"]),
        "query_scale": math.sqrt(head_dim / c.get("query_pre_attn_scalar", 256)),
        "tied_embeddings": c.get("tie_word_embeddings", True),
    }


def _qwen_windows(c: JsonDict) -> tuple[int, ...]:
    layers, window = c["num_hidden_layers"], c.get("sliding_window") or 0
    if not c.get("use_sliding_window", False) or not window:
        return ()
    first = c.get("max_window_layers", layers)
    kinds = c.get("layer_types") or ["full_attention"] * first + ["sliding_attention"] * (layers - first)
    return tuple(window if kind == "sliding_attention" else 0 for kind in kinds)


def _shape(
    c: JsonDict,
    *,
    dim: str = "hidden_size",
    num_layers: str = "num_hidden_layers",
    num_heads: str = "num_attention_heads",
    context_length: str = "max_position_embeddings",
) -> dict[str, Any]:
    shape = {"vocab_size": c["vocab_size"], "dim": c[dim], "num_layers": c[num_layers], "num_heads": c[num_heads]}
    if "intermediate_size" in c:
        shape["ff_dim"] = c["intermediate_size"]
    return {**shape, "context_length": c[context_length]}


def _rope(c: JsonDict) -> JsonDict:
    """The settings of rotary positions, under their new name or their old one."""
    return c.get("rope_parameters") or c.get("rope_scaling") or {}


def _rotary(c: JsonDict, *, theta: float) -> dict[str, Any]:
    rope = _rope(c)
    theta = float(rope.get("rope_theta", c.get("rope_theta", theta)))
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind == "default":
        return {"rope_theta": theta}
    original = rope.get("original_max_position_embeddings") or c.get("original_max_position_embeddings")
    known = {
        "original_length": original or c["max_position_embeddings"],
        **{
            name: rope[name]
            for name in ("low_freq_factor", "high_freq_factor", "beta_fast", "beta_slow")
            if name in rope
        },
    }
    try:
        scaling = RopeScaling(kind, float(rope["factor"]), **known)
    except (InvalidInput, KeyError) as error:
        raise Incompatible(f"rotary positions are scaled in a way that this version does not know: {error}") from error
    if kind == "yarn":
        factor = rope.get("attention_factor") or 0.1 * torch.log(torch.tensor(scaling.factor)).item() + 1.0
        scaling = RopeScaling(kind, scaling.factor, **known, attention_factor=factor)
    return {"rope_theta": theta, "rope_scaling": scaling}


def _activation(name: str) -> str:
    known = {
        "gelu": "gelu",
        "gelu_new": "gelu_tanh",
        "gelu_pytorch_tanh": "gelu_tanh",
        "gelu_fast": "gelu_tanh",
        "relu": "relu",
    }
    if name not in known:
        raise Incompatible(f"the activation is {name!r}; this version knows {', '.join(known)}")
    return known[name]


def _refuse(c: JsonDict, family: str, **expected: Any) -> None:
    for name, value in expected.items():
        if c.get(name, value) != value:
            raise Incompatible(f"this {family} model has {name}={c[name]}; this version reads {name}={value} only")


def _mixtral_config(c: JsonDict) -> dict[str, Any]:
    llama = _mistral_config({"rms_norm_eps": 1e-5, "rope_theta": 1e6, **c})
    return {**llama, "layers": [_experts(c["num_local_experts"], c["num_experts_per_tok"], c)]}


def _qwen3_moe_config(c: JsonDict) -> dict[str, Any]:
    experts = _experts(
        c.get("num_experts") or c["num_local_experts"], c["num_experts_per_tok"], c,
        expert_dim=c["moe_intermediate_size"], normalize=c.get("norm_topk_prob", False),
    )  # fmt: skip
    step, plain = c.get("decoder_sparse_step", 1), c.get("mlp_only_layers") or ()
    layers = [{} if n in plain or (n + 1) % step else experts for n in range(c["num_hidden_layers"])]
    return {**_qwen3_config(c), "layers": layers}


def _experts(experts: int, top: int, c: JsonDict, **more: Any) -> dict[str, Any]:
    """The channel of a layer with experts. Its loss is the family's while training."""
    balance = c.get("router_aux_loss_coef", 0.001)
    return {"channel": {"kind": "experts", "experts": experts, "top": top, "balance": balance, **more}}


def _bert_config(c: JsonDict) -> dict[str, Any]:
    _refuse(
        c, "bert", position_embedding_type="absolute", is_decoder=False, add_cross_attention=False,
        tie_word_embeddings=True,
    )  # fmt: skip
    return {
        **_shape(c),
        "num_kv_heads": c["num_attention_heads"],
        "positions": "learned",
        "norm": "layer",
        "norm_order": "post",
        "norm_eps": c.get("layer_norm_eps", 1e-12),
        "activation": _activation(c.get("hidden_act", "gelu")),
        "qkv_bias": True,
        "out_bias": True,
        "ff_bias": True,
    }


def _t5_config(c: JsonDict) -> dict[str, Any]:
    gate, _, activation = c.get("feed_forward_proj", "relu").rpartition("-")
    gated, num_encoder_layers = {"gelu": "geglu", "silu": "swiglu"}, c["num_layers"]
    if gate not in ("", "gated") or (gate and activation not in gated):
        raise Incompatible(f"feed_forward_proj is {c['feed_forward_proj']!r}; expected relu, gated-gelu or gated-silu")
    return {
        "vocab_size": c["vocab_size"],
        "dim": c["d_model"],
        "num_layers": c.get("num_decoder_layers") or num_encoder_layers,
        "num_heads": c["num_heads"],
        "num_kv_heads": c["num_heads"],
        "head_dim": c["d_kv"],
        "ff_dim": c["d_ff"],
        "context_length": c.get("n_positions") or 512,
        "positions": "t5",
        "num_buckets": c.get("relative_attention_num_buckets", 32),
        "max_distance": c.get("relative_attention_max_distance", 128),
        "norm_eps": c.get("layer_norm_epsilon", 1e-6),
        "activation": gated[activation] if gate else _activation(activation),
        "query_scale": math.sqrt(c["d_kv"]),  # T5 does not divide by it
        "cross": "source",
    }


FAMILIES: Mapping[str, Family] = {
    "gpt2": Family(_gpt2_config, GPT2, "transformer.", (".attn.bias", ".attn.masked_bias")),
    "gpt_neox": Family(
        _neox_config, GPT_NEOX, "gpt_neox.", (".attention.bias", ".attention.masked_bias", ".rotary_emb.inv_freq")
    ),
    "llama": Family(_llama_config, {**LLAMA, **LLAMA_BIASES}, "model.", (".rotary_emb.inv_freq",)),
    "mistral": Family(_mistral_config, LLAMA, "model.", (".rotary_emb.inv_freq",)),
    "mixtral": Family(_mixtral_config, MIXTRAL, "model.", (".rotary_emb.inv_freq",)),
    "qwen2": Family(_qwen2_config, {**LLAMA, **LLAMA_BIASES}, "model.", (".rotary_emb.inv_freq",)),
    "qwen3": Family(_qwen3_config, QWEN3, "model.", (".rotary_emb.inv_freq",)),
    "qwen3_moe": Family(_qwen3_moe_config, QWEN3_MOE, "model.", (".rotary_emb.inv_freq",)),
    "gemma3_text": Family(_gemma3_config, GEMMA3, "model.", (".rotary_emb.inv_freq",)),
    "olmo2": Family(_olmo2_config, OLMO2, "model.", (".rotary_emb.inv_freq",)),
    "phi3": Family(_phi3_config, PHI3, "model.", (".rotary_emb.inv_freq",)),
    "smollm3": Family(_smollm3_config, {**LLAMA, **LLAMA_BIASES}, "model.", (".rotary_emb.inv_freq",)),
}

# Models that read whole texts and continue none. The pooler and the guess at the next sentence are left out.
ENCODERS: Mapping[str, Family] = {
    "bert": Family(
        _bert_config, BERT, "bert.",
        (
            "pooler.dense.weight", "pooler.dense.bias", "cls.seq_relationship.weight", "cls.seq_relationship.bias",
            "embeddings.position_ids", "cls.predictions.decoder.bias",
        ),
    ),
}  # fmt: skip

# Models that answer a source text. A bias of cross attention, which old files have, is not used.
ENCODER_DECODERS: Mapping[str, Family] = dict.fromkeys(
    ("t5", "mt5"),
    Family(_t5_config, T5, "", (".embed_tokens.weight", ".EncDecAttention.relative_attention_bias.weight")),
)


def read_config(config: JsonDict, families: Mapping[str, Family] = FAMILIES) -> ModelConfig:
    """Returns memlm's config for another family's. Raises Incompatible, with its name, for an unknown family or
    setting.
    """
    family = family_of(config, families)
    try:
        return ModelConfig(**family.config(config))
    except KeyError as error:
        raise Incompatible(
            f"the config of this {config['model_type']} model lacks {error}; restore the file"
        ) from error
    except InvalidInput as error:
        raise Incompatible(f"the config of this {config['model_type']} model does not fit together: {error}") from error


def family_of(config: JsonDict, families: Mapping[str, Family] = FAMILIES) -> Family:
    """Returns the family that `model_type` names. Raises Incompatible for an unknown one."""
    model_type = str(config.get("model_type"))
    if model_type in families:
        return families[model_type]
    if families is not FAMILIES:
        kind = "encoders" if families is ENCODERS else "encoder-decoders"
        raise Incompatible(
            f"model_type is {model_type!r}; the {kind} that this version reads are {', '.join(families)}"
        )
    if model_type in ENCODER_DECODERS:
        raise Incompatible(
            f"model_type is {model_type!r}, an encoder-decoder, which answers a source and continues no prompt; load it"
            " by memlm.Seq2Seq.load. Datastores, sessions, adapters and the server need a decoder"
        )
    if model_type in ENCODERS:
        raise Incompatible(
            f"model_type is {model_type!r}, an encoder, which continues no text; load a decoder, and give this one as"
            " its passage_encoder"
        )
    raise Incompatible(
        f"model_type is {model_type!r}; this version reads memlm (made by `memlm train`), {', '.join(families)}"
    )
