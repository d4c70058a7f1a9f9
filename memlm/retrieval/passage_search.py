"""A question -> the passages of datastores that are likeliest to answer it.

By words, passages are ranked by BM25. By meaning, they are ranked by the vectors of an encoder, or by the mean of the
model's keys. By auto, both scores are added where there is an encoder, and a passage whose vector is not made yet is
found by its words. All figures are over the passages that are live, in all segments and datastores together. So the
result is that of one datastore, built from the live documents.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
from jaxtyping import Bool, Float32, Float64, Int64

from memlm.api.answers import FindPassagesRequest
from memlm.api.passages import Passage, PassagesBy
from memlm.base.phrases import terms_of
from memlm.base.steps import Offload, Steps
from memlm.index.store.derived.passage_vectors import PassageEncoder
from memlm.index.store.derived.passages import SegmentPassages
from memlm.index.store.segment import Segment
from memlm.index.store.snapshot import Snapshot
from memlm.retrieval.retriever import exclusion_of
from memlm.retrieval.store import ModelStore

K1, B = 1.2, 0.75  # of BM25: how soon a repeated word counts no more, and how much a long passage counts less
MOST_WORDS = 500  # different words of a question that are looked up
COSINE_WEIGHT = 50  # in units of BM25


@dataclass(frozen=True, slots=True)
class _Part:
    """The P passages of one segment of a datastore, and which of them are live."""

    store: ModelStore
    segment: Segment
    passages: SegmentPassages
    live_P: Bool[np.ndarray, " P"]
    vectors_FD: Float32[np.ndarray, "F D"] | None = None  # of an encoder, of the first F passages


def find_passages(
    stores: Sequence[ModelStore],
    request: FindPassagesRequest,
    question_D: Float32[np.ndarray, " D"] | None,
    encoder: PassageEncoder | None = None,
) -> Steps[tuple[Passage, ...]]:
    """Finds the k best passages. `question_D` is the mean key of the question, or its vector by the `encoder`, None for
    a search by words, as one by auto is without an encoder.

    The first search of a datastore indexes its passages, some a step: a search that is cancelled leaves them to the
    next one. Vectors are waited for by meaning alone. Raises NotFound for a name in `exclude_documents` that stands for
    no document, and Incompatible for a datastore without keys that is searched by meaning without an encoder.
    """
    if request.by is PassagesBy.WORDS:
        encoder = None
    elif encoder is None and request.by is PassagesBy.MEANING:
        for store in stores:
            store.snapshot.check_searchable(store.name)
    while True:
        snapshots = [store.snapshot for store in stores]
        views: list[Snapshot] = yield Offload(partial(_views, stores, request.exclude_documents))
        parts = list[_Part]()
        for store, view in zip(stores, views, strict=True):
            for segment in view.segments:
                passages = yield from store.whole_passages_of(segment)
                vectors_FD = None
                if encoder is not None:
                    waited = request.by is PassagesBy.MEANING
                    vectors_of = store.whole_vectors_of if waited else store.known_vectors_of
                    vectors_FD = (yield from vectors_of(segment, encoder)).vectors_PD
                live_P = ~segment.deleted_mask[passages.documents_P]
                parts.append(_Part(store, segment, passages, live_P, vectors_FD))
        found: tuple[Passage, ...] = yield Offload(partial(_found, parts, request, question_D), is_long=True)
        if [store.snapshot for store in stores] == snapshots:  # no document was deleted meanwhile
            return found


def bm25(
    counts: Iterable[Int64[np.ndarray, " P"]], num_words_P: Int64[np.ndarray, " P"], live_P: Bool[np.ndarray, " P"]
) -> Float64[np.ndarray, " P"]:
    """Scores passages by how often each word stands in them (BM25, Robertson and Zaragoza 2009, with the logarithm that
    is never negative). Averages and document frequencies are those of the live passages. The counts of one word are
    held at a time.
    """
    scores_P = np.zeros(len(live_P))
    if not (num_live := int(live_P.sum())):
        return scores_P
    norms_P = K1 * (1 - B + B * num_words_P / max(num_words_P[live_P].mean(), 1e-9))
    for counts_P in counts:
        having = int((counts_P[live_P] > 0).sum())
        scores_P += np.log1p((num_live - having + 0.5) / (having + 0.5)) * counts_P * (K1 + 1) / (counts_P + norms_P)
    return scores_P


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


def joined(
    words_P: Float64[np.ndarray, " P"], cosines_P: Float64[np.ndarray, " P"], live_P: Bool[np.ndarray, " P"]
) -> Float64[np.ndarray, " P"]:
    """Adds the scores of passages by words and by meaning. A cosine that is not known (NaN) counts as the mean of those
    of live passages that are.
    """
    is_known_P = np.isfinite(cosines_P)
    known_P = is_known_P & live_P
    mean = float(cosines_P[known_P].mean()) if known_P.any() else 0.0
    return words_P + COSINE_WEIGHT * np.where(is_known_P, cosines_P, mean)


def _views(stores: Sequence[ModelStore], excluded: Sequence[str]) -> list[Snapshot]:
    snapshots = [store.snapshot for store in stores]
    return [*map(exclusion_of(excluded, stores).view_of, snapshots)] if excluded else snapshots


def _found(
    parts: Sequence[_Part], request: FindPassagesRequest, question_D: Float32[np.ndarray, " D"] | None
) -> tuple[Passage, ...]:
    parts = [part for part in parts if len(part.live_P)]
    if not parts:
        return ()
    live_P = np.concatenate([part.live_P for part in parts])
    wanted_P = live_P
    if request.only:
        chosen = [part.segment.chosen(request.only)[part.passages.documents_P] for part in parts]
        wanted_P = live_P & np.concatenate(chosen)
    words_P, cosines_P = np.zeros(len(live_P)), None
    if request.by is not PassagesBy.MEANING:
        words = list(dict.fromkeys(terms_of(request.question)))[:MOST_WORDS]
        counts = (np.concatenate([part.passages.counts_P(word) for part in parts]) for word in words)
        num_words_P = np.concatenate([part.passages.num_words_P for part in parts])
        words_P = bm25(counts, num_words_P, live_P)
    if question_D is not None:
        cosines_P = _cosines(parts, question_D)
    if request.by is PassagesBy.MEANING:
        assert cosines_P is not None
        scores_P = cosines_P
    elif cosines_P is None:
        scores_P, wanted_P = words_P, wanted_P & (words_P > 0)
    else:
        scores_P, wanted_P = joined(words_P, cosines_P, live_P), wanted_P & ((words_P > 0) | np.isfinite(cosines_P))
    best_K = _best(scores_P, wanted_P, request.k)
    return _described(parts, best_K, scores_P[best_K])


def _cosines(parts: Sequence[_Part], question_D: Float32[np.ndarray, " D"]) -> Float64[np.ndarray, " P"]:
    """Compares all passages with the question, NaN for those without a vector."""
    if any(part.vectors_FD is None for part in parts):
        return cosines(question_D, [part.passages.keys_PD for part in parts], [part.live_P for part in parts])
    cosines_P = np.full(sum(len(part.live_P) for part in parts), np.nan)
    first = 0
    for part in parts:  # vectors of length 1, which were learnt to be compared as they are
        assert part.vectors_FD is not None
        cosines_P[first : first + len(part.vectors_FD)] = part.vectors_FD @ question_D
        first += len(part.live_P)
    return cosines_P


def _best(scores_P: Float64[np.ndarray, " P"], wanted_P: Bool[np.ndarray, " P"], k: int) -> Int64[np.ndarray, " K"]:
    """The k best of the wanted passages. Equal ones keep the order of the documents."""
    places_R = np.flatnonzero(wanted_P)
    lows_R = -scores_P[places_R]
    if k < len(places_R):  # sorting all of a million takes a tenth of a second
        near = lows_R <= np.partition(lows_R, k - 1)[k - 1]
        places_R, lows_R = places_R[near], lows_R[near]
    return places_R[np.argsort(lows_R, kind="stable")[:k]]


def _described(
    parts: Sequence[_Part], places_K: Int64[np.ndarray, " K"], scores_K: Float64[np.ndarray, " K"]
) -> tuple[Passage, ...]:
    ends = np.cumsum([len(part.passages) for part in parts])
    numbers_K = np.searchsorted(ends, places_K, side="right")
    within_K = places_K - np.concatenate([[0], ends])[numbers_K]
    chosen = [(parts[number], within) for number, within in zip(numbers_K.tolist(), within_K.tolist(), strict=True)]
    texts = [part.passages.text(within) for part, within in chosen]
    line_ends_K = _line_ends(chosen, [begin for _, begin, _ in texts])
    described = list[Passage]()
    rows = zip(chosen, texts, line_ends_K, scores_K.tolist(), strict=True)
    for (part, within), (text, begin, end), line_ends, score in rows:
        row = int(part.passages.documents_P[within])
        document, first = part.segment.documents.at(row), int(part.segment.starts[row])
        first_line = 1 + line_ends + text[: len(text) - len(text.lstrip())].count("\n")
        text = text.strip()
        described.append(
            Passage(
                store=part.store.name,
                document_id=document.id,
                title=document.title,
                token_offset=begin - first,
                num_tokens=end - begin,
                text=text,
                score=score,
                metadata=document.metadata,
                first_line=first_line,
                last_line=first_line + text.count("\n"),
            )
        )
    return tuple(described)


def _line_ends(chosen: Sequence[tuple[_Part, int]], begins: Sequence[int]) -> list[int]:
    """Counts the line ends before each passage in its document. Passages of a document share one reading of it."""
    counts, documents = [0] * len(chosen), defaultdict[tuple[int, int], list[tuple[int, int]]](list)
    for place, ((part, within), begin) in enumerate(zip(chosen, begins, strict=True)):
        documents[id(part), int(part.passages.documents_P[within])].append((begin, place))
    for (_, row), places in documents.items():
        part = chosen[places[0][1]][0]
        read, count = int(part.segment.starts[row]), 0
        for begin, place in sorted(places):
            count += part.store.line_ends(part.segment.values_N[read:begin])
            read, counts[place] = begin, count
    return counts
