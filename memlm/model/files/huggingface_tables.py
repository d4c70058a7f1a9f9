"""The names of tensors in models of other families: memlm's on the left, the family's on the right.

`{}` stands for the layer, and for the number of an expert.
"""

from __future__ import annotations

from torch import Tensor

from memlm.model.config import ModelConfig
from memlm.model.files.family import Source, Table, same


def transposed(name: str) -> Source:
    """GPT-2 stores matrices as inputs x outputs."""
    return Source((name,), lambda tensor, _: tensor.T)


def interleaved(name: str) -> Source:
    """GPT-NeoX stores query, key and value of each head together. memlm stores all queries, all keys, all values."""
    return Source((name,), _by_kind)


def _by_kind(tensor: Tensor, config: ModelConfig) -> Tensor:
    by_head = tensor.unflatten(0, (config.num_heads, 3, config.head_dim))
    return by_head.transpose(0, 1).flatten(0, 2)


GPT2: Table = {
    "embedding.weight": same("wte.weight"),
    "positions.weight": same("wpe.weight"),
    "blocks.{}.attention_norm.weight": same("h.{}.ln_1.weight"),
    "blocks.{}.attention_norm.bias": same("h.{}.ln_1.bias"),
    "blocks.{}.attention.qkv.weight": transposed("h.{}.attn.c_attn.weight"),
    "blocks.{}.attention.qkv.bias": same("h.{}.attn.c_attn.bias"),
    "blocks.{}.attention.out.weight": transposed("h.{}.attn.c_proj.weight"),
    "blocks.{}.attention.out.bias": same("h.{}.attn.c_proj.bias"),
    "blocks.{}.ff_norm.weight": same("h.{}.ln_2.weight"),
    "blocks.{}.ff_norm.bias": same("h.{}.ln_2.bias"),
    "blocks.{}.ff.up.weight": transposed("h.{}.mlp.c_fc.weight"),
    "blocks.{}.ff.up.bias": same("h.{}.mlp.c_fc.bias"),
    "blocks.{}.ff.down.weight": transposed("h.{}.mlp.c_proj.weight"),
    "blocks.{}.ff.down.bias": same("h.{}.mlp.c_proj.bias"),
    "norm.weight": same("ln_f.weight"),
    "norm.bias": same("ln_f.bias"),
    "head.weight": same("lm_head.weight"),
}

GPT_NEOX: Table = {
    "embedding.weight": same("embed_in.weight"),
    "blocks.{}.attention_norm.weight": same("layers.{}.input_layernorm.weight"),
    "blocks.{}.attention_norm.bias": same("layers.{}.input_layernorm.bias"),
    "blocks.{}.attention.qkv.weight": interleaved("layers.{}.attention.query_key_value.weight"),
    "blocks.{}.attention.qkv.bias": interleaved("layers.{}.attention.query_key_value.bias"),
    "blocks.{}.attention.out.weight": same("layers.{}.attention.dense.weight"),
    "blocks.{}.attention.out.bias": same("layers.{}.attention.dense.bias"),
    "blocks.{}.ff_norm.weight": same("layers.{}.post_attention_layernorm.weight"),
    "blocks.{}.ff_norm.bias": same("layers.{}.post_attention_layernorm.bias"),
    "blocks.{}.ff.up.weight": same("layers.{}.mlp.dense_h_to_4h.weight"),
    "blocks.{}.ff.up.bias": same("layers.{}.mlp.dense_h_to_4h.bias"),
    "blocks.{}.ff.down.weight": same("layers.{}.mlp.dense_4h_to_h.weight"),
    "blocks.{}.ff.down.bias": same("layers.{}.mlp.dense_4h_to_h.bias"),
    "norm.weight": same("final_layer_norm.weight"),
    "norm.bias": same("final_layer_norm.bias"),
    "head.weight": same("embed_out.weight"),
}

LLAMA: Table = {
    "embedding.weight": same("embed_tokens.weight"),
    "blocks.{}.attention_norm.weight": same("layers.{}.input_layernorm.weight"),
    "blocks.{}.attention.qkv.weight": same(
        "layers.{}.self_attn.q_proj.weight", "layers.{}.self_attn.k_proj.weight", "layers.{}.self_attn.v_proj.weight"
    ),
    "blocks.{}.attention.out.weight": same("layers.{}.self_attn.o_proj.weight"),
    "blocks.{}.ff_norm.weight": same("layers.{}.post_attention_layernorm.weight"),
    "blocks.{}.ff.gate_up.weight": same("layers.{}.mlp.gate_proj.weight", "layers.{}.mlp.up_proj.weight"),
    "blocks.{}.ff.down.weight": same("layers.{}.mlp.down_proj.weight"),
    "norm.weight": same("norm.weight"),
    "head.weight": same("lm_head.weight"),
}

LLAMA_BIASES: Table = {
    "blocks.{}.attention.qkv.bias": same(
        "layers.{}.self_attn.q_proj.bias", "layers.{}.self_attn.k_proj.bias", "layers.{}.self_attn.v_proj.bias"
    ),
    "blocks.{}.attention.out.bias": same("layers.{}.self_attn.o_proj.bias"),
    "blocks.{}.ff.gate_up.bias": same("layers.{}.mlp.gate_proj.bias", "layers.{}.mlp.up_proj.bias"),
    "blocks.{}.ff.down.bias": same("layers.{}.mlp.down_proj.bias"),
}

QWEN3: Table = {
    **LLAMA,
    **LLAMA_BIASES,
    "blocks.{}.attention.query_norm.weight": same("layers.{}.self_attn.q_norm.weight"),
    "blocks.{}.attention.key_norm.weight": same("layers.{}.self_attn.k_norm.weight"),
}

OLMO2: Table = {
    **{name: source for name, source in QWEN3.items() if name != "blocks.{}.attention_norm.weight"},
    "blocks.{}.attention_norm.weight": same("layers.{}.post_attention_layernorm.weight"),
    "blocks.{}.ff_norm.weight": same("layers.{}.post_feedforward_layernorm.weight"),
}

GEMMA3: Table = {
    **QWEN3,
    "blocks.{}.attention_out_norm.weight": same("layers.{}.post_attention_layernorm.weight"),
    "blocks.{}.ff_norm.weight": same("layers.{}.pre_feedforward_layernorm.weight"),
    "blocks.{}.ff_out_norm.weight": same("layers.{}.post_feedforward_layernorm.weight"),
}

PHI3: Table = {
    **LLAMA,
    "blocks.{}.attention.qkv.weight": same("layers.{}.self_attn.qkv_proj.weight"),
    "blocks.{}.ff.gate_up.weight": same("layers.{}.mlp.gate_up_proj.weight"),
}

MIXTRAL: Table = {
    **{name: source for name, source in LLAMA.items() if ".ff." not in name},
    "blocks.{}.ff.router.weight": same("layers.{}.block_sparse_moe.gate.weight"),
    "blocks.{}.ff.experts.{}.gate_up.weight": same(
        "layers.{}.block_sparse_moe.experts.{}.w1.weight", "layers.{}.block_sparse_moe.experts.{}.w3.weight"
    ),
    "blocks.{}.ff.experts.{}.down.weight": same("layers.{}.block_sparse_moe.experts.{}.w2.weight"),
}

QWEN3_MOE: Table = {
    **QWEN3,
    "blocks.{}.ff.router.weight": same("layers.{}.mlp.gate.weight"),
    "blocks.{}.ff.experts.{}.gate_up.weight": same(
        "layers.{}.mlp.experts.{}.gate_proj.weight", "layers.{}.mlp.experts.{}.up_proj.weight"
    ),
    "blocks.{}.ff.experts.{}.down.weight": same("layers.{}.mlp.experts.{}.down_proj.weight"),
}

BERT: Table = {
    "embedding.weight": same("embeddings.word_embeddings.weight"),
    "positions.weight": same("embeddings.position_embeddings.weight"),
    "segments.weight": same("embeddings.token_type_embeddings.weight"),
    "embedding_norm.weight": same("embeddings.LayerNorm.weight"),
    "embedding_norm.bias": same("embeddings.LayerNorm.bias"),
    **{
        f"blocks.{{}}.{ours}.{kind}": same(*(f"encoder.layer.{{}}.{name}.{kind}" for name in theirs))
        for kind in ("weight", "bias")
        for ours, theirs in {
            "attention.qkv": ("attention.self.query", "attention.self.key", "attention.self.value"),
            "attention.out": ("attention.output.dense",),
            "attention_norm": ("attention.output.LayerNorm",),
            "ff.up": ("intermediate.dense",),
            "ff.down": ("output.dense",),
            "ff_norm": ("output.LayerNorm",),
        }.items()
    },
    "transform.weight": same("cls.predictions.transform.dense.weight"),
    "transform.bias": same("cls.predictions.transform.dense.bias"),
    "transform_norm.weight": same("cls.predictions.transform.LayerNorm.weight"),
    "transform_norm.bias": same("cls.predictions.transform.LayerNorm.bias"),
    "head.weight": same("cls.predictions.decoder.weight"),
    "head_bias_V": same("cls.predictions.bias"),
}


def _t5_layers(side: str, ours: str, feed_forward: int) -> Table:
    """The layers of T5's encoder or decoder, whose feed-forward is the sub-layer of some number."""
    block, ff = f"{side}.block.{{}}.layer", f"{side}.block.{{}}.layer.{feed_forward}"
    attention, inner = f"{block}.0.SelfAttention", f"{ff}.DenseReluDense"
    return {
        f"{ours}blocks.{{}}.attention_norm.weight": same(f"{block}.0.layer_norm.weight"),
        f"{ours}blocks.{{}}.attention.qkv.weight": same(*(f"{attention}.{name}.weight" for name in "qkv")),
        f"{ours}blocks.{{}}.attention.out.weight": same(f"{attention}.o.weight"),
        f"{ours}blocks.{{}}.ff_norm.weight": same(f"{ff}.layer_norm.weight"),
        f"{ours}blocks.{{}}.ff.up.weight": same(f"{inner}.wi.weight"),
        f"{ours}blocks.{{}}.ff.gate_up.weight": same(f"{inner}.wi_0.weight", f"{inner}.wi_1.weight"),
        f"{ours}blocks.{{}}.ff.down.weight": same(f"{inner}.wo.weight"),
        f"{ours}relative_bias.table.weight": same(f"{attention}.relative_attention_bias.weight".format(0)),
        f"{ours}norm.weight": same(f"{side}.final_layer_norm.weight"),
    }


T5: Table = {
    "embedding.weight": same("shared.weight"),
    **_t5_layers("encoder", "encoder.", 1),
    **_t5_layers("decoder", "", 2),
    "blocks.{}.cross.norm.weight": same("decoder.block.{}.layer.1.layer_norm.weight"),
    "blocks.{}.cross.query.weight": same("decoder.block.{}.layer.1.EncDecAttention.q.weight"),
    "blocks.{}.cross.key_value.weight": same(
        "decoder.block.{}.layer.1.EncDecAttention.k.weight", "decoder.block.{}.layer.1.EncDecAttention.v.weight"
    ),
    "blocks.{}.cross.out.weight": same("decoder.block.{}.layer.1.EncDecAttention.o.weight"),
    "head.weight": same("lm_head.weight"),
}
