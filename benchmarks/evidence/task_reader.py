"""A model of the lm-evaluation-harness that answers in several ways from one reading of each question."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from memlm.base.progress import Progress, silent
from memlm.data.windows import Window, blocks_of
from memlm.generation.likelihood import mixed_likelihood
from memlm.index.neighbors import Neighbors
from memlm.integrations.lm_eval import MemlmLM
from memlm.language_model import LanguageModel
from memlm.retrieval.encoder import BLOCK_WINDOWS, Encoder, Prediction
from memlm.retrieval.result import RetrievalResult
from memlm.retrieval.retriever import Retriever


class TaskReader(MemlmLM):
    """Answers as a retriever of `ways` would, None for the model alone. `way` is the one that is asked next.

    The retrievers differ in λ alone. All ways read a question as a document, which begins with the start token.
    """

    def __init__(self, lm: LanguageModel, ways: dict[str, Retriever | None], progress: Progress = silent) -> None:
        super().__init__(lm)
        self._ways, self._progress = ways, progress
        self._as_document, self.way = True, next(iter(ways))
        self._answers: dict[tuple[str, str], dict[str, tuple[float, bool]]] = {}

    def loglikelihood(self, requests: list[Any], disable_tqdm: bool = False) -> list[tuple[float, bool]]:
        """The log-probability of each continuation after its context, and whether greedy decoding gives it."""
        unread = list(dict.fromkeys(request.args for request in requests if request.args not in self._answers))
        done = 0
        for pairs in blocks_of(unread, BLOCK_WINDOWS):
            self._read(pairs)
            done += len(pairs)
            self._progress("read", done, len(unread))
        return [self._answers[request.args][self.way] for request in requests]

    def _read(self, pairs: Sequence[tuple[str, str]]) -> None:
        """Reads some questions together, and searches the neighbors of all once, which each way weighs."""
        windows = [self._window(*pair) for pair in pairs]
        predictions = Encoder(self.lm.checkpoint.decoder).predictions(windows, hidden=True)
        sizes = [len(window.targets_N) for window in windows]
        weighed = self._weighed(predictions)
        begins = np.cumsum([0, *sizes])
        for pair, window, prediction, begin, size in zip(pairs, windows, predictions, begins, sizes, strict=False):
            new_ids, rows = window.targets_N.tolist(), slice(begin, begin + size)
            logprobs_NV = self._logprobs(prediction)
            self._answers[pair] = {
                way: mixed_likelihood(logprobs_NV, new_ids, None if found is None else rows_of(found, rows))
                for way, found in weighed.items()
            }

    def _weighed(self, predictions: Sequence[Prediction]) -> dict[str, RetrievalResult | None]:
        keys_ND, max_logprobs_N = (
            np.concatenate([getattr(each, name) for each in predictions]) for name in ("keys_ND", "max_logprobs_N")
        )
        found, weighed = None, dict[str, RetrievalResult | None]()
        for way, retriever in self._ways.items():
            if retriever is None:
                weighed[way] = None
                continue
            found = found or retriever.search(keys_ND, max_logprobs_N)
            logweights_NK, lams_N = retriever.knn.weigh(found.neighbors, max_logprobs_N)
            weighed[way] = replace(found, logweights_QK=logweights_NK, lams_Q=lams_N)
        return weighed

    def _logprobs(self, prediction: Prediction) -> Float[Tensor, "N V"]:
        assert prediction.hidden_ND is not None
        decoder = self.lm.checkpoint.decoder
        with torch.inference_mode():
            return decoder.logprobs(prediction.hidden_ND.to(decoder.device, decoder.dtype)).cpu()

    def _window(self, context: str, continuation: str) -> Window:
        context_ids, new_ids = self._split(context, continuation)
        read_ids = self._last(context_ids, 1 - len(new_ids))
        return Window(np.array([*read_ids, *new_ids[:-1]]), np.array(new_ids))


def rows_of(found: RetrievalResult, rows: slice) -> RetrievalResult:
    """The results of some of the keys."""
    near = found.neighbors
    return replace(
        found, neighbors=Neighbors(near.distances_QK[rows], near.ids_QK[rows], near.values_QK[rows]),
        logweights_QK=found.logweights_QK[rows], lams_Q=found.lams_Q[rows], stores_QK=found.stores_QK[rows],
    )  # fmt: skip
