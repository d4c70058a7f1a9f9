"""Which documents hold at a time: those of which the others are earlier or later versions.

A document holds at a moment if its `valid_from` is absent or not later, and no other document of which this is true
supersedes it. Documents that supersede each other in a circle, or themselves, all hold: nothing says which is newer.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import TYPE_CHECKING

import numpy as np
from jaxtyping import Bool, Int64

from memlm.index.store.filters import SUPERSEDES, VALID_FROM, begin_of, ids_of

if TYPE_CHECKING:
    from memlm.index.store.documents import DocumentTable
    from memlm.index.store.segment import Segment

_MOST_BROKEN = 8  # sets of edges on cycles, at different times or after deletions, whose answers are remembered
_TRIMS = 64  # most graphs of versions are chains of a few, of which these leave nothing


@dataclass(frozen=True, slots=True)
class SegmentVersions:
    """What the documents of a segment say of versions, deleted ones too: the rows of those with a `valid_from`, when
    they begin to hold, in microseconds since 1970, and pairs of the row of a document and an id that it supersedes.

    What a malformed field says is left out. `_targets_of` are the rows of these ids in segments that were looked at.
    """

    dated: Int64[np.ndarray, " dated"]
    begins: Int64[np.ndarray, " dated"]
    sources_E: Int64[np.ndarray, " E"]
    ids_E: tuple[str, ...]
    _targets_of: dict[object, Int64[np.ndarray, " E"]]

    @classmethod
    def read(cls, documents: DocumentTable) -> SegmentVersions:
        """Reads the documents that have one of the fields."""
        begins, pairs = dict[int, int](), list[tuple[int, str]]()
        for document in documents.with_fields(VALID_FROM, SUPERSEDES):
            if (begin := begin_of(document.metadata.get(VALID_FROM))) is not None:
                begins[document.row] = begin
            pairs += [(document.row, each) for each in ids_of(document.metadata)]
        return cls(
            np.fromiter(begins, np.int64),
            np.fromiter(begins.values(), np.int64),
            np.array([row for row, _ in pairs], np.int64),
            tuple(id_ for _, id_ in pairs),
            {},
        )

    def targets_in(self, segment: Segment) -> Int64[np.ndarray, " E"]:
        """The rows of the superseded documents in a segment, -1 for those that it does not have."""
        if (targets_E := self._targets_of.get(segment.core)) is None:
            rows = segment.documents.rows_of(self.ids_E)
            targets_E = np.fromiter((rows.get(each, -1) for each in self.ids_E), np.int64, len(self.ids_E))
            self._targets_of[segment.core] = targets_E
        return targets_E

    def keep(self, cores: set[object]) -> None:
        """Forgets all segments but some."""
        for core in list(self._targets_of):  # other threads may change it
            if core not in cores:
                self._targets_of.pop(core, None)


class Versions:
    """Which document of some segments supersedes which, with one number for each document of all. Deletions are not of
    it.
    """

    def __init__(self, segments: Sequence[Segment]) -> None:
        """Looks up the superseded documents, where that was not done before: some microseconds for each."""
        self._firsts = np.cumsum([0, *(segment.record.documents for segment in segments)])
        parts, firsts = [segment.versions for segment in segments], self._firsts.tolist()
        dated, begins, sources, targets = (list[np.ndarray]() for _ in range(4))
        for part, first in zip(parts, firsts, strict=False):
            dated.append(part.dated + first)
            begins.append(part.begins)
            for other, first_other in zip(segments, firsts, strict=False):
                rows_E = part.targets_in(other)
                sources.append(part.sources_E[rows_E >= 0] + first)
                targets.append(rows_E[rows_E >= 0] + first_other)
            part.keep({segment.core for segment in segments})
        none = np.empty(0, np.int64)
        self._dated, self._begins = np.concatenate([none, *dated]), np.concatenate([none, *begins])
        self._sources_E, self._targets_E = np.concatenate([none, *sources]), np.concatenate([none, *targets])
        self._is_cyclic_E = on_cycles(self._sources_E, self._targets_E)
        self._num_cyclic, self._broken = int(self._is_cyclic_E.sum()), dict[bytes, np.ndarray]()

    def holding(self, moment: int, live: Sequence[Bool[np.ndarray, " docs"]]) -> list[Bool[np.ndarray, " docs"]]:
        """Which of the live documents of each segment hold at a moment, in microseconds since 1970."""
        holds = np.concatenate([np.empty(0, bool), *live])
        holds[self._dated[self._begins > moment]] = False
        counts_E = holds[self._sources_E] & holds[self._targets_E]
        cyclic = np.flatnonzero(counts_E & self._is_cyclic_E)
        counts_E[cyclic] = ~self._still_cyclic(cyclic)
        holds[self._targets_E[counts_E]] = False
        return np.split(holds, self._firsts[1:-1]) if live else []

    def _still_cyclic(self, edges_C: Int64[np.ndarray, " C"]) -> Bool[np.ndarray, " C"]:
        """Whether some of the edges on cycles are on a cycle of these alone. The last few answers are remembered, as a
        walk along long cycles takes seconds.
        """
        if len(edges_C) == self._num_cyclic:
            return np.ones(len(edges_C), bool)
        key = blake2b(edges_C.tobytes(), digest_size=16).digest()
        if (found_C := self._broken.get(key)) is None:
            found_C = on_cycles(self._sources_E[edges_C], self._targets_E[edges_C])
            self._broken = dict([*self._broken.items(), (key, found_C)][-_MOST_BROKEN:])  # other threads read it
        return found_C


def on_cycles(sources_E: Int64[np.ndarray, " E"], targets_E: Int64[np.ndarray, " E"]) -> Bool[np.ndarray, " E"]:
    """Whether each edge of a directed graph is part of a cycle: its ends are of one strongly connected component
    (Kosaraju and Sharir's algorithm).
    """
    left, is_cyclic_E = np.arange(len(sources_E)), np.zeros(len(sources_E), bool)
    for _ in range(_TRIMS):
        goes_on = np.isin(targets_E[left], sources_E[left]) & np.isin(sources_E[left], targets_E[left])
        if goes_on.all():
            break
        left = left[goes_on]
    pairs = list(zip(sources_E[left].tolist(), targets_E[left].tolist(), strict=True))
    forward, backward = defaultdict[int, list[int]](list), defaultdict[int, list[int]](list)
    for source, target in pairs:
        forward[source].append(target)
        backward[target].append(source)
    last_first = list(_finished([*forward], forward))[::-1]
    seen, component_of = set[int](), dict[int, int]()
    for root in last_first:
        component_of |= dict.fromkeys(_finished([root], backward, seen), root)
    is_cyclic_E[left] = [component_of[source] == component_of[target] for source, target in pairs]
    return is_cyclic_E


def _finished(
    roots: Iterable[int], following: Mapping[int, Sequence[int]], seen: set[int] | None = None
) -> Iterator[int]:
    """Walks a graph in depth from some roots, and yields each node behind all that were first reached from it."""
    seen = set() if seen is None else seen
    for root in roots:
        walk = [] if root in seen else [(root, iter(following[root]))]
        seen.add(root)
        while walk:
            node, others = walk[-1]
            other = next((each for each in others if each not in seen), None)
            if other is None:
                walk.pop()
                yield node
            else:
                seen.add(other)
                walk.append((other, iter(following[other])))
