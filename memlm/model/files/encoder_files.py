"""The folder of an encoder, BERT or ModernBERT: in the Hugging Face layout, also as sentence-transformers has it."""

from __future__ import annotations

import hashlib
import json
import re
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import torch
import torch.nn.functional as F
from jaxtyping import Float32
from torch import Tensor

from memlm.base.texts import read_text
from memlm.data.encoder_tokenizer import EncoderTokenizer
from memlm.data.tokenizer import json_of
from memlm.errors import Corrupt, Incompatible, check_path
from memlm.model.device import device_of
from memlm.model.files.catalog import MINILM, find_encoder
from memlm.model.files.checkpoint import (
    Undrawn,
    fingerprint_of,
    form_of,
    marks_of,
    read_config_file,
    sources_of,
)
from memlm.model.files.dense_files import Dense, load_dense
from memlm.model.files.family import Family
from memlm.model.files.huggingface import family_of, read_config
from memlm.model.files.huggingface_encoders import ENCODERS
from memlm.model.files.loader import fill
from memlm.model.files.weight_files import WeightFiles
from memlm.model.kernels.linear import stored_as
from memlm.model.text_encoder import TextEncoder

# By the fingerprint of its files: the cosine from which on a passage is about a question. That of MiniLM
# (all-MiniLM-L6-v2) was measured: benchmarks/log/2026-11-28-questions-about-something-else.md.
CLOSE_COSINES = {"2e8a342051c55cb00dd38baae7bc0206": 0.38}
TOKENIZER_CONFIG = "tokenizer_config.json"
CLASSIFIER = "ForSequenceClassification"  # the end of an architecture's name
BATCH_TOKENS = 1024  # with padding: what lies between two layers fits into a core's cache
MODULES_FILE, POOLING_FILE, LENGTH_FILE = "modules.json", "1_Pooling/config.json", "sentence_bert_config.json"
MODULES = re.compile("(Transformer (Pooling (Dense )*)?(Normalize )?)?")  # of sentence-transformers, that are computed


@dataclass(frozen=True)
class EncoderCheckpoint:
    """A loaded encoder with its tokenizer. `pooling` makes a vector of hidden states, of at most `max_tokens` tokens
    with the template, and the layers of `dense` map it.
    """

    path: Path
    encoder: TextEncoder
    tokenizer: EncoderTokenizer
    pooling: str = "mean"
    max_tokens: int = 512
    marks: tuple[tuple[int, ...], ...] = ()  # of the files as they were loaded; none: they are not compared
    dense: tuple[Dense, ...] = ()

    @cached_property
    def fingerprint(self) -> str:
        """A hash of all that the vectors of texts depend on, the type of the weights as loaded included.

        Raises Incompatible if the files have changed since the encoder was loaded.
        """
        if self.marks and self.marks != marks_of(self.path):
            raise Incompatible(f"the files of {self.path} changed after the encoder was loaded; load it again")
        stored = stored_as(self.encoder, self.encoder.dtype)
        parts = [fingerprint_of(self.path), self.tokenizer.fingerprint, self.pooling, str(self.max_tokens), stored]
        parts += [layer.fingerprint for layer in self.dense]
        return hashlib.sha256(" ".join(parts).encode()).hexdigest()[:32]

    @property
    def loaded(self) -> EncoderCheckpoint:
        """Itself."""
        return self

    @property
    def name(self) -> str:
        """The name of its folder."""
        return name_of(self.path)

    @property
    def dim(self) -> int:
        """Numbers of a vector."""
        return self.dense[-1].out_features if self.dense else self.encoder.config.dim

    @cached_property
    def close_cosine(self) -> float | None:
        """The cosine from which on a passage is about a question, None where it was not measured."""
        return CLOSE_COSINES.get(fingerprint_of(self.path))

    def vectors(self, texts: Sequence[str]) -> Float32[np.ndarray, "P D"]:
        """Returns a vector of length 1 for each text. On a CPU each text is read alone, so that its vector depends on
        nothing else. An accelerator reads texts of similar length together: there the same text has the same vector in
        other company up to rounding.
        """
        return self.vectors_of_ids(self.tokenizer.encode(texts, most=self.max_tokens))

    @torch.inference_mode()
    def vectors_of_ids(self, ids: Sequence[Sequence[int]]) -> Float32[np.ndarray, "P D"]:
        """Does the work of `vectors` for texts as token ids in the template, at most `max_tokens` each."""
        vectors_PD = np.zeros((len(ids), self.dim), np.float32)
        for places, tokens_BT, new_B in batches_of_rows(ids, self.encoder.device):
            pooled_BD = self.encoder.pooled(tokens_BT, new_B, pooling=self.pooling)
            for layer in self.dense:
                pooled_BD = layer(pooled_BD)
            vectors_PD[places] = F.normalize(pooled_BD, dim=1).cpu().numpy()
        return vectors_PD


class LazyEncoder:
    """An encoder that is loaded by the first text that it reads, for programs that mostly read none."""

    def __init__(self, folder: Path, dtype: torch.dtype | str = "auto", device: torch.device | str = "auto") -> None:
        self._folder, self._dtype, self._device, self._lock = folder, dtype, device, threading.Lock()

    @cached_property
    def _loaded(self) -> EncoderCheckpoint:
        return load_encoder(self._folder, dtype=self._dtype, device=self._device)

    @property
    def loaded(self) -> EncoderCheckpoint:
        """The encoder, which the first call loads."""
        with self._lock:
            return self._loaded

    @property
    def name(self) -> str:
        """That of the encoder, which is not loaded for it."""
        return name_of(self._folder)

    @property
    def fingerprint(self) -> str:
        """That of the encoder."""
        return self.loaded.fingerprint

    @property
    def dim(self) -> int:
        """That of the encoder."""
        return self.loaded.dim

    @property
    def close_cosine(self) -> float | None:
        """That of the encoder."""
        return self.loaded.close_cosine

    def vectors(self, texts: Sequence[str]) -> Float32[np.ndarray, "P D"]:
        """Those of the encoder."""
        return self.loaded.vectors(texts)


Encoder: TypeAlias = EncoderCheckpoint | LazyEncoder


def encoder_of(
    encoder: str | Path | None, *, dtype: torch.dtype | str = "auto", device: torch.device | str = "auto"
) -> Encoder | None:
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


def batches_of_rows(
    rows: Sequence[Sequence[int]], device: torch.device
) -> Iterator[tuple[list[int], Tensor, list[int]]]:
    """Yields places of rows of token ids, and these as `padded` returns them: on a CPU a row alone, else rows of
    similar length together, the longest first.
    """
    order = sorted(range(len(rows)), key=lambda place: -len(rows[place]))
    while order:
        size = 1 if device.type == "cpu" else max(1, BATCH_TOKENS // len(rows[order[0]]))
        places, order = order[:size], order[size:]
        yield places, *padded([rows[place] for place in places])


def name_of(folder: Path) -> str:
    """The name of a model that is shown. The folder of the installed encoder, and of those of the hub, is no name."""
    if folder == MINILM.path:
        return MINILM.name
    repository = re.fullmatch("models--.+?--(.+)", folder.parent.parent.name)
    return repository[1] if repository and folder.parent.name == "snapshots" else folder.resolve().name


class Body(NamedTuple):
    """An encoder as its files have it, with its tokenizer, its config and its files."""

    encoder: TextEncoder
    tokenizer: EncoderTokenizer
    given: Mapping[str, Any]
    files: WeightFiles
    marks: tuple[tuple[int, ...], ...]

    @property
    def max_tokens(self) -> int:
        """How many tokens of a text are read at most, as sentence-transformers has it, or else as transformers has."""
        folder, positions = self.files.folder, self.encoder.config.context_length
        most = json_of(folder / LENGTH_FILE).get("max_seq_length")
        most = most or json_of(folder / TOKENIZER_CONFIG).get("model_max_length")
        return int(min(most, positions)) if isinstance(most, int | float) and most >= 1 else positions


def load_encoder(
    folder: str | Path,
    *,
    dtype: torch.dtype | str = "auto",
    device: torch.device | str = "auto",
    trainable: bool = False,
) -> EncoderCheckpoint:
    """Reads an encoder, BERT or ModernBERT, from a folder in the Hugging Face layout, BERT's with its head where the
    files have one.

    The pooling, the dense layers and the length of sentence-transformers are followed where their files are there.
    Without them, vectors are means over all places that the model has. `dtype` and `device` are those of
    `load_checkpoint`. Raises NotFound if there is no model, Incompatible for one of another kind, Corrupt for files
    that do not belong together.
    """
    check_path("passage_encoder", folder, "the folder of an encoder")
    path = Path(folder)
    if any(str(each).endswith(CLASSIFIER) for each in read_config_file(path).get("architectures") or ()):
        raise Incompatible(f"{path} is a cross-encoder, which compares texts and has no vectors; give it as reranker")
    body = load_body(path, ENCODERS, dtype=dtype, device=device, trainable=trainable)
    dense = tuple(load_dense(path / each, body.encoder.device) for each in _dense_folders(path))
    widths = [body.encoder.config.dim, *(layer.out_features for layer in dense)]
    if [layer.in_features for layer in dense] != widths[:-1]:
        raise Corrupt(f"{path} has dense layers that do not take vectors of {widths[0]} numbers; copy them again")
    return EncoderCheckpoint(path, body.encoder, body.tokenizer, _pooling(path), body.max_tokens, body.marks, dense)


def load_body(
    path: Path,
    families: Mapping[str, Family],
    *,
    dtype: torch.dtype | str,
    device: torch.device | str,
    trainable: bool = False,
) -> Body:
    """Reads the layers of an encoder of some families. Raises as `load_encoder`."""
    given, marks = read_config_file(path), marks_of(path)
    config, family = read_config(given, families), family_of(given, families)
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
    return Body(encoder.eval(), tokenizer, given, files, marks)


def _modules(folder: Path) -> list[tuple[str, str]]:
    """The modules of sentence-transformers, by kind and folder. Raises Incompatible for others than MODULES."""
    path = folder / MODULES_FILE
    try:
        listed = json.loads(read_text(path)) if path.is_file() else []
        modules = [(str(each["type"]).rpartition(".")[2], str(each.get("path", ""))) for each in listed]
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise Corrupt(f"{path} has no list of modules ({error!r}); copy it again") from error
    kinds = [kind for kind, _ in modules]
    if not MODULES.fullmatch("".join(f"{kind} " for kind in kinds)):
        raise Incompatible(
            f"{folder} has the modules {kinds}; this version computes Transformer, Pooling, Dense and Normalize, in"
            " this order"
        )
    return modules


def _dense_folders(folder: Path) -> list[str]:
    return [path for kind, path in _modules(folder) if kind == "Dense"]


def _pooling(folder: Path) -> str:
    """Reads how sentence-transformers makes a vector. Raises Incompatible for a way that this version lacks."""
    settings = json_of(folder / POOLING_FILE)
    modes = [name for name, value in settings.items() if name.startswith("pooling_mode_") and value is True]
    if named := settings.get("pooling_mode"):
        modes = [f"pooling_mode_{named}_token{'s' * (named == 'mean')}"]
    if modes not in ([], ["pooling_mode_mean_tokens"], ["pooling_mode_cls_token"]):
        raise Incompatible(f"{folder / POOLING_FILE} has {modes}; this version takes the mean or the first token")
    return "first" if modes == ["pooling_mode_cls_token"] else "mean"
