"""Reads the messages of calls, with a bound on the RAM that unfinished messages take.

gRPC buffers a window of 64 KiB of a message that the server has not asked for, and all of a message that is being read.
So each message is read in a slot, and the number of slots bounds the RAM. When all slots are taken, the oldest
unfinished message loses its slot after a second. A client that sends its message at once is served even while others
hold theirs back.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any

import grpc

from memlm.errors import DeadlineExceeded, InvalidInput, Overloaded
from memlm.server.quota import Quota
from memlm.server.telemetry.calls import Transport

EVICTABLE_AFTER_S = 1.0  # how long a message may take while others wait for its place
POLL_S = 0.1


@dataclass(eq=False, slots=True)
class _PendingRead:
    """A message that is being read, and the time limit that ends the read."""

    caller: str
    limit: asyncio.Timeout
    since_s: float = field(default_factory=time.monotonic)
    is_evicted: bool = False


class MessageReader:
    """Reads the messages of calls, at most `slots` at a time and `per_caller` of one caller, each within `limit_s`."""

    def __init__(self, slots: int, per_caller: int, limit_s: float) -> None:
        self._slots, self._limit_s = Quota("messages under way", slots, per_caller), limit_s
        self._readings: dict[_PendingRead, None] = {}  # the oldest first
        self._waiting: dict[asyncio.Future[None], str] = {}

    async def read_message(self, transport: Transport, caller: str) -> bytes:
        """Returns the message of a call with one request.

        Raises InvalidInput if the call ends without one, DeadlineExceeded after the time limit, and Overloaded if the
        message loses its slot to another caller's.
        """
        limit = asyncio.timeout(self._limit_s)
        reading = _PendingRead(caller, limit)
        try:
            async with limit:
                await self._acquire_slot(caller)
                self._readings[reading] = None
                try:
                    data = await transport.read()
                finally:
                    self._release_slot(reading)
        except TimeoutError:
            if reading.is_evicted:
                raise Overloaded("the message came too slowly while others waited for its place; try again") from None
            raise self._timeout_error() from None
        if data is grpc.aio.EOF:
            raise InvalidInput("the call ended without a message")
        return bytes(data)

    async def read_messages(self, transport: Transport) -> AsyncIterator[bytes]:
        """Yields the messages of a call with many requests. Such calls are bounded by their own quotas, and take no
        slot. Raises DeadlineExceeded for a message that takes too long.
        """
        while True:
            try:
                async with asyncio.timeout(self._limit_s):
                    data: Any = await transport.read()
            except TimeoutError:
                raise self._timeout_error() from None
            if data is grpc.aio.EOF:
                return
            yield data

    def _timeout_error(self) -> DeadlineExceeded:
        return DeadlineExceeded(f"no complete message came within {self._limit_s:g} s; the server has ended the call")

    async def _acquire_slot(self, caller: str) -> None:
        if not self._waiting and self._slots.has_room(caller):
            self._slots.take(caller)
            return
        turn = asyncio.get_running_loop().create_future()
        self._waiting[turn] = caller
        try:
            while not turn.done():
                self._evict(caller)
                self._admit()
                await asyncio.wait((turn,), timeout=POLL_S)
        except BaseException:
            if turn.done():
                self._slots.give(caller)
            raise
        finally:
            self._waiting.pop(turn, None)

    def _release_slot(self, reading: _PendingRead) -> None:
        if not reading.is_evicted:
            del self._readings[reading]
            self._slots.give(reading.caller)
        self._admit()

    def _admit(self) -> None:
        """Assigns free slots, to the caller with the fewest slots first, then in order of arrival."""
        while ready := [turn for turn, caller in self._waiting.items() if self._slots.has_room(caller)]:
            turn = min(ready, key=lambda turn: self._slots.of(self._waiting[turn]))
            self._slots.take(self._waiting.pop(turn))
            turn.set_result(None)

    def _evict(self, caller: str) -> None:
        """Takes a slot from the message that has taken longest: one of this caller if it has its share of slots, else
        one of the caller with the most.
        """
        if self._slots.has_room(caller):
            return
        evictable = [each for each in self._readings if time.monotonic() - each.since_s >= EVICTABLE_AFTER_S]
        if self._slots.of(caller) >= self._slots.per_caller:
            evictable = [each for each in evictable if each.caller == caller]
        oldest = max(evictable, key=lambda each: self._slots.of(each.caller), default=None)
        if oldest is not None:
            del self._readings[oldest]
            self._slots.give(oldest.caller)
            oldest.is_evicted = True
            if not oldest.limit.expired():
                oldest.limit.reschedule(asyncio.get_running_loop().time())
