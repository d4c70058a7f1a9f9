"""Held-out text -> k, lam and temperature: retrieves once, then searches over what was retrieved.

For every temperature of a geometric grid and every k of a doubling one, the mean log-likelihood is a concave
function of lam, whose best value bisection finds. What is chosen is kept in the store as its defaults, with
what it was tuned on.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from jaxtyping import Bool, Float, Float32

from memlm.api import MemoryParams
from memlm.checkpoint import Checkpoint, load_checkpoint
from memlm.corpus import Corpus
from memlm.errors import InvalidInput
from memlm.index.datastore import Datastore, KnnDefaults
from memlm.keys import Reader
from memlm.memory import Memory, Retrieval
from memlm.progress import Progress, silent
from memlm.scoring import BLOCK_WINDOWS, document_windows
from memlm.windows import blocks_of

LARGEST_K = 512
WORTH_MORE_K = 0.01  # nats per token below which more neighbours are not worth their time
TEMPERATURE_STEPS = tuple(2.0 ** (step / 2) for step in range(-10, 7))


@dataclass(frozen=True, slots=True)
class TuneReport:
    """What was chosen, on how many tokens, and the nats per token before and after."""

    k: int
    lam: float
    temperature: float
    tokens: int
    base_nats: float
    knn_nats: float
    tuned_on: str


@dataclass(frozen=True, slots=True)
class _Evidence:
    """What tuning looks at: the model's log-probability of each target, and its neighbours, nearest first."""

    lm_logprobs_Q: Float32[np.ndarray, " Q"]
    distances_QK: Float32[np.ndarray, "Q K"]
    agrees_QK: Bool[np.ndarray, "Q K"]


def tune(
    model: str | Path | Checkpoint,
    store: str | Path,
    texts: Corpus,
    *,
    max_tokens: int = 50_000,
    largest_k: int = LARGEST_K,
    progress: Progress = silent,
) -> TuneReport:
    """Tunes a datastore on text that neither it nor the model has seen, and keeps the result as the store's defaults.

    Reads at most `max_tokens` tokens. Raises InvalidInput where the texts are empty.
    """
    checkpoint = model if isinstance(model, Checkpoint) else load_checkpoint(model)
    with Datastore.open(store) as datastore:
        memory = Memory(datastore, checkpoint)
        start = memory.resolve(MemoryParams(k=min(largest_k, max(1, datastore.num_entries))))
        evidence = _gather(checkpoint, start, texts, max_tokens, progress)
        k, temperature, lam, nats = _search(evidence, start.temperature)
        tuned_on = ", ".join(Path(path).name for path in texts.paths) + f" ({len(evidence.lm_logprobs_Q)} tokens)"
        datastore.save_defaults(KnnDefaults(k=k, lam=lam, temperature=temperature, tuned_on=tuned_on))
    base = -float(evidence.lm_logprobs_Q.mean())
    return TuneReport(k, lam, temperature, len(evidence.lm_logprobs_Q), base, nats, tuned_on)


def best_lam(lm_Q: Float[np.ndarray, " Q"], knn_Q: Float[np.ndarray, " Q"]) -> float:
    """The weight that maximises mean log(lam knn + (1 - lam) lm), to 1e-6: bisection on its falling derivative."""
    low, high = 0.0, 1.0
    with np.errstate(divide="ignore", invalid="ignore"):
        while high - low > 1e-6:
            lam = (low + high) / 2
            slope = np.mean((knn_Q - lm_Q) / (lam * knn_Q + (1 - lam) * lm_Q))
            low, high = (lam, high) if slope > 0 else (low, lam)
    return round((low + high) / 2, 4)


def _gather(
    checkpoint: Checkpoint, retrieval: Retrieval, texts: Corpus, max_tokens: int, progress: Progress
) -> _Evidence:
    lm, distances, agrees, num_tokens = [], [], [], 0
    windows = (window for document in texts for window in document_windows(checkpoint, document.text))
    reader = Reader(checkpoint.decoder)
    for block in blocks_of(windows, BLOCK_WINDOWS):
        for window, read in zip(block, reader.predictions(block), strict=True):
            found = retrieval.search(read.keys_ND).neighbours
            lm.append(read.logprobs_N)
            distances.append(found.distances_QK)
            agrees.append(found.values_QK == window.targets_N[:, None])
            num_tokens += len(window.targets_N)
        progress("retrieve", min(num_tokens, max_tokens), max_tokens)
        if num_tokens >= max_tokens:
            break
    if not num_tokens:
        raise InvalidInput("there is no token to tune on; give some held-out text", field="texts")
    return _Evidence(np.concatenate(lm), np.concatenate(distances), np.concatenate(agrees))


def _search(evidence: _Evidence, scale: float) -> tuple[int, float, float, float]:
    """k, temperature, lam and their nats per token: the best, with the smallest k that is nearly as good."""
    lm_Q = np.exp(evidence.lm_logprobs_Q.astype(np.float64))
    best: dict[int, tuple[float, float, float]] = {}
    for step in TEMPERATURE_STEPS:
        temperature = scale * step
        for k, knn_Q in _memory_probabilities(evidence, temperature):
            lam = best_lam(lm_Q, knn_Q)
            nats = -float(np.mean(np.log(np.maximum(lam * knn_Q + (1 - lam) * lm_Q, 1e-300))))
            best[k] = min(best.get(k, (math.inf, 0.0, 0.0)), (nats, temperature, lam))
    least = min(nats for nats, _, _ in best.values())
    k = min(k for k, (nats, _, _) in best.items() if nats <= least + WORTH_MORE_K)
    nats, temperature, lam = best[k]
    return k, temperature, lam, nats


def _memory_probabilities(evidence: _Evidence, temperature: float) -> list[tuple[int, Float[np.ndarray, " Q"]]]:
    """p_kNN of every target for every k at once, from running sums over the neighbours."""
    nearest_Q1 = evidence.distances_QK[:, :1]
    with np.errstate(invalid="ignore"):
        weights_QK = np.exp((nearest_Q1 - evidence.distances_QK) / np.float32(temperature))
    weights_QK = np.where(np.isfinite(evidence.distances_QK), weights_QK, 0.0).astype(np.float64)
    total_QK = weights_QK.cumsum(axis=1)
    agreeing_QK = np.where(evidence.agrees_QK, weights_QK, 0.0).cumsum(axis=1)
    width = weights_QK.shape[1]
    sizes = sorted({min(2**power, width) for power in range(width.bit_length() + 1)})
    lm_Q = np.exp(evidence.lm_logprobs_Q.astype(np.float64))
    return [
        (k, np.where(total_QK[:, k - 1] > 0, agreeing_QK[:, k - 1] / np.maximum(total_QK[:, k - 1], 1e-300), lm_Q))
        for k in sizes
    ]
