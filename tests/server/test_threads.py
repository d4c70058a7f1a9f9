"""Work in threads for the front end's loop."""

import asyncio
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator

import pytest
from running import PATIENCE_S, start_child, wait_until

from memlm.server.inference.threads import in_thread


@pytest.fixture
def children() -> Iterator[list["subprocess.Popen[bytes]"]]:
    started = list[subprocess.Popen[bytes]]()
    yield started
    for child in started:
        child.kill()
        child.wait(PATIENCE_S)


@pytest.mark.skipif(sys.platform != "linux", reason="asks Linux to end a process with a thread")
async def test_a_process_lives_as_long_as_the_thread_that_started_it(children) -> None:
    """So a thread that starts a cluster has to stay."""
    children.append(await in_thread(start_child))
    await asyncio.to_thread(wait_until, lambda: children[0].poll() == -signal.SIGKILL)
    children.append(await in_thread(start_child, stays=True))
    await in_thread(os.getpid)  # another thread begins and ends
    with pytest.raises(subprocess.TimeoutExpired):
        children[1].wait(1)


async def test_work_in_a_thread_gives_its_result_or_its_error(caplog) -> None:
    def fail() -> None:
        raise OSError("of the work")

    assert await in_thread(max, 1, 2) == 2
    with pytest.raises(OSError, match="of the work"):
        await in_thread(fail)


async def test_work_that_nobody_waits_for_any_more_ends_alone(caplog) -> None:
    may_end = threading.Event()
    waiting = asyncio.create_task(in_thread(may_end.wait))
    await asyncio.sleep(0)
    (thread,) = [each for each in threading.enumerate() if each.name == "ray" and each._target.__name__ == "run"][-1:]
    assert thread.daemon
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    may_end.set()
    await asyncio.to_thread(thread.join, PATIENCE_S)
    await asyncio.sleep(0)
    assert not thread.is_alive()
    assert caplog.text == ""
