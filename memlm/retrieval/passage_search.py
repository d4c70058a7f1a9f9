"""A question -> the passages of datastores that are likeliest to answer it.

By words, passages are ranked by BM25. By meaning, they are ranked by the vectors of an encoder, or by the mean of the
model's keys. By both, their ranks in these two orders are joined (reciprocal rank fusion, Cormack et al. 2009). All
figures are over the passages that are live, in all segments and datastores together. So the result is that of one
datastore, built from the live documents.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
from jaxtyping import Bool, Float32, Float64, Int64

from memlm.api.answers import FindPassagesRequest
from memlm.api.passages import Passage, PassagesBy
from memlm.base.phrases import forms_of
from memlm.base.steps import Offload, Steps
from memlm.index.store.derived.bm25 import Searched, best_passages, scores_of
from memlm.index.store.derived.key_means import SegmentMeans
from memlm.index.store.derived.passage_vectors import PassageEncoder
from memlm.index.store.derived.passages import SegmentPassages
from memlm.index.store.filters import DocumentFilter
from memlm.index.store.segment import Segment
from memlm.index.store.snapshot import Snapshot
from memlm.retrieval.found_passages import EXAMINED, EXAMINED_EACH, Found, first_distinct
from memlm.retrieval.retriever import exclusion_of
from memlm.retrieval.store import ModelStore

MOST_WORDS = 500  # different words of a question that are looked up
FUSION_RANK = 60  # added to each rank, so that the first few differ little


@dataclass(frozen=True, slots=True)
class _Part:
    """The P passages of one segment of a datastore, with the means of their keys or the vectors of an encoder."""

    store: ModelStore
    segment: Segment
    passages: SegmentPassages
    means: SegmentMeans | None = None
    vectors_PD: Float32[np.ndarray, "P D"] | None = None

    @property
    def live_P(self) -> Bool[np.ndarray, " P"]:
        """Which of the passages are live."""
        return self.passages.live_P(self.segment.deleted_mask)

    def searched(self, only: DocumentFilter) -> Searched:
        """The passages for a search by words. Nothing is read of most segments, which have no deleted documents."""
        live_P = self.live_P if self.segment.any_deleted else None
        wanted_P = self.segment.chosen(only)[self.passages.cuts.documents_P] if only else None
        return Searched(self.passages.postings, live_P, wanted_P)


def find_passages(
    stores: Sequence[ModelStore],
    request: FindPassagesRequest,
    question_D: Float32[np.ndarray, " D"] | None,
    encoder: PassageEncoder | None = None,
) -> Steps[tuple[Passage, ...]]:
    """Finds the k best passages. `question_D` is the mean key of the question, or its vector by the `encoder`, None for
    a search by words.

    The first search of a datastore indexes its passages, some a step: a search that is cancelled leaves them to the
    next one. Raises NotFound for a name in `exclude_documents` that stands for no document, and Incompatible for a
    datastore without keys, unless it is searched by words or with an encoder.
    """
    if request.by is PassagesBy.WORDS:
        encoder = None
    elif encoder is None:
        for store in stores:
            store.snapshot.check_searchable(store.name)
    while True:
        snapshots = [store.snapshot for store in stores]
        views: list[Snapshot] = yield Offload(partial(_views, stores, request.exclude_documents))
        parts = list[_Part]()
        for store, view in zip(stores, views, strict=True):
            for segment in view.segments:
                passages = yield from store.whole_passages_of(segment)
                means = vectors_PD = None
                if encoder is not None:
                    vectors_PD = (yield from store.whole_vectors_of(segment, encoder)).vectors_PD
                elif request.by is not PassagesBy.WORDS:
                    means = yield from store.whole_means_of(segment)
                parts.append(_Part(store, segment, passages, means, vectors_PD))
        found: tuple[Passage, ...] = yield Offload(partial(_found, parts, request, question_D), is_long=True)
        if [store.snapshot for store in stores] == snapshots:  # no document was deleted meanwhile
            return found


def cosines(
    question_D: Float32[np.ndarray, " D"], keys: Sequence[np.ndarray], live: Sequence[np.ndarray]
) -> Float64[np.ndarray, " P"]:
    """Compares a question with passages, given by their mean keys and by which of them are live, a segment each.

    The mean of the live passages is subtracted first. States of a decoder share a large part, which tells nothing.
    """
    num_live = sum(int(mask_P.sum()) for mask_P in live)
    total_D = sum((keys_PD[mask_P].sum(axis=0, dtype=np.float64) for keys_PD, mask_P in zip(keys, live, strict=True)))
    mean_D = total_D / max(1, num_live)
    query_D, scores = question_D - mean_D, [np.zeros(0)]
    for keys_PD in keys:
        centered_PD = keys_PD - mean_D
        norms_P = np.linalg.norm(centered_PD, axis=1) * np.linalg.norm(query_D)
        scores.append(centered_PD @ query_D / np.maximum(norms_P, 1e-9))
    return np.concatenate(scores)


def fused(orders: Sequence[Int64[np.ndarray, " R"]], num_passages: int) -> Float64[np.ndarray, " P"]:
    """Joins orders of passages, each best first: the sum of 1 / (60 + rank), with ranks from 1. A passage that an
    order lacks gets nothing from it.
    """
    scores_P = np.zeros(num_passages)
    for order_R in orders:
        scores_P[order_R] += 1 / (FUSION_RANK + 1 + np.arange(len(order_R)))
    return scores_P


def _views(stores: Sequence[ModelStore], excluded: Sequence[str]) -> list[Snapshot]:
    snapshots = [store.snapshot for store in stores]
    return [*map(exclusion_of(excluded, stores).view_of, snapshots)] if excluded else snapshots


def _found(
    parts: Sequence[_Part], request: FindPassagesRequest, question_D: Float32[np.ndarray, " D"] | None
) -> tuple[Passage, ...]:
    parts = [part for part in parts if len(part.passages)]
    if not parts:
        return ()
    words, searched = forms_of(request.question)[:MOST_WORDS], [part.searched(request.only) for part in parts]
    if request.by is PassagesBy.WORDS:
        return first_distinct(_by_words(parts, searched, words, request.k), request.k)
    live = [part.live_P for part in parts]
    live_P = wanted_P = np.concatenate(live)
    if request.only:
        wanted_P = live_P & np.concatenate([each.wanted_P for each in searched])
    scores = dict[PassagesBy, np.ndarray]()
    orders = dict[PassagesBy, np.ndarray]()
    if request.by is PassagesBy.BOTH:
        scores_P = scores[PassagesBy.WORDS] = scores_of(searched, words, np.arange(len(live_P)))
        orders[PassagesBy.WORDS] = _best_first(scores_P, wanted_P & (scores_P > 0))
    assert question_D is not None
    if any(part.vectors_PD is None for part in parts):
        scores_P = cosines(question_D, [part.means.keys_PD for part in parts if part.means], live)
    else:  # vectors of length 1, which were learnt to be compared as they are
        scores_P = np.concatenate([part.vectors_PD @ question_D for part in parts]).astype(np.float64)
    scores[PassagesBy.MEANING] = scores_P
    orders[PassagesBy.MEANING] = _best_first(scores_P, wanted_P)
    if request.by is PassagesBy.BOTH:
        scores_P = scores[PassagesBy.BOTH] = fused(list(orders.values()), len(live_P))
        orders[PassagesBy.BOTH] = _best_first(scores_P, scores_P > 0)
    order_R = orders[request.by]
    return first_distinct(_in_order(parts, order_R, scores[request.by][order_R]), request.k)


def _by_words(
    parts: Sequence[_Part], searched: Sequence[Searched], words: Sequence[Sequence[str]], k: int
) -> Iterator[Found]:
    """Passages by BM25, best first: some, and many more where copies took their places."""
    seen = 0
    for most in (2 * k + 8, EXAMINED + EXAMINED_EACH * k):
        numbers_R, scores_R = best_passages(searched, words, most)
        yield from _in_order(parts, numbers_R[seen:], scores_R[seen:])
        seen = len(numbers_R)
        if seen < most:
            return


def _in_order(
    parts: Sequence[_Part], order_R: Int64[np.ndarray, " R"], scores_R: Float64[np.ndarray, " R"]
) -> Iterator[Found]:
    ends = np.cumsum([len(part.passages) for part in parts])
    for place, score in zip(order_R.tolist(), scores_R.tolist(), strict=True):
        number = int(np.searchsorted(ends, place, side="right"))
        part, within = parts[number], int(place - ends[number]) + len(parts[number].passages)
        yield Found(part.store, part.segment, part.passages.cuts, within, score)


def _best_first(scores_P: Float64[np.ndarray, " P"], wanted_P: Bool[np.ndarray, " P"]) -> Int64[np.ndarray, " R"]:
    """The wanted passages by their scores. Equal ones keep the order of the documents."""
    places_R = np.flatnonzero(wanted_P)
    return places_R[np.argsort(-scores_P[places_R], kind="stable")]
