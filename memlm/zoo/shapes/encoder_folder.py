"""The folder of an encoder that was trained here: BERT's in the Hugging Face layout, as `transformers` reads it."""

from __future__ import annotations

import json
from pathlib import Path

from safetensors.torch import save
from torch import Tensor

from memlm.base.files import write_atomic
from memlm.data.encoder_tokenizer import EncoderTokenizer
from memlm.model.files.checkpoint import CONFIG_FILE
from memlm.model.files.encoder_files import EncoderCheckpoint
from memlm.model.files.huggingface import ENCODERS
from memlm.model.files.weight_files import WEIGHTS_FILE
from memlm.model.kernels.linear import Linear
from memlm.model.text_encoder import TextEncoder

ACTIVATIONS = {"gelu": "gelu", "gelu_tanh": "gelu_new", "relu": "relu"}  # as Hugging Face names them


def save_encoder(folder: str | Path, encoder: TextEncoder, tokenizer: EncoderTokenizer) -> EncoderCheckpoint:
    """Writes an encoder as `transformers` does, creating the folder if needed, and returns it as a loaded one. Packed
    weights are written unpacked.
    """
    path, config = Path(folder), encoder.config
    path.mkdir(parents=True, exist_ok=True)
    tokenizer.save(path)
    write_atomic(path / WEIGHTS_FILE, save(_their_weights(encoder)))
    written = {
        "model_type": "bert", "architectures": ["BertModel" if encoder.head is None else "BertForMaskedLM"],
        "vocab_size": config.vocab_size, "hidden_size": config.dim, "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads, "intermediate_size": config.ff_dim,
        "max_position_embeddings": config.context_length, "type_vocab_size": encoder.segments.num_embeddings,
        "hidden_act": ACTIVATIONS[config.activation], "layer_norm_eps": config.norm_eps,
    }  # fmt: skip
    write_atomic(path / CONFIG_FILE, f"{json.dumps(written, indent=2)}\n".encode())
    return EncoderCheckpoint(path, encoder, tokenizer, max_tokens=config.context_length)


def _their_weights(encoder: TextEncoder) -> dict[str, Tensor]:
    """The tensors under the names of Hugging Face: those of memlm that stand for several are cut."""
    weights = dict(encoder.state_dict())
    for name, module in encoder.named_modules():
        if isinstance(module, Linear) and module.packed is not None:
            weights[f"{name}.weight"] = module.dense()
    weights["embedding.weight"] = encoder.embedding.table_VD
    weights.pop("head.weight", None)
    theirs, family = dict[str, Tensor](), ENCODERS["bert"]
    unprefixed = {each for source in family.table.values() for each in source.names if each.startswith("cls.")}
    for name, source in family.sources(list(weights), unprefixed).items():
        pieces = weights[name].chunk(len(source.names))
        theirs |= {each: piece.contiguous().clone() for each, piece in zip(source.names, pieces, strict=True)}
    return theirs
