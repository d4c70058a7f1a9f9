"""Memory does not repeat what the text has just said: the guard against loops, on in generation and off in scoring.

Memory that is trusted can keep a text in a circle for ever: after a line end the nearest entries are line ends. A run
of `RUN` tokens that stands in the last `WINDOW` tokens of a text is not given again by memory: neighbors whose token
would complete it are left out, and their weight goes to the model, which may still repeat it. Only a document that the
text copies may repeat itself: an entry stays where the `COPIED` tokens before it are the last ones of the text.

The guard depends on the text and the entries alone, so a text is what it is alone, in a batch, and in the parts of a
session (benchmarks/log, 2026-11-25-loop-guard.md).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TypeAlias

import numpy as np
from jaxtyping import Bool, Int64

from memlm.retrieval.result import RetrievalResult

RUN, WINDOW, COPIED = 4, 64, 16

# The tokens before entries in their documents, by ids and numbers of stores: -1 before the first.
TokensBefore: TypeAlias = Callable[[np.ndarray, np.ndarray, int], np.ndarray]


def repeating_ids(text_ids: Sequence[int], *, run: int = RUN, window: int = WINDOW) -> Int64[np.ndarray, " R"]:
    """The tokens that would complete a run of tokens that the end of a text holds already."""
    recent = np.array(text_ids[-window:], np.int64)
    if len(recent) < run:
        return recent[:0]
    # Places of the run's last token, where all of its tokens before are the last ones of the text.
    ends = len(recent) - run + 1
    agrees = np.ones(ends, bool)
    for place in range(run - 1):
        agrees &= recent[place : place + ends] == recent[ends + place]
    return recent[run - 1 :][agrees]


def without_repeats(
    result: RetrievalResult, texts: Sequence[Sequence[int]], tokens_before: TokensBefore
) -> RetrievalResult:
    """Leaves out the neighbors of each of Q keys that would repeat a run of its text's last tokens.

    λ of the key shrinks by their weight, so that the neighbors that stay give each token as much as before. An empty
    text is not guarded.
    """
    values_QK = result.neighbors.values_QK
    dropped_QK = np.zeros(values_QK.shape, bool)
    for row, text_ids in enumerate(texts):
        if len(ids := repeating_ids(text_ids)):
            dropped_QK[row] = np.any(values_QK[row, :, None] == ids, axis=1)  # np.isin takes five times as long
    if dropped_QK.any():
        dropped_QK &= ~_copied(result, dropped_QK, texts, tokens_before)
    return _without(result, dropped_QK) if dropped_QK.any() else result


def _copied(
    result: RetrievalResult,
    asked_QK: Bool[np.ndarray, "Q K"],
    texts: Sequence[Sequence[int]],
    tokens_before: TokensBefore,
) -> Bool[np.ndarray, "Q K"]:
    """Which of some neighbors have the last tokens of the text before them."""
    rows_E, columns_E = np.nonzero(asked_QK)
    lasts_QC = np.array([[-2] * (COPIED - len(ids)) + list(ids[-COPIED:]) for ids in texts])
    before_EC = tokens_before(result.neighbors.ids_QK[rows_E, columns_E], result.stores_QK[rows_E, columns_E], COPIED)
    copied_QK = np.zeros_like(asked_QK)
    copied_QK[rows_E, columns_E] = (before_EC == lasts_QC[rows_E]).all(axis=1)
    return copied_QK


def _without(result: RetrievalResult, dropped_QK: Bool[np.ndarray, "Q K"]) -> RetrievalResult:
    order_QK = np.argsort(dropped_QK, axis=1, kind="stable")  # as `keep` moves them
    kept_QK = ~np.take_along_axis(dropped_QK, order_QK, axis=1)
    moved_QK = np.where(kept_QK, np.take_along_axis(result.logweights_QK, order_QK, axis=1), -np.inf)
    share_Q = np.exp(moved_QK.astype(np.float64)).sum(axis=1)
    with np.errstate(divide="ignore", invalid="ignore"):
        logweights_QK = np.where(kept_QK, moved_QK - np.log(share_Q)[:, None], -np.inf).astype(np.float32)
    changed_Q: Bool[np.ndarray, " Q"] = np.any(dropped_QK, axis=1)
    return replace(
        result,
        neighbors=result.neighbors.keep(~dropped_QK),
        logweights_QK=np.where(changed_Q[:, None], logweights_QK, result.logweights_QK),
        lams_Q=np.where(changed_Q, result.lams_Q * np.minimum(share_Q, 1.0), result.lams_Q),
        stores_QK=np.take_along_axis(result.stores_QK, order_QK, axis=1),
    )
