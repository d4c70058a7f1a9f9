"""How many tokens to draft: those that make tokens come fastest, by the measured success of drafts and time of passes.

`Survival` says how likely each drafted token is to be accepted, `PassCost` how long a pass over some rows takes, and
`allot` divides the rows among the sequences of a pass.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from weakref import WeakKeyDictionary, ref

from memlm.api.generation import DraftSource
from memlm.generation.drafts.sources import Draft
from memlm.model import Decoder
from memlm.retrieval.store import ModelStore

MOST_ROWS = 64  # drafted tokens of all sequences in one pass

# By closeness. Those of the text are near a few measured prompts (Isabelle, smollm2), the others are guesses.
PRIOR_CHANCE = {
    DraftSource.REQUEST: (0.5, 0.7, 0.8, 0.9, 0.9, 0.95),
    DraftSource.TEXT: (0.3, 0.4, 0.5, 0.7, 0.8, 0.95),
    DraftSource.NEIGHBORS: (0.1, 0.2, 0.3, 0.5),
    DraftSource.DATASTORE: (0.3, 0.4, 0.5, 0.7, 0.8, 0.95),
}
PRIOR_TRIALS = 4.0  # how many trials a prior counts as
FORGETTING = 0.97  # of the weight of earlier trials, at each one

PRIOR_ROW_COST = 0.06  # of the first row's time, which a further row takes until it was measured
NEW_SHARE, PULL = 0.2, 0.02
EACH_SIZE = 8
LONGEST_SPIKE = 3.0  # times the expected time; a longer pass waited for something else

MOST_SETS = 256  # of datastores with an experience, of some kilobytes each


@dataclass(slots=True)
class _Trials:
    accepted: float = 0.0
    all: float = 0.0

    def add(self, accepted: bool) -> None:
        self.accepted = FORGETTING * self.accepted + accepted
        self.all = FORGETTING * self.all + 1


class Survival:
    """How often drafted tokens were accepted, by source, closeness, and whether they came first.

    That of one sequence begins with the `prior` of all. `tried` and `accepted` count tokens by source and place in the
    draft.
    """

    def __init__(self, prior: Survival | None = None) -> None:
        self._prior = prior
        self.tried, self.accepted = Counter[tuple[DraftSource, int]](), Counter[tuple[DraftSource, int]]()
        self._trials: dict[tuple[DraftSource, int, bool], _Trials] = {}

    def chances(self, draft: Draft) -> list[float]:
        """How likely each token of a draft is to be accepted along with all before it."""
        first, later = self._chance(draft, is_first=True), self._chance(draft, is_first=False)
        return [first * later**place for place in range(len(draft.token_ids))]

    def add(self, draft: Draft, num_accepted: int) -> None:
        """Records how many tokens of a draft were accepted. Those behind the first wrong one were not tried."""
        for place in range(min(num_accepted + 1, len(draft.token_ids))):
            key = draft.source, draft.closeness, place == 0
            self._trials.setdefault(key, _Trials()).add(place < num_accepted)
            self.tried[draft.source, place] += 1
            self.accepted[draft.source, place] += place < num_accepted
        if self._prior is not None:
            self._prior.add(draft, num_accepted)

    def _chance(self, draft: Draft, *, is_first: bool) -> float:
        prior = (
            PRIOR_CHANCE[draft.source][draft.closeness]
            if self._prior is None
            else self._prior._chance(draft, is_first=is_first)
        )
        trials = self._trials.get((draft.source, draft.closeness, is_first), _Trials())
        return (trials.accepted + PRIOR_TRIALS * prior) / (trials.all + PRIOR_TRIALS)


@dataclass(slots=True)
class _Pass:
    num_rows: float
    seconds: float


class PassCost:
    """The time of a pass and its search by its number of rows, learned from the passes themselves.

    Passes of about as many rows count as one point, and times lie on straight lines between the points. The other
    points are drawn a little towards the newest pass, so that a size that looked slow once is tried again.
    """

    def __init__(self) -> None:
        self._points: dict[int, _Pass] = {}  # by `_size_of` rows

    def add(self, num_rows: int, seconds: float) -> None:
        """Records a pass."""
        size = _size_of(num_rows)
        if self._points:
            seconds = min(seconds, LONGEST_SPIKE * self.seconds(num_rows))
        point = self._points.setdefault(size, _Pass(num_rows, seconds))
        point.num_rows += NEW_SHARE * (num_rows - point.num_rows)
        point.seconds += NEW_SHARE * (seconds - point.seconds)
        for other in self._points.values():
            if other is not point:
                likely = seconds * _prior_shape(other.num_rows) / _prior_shape(num_rows)
                other.seconds += PULL * (likely - other.seconds)

    def seconds(self, num_rows: int) -> float:
        """The expected time of a pass. Before the first pass it has no unit."""
        points = sorted(self._points.values(), key=lambda point: point.num_rows)
        below = next((point for point in reversed(points) if point.num_rows <= num_rows), None)
        above = next((point for point in points if point.num_rows > num_rows), None)
        if below is not None and above is not None:
            share = (num_rows - below.num_rows) / (above.num_rows - below.num_rows)
            return below.seconds + share * (above.seconds - below.seconds)
        nearest = below or above
        if nearest is None:
            return _prior_shape(num_rows)
        return nearest.seconds * _prior_shape(num_rows) / _prior_shape(nearest.num_rows)


@dataclass(frozen=True, slots=True)
class Experience:
    """Experience with drafts of the sequences that use the same datastores."""

    survival: Survival = field(default_factory=Survival)
    cost: PassCost = field(default_factory=PassCost)


class DraftBudget:
    """Experience with drafts of all sequences of a decoder, apart for each set of datastores that they use.

    The datastores of a text decide which of its drafts are right, also of those from the text itself, and the searches
    of a pass are part of its time. If the sequences of all sets shared an experience, the times of an answer would tell
    its caller about datastores that this caller may not read.
    """

    def __init__(self) -> None:
        self._experiences: dict[frozenset[ref[ModelStore]], Experience] = {}  # the last used last

    @classmethod
    def of(cls, decoder: Decoder) -> DraftBudget:
        """Returns the one of a decoder, which lives as long as the decoder."""
        return _BUDGETS.setdefault(decoder, cls())

    def experience(self, stores: Iterable[ModelStore]) -> Experience:
        """Returns that of the sequences that use these datastores and no others. It is forgotten with a store, and
        where MOST_SETS others were used since.
        """
        key = frozenset(map(ref, stores))  # no later store equals one that is gone
        experience = self._experiences.pop(key, None) or Experience()
        self._experiences[key] = experience
        if len(self._experiences) > MOST_SETS:
            del self._experiences[next(iter(self._experiences))]
        return experience


_BUDGETS: WeakKeyDictionary[Decoder, DraftBudget] = WeakKeyDictionary()


def allot(chances: Sequence[Sequence[float]], seconds: Callable[[int], float]) -> list[int]:
    """Returns how many drafted tokens of each sequence to read, for the most expected tokens a second.

    `chances` has those of each sequence's drafted tokens, which fall along a draft. Each sequence also reads its last
    token. `seconds` is the time of a pass over some rows.
    """
    lengths = [0] * len(chances)
    likeliest = sorted(
        ((chance, number) for number, each in enumerate(chances) for chance in each), key=lambda pair: -pair[0]
    )
    num_tokens, num_rows = float(len(chances)), len(chances)
    best, best_count = num_tokens / seconds(num_rows), 0
    for count, (chance, _) in enumerate(likeliest[:MOST_ROWS], start=1):
        num_tokens += chance
        rate = num_tokens / seconds(num_rows + count)
        if rate > best:
            best, best_count = rate, count
    for _, number in likeliest[:best_count]:
        lengths[number] += 1
    return lengths


def _prior_shape(num_rows: float) -> float:
    return 1 + PRIOR_ROW_COST * (num_rows - 1)


def _size_of(num_rows: int) -> int:
    """Numbers of rows that take about as long: each one up to 8, then four of each doubling."""
    return num_rows if num_rows <= EACH_SIZE else EACH_SIZE + round(4 * math.log2(num_rows / EACH_SIZE))
