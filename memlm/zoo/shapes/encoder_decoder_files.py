"""The folder of an encoder-decoder: T5's in the Hugging Face layout, of version 1.0 and 1.1."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from memlm.data.encoder_tokenizer import EncoderTokenizer
from memlm.errors import Corrupt
from memlm.model.device import device_of
from memlm.model.files.catalog import find_model
from memlm.model.files.checkpoint import Undrawn, form_of, read_config_file, sources_of
from memlm.model.files.family import Family, Source
from memlm.model.files.huggingface import ENCODER_DECODERS, family_of, read_config
from memlm.model.files.loader import fill
from memlm.model.files.weight_files import WeightFiles
from memlm.zoo.shapes.encoder_decoder import EncoderDecoder

HEAD, SHARED, LAST_NORM = "lm_head.weight", "shared.weight", "norm.weight"


@dataclass(frozen=True)
class Seq2SeqCheckpoint:
    """A loaded encoder-decoder with its tokenizer. The decoder's text begins with `start_id`, which is not part of it,
    and ends with one of `end_ids`.
    """

    path: Path
    model: EncoderDecoder
    tokenizer: EncoderTokenizer
    start_id: int
    end_ids: tuple[int, ...]


def load_encoder_decoder(
    model: str | Path,
    *,
    dtype: torch.dtype | str = "auto",
    device: torch.device | str = "auto",
    context_length: int | None = None,
    trainable: bool = False,
) -> Seq2SeqCheckpoint:
    """Reads a T5 model from a folder in the Hugging Face layout, or by its id on the hub.

    `context_length` is the longest source and the longest answer, in tokens. T5's positions end nowhere. The default is
    the length of the model's training, or 512 where its config has none. `dtype`, `device` and `trainable` are those of
    `load_checkpoint`. Raises NotFound if there is no model, Incompatible for one of another kind, Corrupt for files
    that do not belong together.
    """
    path = find_model(model)
    given = read_config_file(path)
    config, family = read_config(given, ENCODER_DECODERS), family_of(given, ENCODER_DECODERS)
    if context_length is not None:
        config = replace(config, context_length=context_length)
    files, tokenizer = WeightFiles(path), EncoderTokenizer.load(path)
    if tokenizer.vocab_size > config.vocab_size:
        raise Corrupt(
            f"{path}: {tokenizer.vocab_size} tokens in the tokenizer, {config.vocab_size} in the model; restore them"
        )
    config = replace(config, tied_embeddings=not _has_own_head(files))
    if _scales_last_states(given):
        family = _scaled(family)
    if trainable:
        dtype, device = "float32" if dtype == "auto" else dtype, "cpu" if device == "auto" else device
    form = form_of(dtype, device_of(device), trainable=trainable, is_gguf=False)
    with torch.device("meta"), Undrawn():
        decoder = EncoderDecoder(config, num_encoder_layers=given["num_layers"])
    fill(decoder, files, sources_of(decoder, files, family), form)
    return Seq2SeqCheckpoint(path, decoder.eval(), tokenizer, *_ends(given))


def _has_own_head(files: WeightFiles) -> bool:
    """Whether the head is another table than the embedding. Old files hold a shared one twice."""
    if not {HEAD, SHARED} <= files.names:
        return HEAD in files.names
    head_VD, shared_VD = files.view(HEAD), files.view(SHARED)
    return head_VD.dtype != shared_VD.dtype or not torch.equal(head_VD, shared_VD)


def _scales_last_states(given: dict[str, Any]) -> bool:
    """Whether a model is of version 1.0 in this. `transformers` 5 says so by a key of its own, and earlier ones by the
    shared head.
    """
    tied = given.get("tie_word_embeddings", True)
    return given["model_type"] == "t5" and bool(given.get("scale_decoder_outputs", tied))


def _scaled(family: Family) -> Family:
    """T5 1.0 multiplies the last states by 1 / sqrt(D). The last norm's weight does so here."""
    (name,) = family.table[LAST_NORM].names
    last = Source((name,), lambda weight_D, config: weight_D * config.dim**-0.5)
    return replace(family, table={**family.table, LAST_NORM: last})


def _ends(given: dict[str, Any]) -> tuple[int, tuple[int, ...]]:
    ends = given.get("eos_token_id", 1)
    start = given.get("decoder_start_token_id")
    return given.get("pad_token_id", 0) if start is None else start, tuple(ends) if isinstance(ends, list) else (ends,)
