"""A request that a worker has accepted and not yet answered."""

from __future__ import annotations

from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

from memlm.base.steps import Steps
from memlm.generation.generation import Generation
from memlm.generation.step_search import RunningSequence
from memlm.server.inference.messages import Submission


@dataclass(eq=False, slots=True)
class ActiveRequest:
    """The state of one request in a worker's loop.

    The loop advances `steps`, and a thread does `offloaded` work in between. A text draws in the batch by its
    `sequence`.
    """

    submission: Submission
    num_tokens: int = 0  # of its prompt, estimated until the prompt is encoded
    steps: Steps[None] | None = None
    generations: tuple[Generation, ...] = ()  # the rows of its text
    sequence: RunningSequence | None = None
    must_wait: bool = False  # until it is admitted, although it may run already
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
    def is_ready(self) -> bool:
        """Whether the loop can take a step."""
        return self.offloaded is None
