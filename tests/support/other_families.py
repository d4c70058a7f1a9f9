"""Tiny models of other families, saved as `transformers` saves them."""

from pathlib import Path

import torch
import transformers
from transformers import AutoModelForCausalLM

SHAPE = {
    "vocab_size": 300, "hidden_size": 48, "intermediate_size": 80, "num_hidden_layers": 3, "num_attention_heads": 4,
    "max_position_embeddings": 96, "initializer_range": 0.2, "bos_token_id": 0, "eos_token_id": 0,
}  # fmt: skip
LLAMA = {**SHAPE, "num_key_value_heads": 2}
ROPE = {"rope_theta": 10000.0}
GEMMA = {
    **LLAMA, "head_dim": 16, "query_pre_attn_scalar": 24, "sliding_window": 8, "pad_token_id": 0,
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
}  # fmt: skip
PHI = {**LLAMA, "pad_token_id": 0}
SMOLLM3 = {**LLAMA, "num_hidden_layers": 4, "pad_token_id": 0}
CONFIGS = {
    "gpt2": transformers.GPT2Config(
        vocab_size=300, n_embd=48, n_layer=3, n_head=4, n_positions=96, initializer_range=0.2, bos_token_id=0,
        eos_token_id=0,
    ),
    "gpt_neox": transformers.GPTNeoXConfig(**SHAPE, rotary_pct=0.5),
    "gpt_neox serial": transformers.GPTNeoXConfig(
        **SHAPE, rotary_pct=1.0, use_parallel_residual=False, tie_word_embeddings=True
    ),
    "llama": transformers.LlamaConfig(**LLAMA),
    "llama 3 scaling": transformers.LlamaConfig(
        **LLAMA,
        rope_parameters={
            **ROPE, "rope_type": "llama3", "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
            "original_max_position_embeddings": 24,
        },
    ),
    "llama linear scaling": transformers.LlamaConfig(
        **LLAMA, rope_parameters={**ROPE, "rope_type": "linear", "factor": 3.0}
    ),
    "llama yarn": transformers.LlamaConfig(
        **LLAMA,
        rope_parameters={**ROPE, "rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 24},
    ),
    "llama biases": transformers.LlamaConfig(
        **LLAMA, attention_bias=True, mlp_bias=True, tie_word_embeddings=True, head_dim=16
    ),
    "mistral": transformers.MistralConfig(**LLAMA, sliding_window=8),
    "mistral without window": transformers.MistralConfig(**LLAMA, sliding_window=None),
    "qwen2": transformers.Qwen2Config(**LLAMA),
    "qwen2 windows": transformers.Qwen2Config(**LLAMA, use_sliding_window=True, sliding_window=8, max_window_layers=1),
    "qwen3": transformers.Qwen3Config(**LLAMA, head_dim=16),
    "mixtral": transformers.MixtralConfig(
        **LLAMA, num_local_experts=4, num_experts_per_tok=2, sliding_window=8, rope_parameters=ROPE
    ),
    "qwen3 moe": transformers.Qwen3MoeConfig(
        **LLAMA, head_dim=16, num_experts=5, num_experts_per_tok=2, moe_intermediate_size=32, norm_topk_prob=True,
    ),
    "qwen3 moe plain layers": transformers.Qwen3MoeConfig(
        **LLAMA, head_dim=16, num_experts=4, num_experts_per_tok=3, moe_intermediate_size=32, norm_topk_prob=False,
        mlp_only_layers=[0],
    ),
    "gemma3": transformers.Gemma3TextConfig(**GEMMA),
    "gemma3 scaling": transformers.Gemma3TextConfig(
        **GEMMA | {"num_hidden_layers": 4, "layer_types": None}, sliding_window_pattern=2,
        rope_parameters={
            "full_attention": {"rope_type": "linear", "rope_theta": 40_000.0, "factor": 8.0},
            "sliding_attention": {"rope_type": "default", "rope_theta": 300.0},
        },
    ),
    "olmo2": transformers.Olmo2Config(**LLAMA),
    "phi3": transformers.Phi3Config(**PHI, sliding_window=8),
    "phi3 longrope": transformers.Phi3Config(
        **PHI | {"max_position_embeddings": 384}, original_max_position_embeddings=96,
        rope_parameters={
            **ROPE, "rope_type": "longrope", "short_factor": [1.0, 1.1, 1.3, 1.7, 2.0, 2.5],
            "long_factor": [1.0, 2.0, 3.0, 4.0, 5.0, 6.0],
        },
    ),
    "smollm3": transformers.SmolLM3Config(**SMOLLM3),
    "smollm3 windows": transformers.SmolLM3Config(
        **SMOLLM3, use_sliding_window=True, sliding_window=8, no_rope_layers=[1, 0, 1, 0]
    ),
}  # fmt: skip


def save_as_others_do(name: str, folder: Path, tokenizer) -> Path:
    torch.manual_seed(7)
    model = AutoModelForCausalLM.from_config(CONFIGS[name])
    with torch.no_grad():  # biases and norms that could be left out unnoticed
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.add_(torch.randn_like(parameter) * 0.2)
    model.save_pretrained(folder, max_shard_size="40KB" if name == "qwen2" else "1GB")
    tokenizer.save(folder)
    return folder
