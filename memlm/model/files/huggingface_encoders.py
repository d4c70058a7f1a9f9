"""Encoders in the Hugging Face layout: BERT and ModernBERT, alone or with a head that scores pairs of texts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from memlm.errors import Incompatible
from memlm.model.files.family import Family, JsonDict
from memlm.model.files.huggingface_settings import activation_of, refuse_others, shape_of
from memlm.model.files.huggingface_tables import BERT, MODERNBERT


def _bert_config(c: JsonDict) -> dict[str, Any]:
    refuse_others(
        c, "bert", position_embedding_type="absolute", is_decoder=False, add_cross_attention=False,
        tie_word_embeddings=True,
    )  # fmt: skip
    return {
        **shape_of(c),
        "num_kv_heads": c["num_attention_heads"],
        "positions": "learned",
        "norm": "layer",
        "norm_order": "post",
        "norm_eps": c.get("layer_norm_eps", 1e-12),
        "activation": activation_of(c.get("hidden_act", "gelu")),
        "qkv_bias": True,
        "out_bias": True,
        "ff_bias": True,
    }


def _modernbert_config(c: JsonDict) -> dict[str, Any]:
    layers, every = c["num_hidden_layers"], c.get("global_attn_every_n_layers") or 3
    rope = c.get("rope_parameters") or {}
    activations = {"gelu": "geglu_erf", "gelu_new": "geglu", "gelu_pytorch_tanh": "geglu", "silu": "swiglu"}
    if (given := c.get("hidden_activation", "gelu")) not in activations:
        raise Incompatible(f"hidden_activation is {given!r}; this version knows {', '.join(activations)}")
    thetas = dict[str, float]()
    for side, name, default in (("full", "global", 160_000.0), ("sliding", "local", 10_000.0)):
        known = rope.get(f"{side}_attention") or {}
        refuse_others(known, "modernbert", rope_type="default")
        thetas[name] = float(known.get("rope_theta") or c.get(f"{name}_rope_theta") or default)
    kinds = c.get("layer_types") or ["sliding_attention" if n % every else "full_attention" for n in range(layers)]
    window = c.get("local_attention", 128) // 2 + 1  # to each side, with the token itself
    return {
        **shape_of(c),
        "num_kv_heads": c["num_attention_heads"],
        "rope_theta": thetas["global"],
        "local_rope_theta": thetas["local"],
        "windows": tuple(window if kind == "sliding_attention" else 0 for kind in kinds),
        "norm": "layer" if c.get("norm_bias", False) else "layer_unbiased",
        "norm_eps": c.get("norm_eps", 1e-5),
        "activation": activations[given],
        "qkv_bias": c.get("attention_bias", False),
        "out_bias": c.get("attention_bias", False),
        "ff_bias": c.get("mlp_bias", False),
    }


# Models that read whole texts and continue none. Poolers and the guess at the next sentence are left out, and so is
# ModernBERT's head, which only fills in masks.
ENCODERS: Mapping[str, Family] = {
    "bert": Family(
        _bert_config, BERT, "bert.",
        (
            "pooler.dense.weight", "pooler.dense.bias", "cls.seq_relationship.weight", "cls.seq_relationship.bias",
            "embeddings.position_ids", "cls.predictions.decoder.bias",
        ),
    ),
    "modernbert": Family(
        _modernbert_config, MODERNBERT, "model.",
        (
            "head.dense.weight", "head.dense.bias", "head.norm.weight", "head.norm.bias", "decoder.weight",
            "decoder.bias",
        ),
    ),
}  # fmt: skip

# Encoders with a head that scores a pair of texts, which is read beside them (memlm.model.files.cross_encoder_files).
CROSS_ENCODERS: Mapping[str, Family] = {
    name: replace(family, buffers=(*family.buffers, "classifier.weight", "classifier.bias"))
    for name, family in ENCODERS.items()
}
