"""Long use: memory stays flat, and who reads slowly, or not at all, harms nobody else."""

import random
import threading
import time
from pathlib import Path

import pytest
from running import PATIENCE_S, RunningServer, anonymous_bytes
from texts import make_text

from memlm.client import Client

GROWTH_BYTES = 4 << 20  # allocators' noise is an eighth of that; the long test finds 200 bytes a round


def use(client: Client, rng: random.Random, rounds: int) -> None:
    """What people do, some of it broken off."""
    for number in range(rounds):
        with client.generate("the memory", max_tokens=rng.randint(1, 12), seed=number, neighbors=2) as stream:
            for _ in zip(range(rng.randint(1, 12)), stream, strict=False):
                pass
        client.score(make_text(number % 50, rng.randint(5, 40)), token_scores=True)
        client.search(None, make_text(number % 50, 10), k=8)
        with client.session() as session:
            session.append(make_text(number % 50, 8))
            with session.fork() as twin, twin.generate(" it", max_tokens=3) as stream:
                list(stream)


def check(model: Path, store: Path, folder: Path, rounds: int) -> None:
    with RunningServer(folder / "log", model, store, options=("--threads", "1")) as server:
        pids = server.process.pid, server.worker_pid
        with Client(server.address) as client:
            use(client, random.Random(0), rounds)
            before = [anonymous_bytes(pid) for pid in pids]
            use(client, random.Random(0), rounds)  # the same again: what libraries keep for each shape they have now
            after = [anonymous_bytes(pid) for pid in pids]
            assert client.list_sessions() == ()
        assert server.worker_pid == pids[1]
    assert all(now < then + GROWTH_BYTES for then, now in zip(before, after, strict=True)), (before, after)


def test_memory_stays_flat(model_folder: Path, store_folder: Path, tmp_path: Path) -> None:
    check(model_folder, store_folder, tmp_path, 60)


@pytest.mark.slow
def test_memory_stays_flat_over_as_much_as_an_hour_brings(
    model_folder: Path, store_folder: Path, tmp_path: Path
) -> None:
    check(model_folder, store_folder, tmp_path, 20_000)


def test_who_stops_reading_harms_nobody(tmp_path: Path, long_model: Path) -> None:
    """What is drawn for who does not read waits in bounds; all others go on."""
    with (
        RunningServer(tmp_path / "log", long_model, options=("--threads", "1")) as server,
        Client(server.address) as stopped,
        Client(server.address) as slow,
        Client(server.address) as brisk,
    ):
        streams = [stopped.generate("a", temperature=0, top_logprobs=20) for _ in range(3)]
        for stream in streams:
            next(stream)
        read = list[str]()

        def read_slowly() -> None:
            with slow.generate("a", temperature=0, max_tokens=200) as stream:
                for token in stream:
                    read.append(token.text)
                    time.sleep(0.01)

        reader = threading.Thread(target=read_slowly)
        reader.start()
        before = anonymous_bytes(server.process.pid)
        for number in range(30):
            assert len(list(brisk.generate("a", max_tokens=8, temperature=0, timeout_s=10))) == 8, number
        reader.join(PATIENCE_S)
        assert len(read) == 200
        assert anonymous_bytes(server.process.pid) < before + (128 << 20)
        for stream in streams:
            stream.close()
        assert len(list(brisk.generate("a", max_tokens=8, temperature=0, timeout_s=10))) == 8
