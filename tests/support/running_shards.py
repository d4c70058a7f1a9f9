"""Shards in this process and in processes of their own, and streams that ask a server meanwhile."""

import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

import numpy as np
from random_stores import Corpus, add, build
from running import RunningServer, server_forker, wait_until
from server_forkserver import ForkedServer

from memlm.client.client import Client
from memlm.distributed.shard_server import ShardSegments, ShardServer
from memlm.distributed.shards import Shards
from memlm.errors import MemlmError
from memlm.index.neighbors import Neighbors
from memlm.index.store.datastore import Datastore
from memlm.index.store.shards import ShardNumber, split

STREAMS, TOKENS = 16, 8


@contextmanager
def served(path: Path, number: int, num_shards: int, address: str = "127.0.0.1:0") -> Iterator[str]:
    """One shard of a store. Yields its address."""
    with ShardServer(ShardSegments(path, ShardNumber(number, num_shards)), address) as server:
        yield server.address


@contextmanager
def sharded(path: Path, num_shards: int, *, replicas: int = 1) -> Iterator[Shards]:
    """All shards of a store, and their client."""
    with ExitStack() as held:
        addresses = [
            held.enter_context(served(path, number, num_shards))
            for number in range(1, num_shards + 1)
            for _ in range(replicas)
        ]
        yield held.enter_context(Shards(addresses))


def cut_store(folder: Path, index: str = "Flat", num_shards: int = 4) -> Path:
    """A store of several segments, some documents deleted and some entries twice, so that distances are equal."""
    build(folder / "store", Corpus(1, num_documents=24), index).close()
    split(folder / "store", num_shards)
    add(folder / "store", Corpus(1, num_documents=24, prefix="again"), index=index)  # equal keys
    with Datastore.open(folder / "store") as store:
        store.delete(["doc-5", "again-1"])
    return folder / "store"


def assert_same(found: Neighbors, expected: Neighbors) -> None:
    np.testing.assert_array_equal(found.ids_QK, expected.ids_QK)
    np.testing.assert_array_equal(found.distances_QK, expected.distances_QK)
    np.testing.assert_array_equal(found.values_QK, expected.values_QK)


class ShardProcess:
    """`memlm shard` in a process of its own, forked as servers are. `first` may start the command itself elsewhere."""

    def __init__(self, store: Path, shard: str, listen: str, log: Path, first: Sequence[str] = ()) -> None:
        self._first, self._words = first, ["shard", str(store), "--shard", shard]
        self._listen, self._log = listen, log
        self.process: subprocess.Popen[bytes] | ForkedServer
        self.start()

    def start(self) -> None:
        """Starts it, also anew at its address."""
        words = [*self._words, "--listen", self._listen]
        if self._first:
            command = [*self._first, sys.executable, "-c", "from memlm.cli import main; main()"]
            with self._log.open("w") as file:
                self.process = subprocess.Popen([*command, *words], stdout=file, stderr=file)
        else:
            self._log.write_bytes(b"")  # of a process before it, the address would be read
            self.process = server_forker().start(words, self._log, "pass")
        wait_until(lambda: "entries at" in self._log.read_text() or self.process.poll() is not None)
        assert self.process.poll() is None, self._log.read_text()
        self._listen = self.address = self._log.read_text().split("entries at", 1)[1].split()[0]

    def end(self, number: signal.Signals) -> int:
        """Sends a signal, and waits for the end."""
        self.process.send_signal(number)
        return self.process.wait(60)


@contextmanager
def shard_processes(store: Path, folder: Path, *shards: str) -> Iterator[list[ShardProcess]]:
    """Shards by their numbers, on sockets or on ports by turns."""
    with ExitStack() as held:
        started = []
        sockets = held.enter_context(tempfile.TemporaryDirectory(dir="/tmp"))  # TMPDIR may be too long for a socket
        for place, shard in enumerate(shards):
            listen = f"unix:{sockets}/{place}.sock" if place % 2 else "127.0.0.1:0"
            process = ShardProcess(store, shard, listen, folder / f"shard-{place}.log")
            held.callback(process.process.kill)
            started.append(process)
        yield started
        for process in started:
            assert process.end(signal.SIGTERM) == 0, process._log.read_text()


class Load:
    """Streams that ask a server over and over. `failures` are their errors, `wrong` the texts that are others."""

    def __init__(self, server: RunningServer, expected: str) -> None:
        self.answers, self.failures, self.wrong = 0, list[MemlmError](), list[str]()
        self._server, self._expected, self._done = server, expected, threading.Event()
        self._threads = [threading.Thread(target=self._ask) for _ in range(STREAMS)]

    def _ask(self) -> None:
        with Client(self._server.address) as client:
            while not self._done.is_set():
                try:
                    text = ask(client)
                except MemlmError as error:
                    self.failures.append(error)
                    time.sleep(0.05)
                else:
                    self.answers += 1
                    self.wrong += [text] * (text != self._expected)

    def __enter__(self) -> "Load":
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._done.set()
        for thread in self._threads:
            thread.join(60)

    def wait_for(self, answers: int) -> None:
        """Waits until that many further answers came."""
        wanted = self.answers + answers
        wait_until(lambda: self.answers >= wanted)


def ask(client: Client) -> str:
    return client.generate("the quick", max_tokens=TOKENS, temperature=0).result().text
