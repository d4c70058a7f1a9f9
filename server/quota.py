"""Amounts that callers share: so many for all of them, and a part of it for each."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from memlm.errors import Overloaded

SHARE = 4  # each caller may take up to a fourth of what all may
RETRY_AFTER_S = 1.0


class Quota:
    """Counts how much of something each caller holds, and refuses more than `total` for all or `per_caller` for one.

    `noun` completes the sentence "... are all that this server takes". Before something is refused `reclaim` is
    called until there is room or it gives False, to give back what the caller itself (True) or anybody can do without.
    """

    def __init__(self, noun: str, total: int, per_caller: int) -> None:
        self._noun, self.total, self.per_caller = noun, total, min(per_caller, total)
        self._held = Counter[str]()
        self.taken = 0
        self.reclaim: Callable[[str, bool], bool] = lambda caller, own_only: False

    def of(self, caller: str) -> int:
        """How much a caller holds."""
        return self._held[caller]

    def has_room(self, caller: str, amount: int = 1) -> bool:
        """Whether a caller may take so much more."""
        return self.taken + amount <= self.total and self._held[caller] + amount <= self.per_caller

    def take(self, caller: str, amount: int = 1) -> None:
        """Raises Overloaded, and takes nothing, where a caller or all together would hold too much."""
        while not self.has_room(caller, amount):
            if not self.reclaim(caller, self._held[caller] + amount > self.per_caller):
                break
        if not self.has_room(caller, amount):
            scope, limit = ("of one caller", self.per_caller) if self.taken + amount <= self.total else ("", self.total)
            raise Overloaded(
                f"{limit:,} {self._noun}{' ' * bool(scope)}{scope} are all that this server takes; end some, or try"
                f" again in {RETRY_AFTER_S:g} s",
                retry_after_s=RETRY_AFTER_S,
            )
        self._held[caller] += amount
        self.taken += amount

    def give(self, caller: str, amount: int = 1) -> None:
        """Gives back what was taken."""
        self._held[caller] -= amount
        self.taken -= amount
        if not self._held[caller]:
            del self._held[caller]

    @contextmanager
    def hold(self, caller: str, amount: int = 0) -> Iterator[Holding]:
        """Holds an amount, and what is taken on the way, until the end of the block. Raises as `take` does."""
        holding = Holding(self, caller)
        try:
            holding.take(amount)
            yield holding
        finally:
            holding.give(holding.amount)


class Holding:
    """How much of a quota one call of a caller holds."""

    def __init__(self, quota: Quota, caller: str) -> None:
        self._quota, self.caller, self.amount = quota, caller, 0

    def take(self, amount: int) -> None:
        """Takes more. Raises as `Quota.take` does."""
        self._quota.take(self.caller, amount)
        self.amount += amount

    def give(self, amount: int) -> None:
        """Gives some back."""
        self._quota.give(self.caller, amount)
        self.amount -= amount


def share_of(total: int) -> int:
    """What one caller may take of what all may."""
    return max(1, total // SHARE)
