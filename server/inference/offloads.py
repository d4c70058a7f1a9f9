"""Threads for work that would block a worker's loop: encoding a long text, copying and writing a session's state.

The next work item comes from the caller with the fewest items in the threads. Long items never take all threads, so
that a short text is encoded while other callers' long ones are.
"""

from __future__ import annotations

import threading
from collections import Counter
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

from memlm.base.steps import Offload

NUM_THREADS, MOST_LONG = 4, 2


@dataclass(eq=False, slots=True)
class _Waiting:
    caller: str
    offload: Offload
    outcome: Future[Any] = field(default_factory=Future)


class Offloads:
    """A few daemon threads: the end of the process does not wait for a text that is being encoded."""

    def __init__(self) -> None:
        self._waiting: list[_Waiting] = []
        self._running: Counter[str] = Counter()
        self._num_long = 0
        self._changed = threading.Condition()
        self._is_closed = False
        for number in range(NUM_THREADS):
            threading.Thread(target=self._work, name=f"offload {number}", daemon=True).start()

    def submit(self, caller: str, offload: Offload) -> Future[Any]:
        """Queues some work. Cancelling the future drops work that has not begun."""
        waiting = _Waiting(caller, offload)
        with self._changed:
            self._waiting.append(waiting)
            self._changed.notify()
        return waiting.outcome

    def close(self) -> None:
        """Ends the threads once they are idle."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()

    def _work(self) -> None:
        while (next_ := self._take()) is not None:
            try:
                if next_.outcome.set_running_or_notify_cancel():
                    try:
                        next_.outcome.set_result(next_.offload.work())
                    except BaseException as error:
                        next_.outcome.set_exception(error)
            finally:
                self._end(next_)
                del next_  # else an idle thread keeps the text that it read last, and all its tokens

    def _take(self) -> _Waiting | None:
        with self._changed:
            while True:
                if (next_ := self._next()) is not None:
                    self._waiting.remove(next_)
                    self._running[next_.caller] += 1
                    self._num_long += next_.offload.is_long
                    return next_
                if self._is_closed and not self._waiting:
                    return None
                self._changed.wait()

    def _next(self) -> _Waiting | None:
        may_run = (each for each in self._waiting if not each.offload.is_long or self._num_long < MOST_LONG)
        return min(may_run, key=lambda each: self._running[each.caller], default=None)

    def _end(self, ended: _Waiting) -> None:
        with self._changed:
            self._running[ended.caller] -= 1
            if not self._running[ended.caller]:
                del self._running[ended.caller]
            self._num_long -= ended.offload.is_long
            self._changed.notify_all()
