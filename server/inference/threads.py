"""Work in daemon threads for an event loop. Calls of Ray may never return, and other threads keep a process alive."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Any, TypeVar

R = TypeVar("R")


async def in_thread(work: Callable[..., R], *arguments: Any, stays: bool = False) -> R:
    """Does some work in a daemon thread, which `stays` until the end of the process: Linux ends processes that ask for
    it with the thread that started them.
    """
    loop = asyncio.get_running_loop()
    done: asyncio.Future[R] = loop.create_future()

    def finish(set_outcome: Callable[[Any], None], outcome: Any) -> None:
        if not done.done():  # else its caller has left
            set_outcome(outcome)

    def run() -> None:
        try:
            result = work(*arguments)
        except BaseException as error:
            call_soon(loop, finish, done.set_exception, error)
        else:
            call_soon(loop, finish, done.set_result, result)
        if stays:
            threading.Event().wait()

    threading.Thread(target=run, name="ray", daemon=True).start()
    return await done


def call_soon(loop: asyncio.AbstractEventLoop, callback: Callable[..., None], *arguments: Any) -> None:
    """Lets a loop call something soon, from any thread. Nothing is called once the loop is closed."""
    with suppress(RuntimeError):
        loop.call_soon_threadsafe(callback, *arguments)
