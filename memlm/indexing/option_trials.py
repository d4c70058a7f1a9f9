"""How many lists a search probes, tried on held-out text."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace

import numpy as np
from jaxtyping import Float32, Int64

from memlm.base.progress import Progress
from memlm.data.windows import Window
from memlm.index.ivf import PROBES
from memlm.retrieval.encoder import Prediction
from memlm.retrieval.retriever import Retriever

WORTH_MORE_LISTS = 0.0005  # nats per token below which more lists are not worth their time


@dataclass(frozen=True, slots=True)
class EncodedText:
    """N consecutive positions of one document: keys, the tokens that follow, and the log-probabilities that the model
    gives these and the likeliest tokens.
    """

    keys_ND: Float32[np.ndarray, "N D"]
    lm_logprobs_N: Float32[np.ndarray, " N"]
    max_logprobs_N: Float32[np.ndarray, " N"]
    targets_N: Int64[np.ndarray, " N"]

    @classmethod
    def of(cls, window: Window, prediction: Prediction) -> EncodedText:
        """Takes the positions of one window."""
        return cls(prediction.keys_ND, prediction.logprobs_N, prediction.max_logprobs_N, window.targets_N)

    @classmethod
    def joined(cls, parts: Sequence[EncodedText]) -> EncodedText:
        """Concatenates the windows of one document."""
        return cls(*(np.concatenate([getattr(part, field.name) for part in parts]) for field in fields(cls)))


def try_lists(texts: Sequence[EncodedText], retriever: Retriever, progress: Progress) -> tuple[int | None, float]:
    """Returns the fewest lists that lose hardly anything against the most, and their loss in nats per token. Returns
    None and 0 for a store without lists.
    """
    nlist = retriever.stores[0].snapshot.nlist
    if not nlist:
        return None, 0.0
    numbers, nats = sorted({min(nprobe, nlist) for nprobe in PROBES}), list[float]()
    for done, nprobe in enumerate(numbers, start=1):
        nats.append(_evaluate(texts, replace(retriever, knn=replace(retriever.knn, nprobe=nprobe))))
        progress("try lists", done, len(numbers))
    fewest = next(place for place, each in enumerate(nats) if each <= nats[-1] + WORTH_MORE_LISTS)
    return numbers[fewest], nats[fewest] - nats[-1]


def _evaluate(texts: Sequence[EncodedText], retriever: Retriever) -> float:
    """Returns nats per token."""
    nats, count = 0.0, 0
    for text in texts:
        result = retriever.search(text.keys_ND, text.max_logprobs_N)
        _, mixed_N = result.mix_targets(text.lm_logprobs_N, text.targets_N)
        nats -= float(mixed_N.sum(dtype=np.float64))
        count += len(text.targets_N)
    return nats / count
