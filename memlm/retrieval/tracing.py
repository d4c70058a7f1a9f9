"""A text -> its longest passages that stand word for word in datastores (OLMoTrace, arXiv 2504.07096, section 3).

Passages are found by suffix arrays of the datastores' tokens. A trace makes those that are missing. Not as in the
paper, a span may have line ends and full stops within, and ends where words end.
"""

from __future__ import annotations

import math
import unicodedata
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
from jaxtyping import Bool, Float64, Int64

from memlm.api.generation import Neighbor
from memlm.api.tracing import MAX_SPANS, RankBy, Trace, TracedSpan, TraceRequest
from memlm.base.steps import Offload, Steps
from memlm.data.tokenizer import Tokenizer
from memlm.index.store.derived.suffixes import SegmentSuffixes
from memlm.index.store.segment import Segment
from memlm.index.store.snapshot import Snapshot
from memlm.index.suffix_array import DEPTH
from memlm.retrieval.store import SNIPPET_TOKENS, ModelStore, views_as_of

MOST_COUNTED = 1000
MOST_SHOWN = 128  # tokens of a passage, in the text around its place
MOST_CUT = 8  # tokens of a word that an end cuts; what is longer has no spaces between words
POSITIONS_AT_ONCE = 2048


@dataclass(frozen=True, slots=True)
class _Source:
    """A segment with its suffix array, and the documents to look at."""

    store: ModelStore
    segment: Segment
    suffixes: SegmentSuffixes
    wanted: Bool[np.ndarray, " docs"]


@dataclass(frozen=True, slots=True)
class _Span:
    """A passage of a text's tokens, from `begin` to `end`."""

    begin: int
    end: int
    rarity: float

    @property
    def tokens(self) -> int:
        return self.end - self.begin


def trace(stores: Sequence[ModelStore], request: TraceRequest, tokenizer: Tokenizer) -> Steps[Trace]:
    """Traces a text. Suffix arrays that are missing are made first, one piece a step."""
    text_T = yield Offload(partial(tokenizer.encode, request.text))
    while True:
        snapshots = [store.snapshot for store in stores]
        views = yield from views_as_of(request.as_of, snapshots)
        found = yield from _trace(stores, views, request, tokenizer, text_T)
        if [store.snapshot for store in stores] == snapshots:  # no document was deleted meanwhile
            return found


def _trace(
    stores: Sequence[ModelStore],
    views: Sequence[Snapshot],
    request: TraceRequest,
    tokenizer: Tokenizer,
    text_T: Int64[np.ndarray, " T"],
) -> Steps[Trace]:
    sources = list[_Source]()
    for store, view in zip(stores, views, strict=True):
        for segment in view.segments:
            suffixes = yield from store.whole_suffixes_of(segment)
            wanted = yield Offload(partial(_wanted, segment, request))
            if wanted.any():
                sources.append(_Source(store, segment, suffixes, wanted))
    if not sources or len(text_T) < request.min_tokens:
        return Trace(len(text_T), 0)
    lengths_T = np.zeros(len(text_T), np.int64)
    for begin in range(0, len(text_T), POSITIONS_AT_ONCE):
        yield Offload(partial(_measure, sources, text_T, begin, request.min_tokens, lengths_T), is_long=True)
    passages = yield Offload(partial(_longest, sources, text_T, lengths_T), is_long=True)
    borders = _borders(request.text, tokenizer, text_T)
    spans = _chosen(_spans(passages, request.text, borders, sources, text_T, request.min_tokens), request, len(text_T))
    found = yield Offload(partial(_places, sources, spans, text_T, request.max_documents), is_long=True)
    traced, is_traced_T = list[TracedSpan](), np.zeros(len(text_T), bool)
    for span, (count, rows_by_source) in zip(spans, found, strict=True):
        is_traced_T[span.begin : span.end] = True
        begin, end = int(borders[span.begin]), int(borders[span.end])
        begin = end - len(request.text[begin:end].lstrip())
        places = _described(sources, rows_by_source, span.tokens)
        traced.append(TracedSpan(begin, end, span.tokens, request.text[begin:end], span.rarity, count, places))
    return Trace(len(text_T), int(is_traced_T.sum()), tuple(traced))


def _wanted(segment: Segment, request: TraceRequest) -> Bool[np.ndarray, " docs"]:
    wanted = ~segment.deleted_mask
    return wanted & segment.chosen(request.only) if request.only else wanted


def _measure(
    sources: Sequence[_Source],
    text_T: Int64[np.ndarray, " T"],
    begin: int,
    least: int,
    lengths_T: Int64[np.ndarray, " T"],
) -> None:
    """Enters the lengths of the longest passages from some positions on."""
    part = text_T[begin : begin + POSITIONS_AT_ONCE + DEPTH]
    entered = lengths_T[begin : begin + POSITIONS_AT_ONCE]
    for source in sources:
        found = source.suffixes.array.longest(part, source.wanted, least)
        np.maximum(entered, found[: len(entered)], out=entered)


def _longest(
    sources: Sequence[_Source], text_T: Int64[np.ndarray, " T"], lengths_T: Int64[np.ndarray, " T"]
) -> list[tuple[int, int]]:
    """The begins and ends of passages of which none lies in another, with those of `DEPTH` tokens at full length."""
    found = list[tuple[int, int]]()
    last = 0
    for begin in np.flatnonzero(lengths_T).tolist():
        first, end = begin, begin + int(lengths_T[begin])
        if end <= last:
            continue
        if lengths_T[begin] == DEPTH:
            reached = [source.suffixes.array.extended(text_T, begin, source.wanted) for source in sources]
            first, end = max(reached, key=lambda span: (span[1], -span[0]))
        while found and found[-1][0] >= first:
            found.pop()
        found.append((first, end))
        last = end
    return found


def _borders(text: str, tokenizer: Tokenizer, text_T: Int64[np.ndarray, " T"]) -> Int64[np.ndarray, " T+1"]:
    """The character at which each token begins, and the text's end."""
    characters_T = tokenizer.characters[text_T].cumsum() - tokenizer.prepends_space
    return np.concatenate([[0], characters_T]).clip(0, len(text))


def _rarities(sources: Sequence[_Source]) -> Float64[np.ndarray, " V"]:
    """-log of each token's share of all tokens. Infinite for those that stand nowhere, which are in no span."""
    counts = [source.suffixes.token_counts(source.segment.deleted_mask) for source in sources]
    total_V = np.zeros(max(map(len, counts)))
    for each in counts:
        total_V[: len(each)] += each
    with np.errstate(divide="ignore"):
        return math.log(total_V.sum()) - np.log(total_V)


def _spans(
    passages: Sequence[tuple[int, int]],
    text: str,
    borders: Int64[np.ndarray, " T+1"],
    sources: Sequence[_Source],
    text_T: Int64[np.ndarray, " T"],
    least: int,
) -> list[_Span]:
    """The passages without the words and characters that their ends cut, of which none lies in another."""
    cut = list[tuple[int, int]]()
    for begin, end in passages:
        begin = next((each for each in range(begin, begin + MOST_CUT) if not _cuts(text, borders, each)), begin)
        end = next((each for each in range(end, end - MOST_CUT, -1) if not _cuts(text, borders, each)), end)
        if end - begin >= least:
            cut.append((begin, end))
    rarities_V, found = _rarities(sources), list[_Span]()
    for begin, end in sorted(cut, key=lambda span: (span[0], -span[1])):
        if not found or end > found[-1].end:
            found.append(_Span(begin, end, float(rarities_V[text_T[begin:end]].sum())))
    return found


def _cuts(text: str, borders: Int64[np.ndarray, " T+1"], token: int) -> bool:
    """Whether a token begins within a word or a character."""
    at, after = borders[min(token, len(borders) - 1)], borders[min(token + 1, len(borders) - 1)]
    within_word = 0 < at < len(text) and (text[at - 1 : at + 1].isalnum() or unicodedata.category(text[at])[0] == "M")
    return within_word or (at == after and token + 1 < len(borders))


def _chosen(spans: list[_Span], request: TraceRequest, num_tokens: int) -> list[_Span]:
    """The spans that come first, in the order of the text."""
    count = min(MAX_SPANS, max(1, math.ceil(request.spans_per_token * num_tokens)))
    rank = (lambda span: span.rarity) if request.rank_by is RankBy.RARITY else (lambda span: span.tokens)
    return sorted(sorted(spans, key=rank, reverse=True)[:count], key=lambda span: span.begin)


def _places(
    sources: Sequence[_Source], spans: Sequence[_Span], text_T: Int64[np.ndarray, " T"], max_documents: int
) -> list[tuple[int, list[list[int]]]]:
    """For each span, how often it stands in the sources, and in each of them the first row of some documents."""
    begins_Q, lengths_Q = np.array([[span.begin, span.tokens] for span in spans], np.int64).reshape(-1, 2).T
    found = [source.suffixes.array.rows(text_T, begins_Q, lengths_Q, source.wanted) for source in sources]
    places = list[tuple[int, list[list[int]]]]()
    for number in range(len(spans)):
        count, rows_by_source = 0, list[list[int]]()
        for source, rows_of_span in zip(sources, found, strict=True):
            first_rows = dict[int, int]()
            for rows in rows_of_span[number] if count < MOST_COUNTED else ():
                count += len(rows)
                for row, document in zip(rows.tolist(), source.segment.document_at(rows).tolist(), strict=True):
                    first_rows[document] = min(row, first_rows.get(document, row))
                if count >= MOST_COUNTED:
                    break
            room = max_documents - sum(map(len, rows_by_source))
            rows_by_source.append(sorted(first_rows.values())[:room])
        places.append((min(count, MOST_COUNTED), rows_by_source))
    return places


def _described(
    sources: Sequence[_Source], rows_by_source: Sequence[Sequence[int]], num_tokens: int
) -> tuple[Neighbor, ...]:
    places = list[Neighbor]()
    for source, rows in zip(sources, rows_by_source, strict=True):
        ids_K = np.array(rows, np.int64) + source.segment.base_id
        zeros_K = np.zeros(len(rows), np.float32)
        values_K = source.segment.values_N[np.array(rows, np.int64)].astype(np.int64)
        ahead = min(num_tokens, MOST_SHOWN) + SNIPPET_TOKENS
        places += source.store.describe(ids_K, zeros_K, zeros_K - np.inf, values_K, ahead)
    return tuple(places)
