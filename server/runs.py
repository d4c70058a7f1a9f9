"""Generations that outlive their connection for a while: what they told is kept, and told again from any token on."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator

from memlm.errors import InvalidInput, MemlmError, NotFound
from memlm.events import Accepted, Finished
from memlm.server.deletions import Deletion
from memlm.wire import WireEvent

KEPT = 8192  # more than may run at once; the oldest goes first


class Run:
    """One generation: its events so far, and who follows them."""

    def __init__(self, owner: str, keep_s: float, since: Deletion) -> None:
        """Starts with no event. `since` is the latest deletion before the generation began."""
        self.owner, self.keep_s, self.since = owner, keep_s, since
        self.accepted: Accepted | None = None
        self.finished: Finished | None = None
        self.failure: MemlmError | None = None
        self.left_s = time.monotonic()
        self.followers = 0
        self.work: asyncio.Task[None] | None = None
        self.keeper: asyncio.Task[None] | None = None
        self._tokens = list[bytes]()
        self._news = asyncio.Event()

    @property
    def has_ended(self) -> bool:
        """Whether nothing more will come."""
        return self.finished is not None or self.failure is not None

    @property
    def is_given_up(self) -> bool:
        """Whether nobody follows it any more, and nobody came back in time."""
        return not self.followers and time.monotonic() - self.left_s > self.keep_s

    def add(self, event: WireEvent) -> None:
        """What the worker tells."""
        if isinstance(event, Accepted):
            self.accepted = event
        elif isinstance(event, Finished):
            self.finished = event
        else:
            self._tokens += event
        self._wake()

    def fail(self, error: MemlmError) -> None:
        """Nothing more will come, and why."""
        self.failure = error
        self._wake()

    async def follow(self, offset: int) -> AsyncGenerator[WireEvent, None]:
        """What comes, from a token on; what has come already first. Raises its failure, and InvalidInput for a token
        that has not been drawn.
        """
        if offset > len(self._tokens):
            raise InvalidInput(
                f"offset is {offset}, and {len(self._tokens)} tokens have been drawn; expected at most that",
                field="offset",
            )
        self.followers += 1
        try:
            while self.accepted is None and not self.has_ended:
                await self._news.wait()
            if self.accepted is not None:
                yield self.accepted
            while True:
                news = self._news
                if offset < len(self._tokens):
                    coming, offset = tuple(self._tokens[offset:]), len(self._tokens)
                    yield coming
                    continue
                if self.finished is not None:
                    yield self.finished
                    return
                if self.failure is not None:
                    raise self.failure
                await news.wait()
        finally:
            self.followers -= 1
            self.left_s = time.monotonic()

    def _wake(self) -> None:
        self._news.set()
        self._news = asyncio.Event()


class Runs:
    """All of them, by their request ids."""

    def __init__(self) -> None:
        """None yet."""
        self._runs: dict[str, Run] = {}

    def keep(self, run: Run) -> None:
        """From here on it can be found; `run` has been accepted."""
        assert run.accepted is not None
        self._runs[run.accepted.request_id] = run
        if len(self._runs) > KEPT:
            self.stop(*next(iter(self._runs.items())))

    def find(self, request_id: str, owner: str) -> Run:
        """Raises NotFound for what has gone, failed, or is somebody else's."""
        run = self._runs.get(request_id)
        if run is None or run.owner != owner or run.failure is not None or run.is_given_up:
            raise NotFound(
                f"no generation {request_id!r} that could be resumed; ask anew", kind="generation", name=request_id
            )
        return run

    def stop(self, request_id: str, run: Run) -> None:
        """Stops one, and forgets it."""
        self._runs.pop(request_id, None)
        if run.work is not None:
            run.work.cancel()
