"""Messages between the front end and each inference worker: small frozen dataclasses, pickled over one pipe.

The front end sends `Submission`, `Cancel` and `Stop`. The worker answers every `Submission` with any number of `Events`
and then exactly one `Result`, one `Failed`, or, for a generation, one `Events` that ends with `Finished`. A cancelled
`Submission` gets no further answer.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from memlm.api.generation import Accepted
from memlm.api.request import Request
from memlm.errors import InternalError, MemlmError
from memlm.server.telemetry.datastores import StoreStats
from memlm.server.telemetry.metrics import Stats
from memlm.wire.codec import WireEvent

# However far behind a client is, tokens are merged up to this, which is far from the limit of a message.
MAX_EVENT_BYTES = 1 << 19


@dataclass(frozen=True, slots=True)
class Refresh(Request[None]):
    """A request of the front end itself: switch to the latest version of `store`, or of every datastore.

    The answer comes after the switch. For one store it is an error if its folder cannot be read.
    """

    store: str | None = None


@dataclass(frozen=True, slots=True)
class Adopt(Request[None]):
    """A request of the front end itself: read a session's file, whose earlier engine is gone."""

    session_name: str


def party_of(owner: str, caller: str) -> str:
    """Requests of one party may go on from each other's texts: of one token, or else of one client's address, without
    the port, of which each connection has its own.
    """
    return f"token {owner}" if owner else caller.rpartition(":")[0] if caller.startswith("ipv") else caller


@dataclass(frozen=True, slots=True)
class Submission:
    """A request, under the id that its answers, the logs and the client use.

    `caller` is the key by which callers take turns, and `owner` the owner of sessions. `submitted_s` and `deadline_s`
    are on the clock of `time.monotonic`, which all processes of a machine share.
    """

    id: str
    request: Request[Any]
    submitted_s: float
    deadline_s: float | None
    caller: str = ""
    owner: str = ""


@dataclass(frozen=True, slots=True)
class Cancel:
    """Drop a request. It gets no further answer."""

    id: str


@dataclass(frozen=True, slots=True)
class Stop:
    """End the process."""


@dataclass(frozen=True, slots=True)
class Loaded:
    """The first message of a worker that has its model and its datastores. `fingerprints` has those of the model, its
    tokenizer, its adapters and the encoder.
    """

    fingerprints: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class LoadFailed:
    """The only message of a worker that could not load them."""

    error: MemlmError


@dataclass(frozen=True, slots=True)
class Heartbeat:
    """The loop iterates."""

    stats: Stats = field(default_factory=Stats)
    stores: tuple[StoreStats, ...] = ()


@dataclass(frozen=True, slots=True)
class DocumentsDeleted:
    """Another process deleted these documents from a datastore (None: it is not known which)."""

    store: str
    document_ids: tuple[str, ...] | None


@dataclass(frozen=True, slots=True)
class Events:
    """Events of a generation. Tokens are encoded as clients receive them: the front end need not decode them."""

    id: str
    events: tuple[WireEvent, ...]

    def __reduce__(self) -> tuple[Any, ...]:
        return Events, (self.id, self.events)  # a dataclass with slots would be read field by field

    @property
    def size(self) -> int:
        """The sizes of all events."""
        return sum(map(event_size, self.events))


def event_size(event: WireEvent) -> int:
    """Returns the share of an event in the quotas: the bytes of its tokens, or the characters of an answer's prompt
    with its passages. Other events are small.
    """
    if isinstance(event, tuple):
        return sum(map(len, event))
    return event.prompt.size if isinstance(event, Accepted) and event.prompt is not None else 0


@dataclass(frozen=True, slots=True)
class Result:
    """The whole answer to a request other than a generation."""

    id: str
    value: Any


@dataclass(frozen=True, slots=True)
class Failed:
    """The error that ends a request."""

    id: str
    error: MemlmError


ToWorker: TypeAlias = Submission | Cancel | Stop
Answer: TypeAlias = Events | Result | Failed
FromWorker: TypeAlias = Loaded | LoadFailed | Heartbeat | DocumentsDeleted | Answer


def merge_tokens(answers: Sequence[Answer]) -> Iterator[WireEvent]:
    """Yields the events of some answers, with consecutive tokens merged. Raises the failure that ends them."""
    if len(answers) == 1 and isinstance(answers[0], Events):
        yield from answers[0].events  # nothing to merge
        return
    tokens, size = list[bytes](), 0
    for answer in answers:
        for event in answer.events if isinstance(answer, Events) else ():
            if tokens and (size >= MAX_EVENT_BYTES or not isinstance(event, tuple)):
                yield tuple(tokens)
                tokens, size = [], 0
            if isinstance(event, tuple):
                tokens += event
                size += sum(map(len, event))
            else:
                yield event
    if tokens:
        yield tuple(tokens)
    if not isinstance(answers[-1], Events):
        raise _failure(answers[-1])


def _failure(answer: Answer) -> MemlmError:
    return answer.error if isinstance(answer, Failed) else InternalError(f"the worker answered {type(answer).__name__}")
