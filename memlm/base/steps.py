"""Work in bounded steps, so that one loop can serve many requests.

A generator yields None after each step, and an `Offload` for work that would block the loop. Its `yield` returns the
result of that work. `run_steps` runs everything in the calling thread, as the library needs it. The server's worker
takes one step per turn and runs offloads in threads.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from dataclasses import dataclass
from typing import Any, TypeAlias, TypeVar

Outcome = TypeVar("Outcome")


@dataclass(frozen=True, slots=True)
class Offload:
    """Work that any thread may do. One that `is_long` leaves threads free for shorter ones. One that `must_end` changes
    something outside: its steps continue to their end even if the request is cancelled.
    """

    work: Callable[[], Any]
    is_long: bool = False
    must_end: bool = False


Steps: TypeAlias = Generator[Offload | None, Any, Outcome]


def run_steps(steps: Steps[Outcome]) -> Outcome:
    """Runs all steps in this thread and returns their result."""
    try:
        offload = next(steps)
        while True:
            if offload is None:
                offload = next(steps)
                continue
            try:
                result = offload.work()
            except BaseException as error:
                offload = steps.throw(error)
            else:
                offload = steps.send(result)
    except StopIteration as end:
        outcome: Outcome = end.value
        return outcome
