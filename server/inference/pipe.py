"""An inference worker's end of its pipe: what the front says is heard by a thread, what it is told goes out in batches.

Once the front is gone, so is all who could wait for an answer: the process ends.
"""

from __future__ import annotations

import os
import queue
import threading
from multiprocessing.connection import Connection

from memlm.server.inference.messages import FromWorker, ToWorker


class Inbox:
    """What the front has said, read by a thread of its own, so that the front never waits to say it."""

    def __init__(self, pipe: Connection) -> None:
        """Starts reading."""
        self._pipe = pipe
        self._messages: queue.SimpleQueue[ToWorker] = queue.SimpleQueue()
        threading.Thread(target=self._read, name="inbox", daemon=True).start()

    def take(self, *, wait_s: float) -> list[ToWorker]:
        """All that has come; where nothing has, waits for the first of it."""
        taken: list[ToWorker] = []
        try:
            taken.append(self._messages.get(timeout=wait_s) if wait_s else self._messages.get_nowait())
            while True:
                taken.append(self._messages.get_nowait())
        except queue.Empty:
            return taken

    def _read(self) -> None:
        try:
            while True:
                self._messages.put(self._pipe.recv())
        except (EOFError, OSError):
            _exit_process()


class Outbox:
    """What the front is told: all that a turn of the loop has to say in one message, since each costs both sides."""

    def __init__(self, pipe: Connection) -> None:
        """Takes the worker's end of the pipe."""
        self._pipe, self._unsent = pipe, list[FromWorker]()

    def send(self, message: FromWorker) -> None:
        """Tells it with the next `flush`."""
        self._unsent.append(message)

    def flush(self) -> None:
        """Tells what there is to tell."""
        if not self._unsent:
            return
        try:
            self._pipe.send(self._unsent)
        except OSError:
            _exit_process()
        self._unsent = []


def _exit_process() -> None:
    """The front is gone, and with it all who could wait for an answer. What is on disk stands a kill at any point."""
    os._exit(1)
