"""Kills at random moments while others read; bytes that were lost or changed: the last commit stands, or it is said."""

import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
import store_history
from random_stores import IVF, Corpus, build, fill, spec

from memlm.errors import Corrupt, MemlmError, NotFound
from memlm.index.store.datastore import Datastore
from memlm.index.store.manifest import JOURNAL, SUFFIXES
from memlm.index.store.writer import StoreWriter


def started(what: str, path: Path) -> subprocess.Popen:
    command = [sys.executable, store_history.__file__, what, str(path)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


@contextmanager
def readers(path: Path, count: int) -> Iterator[None]:
    """Processes that read all the time; none may have found anything wrong."""
    reading = [started("read", path) for _ in range(count)]
    try:
        yield
        for reader in reading:
            assert reader.stdout is not None
            assert reader.stdout.readline(), reader.communicate()[1]  # it did read, and goes on
    finally:
        for reader in reading:
            reader.kill()
        outputs = [reader.communicate()[1] for reader in reading]
    assert outputs == [""] * count


def kill_again_and_again(path: Path, *, kills: int, seed: int) -> tuple[int, int]:
    """Kills writers at random moments of a change, each of which continues after the last one. Returns the number of
    the last commit, and how many kills left a change half done.

    A kill comes a random part of a change's own duration after a commit, so that it meets a living writer in the middle
    of the next change on a machine of any speed.
    """
    chance, number, half_done = random.Random(seed), 0, 0
    for _ in range(kills):
        writer = started("write", path)
        assert writer.stdout is not None
        acknowledged = writer.stdout.readline()  # includes the start of the process
        for _ in range(chance.randint(1, 3)):
            begin_s = time.monotonic()
            acknowledged = writer.stdout.readline() or acknowledged
            change_s = time.monotonic() - begin_s
        time.sleep(chance.uniform(0, change_s))
        writer.kill()
        rest, errors = writer.communicate()
        assert writer.returncode == -signal.SIGKILL, errors  # alive until then, and so in the middle of a change
        acknowledged = (rest.splitlines() or [acknowledged])[-1]
        half_done += (path / JOURNAL).exists()
        with Datastore.open(path) as store:
            assert store.manifest.number >= max(number, int(acknowledged))
            number = store.manifest.number
            assert store.snapshot.verify() == []
            store_history.check(store)
    return number, half_done


@pytest.mark.crash
def test_kills_at_random_moments_lose_nothing_while_others_read(tmp_path):
    with readers(tmp_path / "s", 2):
        number, _ = kill_again_and_again(tmp_path / "s", kills=6, seed=0)
        assert number >= 2 * 6


@pytest.mark.slow
def test_two_hundred_kills_with_four_readers(tmp_path):
    with readers(tmp_path / "s", 4):
        number, half_done = kill_again_and_again(tmp_path / "s", kills=200, seed=1)
        assert number >= 2 * 200
        assert half_done > 50


def answers(path: Path, queries_QD: np.ndarray) -> tuple:
    """All that a store says, and whether `verify` is content."""
    with Datastore.open(path) as store:
        problems = store.snapshot.verify()
        found = store.search(queries_QD, 4, nprobe=4)
        places = [store.snapshot.locate(ids_K) for ids_K in found.ids_QK]
        return problems, found.distances_QK.tolist(), found.values_QK.tolist(), places


def trouble(path: Path, queries_QD: np.ndarray, sound: tuple) -> str:
    """What is said of a store that was tampered with; nothing only where all its answers are as they were."""
    try:
        outputs = answers(path, queries_QD)
    except MemlmError as error:
        return str(error)
    assert outputs[0] or outputs == sound, "a wrong answer, and no word of it"
    return " ".join(outputs[0])


def flips(size: int, most: int, rng: np.random.Generator) -> list[tuple[int, int]]:
    """Places and bits: every place of a small file, some of a large one."""
    places = np.arange(size) if size <= most else np.sort(rng.choice(size, most, replace=False))
    return [(int(place), 1 << int(rng.integers(8))) for place in places]


def changed_bytes_are_told(tmp_path: Path, most: int) -> int:
    """Flips a bit here and there in every file of a store with deletions; each must be found, and named."""
    path = tmp_path / "s"
    store = build(path, Corpus(1), IVF)
    store.delete(["doc-2"])
    store.close()
    queries_QD, rng, tried = Corpus(1).keys_ND[:6], np.random.default_rng(0), 0
    sound = answers(path, queries_QD)
    of_segment = [file for file in (path / "segments" / "000001").iterdir() if file.name != SUFFIXES]  # derived
    files = [path / "CURRENT", path / store.manifest.name, *of_segment]
    assert len(files) == 8
    for file in files:
        whole = file.read_bytes()
        for place, bit in flips(len(whole), most, rng):
            broken = bytearray(whole)
            broken[place] ^= bit
            file.write_bytes(broken)
            named = trouble(path, queries_QD, sound)
            assert file.name in named or (file.name == "CURRENT" and "manifest" in named), f"{file} at {place}: {named}"
            tried += 1
        file.write_bytes(whole)
    assert answers(path, queries_QD) == sound
    return tried


@pytest.mark.crash
def test_changed_bytes_are_found_and_named(tmp_path):
    assert changed_bytes_are_told(tmp_path, 40) > 250


@pytest.mark.slow
def test_every_changed_byte_of_small_files_and_a_thousand_of_large_ones(tmp_path):
    assert changed_bytes_are_told(tmp_path, 1000) > 4000


def test_files_that_lost_their_unsynced_end_are_found_and_named(tmp_path):
    """As after a power cut, where a file system kept names and lost bytes."""
    path, queries_QD = tmp_path / "s", Corpus(1).keys_ND[:2]
    build(path, Corpus(1), IVF).close()
    sound = answers(path, queries_QD)
    files = [path / "CURRENT", path / "manifest-000001.json", *(path / "segments" / "000001").iterdir()]
    for file in files:
        whole = file.read_bytes()
        for kept in (0, 1, len(whole) // 2, len(whole) - 2):
            file.write_bytes(whole[:kept])
            found = trouble(path, queries_QD, sound)
            if file.name == SUFFIXES:  # derived: a short one counts as missing, and no answer changes
                assert not found
            else:
                assert file.name in found or file.name == "CURRENT"
        file.write_bytes(whole)
    assert answers(path, queries_QD) == sound


def test_an_unfinished_build_that_lost_the_end_of_a_file_is_not_gone_on_with(tmp_path):
    with StoreWriter.create(tmp_path / "s", spec(IVF)) as writer:
        fill(writer, Corpus(1), stop_after=6)
    for name in ("keys.npy", "values.npy"):
        file = tmp_path / "s" / "building" / name
        whole = file.read_bytes()
        file.write_bytes(whole[:-1])
        with pytest.raises(Corrupt, match=f"{name} has"):
            StoreWriter.create(tmp_path / "s", spec(IVF))
        file.write_bytes(whole)
    StoreWriter.create(tmp_path / "s", spec(IVF)).close()


def test_a_store_on_a_medium_that_cannot_be_written_can_be_read(tmp_path):
    path = tmp_path / "s"
    build(path, Corpus(1), IVF).close()
    expected = answers(path, Corpus(1).keys_ND[:6])
    for each in [path, *path.rglob("*")]:
        each.chmod(0o555 if each.is_dir() else 0o444)
    try:
        assert answers(path, Corpus(1).keys_ND[:6]) == expected
    finally:
        for each in [path, *path.rglob("*")]:
            each.chmod(0o755 if each.is_dir() else 0o644)


def test_readers_that_come_before_the_first_commit_are_told_to_wait(tmp_path):
    with pytest.raises(NotFound):
        Datastore.open(tmp_path / "s")
