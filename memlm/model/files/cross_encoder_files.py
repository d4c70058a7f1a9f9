"""The folder of a cross-encoder: BERT or ModernBERT with a head that scores a query and a document read together."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from jaxtyping import Float, Float32
from torch import Tensor

from memlm.data.encoder_tokenizer import EncoderTokenizer
from memlm.errors import Corrupt, Incompatible, check_path
from memlm.model.files.catalog import find_model
from memlm.model.files.checkpoint import fingerprint_of, marks_of
from memlm.model.files.encoder_files import Body, batches_of_rows, load_body, name_of
from memlm.model.files.huggingface_encoders import CROSS_ENCODERS
from memlm.model.files.weight_files import WeightFiles
from memlm.model.kernels.linear import stored_as
from memlm.model.text_encoder import TextEncoder

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "gelu": F.gelu, "gelu_new": partial(F.gelu, approximate="tanh"), "relu": F.relu, "silu": F.silu, "tanh": torch.tanh,
}  # fmt: skip


@dataclass(frozen=True)
class RelevanceHead:
    """norm(activation(x W' + b)) v + c: the score of a pair, in float32. BERT's has no norm."""

    pooling: str
    activation: str
    tensors: dict[str, Tensor]  # weight_DD, bias_D, norm_D, norm_bias_D, out_1D and out_bias_1, without those it lacks
    norm_eps: float = 0.0

    def __call__(self, pooled_BD: Float[Tensor, "B D"]) -> Float[Tensor, " B"]:
        t = self.tensors
        inner_BD = ACTIVATIONS[self.activation](F.linear(pooled_BD, t["weight_DD"], t.get("bias_D")))
        if "norm_D" in t:
            inner_BD = F.layer_norm(inner_BD, inner_BD.shape[1:], t["norm_D"], t.get("norm_bias_D"), self.norm_eps)
        return F.linear(inner_BD, t["out_1D"], t.get("out_bias_1"))[:, 0]


@dataclass(frozen=True)
class CrossEncoder:
    """A loaded cross-encoder with its tokenizer, which reads at most `max_tokens` of a pair with the template."""

    path: Path
    encoder: TextEncoder
    tokenizer: EncoderTokenizer
    head: RelevanceHead
    max_tokens: int
    marks: tuple[tuple[int, ...], ...] = ()

    @property
    def name(self) -> str:
        """The name of its folder."""
        return name_of(self.path)

    @cached_property
    def fingerprint(self) -> str:
        """A hash of all that scores depend on. Raises Incompatible if the files have changed since it was loaded."""
        if self.marks and self.marks != marks_of(self.path):
            raise Incompatible(f"the files of {self.path} changed after the reranker was loaded; load it again")
        stored = stored_as(self.encoder, self.encoder.dtype)
        parts = (fingerprint_of(self.path), self.tokenizer.fingerprint, str(self.max_tokens), stored)
        return hashlib.sha256(" ".join(parts).encode()).hexdigest()[:32]

    def encode(self, query: str, documents: Sequence[str]) -> list[tuple[list[int], list[int]]]:
        """Returns the token ids of the query with each document, and their segments. The longer text of a pair that is
        too long is cut, as `transformers` cuts it.
        """
        return self.tokenizer.encode_pairs([(query, document) for document in documents], most=self.max_tokens)

    @torch.inference_mode()
    def scores(self, pairs: Sequence[tuple[list[int], list[int]]]) -> Float32[np.ndarray, " P"]:
        """Returns the score of each encoded pair, from 0 to 1: the sigmoid of the head's score."""
        scores_P = np.zeros(len(pairs), np.float32)
        for places, tokens_BT, new_B in batches_of_rows([ids for ids, _ in pairs], self.encoder.device):
            segments_BT = torch.zeros_like(tokens_BT)
            for row, place in enumerate(places):
                segments_BT[row, : new_B[row]] = torch.tensor(pairs[place][1])
            pooled_BD = self.encoder.pooled(tokens_BT, new_B, pooling=self.head.pooling, segments_BT=segments_BT)
            scores_P[places] = self.head(pooled_BD).sigmoid().cpu().numpy()
        return scores_P


def load_cross_encoder(
    folder: str | Path, *, dtype: torch.dtype | str = "auto", device: torch.device | str = "auto"
) -> CrossEncoder:
    """Reads a cross-encoder, `BertForSequenceClassification` or ModernBERT's, with one score for a pair, by its folder
    or its id on the hub.

    Raises NotFound if there is none, Incompatible for a model of another kind, Corrupt for files that do not belong
    together.
    """
    check_path("reranker", folder, "the folder of a cross-encoder")
    path = find_model(folder)
    body = load_body(path, CROSS_ENCODERS, dtype=dtype, device=device)
    if "classifier.weight" not in body.files.names:
        raise Incompatible(
            f"{path} has no head that scores two texts; give a cross-encoder, as cross-encoder/ms-marco-MiniLM-L6-v2,"
            " or this one as passage_encoder"
        )
    if (labels := body.files.shape("classifier.weight")[0]) != 1:
        raise Incompatible(f"{path} has {labels} scores for a pair; this version reads cross-encoders with one")
    return CrossEncoder(path, body.encoder, body.tokenizer, _head(body), body.max_tokens, body.marks)


def _head(body: Body) -> RelevanceHead:
    given, files, device = body.given, body.files, body.encoder.device
    if given["model_type"] == "bert":
        dense, pooling, activation = "bert.pooler.dense", "first", "tanh"
    else:
        dense, pooling = "head.dense", "mean" if given.get("classifier_pooling", "cls") == "mean" else "first"
        activation = given.get("classifier_activation", "gelu")
    if activation not in ACTIVATIONS:
        raise Incompatible(f"classifier_activation is {activation!r}; this version knows {', '.join(ACTIVATIONS)}")
    names = {
        "weight_DD": f"{dense}.weight", "bias_D": f"{dense}.bias", "norm_D": "head.norm.weight",
        "norm_bias_D": "head.norm.bias", "out_1D": "classifier.weight", "out_bias_1": "classifier.bias",
    }  # fmt: skip
    read = {ours: files.view(name).float().clone().to(device) for ours, name in names.items() if name in files.names}
    _check_head(body.encoder.config.dim, read, files)
    return RelevanceHead(pooling, activation, read, given.get("norm_eps", 1e-5))


def _check_head(dim: int, read: dict[str, Any], files: WeightFiles) -> None:
    shapes = {"weight_DD": (dim, dim), "out_1D": (1, dim), "bias_D": (dim,), "norm_D": (dim,), "norm_bias_D": (dim,),
              "out_bias_1": (1,)}  # fmt: skip
    for name, shape in shapes.items():
        found = tuple(read[name].shape) if name in read else None
        if found != shape and (found is not None or name in ("weight_DD", "out_1D")):
            raise Corrupt(f"{files.folder}: {name} of its head has the shape {found}; expected {shape}; restore it")
