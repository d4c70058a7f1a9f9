"""A worker's end of its pipe to the front end: a thread reads messages, and the loop writes them in batches.

The process exits when the front end is gone, since nothing is left to answer.
"""

from __future__ import annotations

import os
import queue
import threading
from collections.abc import Callable
from multiprocessing.connection import Connection

from memlm.server.inference.messages import FromWorker, ToWorker


class Inbox:
    """Messages of the front end that the loop has not taken yet."""

    def __init__(self) -> None:
        self._messages: queue.SimpleQueue[ToWorker] = queue.SimpleQueue()

    def put(self, message: ToWorker) -> None:
        """Adds a message. Any thread may."""
        self._messages.put(message)

    def take(self, *, wait_s: float) -> list[ToWorker]:
        """Returns all messages that have come. Waits up to `wait_s` for the first one."""
        taken: list[ToWorker] = []
        try:
            taken.append(self._messages.get(timeout=wait_s) if wait_s else self._messages.get_nowait())
            while True:
                taken.append(self._messages.get_nowait())
        except queue.Empty:
            return taken


class PipeInbox(Inbox):
    """An inbox whose messages a thread reads from a pipe, so that the front end never blocks in writing."""

    def __init__(self, pipe: Connection) -> None:
        super().__init__()
        self._pipe = pipe
        threading.Thread(target=self._read, name="inbox", daemon=True).start()

    def _read(self) -> None:
        try:
            while True:
                self.put(self._pipe.recv())
        except (EOFError, OSError):
            _exit_process()


class Outbox:
    """Messages to the front end. Those of one iteration of the loop go together, since each write costs both sides."""

    def __init__(self, write: Callable[[list[FromWorker]], None]) -> None:
        """`write` carries them. Where it raises OSError, the front end is gone."""
        self._write, self._unsent = write, list[FromWorker]()

    def send(self, message: FromWorker) -> None:
        """Queues a message for the next `flush`."""
        self._unsent.append(message)

    def flush(self) -> None:
        """Writes the queued messages."""
        if not self._unsent:
            return
        try:
            self._write(self._unsent)
        except OSError:
            _exit_process()
        self._unsent = []


def _exit_process() -> None:
    """Exits at once. The files on disk survive a kill at any point."""
    os._exit(1)
