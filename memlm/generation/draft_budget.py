"""How many tokens to draft: those that make tokens come fastest, by the measured success of drafts and time of passes.

`Survival` says how likely each drafted token is to be accepted, `PassCost` how long a pass over some rows takes, and
`allot` divides the rows among the sequences of a pass.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from weakref import WeakKeyDictionary

from memlm.api.generation import DraftSource
from memlm.generation.drafting import Draft
from memlm.model import Decoder

MOST_ROWS = 64  # drafted tokens of all sequences in one pass

PRIOR_CHANCE = {
    DraftSource.REQUEST: 0.7,
    DraftSource.TEXT: 0.5,
    DraftSource.NEIGHBORS: 0.25,
    DraftSource.DATASTORE: 0.5,
}
PRIOR_TRIALS = 4.0  # how many trials a prior counts as
FORGETTING = 0.97  # of the weight of earlier trials, at each one

PRIOR_ROW_COST = 0.06  # of the first row's time, which a further row takes until it was measured
NEW_SHARE, PULL = 0.2, 0.02
LONGEST_SPIKE = 3.0  # times the expected time; a longer pass waited for something else


@dataclass(slots=True)
class _Trials:
    accepted: float = 0.0
    all: float = 0.0

    def add(self, accepted: bool) -> None:
        self.accepted = FORGETTING * self.accepted + accepted
        self.all = FORGETTING * self.all + 1


class Survival:
    """How often drafted tokens were accepted, by source, closeness, and whether they came first.

    That of one sequence begins with the `prior` of all.
    """

    def __init__(self, prior: Survival | None = None) -> None:
        self._prior = prior
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
        if self._prior is not None:
            self._prior.add(draft, num_accepted)

    def _chance(self, draft: Draft, *, is_first: bool) -> float:
        prior = PRIOR_CHANCE[draft.source] if self._prior is None else self._prior._chance(draft, is_first=is_first)
        trials = self._trials.get((draft.source, draft.closeness, is_first), _Trials())
        return (trials.accepted + PRIOR_TRIALS * prior) / (trials.all + PRIOR_TRIALS)


class PassCost:
    """The time of a pass by its number of rows, learned from the passes themselves.

    What was measured for other numbers of rows is drawn a little towards the newest pass, so that a number that looked
    slow once is tried again.
    """

    def __init__(self) -> None:
        self._seconds: dict[int, float] = {}  # by `_size_of` rows

    def add(self, num_rows: int, seconds: float) -> None:
        """Records a pass."""
        size, shape = _size_of(num_rows), _prior_shape(num_rows)
        if self._seconds:
            seconds = min(seconds, LONGEST_SPIKE * self.seconds(num_rows))
        before = self._seconds.get(size, seconds)
        self._seconds[size] = before + NEW_SHARE * (seconds - before)
        for other, known in self._seconds.items():
            if other != size:
                likely = seconds * _prior_shape(_rows_of(other)) / shape
                self._seconds[other] = known + PULL * (likely - known)

    def seconds(self, num_rows: int) -> float:
        """The expected time of a pass. Between measured sizes it is a straight line. Before the first pass it has no
        unit.
        """
        if not self._seconds:
            return _prior_shape(num_rows)
        size = _size_of(num_rows)
        if (known := self._seconds.get(size)) is not None:
            return known
        below = max((other for other in self._seconds if other < size), default=None)
        above = min((other for other in self._seconds if other > size), default=None)
        if below is not None and above is not None:
            share = (num_rows - _rows_of(below)) / (_rows_of(above) - _rows_of(below))
            return self._seconds[below] + share * (self._seconds[above] - self._seconds[below])
        nearest = below if above is None else above
        assert nearest is not None
        return self._seconds[nearest] * _prior_shape(num_rows) / _prior_shape(_rows_of(nearest))


class DraftBudget:
    """What all sequences of a decoder have learned about drafts."""

    def __init__(self) -> None:
        self.survival, self.cost = Survival(), PassCost()

    @classmethod
    def of(cls, decoder: Decoder) -> DraftBudget:
        """Returns the one of a decoder, which lives as long as the decoder."""
        return _BUDGETS.setdefault(decoder, cls())


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
    """Numbers of rows that take about as long: every one up to 4, then two of each doubling."""
    return round(2 * math.log2(num_rows))


def _rows_of(size: int) -> float:
    return 2 ** (size / 2)
