"""A chat template, and a tiny model with its special tokens."""

import json
from pathlib import Path

import tokenizers
import torch

from memlm.data.tokenizer import SpecialIds, Tokenizer
from memlm.model import Decoder, ModelConfig
from memlm.model.files.checkpoint import save_checkpoint

CHATML = """{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}{{ '<|im_start|>system
You are a helpful assistant<|im_end|>
' }}{% endif %}{{'<|im_start|>' + message['role'] + '
' + message['content'] + '<|im_end|>' + '
'}}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant
' }}{% endif %}"""
TOKENS = {"bos_token": "<|im_start|>", "eos_token": "<|im_end|>"}
END_ID = 301
# For a model whose only special token is its own.
PLAIN = (
    "{{ bos_token }}{% for message in messages %}{{ message.role }}: {{ message.content }}{{ eos_token }}{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)
PLAIN_TOKENS = {"bos_token": "<|endoftext|>", "eos_token": "<|endoftext|>"}


def with_chat_tokens(tokenizer: Tokenizer) -> Tokenizer:
    """The tokenizer with two more special tokens, 300 and END_ID, neither of which ends a text."""
    backend = tokenizers.Tokenizer.from_str(tokenizer._backend.to_str())
    backend.add_special_tokens(list(TOKENS.values()))
    return Tokenizer(backend, SpecialIds(300, (tokenizer.end_id,), ()))


def give_template(folder: Path, source: str, tokens: dict[str, str]) -> None:
    """Writes a template into a model's folder."""
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": source, **tokens}))


def save_chat_model(folder: Path, tokenizer: Tokenizer, *, context_length: int = 400) -> Path:
    """A tiny model of random parameters whose template is CHATML."""
    torch.manual_seed(0)
    shape = {"dim": 32, "num_layers": 2, "num_heads": 4, "num_kv_heads": 2, "ff_dim": 48}
    decoder = Decoder(ModelConfig(vocab_size=302, context_length=context_length, **shape))
    with torch.no_grad():
        for parameter in decoder.parameters():
            if parameter.dim() == 2:
                parameter.mul_(6)
    save_checkpoint(folder, decoder, with_chat_tokens(tokenizer))
    give_template(folder, CHATML, TOKENS)
    return folder
