"""Messages between the front end and each inference worker: small frozen dataclasses, pickled over one pipe.

The front end sends `Submission`, `Cancel` and `Stop`. The worker answers every `Submission` with any number of `Events`
and then exactly one `Result`, one `Failed`, or, for a generation, one `Events` that ends with `Finished`. A cancelled
`Submission` gets no further answer.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, TypeAlias

from memlm.api.request import Request
from memlm.errors import MemlmError
from memlm.server.telemetry.metrics import Stats
from memlm.wire.codec import WireEvent


@dataclass(frozen=True, slots=True)
class Refresh(Request[None]):
    """The front's own question: move to what is in the folder of `store` now, or of all; answered once that is done.

    Of one store, the answer is an error where its folder cannot be read.
    """

    store: str | None = None


@dataclass(frozen=True, slots=True)
class Submission:
    """A question, under the id that its answers carry, which is also the one that logs and clients know it by.

    `caller` is whose turn it takes, `owner` whose sessions it sees; `submitted_s` and `deadline_s` are on the clock of
    `time.monotonic`, which all processes of a machine share.
    """

    id: str
    request: Request[Any]
    submitted_s: float
    deadline_s: float | None
    caller: str = ""
    owner: str = ""


@dataclass(frozen=True, slots=True)
class Cancel:
    """Nobody waits for this answer any more."""

    id: str


@dataclass(frozen=True, slots=True)
class Stop:
    """End the process."""


@dataclass(frozen=True, slots=True)
class Loaded:
    """The first message of a worker that has its model and its stores."""


@dataclass(frozen=True, slots=True)
class LoadFailed:
    """The only message of a worker that could not load them."""

    error: MemlmError


@dataclass(frozen=True, slots=True)
class Heartbeat:
    """The work loop went round."""

    stats: Stats = field(default_factory=Stats)


@dataclass(frozen=True, slots=True)
class DocumentsDeleted:
    """A datastore has these documents no more, since another process deleted them; None where it is not known which."""

    store: str
    document_ids: tuple[str, ...] | None


@dataclass(frozen=True, slots=True)
class Events:
    """What a generation did since the last message, its tokens as they go out: the front, whose time all share, need
    not read them.
    """

    id: str
    events: tuple[WireEvent, ...]


@dataclass(frozen=True, slots=True)
class Result:
    """The whole answer to a question that is no generation."""

    id: str
    value: Any


@dataclass(frozen=True, slots=True)
class Failed:
    """Why a question has no answer, or no complete one."""

    id: str
    error: MemlmError


ToWorker: TypeAlias = Submission | Cancel | Stop
Answer: TypeAlias = Events | Result | Failed
FromWorker: TypeAlias = Loaded | LoadFailed | Heartbeat | DocumentsDeleted | Answer
