"""A store may be copied while somebody writes to it: a copy holds one commit's content, or is refused by name."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import pytest
import store_history

from memlm.errors import Corrupt, NotFound
from memlm.index.store.datastore import Datastore


def copies_beside_a_writer(folder: Path, count: int, commits: int) -> tuple[int, int, int]:
    """Copies a store `count` times, in turn by hard links and by bytes, and goes on until copies of `commits` commits
    are sound: on a slow disk many copies are made while the writer commits once. Returns how many were sound, of how
    many commits, and how many the writer overtook.
    """
    store, sound, overtaken, numbers = folder / "store", 0, 0, set[int]()
    command = [sys.executable, store_history.__file__, "write", str(store)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as writer:
        try:
            assert writer.stdout is not None
            assert writer.stdout.readline(), writer.communicate()[1]
            number, until = 0, time.monotonic() + 120
            while number < count or (len(numbers) < commits and time.monotonic() < until):
                copy = folder / f"copy-{number}"
                how = ("-al", "-r")[number % 2]
                done = subprocess.run(["cp", how, str(store), str(copy)], capture_output=True, timeout=60)
                try:
                    with Datastore.open(copy) as opened:
                        store_history.check(opened)
                        if done.returncode == 0:
                            assert opened.snapshot.verify() == []
                        numbers.add(opened.manifest.number)
                    sound += 1
                except (Corrupt, NotFound):  # the commit it began with was swept away before cp came to its files
                    overtaken += 1
                number += 1
            assert writer.poll() is None, writer.communicate()[1]
        finally:
            writer.kill()
    with Datastore.open(store) as opened:
        assert opened.snapshot.verify() == []
        store_history.check(opened)
    return sound, overtaken, len(numbers)


def test_copies_beside_a_writer_are_of_one_commit(tmp_path: Path) -> None:
    sound, _, commits = copies_beside_a_writer(tmp_path, 40, 3)
    assert sound > 4
    assert commits > 2


@pytest.mark.slow
def test_five_hundred_copies_beside_a_writer_are_of_one_commit(tmp_path: Path) -> None:
    sound, overtaken, _ = copies_beside_a_writer(tmp_path, 500, 3)
    assert sound + overtaken >= 500
    assert sound > 50
