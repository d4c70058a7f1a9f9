"""A request that a worker has accepted and not yet answered."""

from __future__ import annotations

from collections.abc import Generator
from concurrent.futures import Future
from dataclasses import dataclass
from enum import Enum, auto
from typing import Any, TypeAlias

from memlm.base.steps import Offload
from memlm.generation.generation import Generation
from memlm.generation.step_search import RunningSequence
from memlm.server.inference.messages import Submission


class Life(Enum):
    """How far a request has come in a worker's loop, which alone changes it."""

    BEGINNING = auto()  # its first steps, such as encoding its prompt
    WAITING = auto()  # until it is admitted
    RUNNING = auto()  # it takes steps by turns
    DRAWING = auto()  # until the batch has drawn a token for it


# A request that yields one of these waits for admission, or for a token. None is the end of a step.
Advances: TypeAlias = Generator[Offload | Life | None, Any, None]


@dataclass(eq=False, slots=True)
class ActiveRequest:
    """The state of one request in a worker's loop.

    The loop advances `steps`, and a thread does `offloaded` work in between. A text draws in the batch by its
    `sequence`.
    """

    submission: Submission
    num_tokens: int = 0  # of its prompt, estimated until the prompt is encoded
    life: Life = Life.BEGINNING
    steps: Advances | None = None
    generations: tuple[Generation, ...] = ()  # the rows of its text
    sequence: RunningSequence | None = None
    cache_bytes: int = 0  # the most that its keys and values may take
    offloaded: Future[Any] | None = None
    must_end: bool = False  # the offloaded work writes to the disk and cannot be cancelled
    is_abandoned: bool = False  # cancelled, and kept until its offloaded work has ended

    @property
    def id(self) -> str:
        return self.submission.id

    @property
    def caller(self) -> str:
        return self.submission.caller

    @property
    def is_admitted(self) -> bool:
        """Whether it takes one of the places of running requests."""
        return self.life in (Life.RUNNING, Life.DRAWING)

    @property
    def is_ready(self) -> bool:
        """Whether the loop can take a step."""
        return self.offloaded is None
