"""Passages in the order of a search -> the first of them that differ, described: document, headings, pages and lines.

Passages of nearly the same text, as navigation, licenses and copies of a page have, count once: the best of them is
shown, and names the places of the others.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import chain, islice
from typing import NamedTuple, Protocol, TypeAlias, TypeVar

from memlm.api.passages import Passage
from memlm.base.passage_texts import PAGES, format_of
from memlm.base.phrases import words_of
from memlm.index.store.derived.cuts import SegmentCuts
from memlm.index.store.segment import Segment
from memlm.retrieval.sentences import AskedWords
from memlm.retrieval.store import ModelStore

NEARLY = 0.9  # of the runs of words in two texts that both have, from which on they are nearly the same
RUN_WORDS = 3
MOST_ALSO = 8  # places that a passage names
EXAMINED, EXAMINED_EACH = 64, 8  # different texts that are read at most: some, and more for each that is wanted
MOST_COPIES = 4096  # passages that are read beside these, of texts that were read before
MOST_COMPARED = 64  # texts with which a text is compared

Runs: TypeAlias = frozenset[tuple[str, ...]]


class HasText(Protocol):
    """A passage to compare."""

    @property
    def text(self) -> str:
        """Its text."""


T = TypeVar("T", bound=HasText)


class Found(NamedTuple):
    """A passage that a search found, by its number in a segment, and its score."""

    store: ModelStore
    segment: Segment
    cuts: SegmentCuts
    number: int
    score: float

    @property
    def text(self) -> str:
        return self.cuts.texts([self.number])[0]

    @property
    def document(self) -> int:
        """The row of its document."""
        return int(self.cuts.documents_P[self.number])


def first_distinct(found: Iterable[Found], k: int, asked: AskedWords) -> tuple[Passage, ...]:
    """Describes the first k passages of different texts, each with its sentence, and the places of those that are
    nearly the same.
    """
    groups = groups_of(found, k)
    described = iter(_described([each for group in groups for each in group]))
    passages = list[Passage]()
    for group in groups:
        first, *others = islice(described, len(group))
        first = asked.point_out(first)
        passages.append(replace(first, also=tuple(dict.fromkeys(each.place for each in others))))
    return tuple(passages)


def runs_of(text: str) -> Runs:
    """Each three words of a text that follow each other, or all words of a shorter one."""
    words = words_of(text)
    ends = range(RUN_WORDS, max(RUN_WORDS, len(words)) + 1)
    return frozenset(tuple(words[end - RUN_WORDS : end]) for end in ends)


def are_nearly_same(one: Runs, other: Runs) -> bool:
    """Whether two texts share most runs of words (their Jaccard index, Broder 1997)."""
    small, large = sorted((len(one), len(other)))
    if small < NEARLY * large:  # which no overlap makes up for
        return False
    shared = len(one & other)
    return shared >= NEARLY * (small + large - shared)


def groups_of(found: Iterable[T], k: int) -> list[list[T]]:
    """Puts passages of nearly the same text together, until k groups are there and another text comes.

    A passage joins the first group whose first text is nearly its own. It is compared with those that share one of its
    rarest runs (Bayardo et al. 2007), which leaves none out while these are MOST_COMPARED at most: so always up to that
    k. With more, a passage may begin a group of its own, which keeps the time of a large k linear.
    """
    groups, group_by_runs, copies = list[list[T]](), dict[Runs, int](), 0
    found = iter(found)
    head = [(each, runs_of(each.text)) for each in islice(found, k)]  # fewer never make k groups
    known = _KnownTexts(Counter(run for _, runs in head for run in runs))
    for each, own in chain(head, ((each, runs_of(each.text)) for each in found)):
        group, is_copy = group_by_runs.get(own), own in group_by_runs
        if group is None:
            group = known.group_of(own)
        if group is None:
            if len(groups) == k:
                break
            group = known.add(own)
            groups.append([])
        group_by_runs[own], copies = group, copies + is_copy
        groups[group] += [each] * (len(groups[group]) <= MOST_ALSO)
        if copies == MOST_COPIES or len(group_by_runs) == EXAMINED + EXAMINED_EACH * k:
            break
    return groups


class _KnownTexts:
    """The first text of each group, found by its rarest runs."""

    def __init__(self, counts: Counter[tuple[str, ...]]) -> None:
        self._counts, self._runs = counts, list[Runs]()
        self._groups = defaultdict[tuple[str, ...], list[int]](list)

    def group_of(self, own: Runs) -> int | None:
        """The first group of nearly the same text."""
        near = sorted({group for run in self._rarest(own) for group in self._groups.get(run, ())})
        return next((group for group in near[:MOST_COMPARED] if are_nearly_same(own, self._runs[group])), None)

    def add(self, own: Runs) -> int:
        """Begins a group."""
        self._runs.append(own)
        for run in self._rarest(own):
            if len(self._groups[run]) < MOST_COMPARED:
                self._groups[run].append(len(self._runs) - 1)
        return len(self._runs) - 1

    def _rarest(self, own: Runs) -> list[tuple[str, ...]]:
        """So many runs that two texts which share NEARLY of theirs have one of these in common, in any one order."""
        count = len(own) - math.ceil(NEARLY * len(own)) + 1
        return sorted(own, key=lambda run: (self._counts[run], run))[:count]


def _described(found: Sequence[Found]) -> list[Passage]:
    passages = list[Passage]()
    for each in found:
        (begin, end), text, (lines, pages) = each.cuts.rows(each.number), each.text, each.cuts.ends_before(each.number)
        document = each.segment.documents.at(each.document)
        before = text[: len(text) - len(text.lstrip())]
        text, first_line, first_page = text.strip(), 1 + lines + before.count("\n"), 1 + pages + before.count("\f")
        has_pages = format_of(document.metadata) in PAGES
        passages.append(
            Passage(
                store=each.store.name,
                document_id=document.id,
                title=document.title,
                token_offset=begin - int(each.segment.starts[each.document]),
                num_tokens=end - begin,
                text=text,
                score=each.score,
                metadata=document.metadata,
                first_line=first_line,
                last_line=first_line + text.count("\n"),
                headings=each.cuts.headings(range(each.number, each.number + 1))[0],
                first_page=first_page if has_pages else 0,
                last_page=first_page + text.count("\f") if has_pages else 0,
            )
        )
    return passages
