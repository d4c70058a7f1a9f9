"""Limited amounts that callers share: a total, and a part of it for each caller."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from memlm.errors import Overloaded

SHARE = 4  # a caller may take a fourth of the total
RETRY_AFTER_S = 1.0


class Quota:
    """Counts the amount that each caller holds. Refuses more than `total` in all or `per_caller` for one caller.

    `noun` completes the sentence "... are all that this server takes". Before a refusal, `reclaim` is called until
    there is room or it returns False. It frees something of this caller (True) or of any caller.
    """

    def __init__(self, noun: str, total: int, per_caller: int) -> None:
        self._noun, self.total, self.per_caller = noun, total, min(per_caller, total)
        self._held = Counter[str]()
        self.taken = 0
        self.reclaim: Callable[[str, bool], bool] = lambda caller, own_only: False

    def of(self, caller: str) -> int:
        """The amount that a caller holds."""
        return self._held[caller]

    def has_room(self, caller: str, amount: int = 1) -> bool:
        """Whether a caller may take this amount."""
        return self.taken + amount <= self.total and self._held[caller] + amount <= self.per_caller

    def take(self, caller: str, amount: int = 1) -> None:
        """Adds to the amount that a caller holds. Raises Overloaded, and adds nothing, above a limit."""
        while not (has_room := self.has_room(caller, amount)):
            if not self.reclaim(caller, self._held[caller] + amount > self.per_caller):
                break
        if not has_room:
            scope, limit = ("of one caller", self.per_caller) if self.taken + amount <= self.total else ("", self.total)
            raise Overloaded(
                f"{limit:,} {self._noun}{' ' * bool(scope)}{scope} are all that this server takes; end some, or try"
                f" again in {RETRY_AFTER_S:g} s",
                retry_after_s=RETRY_AFTER_S,
            )
        self._held[caller] += amount
        self.taken += amount

    def give(self, caller: str, amount: int = 1) -> None:
        self.taken -= amount
        if held := self._held[caller] - amount:
            self._held[caller] = held
        else:
            self._held.pop(caller, None)

    @contextmanager
    def hold(self, caller: str, amount: int = 0) -> Iterator[Holding]:
        """Holds an amount, and amounts taken in the block, until its end. Raises as `take` does."""
        holding = Holding(self, caller)
        try:
            holding.take(amount)
            yield holding
        finally:
            holding.give(holding.amount)


class Holding:
    """The amount that one call of a caller holds."""

    def __init__(self, quota: Quota, caller: str) -> None:
        self._quota, self.caller, self.amount = quota, caller, 0

    def take(self, amount: int) -> None:
        """Raises as `Quota.take` does."""
        self._quota.take(self.caller, amount)
        self.amount += amount

    def give(self, amount: int) -> None:
        self._quota.give(self.caller, amount)
        self.amount -= amount


def share_of(total: int) -> int:
    """The part of a total that one caller may take."""
    return max(1, total // SHARE)
