"""A question -> the passages of datastores that are likeliest to answer it.

By words, passages are ranked by BM25, and by meaning by the vectors of an encoder. By auto, both scores are added where
there is an encoder, and a passage whose vector is not made yet is found by its words. All figures are over the passages
that are live, in all segments and datastores together. So the result is that of one datastore, built from the live
documents.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TypeAlias

import numpy as np
from jaxtyping import Bool, Float32, Float64, Int64

from memlm.api.answers import FindPassagesRequest
from memlm.api.passages import Passage, PassagesBy
from memlm.base.phrases import forms_of
from memlm.base.steps import Offload, Steps
from memlm.errors import Incompatible
from memlm.index.store.derived.bm25 import Query, Searched
from memlm.index.store.derived.passage_vectors import PassageEncoder
from memlm.index.store.derived.passages import SegmentPassages
from memlm.index.store.filters import DocumentFilter
from memlm.index.store.segment import Segment
from memlm.index.store.snapshot import Snapshot
from memlm.model.files.catalog import NEEDS_ENCODER
from memlm.retrieval.found_passages import Found, first_distinct
from memlm.retrieval.retriever import exclusion_of
from memlm.retrieval.sentences import MOST_WORDS, AskedWords
from memlm.retrieval.store import ModelStore

SPARE = 8  # passages that are found beside those that are wanted, since some have nearly the same text
NEARLY_CLOSE, MANY_WORDS = 0.08, 0.28  # below the cosine of a close passage; and BM25, as a share of its most
MANY_WORDS_BEHIND = 0.2  # the same behind earlier questions, whose words count too
EARLIER = 0.3  # of the weight of a question, for those before it: benchmarks/log/2026-11-28-query-of-longer-chats.md
COSINE_WEIGHT = 1.0  # beside BM25 as a share of its most: benchmarks/log/2026-11-28-passages-by-meaning.md

# Takes how many of the best passages are wanted, and returns their numbers and scores, best first.
BestOf: TypeAlias = Callable[[int], tuple[Int64[np.ndarray, " K"], Float64[np.ndarray, " K"]]]


@dataclass(frozen=True, slots=True)
class _Part:
    """The P passages of one segment of a datastore, with the vectors of an encoder if it searches by these."""

    store: ModelStore
    segment: Segment
    passages: SegmentPassages
    vectors_FD: Float32[np.ndarray, "F D"] | None = None  # of the first F passages

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
    encoder: PassageEncoder | None = None,
    *,
    before: str = "",
    close: bool = False,
) -> Steps[tuple[Passage, ...]]:
    """Finds the k best passages. A search by auto is one by words without an `encoder`. `before` is what was asked
    before, to which the question may refer: it counts less. With `close`, passages about something else are left out,
    where the encoder can tell.

    The first search of a datastore indexes its passages, some a step: a search that is cancelled leaves them to the
    next one. Vectors are waited for by meaning alone. Raises NotFound for a name in `exclude_documents` that stands for
    no document, and Incompatible for a search by meaning without an encoder.
    """
    if encoder is None and request.by is PassagesBy.MEANING:
        raise Incompatible(NEEDS_ENCODER)
    question_D: Float32[np.ndarray, " D"] | None = None
    least: float | None = None
    if request.by is PassagesBy.WORDS:
        encoder = None
    elif encoder is not None:
        least = encoder.close_cosine if close else None
        texts = [text for text in (request.question.strip(), before) if text]
        vectors_TD: np.ndarray = yield Offload(partial(encoder.vectors, texts))
        question_D = vectors_TD[0] + EARLIER * vectors_TD[1:].sum(axis=0)
    while True:
        snapshots = [store.snapshot for store in stores]
        views: list[Snapshot] = yield Offload(partial(_views, stores, request), is_long=request.as_of is not None)
        parts = list[_Part]()
        for store, view in zip(stores, views, strict=True):
            for segment in view.segments:
                passages = yield from store.whole_passages_of(segment)
                vectors_FD = None
                if encoder is not None:
                    waits = request.by is PassagesBy.MEANING
                    vectors_of = store.whole_vectors_of if waits else store.known_vectors_of
                    vectors_FD = (yield from vectors_of(segment, encoder)).vectors_PD
                parts.append(_Part(store, segment, passages, vectors_FD))
        find = partial(_found, parts, request, before, question_D, least)
        found: tuple[Passage, ...] = yield Offload(find, is_long=True)
        if [store.snapshot for store in stores] == snapshots:  # no document was deleted meanwhile
            return found


def _views(stores: Sequence[ModelStore], request: FindPassagesRequest) -> list[Snapshot]:
    snapshots = [store.snapshot for store in stores]
    if not request.exclude_documents and request.as_of is None:
        return snapshots
    return [*map(exclusion_of(request.exclude_documents, stores, request.as_of).view_of, snapshots)]


def _found(
    parts: Sequence[_Part],
    request: FindPassagesRequest,
    before: str,
    question_D: Float32[np.ndarray, " D"] | None,
    least: float | None,
) -> tuple[Passage, ...]:
    parts = [part for part in parts if len(part.passages)]
    if not parts:
        return ()
    words = forms_of(f"{request.question} {before}")[:MOST_WORDS]
    searched = [part.searched(request.only) for part in parts]
    num_own = len(forms_of(request.question)) if before else len(words)
    query = Query(searched, words, [1.0 if number < num_own else EARLIER for number in range(len(words))])
    asked = AskedWords(words[:num_own], query.weights_W[:num_own])  # alone they tell its sentence better
    has_vectors = any(part.vectors_FD is not None and len(part.vectors_FD) for part in parts)
    if request.by is PassagesBy.WORDS or (request.by is PassagesBy.AUTO and not has_vectors):
        return first_distinct(_in_order(parts, query.best, request.k), request.k, asked)
    assert question_D is not None
    live_P = wanted_P = np.concatenate([part.live_P for part in parts])
    if request.only:
        wanted_P = live_P & np.concatenate([each.wanted_P for each in searched])
    cosines_P = _cosines(parts, question_D)
    best: BestOf
    if request.by is PassagesBy.AUTO:
        best = partial(_best_by_both, query, cosines_P, live_P, wanted_P)
    else:
        best = partial(_best_by_score, cosines_P, wanted_P)
    if least is not None:
        best = partial(_close_ones, best, query, cosines_P, least, MANY_WORDS_BEHIND if before else MANY_WORDS)
    return first_distinct(_in_order(parts, best, request.k), request.k, asked)


def _in_order(parts: Sequence[_Part], best: BestOf, k: int) -> Iterator[Found]:
    """Yields all passages that a search finds, best first. It finds about k, and more where these are not enough."""
    ends, done, wanted = np.cumsum([len(part.passages) for part in parts]), 0, 2 * k + SPARE
    while True:
        places_K, scores_K = best(wanted)
        for place, score in zip(places_K[done:].tolist(), scores_K[done:].tolist(), strict=True):
            number = int(np.searchsorted(ends, place, side="right"))
            part, within = parts[number], place - int(ends[number]) + len(parts[number].passages)
            yield Found(part.store, part.segment, part.passages.cuts, within, score)
        if len(places_K) < wanted:
            return
        done, wanted = wanted, 4 * wanted


def _best_by_both(
    query: Query,
    cosines_P: Float64[np.ndarray, " P"],
    live_P: Bool[np.ndarray, " P"],
    wanted_P: Bool[np.ndarray, " P"],
    k: int,
) -> tuple[Int64[np.ndarray, " K"], Float64[np.ndarray, " K"]]:
    """The k passages with the largest sums of BM25, as a share of its most, and COSINE_WEIGHT x cosine, and these sums.
    A cosine that is not known (NaN) counts as the mean of those of live passages that are.
    """
    is_known_P = np.isfinite(cosines_P)
    known = cosines_P[is_known_P & live_P]
    by_meaning_P = COSINE_WEIGHT * np.where(is_known_P, cosines_P, known.mean() if len(known) else 0.0)
    most = max(query.most, 1e-9)
    first_K, scores_K = query.best(k)

    def sums(places_C: Int64[np.ndarray, " C"]) -> Float64[np.ndarray, " C"]:
        return query.scores(places_C) / most + by_meaning_P[places_C]

    # Words add at most as much as to the passage that they rank first. With that, most cannot be among the best.
    some = np.union1d(first_K, _best(by_meaning_P, wanted_P & is_known_P, k))
    floor = np.partition(sums(some), -k)[-k] if len(some) >= k else -np.inf
    bound_P = by_meaning_P + scores_K.max(initial=0.0) / most + 1e-9
    places_C = np.flatnonzero(wanted_P & (bound_P >= floor))
    sums_C = sums(places_C)
    is_found_C = is_known_P[places_C] | (sums_C > by_meaning_P[places_C])
    best = _best(sums_C, is_found_C, k)
    return places_C[best], sums_C[best]


def _close_ones(
    best: BestOf, query: Query, cosines_P: Float64[np.ndarray, " P"], least: float, many_words: float, k: int
) -> tuple[Int64[np.ndarray, " K"], Float64[np.ndarray, " K"]]:
    """Of the k best passages those that are about the question: with a cosine of `least`, or nearly and with many of
    its words, or without a vector.
    """
    places_K, scores_K = best(k)
    cosines_K, shares_K = cosines_P[places_K], query.scores(places_K) / max(query.most, 1e-9)
    is_near_K = (cosines_K >= least - NEARLY_CLOSE) & (shares_K >= many_words)
    kept_K = is_near_K | (cosines_K >= least) | np.isnan(cosines_K)
    return places_K[kept_K], scores_K[kept_K]


def _cosines(parts: Sequence[_Part], question_D: Float32[np.ndarray, " D"]) -> Float64[np.ndarray, " P"]:
    """Compares all passages with the question by their vectors, NaN for those without one. They have the length 1, and
    were learnt to be compared as they are.
    """
    cosines_P, first = np.full(sum(len(part.passages) for part in parts), np.nan), 0
    for part in parts:
        assert part.vectors_FD is not None
        # Of a product with a matrix, the last bit depends on where a row stands, and so on rows that were deleted.
        cosines_P[first : first + len(part.vectors_FD)] = np.einsum("pd,d->p", part.vectors_FD, question_D)
        first += len(part.passages)
    return cosines_P


def _best_by_score(
    scores_P: Float64[np.ndarray, " P"], wanted_P: Bool[np.ndarray, " P"], k: int
) -> tuple[Int64[np.ndarray, " K"], Float64[np.ndarray, " K"]]:
    best_K = _best(scores_P, wanted_P, k)
    return best_K, scores_P[best_K]


def _best(scores_P: Float64[np.ndarray, " P"], wanted_P: Bool[np.ndarray, " P"], k: int) -> Int64[np.ndarray, " K"]:
    """The k best of the wanted passages. Equal ones keep the order of the documents."""
    places_R = np.flatnonzero(wanted_P)
    lows_R = -scores_P[places_R]
    if k < len(places_R):  # sorting all of a million takes a tenth of a second
        near_R = lows_R <= np.partition(lows_R, k - 1)[k - 1]
        places_R, lows_R = places_R[near_R], lows_R[near_R]
    return places_R[np.argsort(lows_R, kind="stable")[:k]]
