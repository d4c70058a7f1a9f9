"""Tiny encoders, as `transformers` saves them, and a twin of them by loops in float64."""

import json
from pathlib import Path

import numpy as np
import torch
import transformers

from memlm.data.encoder_tokenizer import EncoderTokenizer
from memlm.model import ModelConfig
from memlm.model.text_encoder import TextEncoder

BERT = {
    "vocab_size": 300, "hidden_size": 48, "intermediate_size": 80, "num_hidden_layers": 3, "num_attention_heads": 4,
    "max_position_embeddings": 64, "initializer_range": 0.2, "type_vocab_size": 2,
}  # fmt: skip
KINDS = {
    "masked": (transformers.BertForMaskedLM, {}),
    "gelu by tanh": (transformers.BertForMaskedLM, {"hidden_act": "gelu_new"}),
    "pretraining": (transformers.BertForPreTraining, {"hidden_act": "relu", "type_vocab_size": 3}),
    "no head": (transformers.BertModel, {}),
}
SHAPE = ModelConfig(
    vocab_size=40, dim=16, num_layers=2, num_heads=4, num_kv_heads=4, ff_dim=20, context_length=24, positions="learned",
    norm="layer", norm_order="post", norm_eps=1e-12, activation="gelu", qkv_bias=True, out_bias=True, ff_bias=True,
)  # fmt: skip


def shaken(model: torch.nn.Module) -> torch.nn.Module:
    """The model with biases and norms that could not be left out unnoticed."""
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.add_(torch.randn_like(parameter) * 0.2)
    return model


def make_encoder(config: ModelConfig = SHAPE, **more) -> TextEncoder:
    torch.manual_seed(5)
    encoder = TextEncoder(config, **more).double().eval()
    with torch.no_grad():
        for parameter in encoder.parameters():
            if parameter.dim() == 2:
                parameter.mul_(15)
    return shaken(encoder)


def encoder_tokenizer(vocab_size: int = 300) -> EncoderTokenizer:
    return EncoderTokenizer.train(["the page of the model and the memory " * 20], vocab_size=vocab_size)


def save_bert(kind: str, folder: Path, seed: int = 7) -> Path:
    """Saves a random BERT with a tokenizer of memlm."""
    torch.manual_seed(seed)
    made, changes = KINDS[kind]
    shaken(made(transformers.BertConfig(**{**BERT, **changes}))).save_pretrained(folder)
    encoder_tokenizer().save(folder)
    return folder


def change_json(path: Path, **changes) -> None:
    content = json.loads(path.read_text()) if path.is_file() else {}
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps({**content, **changes}))


class EncoderTwin:
    """BERT (arXiv 1810.04805), one text, head and query at a time."""

    def __init__(self, encoder: TextEncoder) -> None:
        self.config = encoder.config
        self.w = {name: tensor.detach().numpy() for name, tensor in encoder.state_dict().items()}

    def linear(self, name: str, x: np.ndarray) -> np.ndarray:
        return x @ self.w[f"{name}.weight"].T + self.w[f"{name}.bias"]

    def norm(self, name: str, x: np.ndarray) -> np.ndarray:
        rows = [(row - row.mean()) / np.sqrt(row.var() + self.config.norm_eps) for row in x]
        return np.stack(rows) * self.w[f"{name}.weight"] + self.w[f"{name}.bias"]

    def gelu(self, x: np.ndarray) -> np.ndarray:
        return x * 0.5 * (1 + torch.erf(torch.from_numpy(x / np.sqrt(2))).numpy())

    def hidden(self, tokens: list[int], segments: list[int]) -> np.ndarray:
        tables = (("embedding", tokens), ("positions", range(len(tokens))), ("segments", segments))
        x = sum(np.stack([self.w[f"{table}.weight"][number] for number in numbers]) for table, numbers in tables)
        x = self.norm("embedding_norm", x)
        for layer in range(self.config.num_layers):
            prefix = f"blocks.{layer}."
            x = self.norm(f"{prefix}attention_norm", x + self.attend(f"{prefix}attention.", x))
            inner = self.gelu(self.linear(f"{prefix}ff.up", x))
            x = self.norm(f"{prefix}ff_norm", x + self.linear(f"{prefix}ff.down", inner))
        return x

    def attend(self, prefix: str, x: np.ndarray) -> np.ndarray:
        width, heads = self.config.head_dim, self.config.num_heads
        query, key, value = np.split(self.linear(f"{prefix}qkv", x), 3, axis=1)
        mixed = np.zeros((len(x), heads * width))
        for h in range(heads):
            own = slice(h * width, (h + 1) * width)
            for t in range(len(x)):
                scores = np.array([query[t, own] @ key[s, own] / np.sqrt(width) for s in range(len(x))])
                weights = np.exp(scores - scores.max())
                mixed[t, own] = sum(w * value[s, own] for s, w in enumerate(weights / weights.sum()))
        return self.linear(f"{prefix}out", mixed)

    def logits(self, tokens: list[int], segments: list[int]) -> np.ndarray:
        x = self.norm("transform_norm", self.gelu(self.linear("transform", self.hidden(tokens, segments))))
        return x @ self.w["head.weight"].T + self.w["head_bias_V"]
