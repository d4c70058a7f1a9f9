"""Tiny encoder-decoders, as `transformers` saves them, and a twin of them by loops in float64."""

import math
from pathlib import Path

import numpy as np
import tokenizers
import torch
import transformers
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from tokenizers.processors import TemplateProcessing

from memlm.zoo.shapes.encoder_decoder import EncoderDecoder

T5 = {
    "vocab_size": 120, "d_model": 32, "d_kv": 12, "d_ff": 48, "num_layers": 2, "num_decoder_layers": 3, "num_heads": 4,
    "relative_attention_num_buckets": 12, "relative_attention_max_distance": 20, "decoder_start_token_id": 0,
}  # fmt: skip
KINDS = {
    "1.0": {},
    "1.1": {"feed_forward_proj": "gated-gelu", "tie_word_embeddings": False},
    "1.1 with silu and a shared head": {"feed_forward_proj": "gated-silu", "tie_word_embeddings": False},
    "multilingual": {"feed_forward_proj": "gated-gelu", "tie_word_embeddings": False},
}
WORDS = ["one", "two", "three", "red", "blue", "dog", "cat"]


def tokenizer_of(vocab_size: int = 120) -> tokenizers.Tokenizer:
    """Words between spaces, with T5's special tokens and template."""
    special = ["<pad>", "</s>", "<unk>"]
    sentinels = [f"<extra_id_{n}>" for n in range(4)]
    backend = tokenizers.Tokenizer(
        WordLevel({word: n for n, word in enumerate([*special, *WORDS, *sentinels])}, unk_token="<unk>")
    )
    backend.pre_tokenizer = WhitespaceSplit()
    backend.add_special_tokens([*special, *sentinels])
    backend.post_processor = TemplateProcessing(single="$A </s>", special_tokens=[("</s>", 1)])
    return backend


def save_t5(kind: str, folder: Path, seed: int = 7) -> Path:
    """Saves a random T5 whose every weight matters, with a tokenizer."""
    torch.manual_seed(seed)
    is_multilingual = kind == "multilingual"
    config, made = (
        (transformers.MT5Config, transformers.MT5ForConditionalGeneration)
        if is_multilingual
        else (transformers.T5Config, transformers.T5ForConditionalGeneration)
    )
    model = made(config(**{**T5, **KINDS[kind]}))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.add_(torch.randn_like(parameter) * (0.5 if "bias" in name else 0.08))
        if kind in ("1.1", "multilingual"):
            model.lm_head.weight = torch.nn.Parameter(torch.randn_like(model.lm_head.weight) * 0.3)
    model.save_pretrained(folder)
    tokenizer_of().save(str(folder / "tokenizer.json"))
    return folder


def of_transformers(folder: Path) -> torch.nn.Module:
    made = transformers.AutoModelForSeq2SeqLM.from_pretrained(folder, attn_implementation="eager")
    return made.eval()


class Seq2SeqTwin:
    """T5 (arXiv 1910.10683), one text, head and query at a time."""

    def __init__(self, model: EncoderDecoder) -> None:
        self.config = model.config
        self.num_encoder_layers = len(model.encoder.blocks)
        self.w = {name: tensor.detach().double().numpy() for name, tensor in model.weights().items()}

    def norm(self, name: str, x: np.ndarray) -> np.ndarray:
        return x / np.sqrt((x**2).mean(axis=1, keepdims=True) + self.config.norm_eps) * self.w[f"{name}.weight"]

    def bucket(self, ahead: int, *, sees_later: bool) -> int:
        """Where the bias of a key `ahead` tokens before its query stands."""
        count, first = self.config.num_buckets, 0
        if sees_later:
            count //= 2
            first = count if ahead < 0 else 0
        distance, exact = abs(ahead), count // 2
        if distance < exact:
            return first + distance
        far = math.log(distance / exact) / math.log(self.config.max_distance / exact) * (count - exact)
        return first + min(count - 1, exact + int(far))

    def attend(self, queries, keys, values, bias):
        """Mixtures of values for each query and head. `bias(t, s, h)` is None where t does not see s."""
        H, d = self.config.num_heads, self.config.head_dim
        mixed = np.zeros((len(queries), H * d))
        for t in range(len(queries)):
            for h in range(H):
                own = slice(h * d, (h + 1) * d)
                seen = [s for s in range(len(keys)) if bias(t, s, h) is not None]
                scores = np.array([queries[t, own] @ keys[s, own] + bias(t, s, h) for s in seen])
                weights = np.exp(scores - scores.max())
                mixed[t, own] = sum(w * values[s, own] for w, s in zip(weights / weights.sum(), seen, strict=True))
        return mixed

    def feed_forward(self, prefix: str, x: np.ndarray) -> np.ndarray:
        if self.config.activation == "relu":
            inner = np.maximum(0, x @ self.w[f"{prefix}up.weight"].T)
        else:
            gate, up = np.split(x @ self.w[f"{prefix}gate_up.weight"].T, 2, axis=1)
            inner = gate * 0.5 * (1 + np.tanh(np.sqrt(2 / np.pi) * (gate + 0.044715 * gate**3))) * up
        return inner @ self.w[f"{prefix}down.weight"].T

    def layer(self, prefix: str, x: np.ndarray, bias, source: np.ndarray | None) -> np.ndarray:
        read = self.norm(f"{prefix}attention_norm", x)
        heads = np.split(read @ self.w[f"{prefix}attention.qkv.weight"].T, 3, axis=1)
        x = x + self.attend(*heads, bias) @ self.w[f"{prefix}attention.out.weight"].T
        if source is not None:
            queries = self.norm(f"{prefix}cross.norm", x) @ self.w[f"{prefix}cross.query.weight"].T
            pairs = np.split(source @ self.w[f"{prefix}cross.key_value.weight"].T, 2, axis=1)
            x = x + self.attend(queries, *pairs, lambda t, s, h: 0.0) @ self.w[f"{prefix}cross.out.weight"].T
        return x + self.feed_forward(f"{prefix}ff.", self.norm(f"{prefix}ff_norm", x))

    def encoded(self, tokens: list[int]) -> np.ndarray:
        table, x = self.w["encoder.relative_bias.table.weight"], self.w["embedding.weight"][tokens]
        for layer in range(self.num_encoder_layers):
            x = self.layer(
                f"encoder.blocks.{layer}.", x, lambda t, s, h: table[self.bucket(t - s, sees_later=True), h], None
            )
        return self.norm("encoder.norm", x)

    def logits(self, source: list[int], tokens: list[int]) -> np.ndarray:
        table, x = self.w["relative_bias.table.weight"], self.w["embedding.weight"][tokens]
        encoded = self.encoded(source)

        def bias(t: int, s: int, h: int) -> float | None:
            return table[self.bucket(t - s, sees_later=False), h] if s <= t else None

        for layer in range(self.config.num_layers):
            x = self.layer(f"blocks.{layer}.", x, bias, encoded)
        head = self.w["embedding.weight" if self.config.tied_embeddings else "head.weight"]
        return self.norm("norm", x) @ head.T
