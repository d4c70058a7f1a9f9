"""Words -> the passages that BM25 ranks first (Robertson and Zaragoza 2009, with the logarithm that is never negative).

A word has forms, the terms by which passages may have it: a passage has the word where it has any of them. Averages and
document frequencies are those of the live passages. `bm25` scores all passages. `Query.best` equals it to the last
bit, and equal passages keep their order.
"""

from __future__ import annotations

import math
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import pairwise

import numpy as np
from jaxtyping import Bool, Float, Float32, Float64, Int64, UInt, UInt64

from memlm.index.store.derived.postings import K1, B, Block, Postings, TermRow, hash_of, norms_of

SLACK = 1 - 1e-4  # of a comparison with a sum that was added up in single precision
QUICKER = 4  # times as many entries of a word are added to sums as are looked up one by one, in the same time
VIEW_PASSAGES = 1 << 19  # whose sums stay in the cache of a core


@dataclass(frozen=True, slots=True)
class Searched:
    """The passages of one file of postings: which of them are live, and which of these are wanted. None stands for all
    passages, or all live ones. What is not wanted counts in averages and frequencies.
    """

    postings: Postings
    live_P: Bool[np.ndarray, " P"] | None = None
    wanted_P: Bool[np.ndarray, " P"] | None = None

    def is_live_P(self) -> Bool[np.ndarray, " P"]:
        """Which passages are live."""
        return np.broadcast_to(np.True_, len(self.postings)) if self.live_P is None else self.live_P

    def is_wanted_P(self) -> Bool[np.ndarray, " P"]:
        """Which passages are wanted, if they are live."""
        return np.broadcast_to(np.True_, len(self.postings)) if self.wanted_P is None else self.wanted_P


def bm25(
    counts: Iterable[Int64[np.ndarray, " P"]], lengths_P: Int64[np.ndarray, " P"], live_P: Bool[np.ndarray, " P"]
) -> Float64[np.ndarray, " P"]:
    """Scores passages by how often each word stands in them, one word at a time."""
    scores_P = np.zeros(len(live_P))
    if not (num_live := int(live_P.sum())):
        return scores_P
    norms_P = K1 * (1 - B + B * lengths_P / max(lengths_P[live_P].mean(), 1e-9))
    for counts_P in counts:
        scores_P += _parts(_weight(num_live, int((counts_P[live_P] > 0).sum())), counts_P, norms_P)
    return scores_P


class Query:
    """A question's words in the passages of some parts, and the weight of each word. A passage's number counts the
    passages of the parts one after another.
    """

    def __init__(
        self, parts: Sequence[Searched], words: Sequence[Sequence[str]], shares_W: Sequence[float] | None = None
    ) -> None:
        """Looks each word up in each block. Each counts with a share of its weight, by default with all of it.
        Raises Corrupt for damaged postings.
        """
        self._views, self.weights_W = _weighed(parts, words)
        if shares_W is not None:
            self.weights_W = [share * weight for share, weight in zip(shares_W, self.weights_W, strict=True)]

    @property
    def most(self) -> float:
        """What the score of a passage is less than, however often it has the words."""
        return sum(self.weights_W) * (K1 + 1)

    def best(self, k: int) -> tuple[Int64[np.ndarray, " K"], Float64[np.ndarray, " K"]]:
        """The at most k wanted live passages with the highest scores above 0, best first, and their scores.

        Cost: the postings of the rarer words (MaxScore). Raises Corrupt for damaged postings.
        """
        best = _Best(k)
        for view in sorted(self._views, key=lambda view: -view.bound(self.weights_W)):
            if view.bound(self.weights_W) < best.floor:
                break
            view.add_to(best, self.weights_W)
        numbers_C = np.sort(best.numbers)
        scores_C = self._scores(numbers_C)
        order_K = np.argsort(-scores_C, kind="stable")[:k]
        return numbers_C[order_K], scores_C[order_K]

    def scores(self, numbers_C: Int64[np.ndarray, " C"]) -> Float64[np.ndarray, " C"]:
        """The score of each of some passages."""
        order_C, scores_C = np.argsort(numbers_C), np.empty(len(numbers_C))
        scores_C[order_C] = self._scores(numbers_C[order_C])
        return scores_C

    def _scores(self, numbers_C: Int64[np.ndarray, " C"]) -> Float64[np.ndarray, " C"]:
        """The scores of passages whose numbers are in order."""
        ends = np.searchsorted(numbers_C, [view.first + view.num_passages for view in self._views]).tolist()
        spans = zip(self._views, pairwise([0, *ends]), strict=True)
        parts = [
            view.scores(numbers_C[begin:end] - view.first, self.weights_W)
            for view, (begin, end) in spans
            if begin < end
        ]
        return np.concatenate([np.zeros(0), *parts])


class _Term:
    """The postings of a term in the blocks of a view: the places where it stands, and how often. Without places, there
    is a count for each passage of the view.
    """

    def __init__(self, num_passages: int) -> None:
        self._num_passages, self._found = num_passages, list[tuple[int, Block, TermRow]]()
        self.frequency, self.bound = 0, 0.0

    def add(self, begin: int, block: Block, row: TermRow, scale: float) -> None:
        """Adds those of a block that begins at a place of the view. They add `scale` times as much to a score, at most,
        as the block expects.
        """
        self._found.append((begin, block, row))
        self.frequency, self.bound = self.frequency + row.frequency, max(self.bound, scale * row.bound)

    @cached_property
    def postings(self) -> tuple[Int64[np.ndarray, " F"] | None, UInt[np.ndarray, " F"]]:
        """The places in their order, and the counts."""
        found = [(begin, *block.postings(row)) for begin, block, row in self._found]
        places = [np.add(each, begin, dtype=np.int64) for begin, each, _ in found if each is not None]
        counts = [each for _, _, each in found]
        if len(places) == len(found):
            return np.concatenate(places), np.concatenate(counts)
        if len(counts) == 1 and len(counts[0]) == self._num_passages:
            return None, counts[0]
        counts_P = np.zeros(self._num_passages, np.result_type(*counts))
        for begin, some, each in found:
            counts_P[slice(begin, begin + len(each)) if some is None else begin + some.astype(np.int64)] = each
        return None, counts_P

    def counts_at(self, places_C: Int64[np.ndarray, " C"]) -> np.ndarray:
        """How often the term stands in each of some passages, which are in their order."""
        bounds = [(begin, begin + block.num_passages) for begin, block, _ in self._found]
        spans = np.searchsorted(places_C, bounds).tolist()
        counts_C = np.zeros(len(places_C), np.uint32)
        for (begin, block, row), (first, end) in zip(self._found, spans, strict=True):
            if first < end:
                counts_C[first:end] = block.counts_at(row, places_C[first:end] - begin)
        return counts_C


class _Word:
    """The postings of a word in the blocks of a view, of all its forms there."""

    def __init__(self, forms: list[_Term]) -> None:
        self._forms = forms
        # Of several forms, the counts add up, and the bound of the sum is at most the sum of the bounds.
        self.bound = min(1.0, sum(form.bound for form in forms)) * (K1 + 1)
        self.entries = sum(form.frequency for form in forms)

    def frequency(self, live_P: Bool[np.ndarray, " P"] | None) -> int:
        """How many live passages have the word."""
        if live_P is None and len(self._forms) == 1:
            return self._forms[0].frequency
        places, counts = self.postings
        if places is None:
            return int(np.count_nonzero(counts if live_P is None else (counts != 0) & live_P))
        return len(places) if live_P is None else int(np.count_nonzero(live_P[places]))

    @cached_property
    def postings(self) -> tuple[Int64[np.ndarray, " F"] | None, np.ndarray]:
        """The places with the word in their order, and how often it stands there. None: a count for each passage."""
        if len(self._forms) == 1:
            return self._forms[0].postings
        found = [form.postings for form in self._forms]
        if any(places is None for places, _ in found):
            num_passages = next(len(counts) for places, counts in found if places is None)
            counts_P = np.zeros(num_passages, np.int64)
            for places, counts in found:
                counts_P[slice(None) if places is None else places] += counts
            return None, counts_P
        places, counts = (np.concatenate(each) for each in zip(*found, strict=True))
        order = places.argsort(kind="stable")  # merges runs that are in order
        places, counts = places[order], counts[order]
        firsts = np.flatnonzero(np.diff(places, prepend=-1))
        if len(firsts) < len(places):
            places, counts = places[firsts], np.add.reduceat(counts, firsts, dtype=np.int64)
        return places, counts

    def counts_at(self, places_C: Int64[np.ndarray, " C"]) -> np.ndarray:
        """How often the word stands in each of some passages, which are in their order."""
        return sum((form.counts_at(places_C) for form in self._forms[1:]), self._forms[0].counts_at(places_C))


class _View:
    """Some blocks that follow each other, with the words of a question that they have. `first` is the number of their
    first passage.
    """

    def __init__(self, first: int) -> None:
        self.first, self.num_passages = first, 0
        self.words, self._mean = dict[int, _Word](), 1.0
        self._blocks = list[tuple[Searched, Block]]()

    def add(self, part: Searched, block: Block) -> None:
        """Adds the next block."""
        self._blocks.append((part, block))
        self.num_passages += block.num_passages

    def look_up(self, hashes_F: UInt64[np.ndarray, " F"], words_F: list[int], mean: float) -> None:
        """Finds the words: the form of each hash belongs to a word. Passages have `mean` terms on average."""
        self._mean, begin = mean, 0
        terms = defaultdict[int, _Term](partial(_Term, self.num_passages))
        for _, block in self._blocks:
            scale = max(1.0, mean / block.mean)  # a longer mean makes a passage count more, at most by so much
            for row in block.look_up(hashes_F):
                terms[row.term].add(begin, block, row, scale)
            begin += block.num_passages
        forms = defaultdict[int, list[_Term]](list)
        for number, term in terms.items():
            forms[words_F[number]].append(term)
        self.words = {word: _Word(each) for word, each in forms.items()}

    def frequencies(self) -> Iterator[tuple[int, int]]:
        """Each word, and how many live passages have it."""
        is_whole = all(part.live_P is None for part, _ in self._blocks)
        live_P = None if is_whole else self._of_passages(Searched.is_live_P)
        return ((number, word.frequency(live_P)) for number, word in self.words.items())

    def bound(self, weights_W: list[float]) -> float:
        """The highest score that its passages can have."""
        return sum(weights_W[number] * word.bound for number, word in self.words.items())

    def scores(self, places_C: Int64[np.ndarray, " C"], weights_W: list[float]) -> Float64[np.ndarray, " C"]:
        """The scores of some passages, which are in their order. Their parts are added up in the order of the words, as
        `bm25` does.
        """
        lengths_C = self._of_passages(lambda part: part.postings.lengths_P)[places_C]
        scores_C, norms_C = np.zeros(len(places_C)), norms_of(lengths_C, self._mean)
        for number in sorted(self.words):
            scores_C += _parts(weights_W[number], self.words[number].counts_at(places_C), norms_C)
        return scores_C

    def add_to(self, best: _Best, weights_W: list[float]) -> None:
        """Adds those passages to the best ones that may belong there.

        Word by word, the weightiest first, the parts of a passage are added up. As soon as the words that are left
        cannot make a passage one of the best, only those count that have something already.
        """
        bounded = ((weights_W[number] * word.bound, number) for number, word in self.words.items())
        bounds = deque(sorted(bounded, reverse=True))
        rest, wanted_P = self.bound(weights_W), self._wanted_P
        sums_P = np.zeros(self.num_passages, np.float32)
        while bounds and rest >= best.floor:
            bound, number = bounds.popleft()
            rest -= bound
            rows = self._add_word(sums_P, number, weights_W)
            if not best.is_full:
                best.raise_floor(sums_P[rows] if wanted_P is None else sums_P[rows][wanted_P[rows]])
        places_C = np.flatnonzero(sums_P >= max(best.floor - rest, 1e-30))
        if wanted_P is not None:
            places_C = places_C[wanted_P[places_C]]
        for bound, number in bounds:
            rest -= bound
            if self.words[number].entries < QUICKER * len(places_C):
                self._add_word(sums_P, number, weights_W)
            else:
                counts_C = self.words[number].counts_at(places_C)
                sums_P[places_C] += _parts(weights_W[number], counts_C, self._norms_P[places_C])
            places_C = places_C[sums_P[places_C] >= best.floor - rest]
            if not len(places_C):
                return
        best.add(self.first + places_C, sums_P[places_C])

    def _add_word(
        self, sums_P: Float32[np.ndarray, " P"], number: int, weights_W: list[float]
    ) -> slice | Int64[np.ndarray, " F"]:
        """Adds the parts of a word to the sums of all passages that have it. Returns where they are."""
        places, counts = self.words[number].postings
        if places is None:
            sums_P += _parts(weights_W[number], counts, self._norms_P)
            return slice(None)
        np.add.at(sums_P, places, _parts(weights_W[number], counts, self._norms_P.take(places)))  # quicker than +=
        return places

    @cached_property
    def _norms_P(self) -> Float32[np.ndarray, " P"]:
        return self._of_passages(lambda part: part.postings.norms_P(self._mean))

    @property
    def _wanted_P(self) -> Bool[np.ndarray, " P"] | None:
        if all(part.live_P is None and part.wanted_P is None for part, _ in self._blocks):
            return None
        return self._of_passages(Searched.is_live_P) & self._of_passages(Searched.is_wanted_P)

    def _of_passages(self, of: Callable[[Searched], np.ndarray]) -> np.ndarray:
        """The words of the parts in the passages of the view."""
        (part, first), (last_part, last) = self._blocks[0], self._blocks[-1]
        if part is last_part:
            return of(part)[first.first : last.first + last.num_passages]
        return np.concatenate([of(part)[block.first :][: block.num_passages] for part, block in self._blocks])


class _Best:
    """The passages so far that may be among the k best, with sums that are nearly their scores. A passage with a score
    below `floor` is none of the best.
    """

    def __init__(self, k: int) -> None:
        self._k, self.floor = k, 0.0
        self.numbers, self._sums = np.zeros(0, np.int64), np.zeros(0, np.float32)

    @property
    def is_full(self) -> bool:
        """Whether there are k."""
        return len(self.numbers) >= self._k

    def add(self, numbers: Int64[np.ndarray, " C"], sums: Float32[np.ndarray, " C"]) -> None:
        """Adds passages with their sums."""
        numbers, sums = np.concatenate([self.numbers, numbers]), np.concatenate([self._sums, sums])
        self.raise_floor(sums)
        self.numbers, self._sums = numbers[sums >= self.floor], sums[sums >= self.floor]

    def raise_floor(self, sums: Float32[np.ndarray, " C"]) -> None:
        """Notes that there are different passages with these sums or higher ones."""
        if len(sums) >= self._k:
            self.floor = max(self.floor, float(np.partition(sums, -self._k)[-self._k]) * SLACK)


def _weighed(parts: Sequence[Searched], words: Sequence[Sequence[str]]) -> tuple[list[_View], list[float]]:
    """All passages of the parts, in views, and the weight of each word."""
    views, first = list[_View](), 0
    for part in parts:
        for block in part.postings.blocks:
            if not views or views[-1].num_passages + block.num_passages > VIEW_PASSAGES:
                views.append(_View(first))
            views[-1].add(part, block)
            first += block.num_passages
    sizes = [part.postings.size(part.live_P) for part in parts]
    num_live, num_terms = (sum(each) for each in zip((0, 0), *sizes, strict=True))
    words_F = [number for number, forms in enumerate(words) for _ in forms]
    hashes_F = np.array([hash_of(form) for forms in words for form in forms], np.uint64)
    frequencies_W = [0] * len(words)
    for view in views:
        view.look_up(hashes_F, words_F, max(num_terms / max(num_live, 1), 1e-9))
        for number, frequency in view.frequencies():
            frequencies_W[number] += frequency
    return views, [_weight(num_live, frequency) for frequency in frequencies_W]


def _weight(num_live: int, having: int) -> float:
    """How much a word counts that `having` of the live passages have."""
    if not num_live:
        return 0.0
    return math.log1p((num_live - having + 0.5) / (having + 0.5))


def _parts(weight: float, counts_P: np.ndarray, norms_P: Float[np.ndarray, " P"]) -> Float[np.ndarray, " P"]:
    """The parts of a word in the scores of passages."""
    counts_P = counts_P.astype(norms_P.dtype)
    parts_P: np.ndarray = weight * counts_P * (K1 + 1) / (counts_P + norms_P)
    return parts_P
