"""What the front and its worker tell each other: small frozen dataclasses, pickled over one pipe.

The front asks (`Ask`, `Cancel`, `Stop`); the worker answers every `Ask` with any number of `Events` and then exactly
one `Result`, one `Failed`, or, for a generation, one `Events` that ends with `Finished`. A cancelled `Ask` gets no
further answer.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, TypeAlias

from memlm.api import GenerationEvent
from memlm.errors import MemlmError
from memlm.questions import Question


@dataclass(frozen=True, slots=True)
class Ask:
    """A question, under the number that its answers carry.

    `deadline_s` and `asked_s` are on the clock of `time.monotonic`, which all processes of a machine share.
    """

    call_id: int
    request_id: str
    question: Question
    asked_s: float
    deadline_s: float | None


@dataclass(frozen=True, slots=True)
class Cancel:
    """Nobody waits for this answer any more."""

    call_id: int


@dataclass(frozen=True, slots=True)
class Stop:
    """End the process."""


@dataclass(frozen=True, slots=True)
class Loaded:
    """The first message of a worker that has its model and its stores."""


@dataclass(frozen=True, slots=True)
class NotLoaded:
    """The only message of a worker that could not load them."""

    error: MemlmError


@dataclass(frozen=True, slots=True)
class Heartbeat:
    """The work loop went round."""


@dataclass(frozen=True, slots=True)
class Events:
    """What a generation did since the last message."""

    call_id: int
    events: tuple[GenerationEvent, ...]


@dataclass(frozen=True, slots=True)
class Result:
    """The whole answer to a question that is no generation."""

    call_id: int
    value: Any


@dataclass(frozen=True, slots=True)
class Failed:
    """Why a question has no answer, or no complete one."""

    call_id: int
    error: MemlmError


ToWorker: TypeAlias = Ask | Cancel | Stop
Answer: TypeAlias = Events | Result | Failed
FromWorker: TypeAlias = Loaded | NotLoaded | Heartbeat | Answer
