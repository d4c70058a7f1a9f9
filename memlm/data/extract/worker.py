"""A child that reads files for another process, within limits: it may loop, grow or crash, and be replaced.

It reads requests from standard input and answers each on standard output. A request is a line of JSON, `{"kind",
"bytes"}`, and that many bytes. An answer is a line with a number of bytes and so much JSON: `{"text", "title"}` or
`{"why"}`, with `"is_last"` where it ends then. Nothing that it says is trusted to be more than texts.
"""

from __future__ import annotations

import json
import os
import resource
import signal
import sys
from typing import IO

from memlm.base.machine import die_with_parent
from memlm.data.extract.outcome import Unreadable
from memlm.data.extract.readers import read

WALL_FACTOR = 10  # a reader sleeps for nothing: this ends one that waits for ever


def serve(requests: IO[bytes], answers: IO[bytes], cpu_s: float, ram_bytes: int) -> None:
    """Answers requests until they end. A file that takes more than `cpu_s` of processor time ends the process, and so
    does one that takes too much memory, after the answer.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal's Ctrl-C is for the parent, whose end closes our input
    sys.setrecursionlimit(2000)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    _limit_memory(ram_bytes)
    while line := requests.readline():
        request = json.loads(line)
        data = requests.read(request["bytes"])
        signal.setitimer(signal.ITIMER_PROF, cpu_s)  # nobody handles these signals, so that they end native code too
        signal.setitimer(signal.ITIMER_REAL, cpu_s * WALL_FACTOR)
        answer = _answer(request["kind"], data, ram_bytes)
        del data
        encoded = json.dumps(answer).encode()
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.setitimer(signal.ITIMER_REAL, 0)
        answers.write(b"%d\n" % len(encoded) + encoded)
        answers.flush()
        if "is_last" in answer:
            return


def _answer(kind: str, data: bytes, ram_bytes: int) -> dict[str, object]:
    try:
        text, title = read(kind, data)
    except Unreadable as error:
        return {"why": str(error)}
    except MemoryError:
        why = f"takes more than {ram_bytes >> 20:,} MiB of memory to read; split it"
        return {"why": why, "is_last": True}  # what is left of it is not known
    except RecursionError:
        return {"why": "is nested too deeply"}
    except (
        Exception
    ) as error:  # a reader's own, of input that nobody thought of: the file is named, and the rest goes on
        return {"why": f"is damaged ({type(error).__name__}: {error})"[:500]}
    return {"text": text, "title": title}


def _limit_memory(ram_bytes: int) -> None:
    """Bounds the address space, where the system does so: macOS does not, and has but the limit of time."""
    if sys.platform == "linux":
        with open("/proc/self/statm", "rb") as file:
            used = int(file.read().split()[0]) * os.sysconf("SC_PAGE_SIZE")
        resource.setrlimit(resource.RLIMIT_AS, (used + ram_bytes, used + ram_bytes))


def main() -> None:
    """Serves the process that started this one, with the limits that it gives."""
    die_with_parent(int(sys.argv[4]))  # else it would go on with the file that it reads
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what a library prints is no answer
    serve(sys.stdin.buffer, answers, float(sys.argv[2]), int(sys.argv[3]))
