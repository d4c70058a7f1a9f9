"""Options of a search, tried on held-out text: how many lists are probed, and how many pointers replace a search."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace

import numpy as np
from jaxtyping import Float32, Int64

from memlm.base.progress import Progress
from memlm.data.windows import Window
from memlm.index.ivf import PROBES
from memlm.retrieval.encoder import Prediction
from memlm.retrieval.interpolation import mix_targets, target_logprobs
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
        nats.append(_evaluate(texts, replace(retriever, nprobe=nprobe))[0])
        progress("try lists", done, len(numbers))
    fewest = next(place for place, each in enumerate(nats) if each <= nats[-1] + WORTH_MORE_LISTS)
    return numbers[fewest], nats[fewest] - nats[-1]


def try_pointers(
    texts: Sequence[EncodedText], retriever: Retriever, most_loss: float, progress: Progress
) -> tuple[int | None, float, float]:
    """Finds the number of pointers that saves most searches for at most `most_loss` nats per token
    (experimental, see `memlm.retrieval.pointers`). Positions are searched one by one, which takes long.

    Returns the number (None if none saves any), the share of searches that it saves, and its loss.
    """
    nats_without, _ = _evaluate(texts, retriever)
    best: tuple[int | None, float, float] = (None, 0.0, 0.0)
    numbers = [2**power for power in range(retriever.k.bit_length())]
    for done, min_pointers in enumerate(reversed(numbers), start=1):
        nats, searched = _evaluate(texts, replace(retriever, min_pointers=min_pointers))
        progress("try pointers", done, len(numbers))
        if nats - nats_without > most_loss:  # fewer pointers lose more
            progress("try pointers", len(numbers), len(numbers))
            break
        if 1 - searched > best[1]:
            best = min_pointers, 1 - searched, nats - nats_without
    return best


def _evaluate(texts: Sequence[EncodedText], retriever: Retriever) -> tuple[float, float]:
    """Returns nats per token, and the share of positions that an index was searched for."""
    nats, searches, count = 0.0, 0, 0
    for text in texts:
        result = retriever.search_in_order(text.keys_ND, text.max_logprobs_N, text.targets_N, retriever.new_policy())
        knn_N = target_logprobs(result.logweights_QK, result.neighbors.values_QK, text.targets_N)
        found_N = (result.neighbors.ids_QK >= 0).any(axis=1)
        nats -= float(mix_targets(text.lm_logprobs_N, knn_N, found_N, result.lams_Q).sum(dtype=np.float64))
        searches, count = searches + int(result.searched_Q.sum()), count + len(text.targets_N)
    return nats / count, searches / count
