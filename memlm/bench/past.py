"""Gain of a kNN-LM over the earlier positions of the document itself.

A continuous cache (arXiv 1612.04426, equations 2 and 3; without a bound 1711.02604) by the distances of kNN-LM
(1911.00172): p_past(v) is the softmax of -distance/temperature over all earlier positions of the document, summed
over those that v followed. It needs no training, so it is the baseline for trained memories. Temperature and lam are
fitted on every other document, and the gain is measured on the rest.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from math import sqrt
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jaxtyping import Float, Float32, Int64
from torch import Tensor

from memlm.base.progress import Progress, silent
from memlm.data.corpus import Corpus
from memlm.data.windows import blocks_of
from memlm.errors import InvalidInput
from memlm.model.checkpoint import Checkpoint, load_checkpoint
from memlm.retrieval.encoder import Encoder, document_windows
from memlm.retrieval.interpolation import mix_targets

WINDOWS_AT_ONCE, ROWS_AT_ONCE = 16, 512
SCALED = (0.0125, 0.025, 0.05, 0.1, 0.2, 0.4)  # temperatures, as shares of the median distance of two positions
LAMS = (0.05, 0.1, 0.2, 0.3, 0.5, 0.7)
SETTINGS = tuple(product(SCALED, LAMS))


@dataclass(frozen=True, slots=True)
class Read:
    """A document as the model read it: each position's key, the token that follows, and its log-probability."""

    keys_ND: Float32[np.ndarray, "N D"]
    targets_N: Int64[np.ndarray, " N"]
    logprobs_N: Float32[np.ndarray, " N"]


def bench_past(
    model: Path,
    texts: Corpus,
    *,
    max_tokens: int = 100_000,
    document_tokens: int = 8192,
    dtype: str = "auto",
    device: str = "auto",
    progress: Progress = silent,
) -> dict[str, Any]:
    """Nats per token of a model, and the gain from a document's earlier positions: all, or those beyond the context.

    The longest documents are read, `document_tokens` of each, until there are `max_tokens`. Errors are standard errors
    over documents. Raises InvalidInput for fewer than four documents.
    """
    checkpoint = load_checkpoint(model, dtype=dtype, device=device)
    documents = list(_documents(checkpoint, texts, max_tokens, document_tokens))
    if len(documents) < 4:
        raise InvalidInput(
            f"there are {len(documents)} documents to read; give four of held-out text at least, or raise max_tokens",
            field="texts",
        )
    gaps = {"past": 1, "past_beyond_context": checkpoint.decoder.config.context_length}
    nats = np.empty((len(gaps), len(documents), len(SETTINGS)))
    alone, sizes, scale = np.empty(len(documents)), np.empty(len(documents)), 0.0
    for number, tokens_N in enumerate(documents):
        read = _read(checkpoint, tokens_N)
        scale = scale or _median_distance(read.keys_ND)
        alone[number], sizes[number] = -read.logprobs_N.sum(), len(tokens_N)
        for row, gap in enumerate(gaps.values()):
            nats[row, number] = _nats(read, scale, gap)
        progress("read", number + 1, len(documents))
    measured = slice(1, None, 2)
    figures: dict[str, Any] = {
        "documents": len(alone[measured]),
        "tokens": int(sizes[measured].sum()),
        "nats_per_token": alone[measured].sum() / sizes[measured].sum(),
    }
    for name, nats_NS in zip(gaps, nats, strict=True):
        best = int(nats_NS[::2].sum(axis=0).argmin())
        less, error = per_token(alone[measured] - nats_NS[measured, best], sizes[measured])
        figures |= {f"nats_less_{name}": less, f"nats_less_{name}_error": error}
        figures |= {f"{name}_temperature": SETTINGS[best][0] * scale, f"{name}_lam": SETTINGS[best][1]}
    return figures


def past_logprobs(
    keys_ND: Float[Tensor, "N D"], targets_N: Int64[Tensor, " N"], temperatures: Sequence[float], gap: int
) -> Float[Tensor, "S N"]:
    """log p_past of the token after each position, at some temperatures, over all positions at least `gap` earlier.

    It is -inf if no such position is followed by that token.
    """
    logprobs = []
    for rows in torch.arange(len(keys_ND)).split(ROWS_AT_ONCE):
        distances_RN = torch.cdist(keys_ND[rows], keys_ND).square_()
        distances_RN[torch.arange(len(keys_ND)) > rows[:, None] - gap] = torch.inf
        others_RN = targets_N[rows, None] != targets_N
        shares = []
        for scores_RN in (-distances_RN / temperature for temperature in temperatures):
            agreeing_R = scores_RN.masked_fill(others_RN, -torch.inf).logsumexp(1)
            shares.append(torch.where(agreeing_R > -torch.inf, agreeing_R - scores_RN.logsumexp(1), -torch.inf))
        logprobs.append(torch.stack(shares))
    return torch.cat(logprobs, dim=1)


def _documents(
    checkpoint: Checkpoint, texts: Corpus, max_tokens: int, document_tokens: int
) -> Iterator[Int64[np.ndarray, " N"]]:
    """The beginnings of the longest documents, in turns of fitting and measuring."""
    taken = 0
    for tokens_N in sorted((checkpoint.tokenizer.encode(document.text) for document in texts), key=len, reverse=True):
        if taken >= max_tokens or len(tokens_N) < 2:
            return
        yield tokens_N[:document_tokens].astype(np.int64)
        taken += min(len(tokens_N), document_tokens)


def _read(checkpoint: Checkpoint, tokens_N: Int64[np.ndarray, " N"]) -> Read:
    encoder, predictions = Encoder(checkpoint.decoder), []
    windows = list(document_windows(checkpoint.decoder, tokens_N, checkpoint.tokenizer.start_id))
    for block in blocks_of(windows, WINDOWS_AT_ONCE):
        predictions += encoder.predictions(block)
    keys_ND = np.concatenate([prediction.keys_ND for prediction in predictions], dtype=np.float32)
    return Read(keys_ND, tokens_N, np.concatenate([prediction.logprobs_N for prediction in predictions]))


def _nats(read: Read, scale: float, gap: int) -> Float[np.ndarray, " S"]:
    """Nats of the document by each setting."""
    keys_ND, targets_N = torch.from_numpy(read.keys_ND), torch.from_numpy(read.targets_N)
    there_N = np.arange(len(read.targets_N)) >= gap
    told_SN = past_logprobs(keys_ND, targets_N, [scaled * scale for scaled in SCALED], gap).numpy()
    return np.array([-mix_targets(read.logprobs_N, told_N, there_N, lam).sum() for told_N in told_SN for lam in LAMS])


def _median_distance(keys_ND: Float32[np.ndarray, "N D"]) -> float:
    """Of two positions of a document: the scale of the model's keys."""
    some_ND = torch.from_numpy(keys_ND[:ROWS_AT_ONCE])
    distances_NN = torch.cdist(some_ND, some_ND).square_()
    return float(distances_NN[~torch.eye(len(some_ND), dtype=torch.bool)].median())


def per_token(some_N: Float[np.ndarray, " N"], sizes_N: Float[np.ndarray, " N"]) -> tuple[float, float]:
    """Returns a figure per token, and its standard error over documents."""
    mean = some_N.sum() / sizes_N.sum()
    spread = ((some_N - mean * sizes_N) ** 2).sum() * len(sizes_N) / max(1, len(sizes_N) - 1)
    return float(mean), sqrt(spread) / float(sizes_N.sum())
