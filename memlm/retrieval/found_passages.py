"""Passages in the order of a search -> the first of them that differ, described: document, headings, pages and lines.

Passages of nearly the same text, as navigation, licenses and copies of a page have, count once: the best of them is
shown, and names the places of the others.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import islice
from typing import NamedTuple, TypeAlias

from memlm.api.passages import Passage
from memlm.base.passage_texts import PAGES, format_of
from memlm.base.phrases import words_of
from memlm.index.store.derived.cuts import SegmentCuts
from memlm.index.store.segment import Segment
from memlm.retrieval.store import ModelStore

NEARLY = 0.9  # of the runs of words in two texts that both have, from which on they are nearly the same
RUN_WORDS = 3
MOST_ALSO = 8  # places that a passage names
EXAMINED, EXAMINED_EACH = 64, 8  # passages that are compared at most: some, and more for each that is wanted

Runs: TypeAlias = frozenset[tuple[str, ...]]


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


def first_distinct(found: Iterable[Found], k: int) -> tuple[Passage, ...]:
    """Describes the first k passages of different texts, each with the places of those that are nearly the same."""
    groups = _groups(islice(found, EXAMINED + EXAMINED_EACH * k), k)
    described = iter(_described([each for group in groups for each in group]))
    passages = list[Passage]()
    for group in groups:
        first, *others = islice(described, len(group))
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


def _groups(found: Iterable[Found], k: int) -> list[list[Found]]:
    """Passages of nearly the same text together, until k groups are there and another text comes."""
    groups, runs = list[list[Found]](), list[Runs]()
    for each in found:
        own = runs_of(each.text)
        same = next((number for number, other in enumerate(runs) if are_nearly_same(own, other)), None)
        if same is not None:
            groups[same] += [each] * (len(groups[same]) <= MOST_ALSO)
        elif len(groups) < k:
            groups.append([each])
            runs.append(own)
        else:
            break
    return groups


def _described(found: Sequence[Found]) -> list[Passage]:
    passages = list[Passage]()
    for each, (lines, pages) in zip(found, _ends_before(found), strict=True):
        (begin, end), text = each.cuts.rows(each.number), each.text
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


def _ends_before(found: Sequence[Found]) -> list[tuple[int, int]]:
    """Counts the line ends and form feeds before each passage in its document. Passages of a document share one reading
    of it.
    """
    counts, documents = [(0, 0)] * len(found), defaultdict[tuple[int, int], list[tuple[int, int]]](list)
    for place, each in enumerate(found):
        documents[id(each.segment), each.document].append((each.number, place))
    for places in documents.values():
        each = found[places[0][1]]
        read, lines, pages = int(each.segment.starts[each.document]), 0, 0
        for number, place in sorted(places):
            begin, _ = each.cuts.rows(number)
            more_lines, more_pages = each.store.line_and_page_ends(each.segment.values_N[read:begin])
            read, lines, pages, skipped = begin, lines + more_lines, pages + more_pages, each.cuts.skipped(number)
            counts[place] = lines + skipped.count(b"\n"), pages + skipped.count(b"\f")
    return counts
