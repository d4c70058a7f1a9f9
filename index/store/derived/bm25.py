"""Words -> the passages that BM25 ranks first (Robertson and Zaragoza 2009, with the logarithm that is never negative).

A word has forms, the terms by which passages may have it: a passage has the word where it has any of them. Averages and
document frequencies are those of the live passages. `bm25` scores all passages. `best_passages` equals it to the last
bit, and equal passages keep their order.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from jaxtyping import Bool, Float64, Int64

from memlm.index.store.derived.postings import K1, B, Block, Postings, TermPostings, hash_of

SLACK = 1 - 1e-9  # of a comparison with a sum that was added up in another order


@dataclass(frozen=True, slots=True)
class Searched:
    """The passages of one file of postings: which of them are live, and which of these are wanted. None stands for all
    passages, or all live ones. What is not wanted counts in averages and frequencies.
    """

    postings: Postings
    live_P: Bool[np.ndarray, " P"] | None = None
    wanted_P: Bool[np.ndarray, " P"] | None = None


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


def best_passages(
    parts: Sequence[Searched], words: Sequence[Sequence[str]], k: int
) -> tuple[Int64[np.ndarray, " K"], Float64[np.ndarray, " K"]]:
    """The at most k wanted live passages with the highest scores above 0, best first, and their scores. A passage's
    number counts the passages of the parts one after another.

    Cost: a look at each word's table in each block, and the postings of the rarer words. Raises Corrupt for damaged
    postings.
    """
    views, weights_W = _views(parts, words)
    best = _Best(k)
    for view in sorted(views, key=lambda view: -view.bound(weights_W)):
        if view.bound(weights_W) < best.floor:
            break
        with view.block.read():
            view.add_to(best, weights_W)
    return best.numbers, best.scores


def scores_of(
    parts: Sequence[Searched], words: Sequence[Sequence[str]], numbers_C: Int64[np.ndarray, " C"]
) -> Float64[np.ndarray, " C"]:
    """The score of each of some passages, by their numbers as of `best_passages`."""
    views, weights_W = _views(parts, words)
    scores_C = np.zeros(len(numbers_C))
    for view in views:
        within_C = (numbers_C >= view.first) & (numbers_C < view.first + view.block.num_passages)
        with view.block.read():
            scores_C[within_C] = view.scores(numbers_C[within_C] - view.first, weights_W)
    return scores_C


def most_of(parts: Sequence[Searched], words: Sequence[Sequence[str]]) -> float:
    """What the score of a passage is less than, however often it has the words."""
    return sum(_views(parts, words)[1]) * (K1 + 1)


class _Word:
    """The postings of a word in a block, of all its forms there."""

    def __init__(self, forms: list[TermPostings], scale: float) -> None:
        self._forms = forms
        # A longer mean makes a passage count more, at most by as much as the mean is longer. Of several forms, the
        # counts add up, and the bound of the sum is at most the sum of the bounds.
        self.bound = min(1.0, scale * sum(form.bound for form in forms)) * (K1 + 1)

    def frequency(self, live_P: Bool[np.ndarray, " P"] | None) -> int:
        """How many live passages have the word."""
        if live_P is None and len(self._forms) == 1:
            return self._forms[0].frequency
        places, counts = self.postings
        if live_P is None:
            return int(np.count_nonzero(counts))
        return int(np.count_nonzero((counts != 0) & live_P if places is None else live_P[places]))

    @cached_property
    def postings(self) -> tuple[np.ndarray | None, np.ndarray]:
        """The places with the word, and how often it stands there. None: a count for each passage."""
        if len(self._forms) == 1:
            return self._forms[0][:2]
        counts_P = sum((form.counts_P for form in self._forms[1:]), self._forms[0].counts_P)
        places = np.flatnonzero(counts_P)
        return places, counts_P[places]

    def counts_at(self, places_C: Int64[np.ndarray, " C"]) -> Int64[np.ndarray, " C"]:
        """How often the word stands in each of some passages."""
        return sum((form.counts_at(places_C) for form in self._forms[1:]), self._forms[0].counts_at(places_C))


class _View:
    """A block, with the words of a question that it has. `first` is the number of its first passage."""

    def __init__(self, block: Block, first: int, live_P: np.ndarray | None, wanted_P: np.ndarray | None) -> None:
        self.block, self.first = block, first
        self.live_P, self._wanted_P = live_P, wanted_P
        self.words, self.mean = dict[int, _Word](), 1.0

    def look_up(self, hashes_F: np.ndarray, words_F: list[int], mean: float) -> None:
        """Finds the words: the form of each hash belongs to a word."""
        self.mean = mean
        forms = dict[int, list[TermPostings]]()
        for word, row in zip(words_F, self.block.rows(hashes_F).tolist(), strict=True):
            if row >= 0:
                forms.setdefault(word, []).append(self.block.postings(row))
        scale = max(1.0, mean / self.block.mean)
        self.words = {word: _Word(each, scale) for word, each in forms.items()}

    def bound(self, weights_W: list[float]) -> float:
        """The highest score that its passages can have."""
        return sum(weights_W[number] * word.bound for number, word in self.words.items())

    def scores(self, places_C: Int64[np.ndarray, " C"], weights_W: list[float]) -> Float64[np.ndarray, " C"]:
        """The scores of some passages: their parts are added up in the order of the words, as `bm25` does."""
        scores_C, norms_C = np.zeros(len(places_C)), self.block.norms_P(self.mean)[places_C]
        for number in sorted(self.words):
            scores_C += _parts(weights_W[number], self.words[number].counts_at(places_C), norms_C)
        return scores_C

    def add_to(self, best: _Best, weights_W: list[float]) -> None:
        """Adds those passages to the best ones that belong there."""
        bounds = sorted((weights_W[number] * word.bound, number) for number, word in self.words.items())
        rest, optional = 0.0, list[tuple[float, int]]()
        while bounds and rest + bounds[0][0] < best.floor:  # a passage with these words alone is not among the best
            optional.append(bounds.pop(0))
            rest += optional[-1][0]
        sums_P = self._sums(weights_W, [number for _, number in bounds])
        for mask_P in (self.live_P, self._wanted_P):
            if mask_P is not None:
                sums_P *= mask_P
        places_C = np.flatnonzero(sums_P >= max(best.floor - rest, 1e-300))
        sums_C, norms_P = sums_P[places_C], self.block.norms_P(self.mean)
        for bound, number in reversed(optional):
            rest -= bound
            sums_C += _parts(weights_W[number], self.words[number].counts_at(places_C), norms_P[places_C])
            kept = sums_C + rest >= best.floor
            places_C, sums_C = places_C[kept], sums_C[kept]
        if len(places_C) > best.k:
            least = np.partition(sums_C, -best.k)[-best.k] * SLACK
            places_C = places_C[sums_C >= least]
        best.add(self.first + places_C, self.scores(places_C, weights_W))

    def _sums(self, weights_W: list[float], numbers: list[int]) -> Float64[np.ndarray, " P"]:
        """The parts of some words in the score of each passage, added up in any order."""
        sums_P, norms_P = np.zeros(self.block.num_passages), self.block.norms_P(self.mean)
        for number in numbers:
            places, counts = self.words[number].postings
            if places is None:
                sums_P += _parts(weights_W[number], counts, norms_P)
            else:
                sums_P[places] += _parts(weights_W[number], counts, norms_P[places])
        return sums_P


class _Best:
    """The k best passages so far, best first. A passage with a score below `floor` is none of them."""

    def __init__(self, k: int) -> None:
        self.k, self.floor = k, 0.0
        self.numbers, self.scores = np.zeros(0, np.int64), np.zeros(0)

    def add(self, numbers: Int64[np.ndarray, " C"], scores: Float64[np.ndarray, " C"]) -> None:
        numbers, scores = np.concatenate([self.numbers, numbers]), np.concatenate([self.scores, scores])
        order = np.lexsort((numbers, -scores))[: self.k]
        self.numbers, self.scores = numbers[order], scores[order]
        if len(order) == self.k:
            self.floor = float(self.scores[-1]) * SLACK


def _views(parts: Sequence[Searched], words: Sequence[Sequence[str]]) -> tuple[list[_View], list[float]]:
    """The blocks of all parts, and the weight of each word."""
    views, first = list[_View](), 0
    for part in parts:
        for block in part.postings.blocks:
            rows = slice(block.first, block.first + block.num_passages)
            masks = [None if mask_P is None else mask_P[rows] for mask_P in (part.live_P, part.wanted_P)]
            views.append(_View(block, first + block.first, *masks))
        first += len(part.postings)
    num_live, mean = _averages(views)
    words_F = [number for number, forms in enumerate(words) for _ in forms]
    hashes_F = np.array([hash_of(form) for forms in words for form in forms], np.uint64)
    frequencies_W = [0] * len(words)
    for view in views:
        with view.block.read():
            view.look_up(hashes_F, words_F, mean)
            for number, word in view.words.items():
                frequencies_W[number] += word.frequency(view.live_P)
    return views, [_weight(num_live, frequency) for frequency in frequencies_W]


def _averages(views: Sequence[_View]) -> tuple[int, float]:
    """The number of live passages, and how many terms they have on average."""
    num_live = num_terms = 0
    for view in views:
        if view.live_P is None:
            num_live, num_terms = num_live + view.block.num_passages, num_terms + view.block.num_terms
        else:
            num_live += int(np.count_nonzero(view.live_P))
            num_terms += int((view.block.lengths_P * view.live_P).sum())
    return num_live, max(num_terms / max(num_live, 1), 1e-9)


def _weight(num_live: int, having: int) -> float:
    """How much a word counts that `having` of the live passages have."""
    if not num_live:
        return 0.0
    return math.log1p((num_live - having + 0.5) / (having + 0.5))


def _parts(weight: float, counts_P: np.ndarray, norms_P: Float64[np.ndarray, " P"]) -> Float64[np.ndarray, " P"]:
    """The parts of a word in the scores of passages."""
    parts_P: np.ndarray = weight * counts_P.astype(np.float64) * (K1 + 1) / (counts_P + norms_P)
    return parts_P
