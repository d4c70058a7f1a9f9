"""The folder of an encoder: BERT's in the Hugging Face layout, also with the files of sentence-transformers."""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

import numpy as np
import torch
from jaxtyping import Float32
from torch import Tensor

from memlm.base.texts import read_text
from memlm.data.encoder_tokenizer import EncoderTokenizer
from memlm.data.tokenizer import json_of
from memlm.errors import Corrupt, Incompatible, check_path
from memlm.model.device import device_of
from memlm.model.files.catalog import find_encoder
from memlm.model.files.checkpoint import (
    Undrawn,
    fingerprint_of,
    form_of,
    marks_of,
    read_config_file,
    sources_of,
)
from memlm.model.files.huggingface import ENCODERS, family_of, read_config
from memlm.model.files.loader import fill
from memlm.model.files.weight_files import WeightFiles
from memlm.model.kernels.linear import stored_as
from memlm.model.text_encoder import TextEncoder

# By the fingerprint of its files: the cosine from which on a passage is about a question. That of MiniLM
# (all-MiniLM-L6-v2) was measured: benchmarks/log/2026-11-28-questions-about-something-else.md.
CLOSE_COSINES = {"2e8a342051c55cb00dd38baae7bc0206": 0.38}
BATCH_TOKENS = 1024  # with padding: what lies between two layers fits into a core's cache
MODULES_FILE, POOLING_FILE, LENGTH_FILE = "modules.json", "1_Pooling/config.json", "sentence_bert_config.json"
MODULES = ("Transformer", "Pooling", "Normalize")  # of sentence-transformers, that are computed


@dataclass(frozen=True)
class EncoderCheckpoint:
    """A loaded encoder with its tokenizer. `pooling` makes a vector of hidden states, of at most `max_tokens` tokens
    with the template.
    """

    path: Path
    encoder: TextEncoder
    tokenizer: EncoderTokenizer
    pooling: str = "mean"
    max_tokens: int = 512
    marks: tuple[tuple[int, ...], ...] = ()  # of the files as they were loaded; none: they are not compared

    @cached_property
    def fingerprint(self) -> str:
        """A hash of all that the vectors of texts depend on, the type of the weights as loaded included.

        Raises Incompatible if the files have changed since the encoder was loaded.
        """
        if self.marks and self.marks != marks_of(self.path):
            raise Incompatible(f"the files of {self.path} changed after the encoder was loaded; load it again")
        stored = stored_as(self.encoder, self.encoder.dtype)
        parts = (fingerprint_of(self.path), self.tokenizer.fingerprint, self.pooling, str(self.max_tokens), stored)
        return hashlib.sha256(" ".join(parts).encode()).hexdigest()[:32]

    @property
    def dim(self) -> int:
        """Numbers of a vector."""
        return self.encoder.config.dim

    @cached_property
    def close_cosine(self) -> float | None:
        """The cosine from which on a passage is about a question, None where it was not measured."""
        return CLOSE_COSINES.get(fingerprint_of(self.path))

    @torch.inference_mode()
    def vectors(self, texts: Sequence[str]) -> Float32[np.ndarray, "P D"]:
        """Returns a vector of length 1 for each text. On a CPU each text is read alone, so that its vector depends on
        nothing else. An accelerator reads texts of similar length together: there the same text has the same vector in
        other company up to rounding.
        """
        ids = self.tokenizer.encode(texts, most=self.max_tokens)
        vectors_PD = np.zeros((len(texts), self.encoder.config.dim), np.float32)
        order = sorted(range(len(ids)), key=lambda place: -len(ids[place]))
        is_alone = next(self.encoder.parameters()).device.type == "cpu"
        while order:
            size = 1 if is_alone else max(1, BATCH_TOKENS // len(ids[order[0]]))
            places, order = order[:size], order[size:]
            tokens_BT, new_B = padded([ids[place] for place in places])
            vectors_PD[places] = self.encoder.vectors(tokens_BT, new_B, pooling=self.pooling).cpu().numpy()
        return vectors_PD


class LazyEncoder:
    """An encoder that is loaded by the first text that it reads, for programs that mostly read none."""

    def __init__(self, folder: Path, dtype: torch.dtype | str = "auto", device: torch.device | str = "auto") -> None:
        self._folder, self._dtype, self._device, self._lock = folder, dtype, device, threading.Lock()

    @cached_property
    def _loaded(self) -> EncoderCheckpoint:
        return load_encoder(self._folder, dtype=self._dtype, device=self._device)

    @property
    def fingerprint(self) -> str:
        """That of the encoder."""
        with self._lock:
            return self._loaded.fingerprint

    @property
    def dim(self) -> int:
        """That of the encoder."""
        with self._lock:
            return self._loaded.dim

    @property
    def close_cosine(self) -> float | None:
        """That of the encoder."""
        with self._lock:
            return self._loaded.close_cosine

    def vectors(self, texts: Sequence[str]) -> Float32[np.ndarray, "P D"]:
        """Those of the encoder."""
        with self._lock:
            loaded = self._loaded
        return loaded.vectors(texts)


def encoder_of(
    encoder: str | Path | None, *, dtype: torch.dtype | str = "auto", device: torch.device | str = "auto"
) -> EncoderCheckpoint | LazyEncoder | None:
    """The encoder of passages that a setting names: `auto` for the installed one, if there is one, which its first use
    loads, `none` or None for none, or what `find_encoder` finds. Raises what `load_encoder` does.
    """
    folder = find_encoder(encoder)
    if folder is None:
        return None
    return LazyEncoder(folder, dtype, device) if encoder == "auto" else load_encoder(folder, dtype=dtype, device=device)


def padded(rows: Sequence[Sequence[int]]) -> tuple[Tensor, list[int]]:
    """Returns token ids of unequal numbers as one tensor (B, T), padded with zeros, and their numbers."""
    new_B = [len(row) for row in rows]
    tokens_BT = torch.zeros(len(rows), max(new_B), dtype=torch.int64)
    for row, ids in enumerate(rows):
        tokens_BT[row, : len(ids)] = torch.tensor(ids)
    return tokens_BT, new_B


def load_encoder(
    folder: str | Path,
    *,
    dtype: torch.dtype | str = "auto",
    device: torch.device | str = "auto",
    trainable: bool = False,
) -> EncoderCheckpoint:
    """Reads a BERT encoder from a folder in the Hugging Face layout, with its head where the files have one.

    The pooling and the length of sentence-transformers are followed where their files are there. Without them, vectors
    are means over all places that the model has. `dtype` and `device` are those of `load_checkpoint`. Raises NotFound
    if there is no model, Incompatible for one of another kind, Corrupt for files that do not belong together.
    """
    check_path("passage_encoder", folder, "the folder of a BERT encoder")
    path = Path(folder)
    given, marks = read_config_file(path), marks_of(path)
    config, family = read_config(given, ENCODERS), family_of(given, ENCODERS)
    files, tokenizer = WeightFiles(path), EncoderTokenizer.load(path)
    if tokenizer.vocab_size > config.vocab_size:
        raise Corrupt(
            f"{path}: {tokenizer.vocab_size} tokens in the tokenizer, {config.vocab_size} in the model; restore them"
        )
    has_head = any(name.startswith("cls.predictions.") for name in files.names)
    if not has_head:
        config = replace(config, tied_embeddings=False)
    if trainable:
        dtype, device = "float32" if dtype == "auto" else dtype, "cpu" if device == "auto" else device
    form = form_of(dtype, device_of(device), trainable=trainable, is_gguf=False)
    with torch.device("meta"), Undrawn():
        encoder = TextEncoder(config, num_segments=given.get("type_vocab_size", 2), has_head=has_head)
    fill(encoder, files, sources_of(encoder, files, family), form)
    most = json_of(path / LENGTH_FILE).get("max_seq_length") or config.context_length
    most = min(most, config.context_length)
    return EncoderCheckpoint(path, encoder.eval(), tokenizer, _pooling(path), most, marks)


def _pooling(folder: Path) -> str:
    """Reads how sentence-transformers makes a vector. Raises Incompatible for a way that this version lacks."""
    path = folder / MODULES_FILE
    try:
        modules = json.loads(read_text(path)) if path.is_file() else []
        kinds = [str(each["type"]).rpartition(".")[2] for each in modules]
    except (ValueError, KeyError, TypeError) as error:
        raise Corrupt(f"{path} has no list of modules ({error!r}); copy it again") from error
    if unknown := [kind for kind in kinds if kind not in MODULES]:
        raise Incompatible(f"{folder} has the modules {unknown}; this version computes {', '.join(MODULES)}")
    settings = json_of(folder / POOLING_FILE)
    modes = [name for name, value in settings.items() if name.startswith("pooling_mode_") and value is True]
    if named := settings.get("pooling_mode"):
        modes = [f"pooling_mode_{named}_token{'s' * (named == 'mean')}"]
    if modes not in ([], ["pooling_mode_mean_tokens"], ["pooling_mode_cls_token"]):
        raise Incompatible(f"{folder / POOLING_FILE} has {modes}; this version takes the mean or the first token")
    return "first" if modes == ["pooling_mode_cls_token"] else "mean"
