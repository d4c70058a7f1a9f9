"""A step's positions -> their log-probabilities and neighbors: of datastores, and of each text's own past."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from jaxtyping import Float, Float32
from torch import Tensor

from memlm.api.generation import Token
from memlm.generation.generation import Generation
from memlm.generation.mixture import Mixture
from memlm.index.store.snapshot import Snapshot
from memlm.model import Decoder, DecoderState
from memlm.retrieval.gate import gated
from memlm.retrieval.loop_guard import without_repeats
from memlm.retrieval.own_past import nothing_before
from memlm.retrieval.result import RetrievalResult
from memlm.retrieval.retriever import Retriever


@dataclass(eq=False, slots=True)
class RunningSequence:
    """A generation in the batch, with its tokens of the last step, or its failure. After the last step, `state` is the
    KV cache for its session, if it has one. `since_s` (perf_counter) is the end of its last step.

    A text of a `mixture` has a sequence for each of its `rows`, of which its first one stands for all.
    """

    generation: Generation
    tokens: tuple[Token, ...] = ()
    failure: Exception | None = None
    since_s: float = 0.0
    state: DecoderState | None = None
    mixture: Mixture | None = None
    rows: tuple[RunningSequence, ...] = ()

    @property
    def is_done(self) -> bool:
        """Whether it has failed or generated its last token."""
        return self.failure is not None or self.generation.finished is not None


class Decoded(NamedTuple):
    """A sequence with the final hidden states and the keys of N positions: its last token and its draft."""

    sequence: RunningSequence
    hidden_ND: Tensor
    keys_ND: Tensor


class Found(NamedTuple):
    """The log-probabilities of all positions of a step, the neighbors in datastores for each position of each sequence,
    and for each sequence those in its own past.
    """

    logprobs_RV: Float[Tensor, "R V"]
    results: list[list[RetrievalResult | None]]
    pasts: list[RetrievalResult | None]


def search_memories(decoder: Decoder, decoded: Sequence[Decoded]) -> Found:
    """Searches the memories of all positions of a step."""
    logprobs_RV = decoder.logprobs(torch.cat([each.hidden_ND for each in decoded])).cpu()
    results = _search_stores(decoder, decoded, logprobs_RV)
    each_NV = logprobs_RV.split([len(each.hidden_ND) for each in decoded])
    return Found(logprobs_RV, results, list(map(_search_past, decoded, each_NV)))


class _Position(NamedTuple):
    """A position that datastores are searched for, in the views of one text: that behind so many tokens of a draft."""

    each: Decoded
    number: int  # of the sequence
    place: int
    row: int  # of all positions
    views: tuple[Snapshot, ...]


def _search_stores(
    decoder: Decoder, decoded: Sequence[Decoded], logprobs_RV: Float[Tensor, "R V"]
) -> list[list[RetrievalResult | None]]:
    """Searches once for each retriever, also where sequences exclude documents. A gate changes the log-probabilities
    in place.
    """
    results: list[list[RetrievalResult | None]] = [[None] * len(each.hidden_ND) for each in decoded]
    for retriever, positions in _positions_by_retriever(decoded).items():
        try:
            found = _search_together(decoder, retriever, positions, logprobs_RV)
            for query, position in enumerate(positions):
                results[position.number][position.place] = found.row(query)
        except Exception as error:
            for position in positions:
                position.each.sequence.failure = error
    return results


def _positions_by_retriever(decoded: Sequence[Decoded]) -> dict[Retriever, list[_Position]]:
    """The positions whose neighbors are needed. A text whose views cannot be had has failed."""
    positions, row = dict[Retriever, list[_Position]](), 0
    for number, each in enumerate(decoded):
        first, row = row, row + len(each.hidden_ND)
        generation = each.sequence.generation
        if (retriever := generation.retriever) is None or not generation.needs_retrieval:
            continue
        try:
            views = retriever.views
        except Exception as error:
            each.sequence.failure = error
            continue
        mine = [_Position(each, number, place, first + place, views) for place in range(len(each.hidden_ND))]
        positions.setdefault(retriever.shared, []).extend(mine)
    return positions


def _search_together(
    decoder: Decoder, retriever: Retriever, positions: Sequence[_Position], logprobs_RV: Float[Tensor, "R V"]
) -> RetrievalResult:
    """The neighbors of the positions of a retriever, without those that would repeat a text."""
    rows, max_logprobs_Q = [position.row for position in positions], None
    if retriever.knn.adaptive is not None:
        max_logprobs_Q = logprobs_RV.numpy()[rows].max(axis=1)
    keys_QD = _as_numpy(torch.stack([position.each.keys_ND[position.place] for position in positions]))
    views_Q = [position.views for position in positions]
    found = retriever.search(keys_QD, max_logprobs_Q, views_Q, may_be_partial=True)
    texts = [position.each.sequence.generation.guarded_ids(position.place) for position in positions]
    found = without_repeats(found, texts, retriever.tokens_before)
    if retriever.knn.gate is not None:
        hidden_QD = torch.stack([position.each.hidden_ND[position.place] for position in positions])
        logprobs_RV[rows] = decoder.logprobs(gated(decoder, retriever.knn.gate, hidden_QD, found.neighbors)).cpu()
    return found


def _search_past(each: Decoded, logprobs_NV: Float[Tensor, "N V"]) -> RetrievalResult | None:
    """Searches the past of one text for its positions of the step, each among those before it."""
    generation = each.sequence.generation
    if each.sequence.failure is not None or generation.past is None or not generation.past.is_searched:
        return None
    try:
        found = generation.past.search(_as_numpy(each.keys_ND), logprobs_NV.numpy().max(axis=1))
        texts = list(map(generation.guarded_ids, range(len(logprobs_NV))))
        return without_repeats(found, texts, nothing_before)
    except Exception as error:
        each.sequence.failure = error
        return None


def remember(sequence: RunningSequence, token_ids: Sequence[int], keys_ND: Float[Tensor, "N D"]) -> None:
    """Adds tokens that the model has read to the past of their text, if it has one."""
    if (past := sequence.generation.past) is not None and sequence.failure is None:
        try:
            past.read(token_ids, _as_numpy(keys_ND))
        except Exception as error:
            sequence.failure = error


def _as_numpy(keys_ND: Float[Tensor, "N D"]) -> Float32[np.ndarray, "N D"]:
    """Keys for a search."""
    keys: np.ndarray = keys_ND.float().cpu().numpy()
    return keys
