"""Drafts: guesses of the next tokens that one pass of the model can check (speculative decoding, arXiv 2211.17192).

A pass over a token and its draft costs little more than one over the token. Each position is sampled from the mixture
as without drafts, and the next one counts only where the sample is the drafted token. So drafts change the speed of a
text, and never its words.

The sources are cheap and need no second model. They copy the text's own past (prompt lookup), the caller's draft, the
continuations of the neighbors that have the sampled token (REST, arXiv 2311.08252), and documents that hold the last
tokens of the text (SAM decoding, arXiv 2411.10666).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from memlm.api.generation import DraftSource
from memlm.index.store.snapshot import Snapshot
from memlm.retrieval.passages import Passage
from memlm.retrieval.result import RetrievalResult
from memlm.retrieval.retriever import Retriever

LONGEST_DRAFT = 16
LONG_RUN, SHORT_RUN = 5, 2  # a run of tokens is looked up by its last 5 tokens, or its last 2
COMPARED = 16  # tokens before a match that tell how alike two texts are
INDEXED = 1 << 16  # the latest tokens of a text, and the first of an expected one, that are indexed, in some 40 ms


class Draft(NamedTuple):
    """Tokens that may come next, with their source. `closeness` is a small number: drafts of a source with equal ones
    are about as good.
    """

    token_ids: Sequence[int]
    source: DraftSource
    closeness: int


class RunIndex:
    """Where each run of tokens last stood in a text that grows."""

    def __init__(self, token_ids: Sequence[int] = ()) -> None:
        self.token_ids = list[int]()
        self._after: dict[tuple[int, ...], int] = {}
        for token_id in token_ids:
            self.append(token_id)

    def append(self, token_id: int) -> None:
        """Adds a token. The runs that end right before it are found from now on."""
        ids, place = self.token_ids, len(self.token_ids)
        if place >= SHORT_RUN:
            self._after[tuple(ids[-SHORT_RUN:])] = place
            if place >= LONG_RUN:
                self._after[tuple(ids[-LONG_RUN:])] = place
        ids.append(token_id)

    def find(self, context_ids: Sequence[int]) -> tuple[int, int]:
        """Returns the place after the latest run that a text ends with, and the number of equal tokens before it.
        (0, 0) if there is none.
        """
        for size in (LONG_RUN, SHORT_RUN):
            if len(context_ids) >= size and (place := self._after.get(tuple(context_ids[-size:]))) is not None:
                return place, self._num_equal_before(place, context_ids)
        return 0, 0

    def continuation(self, place: int, count: int) -> list[int]:
        """The tokens from a place on. Behind the end of the text they begin again, as a loop does."""
        found = self.token_ids[place : place + count]
        while 0 < len(found) < count:
            found += found[: count - len(found)]
        return found

    def _num_equal_before(self, place: int, context_ids: Sequence[int]) -> int:
        ids, num_equal = self.token_ids, 0
        most = min(COMPARED, place, len(context_ids))
        while num_equal < most and ids[place - 1 - num_equal] == context_ids[-1 - num_equal]:
            num_equal += 1
        return num_equal


class ExpectedText:
    """A text that the output should resemble: the place in it where the output is."""

    def __init__(self, token_ids: Sequence[int]) -> None:
        self._index, self._place, self._num_equal = RunIndex(token_ids), 0, 0

    def append(self, token_id: int, context_ids: Sequence[int]) -> None:
        """Follows the output by a token. `context_ids` ends with it.

        After a token that differs, the next one is expected to be the next again, until a run shows another place.
        """
        expected = self._index.token_ids[self._place : self._place + 1]
        self._place += 1
        if expected == [token_id]:
            self._num_equal += 1
            return
        self._num_equal = 0
        place, num_equal = self._index.find(context_ids)
        if num_equal:
            self._place, self._num_equal = place, num_equal

    def draft(self, count: int) -> Draft:
        """The next tokens, none behind the end."""
        ids = self._index.token_ids[self._place : self._place + count]
        return Draft(ids, DraftSource.REQUEST, _closeness(self._num_equal))


class Drafter:
    """The sources of one sequence. `context_ids` is its text so far, which the caller extends before `append`."""

    def __init__(
        self, context_ids: Sequence[int], expected_ids: Sequence[int] = (), retriever: Retriever | None = None
    ) -> None:
        self._context_ids, self._retriever = context_ids, retriever
        self._index: RunIndex | None = None
        self._expected = ExpectedText(expected_ids[:INDEXED]) if expected_ids else None
        self._result: RetrievalResult | None = None
        self._views: tuple[Snapshot, ...] = ()  # that the neighbors were found in
        self._passage: Passage | None = None
        self._since_passage = list[int]()

    def append(self, token_id: int, result: RetrievalResult | None) -> None:
        """Follows the text by its last token, which was sampled with these neighbors."""
        self._result, self._views = result, () if self._retriever is None else self._retriever.views
        self._since_passage.append(token_id)
        if self._index is not None:
            self._index.append(token_id)
        if self._expected is not None:
            self._expected.append(token_id, self._context_ids[-COMPARED:])

    def drafts(self, count: int) -> Iterator[Draft]:
        """Yields the drafts of all sources, of at most `count` tokens each, none empty."""
        for draft in (self._from_request(count), self._from_text(count), *self._from_memory(count)):
            if draft is not None and draft.token_ids:
                yield draft

    def _from_request(self, count: int) -> Draft | None:
        return None if self._expected is None else self._expected.draft(count)

    def _from_text(self, count: int) -> Draft | None:
        if self._index is None:
            self._index = RunIndex(self._context_ids[-INDEXED:])
        place, num_equal = self._index.find(self._context_ids[-COMPARED:])
        if not num_equal:
            return None
        return Draft(self._index.continuation(place, count), DraftSource.TEXT, _closeness(num_equal))

    def _from_memory(self, count: int) -> Iterator[Draft]:
        retriever = self._retriever
        if retriever is None:
            return
        if self._result is not None and self._views == retriever.views:  # no document was deleted meanwhile
            yield neighbors_draft(self._result, self._context_ids[-1], retriever, count)
        passage = None if self._passage is None else retriever.follow(self._passage, self._since_passage)
        self._passage = passage or retriever.passage_after(self._context_ids[-COMPARED:])
        self._since_passage.clear()
        if self._passage is not None:
            length = min(self._passage.length, COMPARED)
            yield Draft(self._passage.tokens(count), DraftSource.DATASTORE, _closeness(length))


def neighbors_draft(result: RetrievalResult, token_id: int, retriever: Retriever, count: int) -> Draft:
    """The continuations of the neighbors that have the sampled token, as one chain: each place takes the token of the
    largest weight, and only the neighbors that have it go on.
    """
    (columns,) = np.nonzero(result.neighbors.values_QK[0] == token_id)
    if not len(columns):
        return Draft((), DraftSource.NEIGHBORS, 0)
    weights_E = np.exp(result.logweights_QK[0, columns].astype(np.float64))
    closeness = min(3, int(4 * weights_E.sum()))
    after_EC = retriever.tokens_after(result.neighbors.ids_QK[0, columns], result.stores_QK[0, columns], count)
    chain = list[int]()
    for after_E in after_EC.T:
        weight_of: dict[int, float] = {}
        for next_id, weight in zip(after_E.tolist(), weights_E.tolist(), strict=True):
            weight_of[next_id] = weight_of.get(next_id, 0.0) + weight
        best = max(weight_of, key=weight_of.__getitem__)
        if best < 0 or not weight_of[best]:
            break
        chain.append(best)
        weights_E = np.where(after_E == best, weights_E, 0.0)
    return Draft(chain, DraftSource.NEIGHBORS, closeness)


def _closeness(num_equal: int) -> int:
    """0 for no equal token before, then one more for each doubling."""
    return num_equal.bit_length()
