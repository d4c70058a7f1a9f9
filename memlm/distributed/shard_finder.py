"""Finds the shards of a name on a Ray cluster, in a process of its own.

Ray ends a process of its cluster that has lost the head node. A server must outlive that: its shards answer without
Ray. So a child process joins the cluster, and answers each line on its input with a line of JSON. It ends with its
input.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from contextlib import ExitStack, suppress
from typing import Any

from memlm.base.interpreter import same_imports
from memlm.base.options import RAY
from memlm.errors import MemlmError, NotFound, Unavailable

FOLDER_S, ASK_AGAIN_S = 60.0, 0.2
ASK_S = 60.0  # for Ray to answer, with the start of a process that asks it


class ShardFinder:
    """Knows the addresses of the shards of `ray://NAME` on the cluster at `address`, as `joined` finds it. For one
    thread, but for `close`.
    """

    def __init__(self, url: str, address: str | None = None) -> None:
        self.url, self._cluster = url, address
        self.addresses = dict[str, str]()  # by the names of actors, as long as these exist
        self.path, self.num_processes = "", 0
        self._process: subprocess.Popen[str] | None = None
        self._is_closed = False

    def ask(self) -> None:
        """Asks Ray. An address holds until its actor has another one, or is gone, so that nothing changes while Ray
        does not answer. Raises Unavailable then, and where Ray takes longer than a minute.
        """
        try:
            answer = json.loads(self._line())
        except (OSError, ValueError) as error:  # no process can be started, or it was killed in the middle of a line
            self._end()
            raise Unavailable(f"Ray does not tell where the shards of {self.url} are ({error})") from error
        if (problem := answer.get("problem")) is not None:
            self._end()  # it ends by itself, and the next one may find a cluster
            raise Unavailable(problem)
        found: dict[str, list[str] | None] = answer["shards"]
        self.num_processes = len(found)  # with those that do not answer
        self.path = next((each[0] for each in found.values() if each), self.path)
        known = {actor: each[1] if each else self.addresses.get(actor, "") for actor, each in found.items()}
        self.addresses = {actor: address for actor, address in known.items() if address}

    def _line(self) -> str:
        process = self._process
        if process is None or process.poll() is not None:
            self._end()
            command = [sys.executable, "-m", "memlm.distributed.shard_finder", self.url.removeprefix(RAY)]
            command += [] if self._cluster is None else [self._cluster]
            self._process = process = subprocess.Popen(
                command,
                env={**os.environ, **same_imports()},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
                start_new_session=True,
            )
        line = ""
        if self._is_closed:
            process.kill()
        assert process.stdin is not None
        assert process.stdout is not None
        killing = threading.Timer(ASK_S, process.kill)  # a cluster that is lost may never answer
        killing.daemon = True
        killing.start()
        with suppress(OSError, ValueError):  # it has ended
            process.stdin.write("\n")
            process.stdin.flush()
            line = process.stdout.readline()
        killing.cancel()
        return line or json.dumps({"problem": f"Ray does not tell where the shards of {self.url} are"})

    def close(self) -> None:
        """Ends the child process. Another thread's `ask` raises."""
        self._is_closed = True
        self._end()

    def _end(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            process.communicate()


def find_folder(url: str, address: str | None = None) -> str:
    """The folder of the datastore whose shards run as `ray://NAME`, on the cluster at `address`, as `joined` finds it.

    Raises NotFound for a name without shards, and Unavailable without a cluster, or if no shard answers in a minute.
    """
    finder, deadline_s = ShardFinder(url, address), time.monotonic() + FOLDER_S
    try:
        finder.ask()
        while finder.num_processes and not finder.path:  # they are busy, or being started again
            if time.monotonic() > deadline_s:
                raise Unavailable(f"{finder.num_processes} shards of {url} run, and none answers in {FOLDER_S:g} s")
            time.sleep(ASK_AGAIN_S)
            finder.ask()
    finally:
        finder.close()
    if not finder.path:
        raise no_shards(url)
    return finder.path


def no_shards(url: str) -> NotFound:
    """The error for a name without shards."""
    name = url.removeprefix(RAY)
    return NotFound(
        f"no shards of the name {name!r} answer on the Ray cluster; start some: memlm shard STORE --engine ray --name"
        f" {name} --shards N",
        kind="shards",
        name=name,
    )


def main() -> None:
    """Answers until the input ends."""
    with os.fdopen(os.dup(1), "w") as answers, ExitStack() as held:
        os.dup2(2, 1)  # whatever Ray prints is no answer
        answer: dict[str, Any]
        try:
            from memlm.distributed.ray_shards import find, joined

            held.enter_context(joined(sys.argv[2] if len(sys.argv) > 2 else None))
        except ImportError:
            answer = {"problem": "ray:// needs Ray; install it: pip install 'memlm[ray]'"}
        except MemlmError as error:
            answer = {"problem": str(error)}
        else:
            for _ in sys.stdin:
                found = {actor: each and (each.path, each.address) for actor, each in find(sys.argv[1]).items()}
                print(json.dumps({"shards": found}), file=answers, flush=True)
            return
        print(json.dumps(answer), file=answers, flush=True)


if __name__ == "__main__":
    main()
