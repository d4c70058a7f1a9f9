"""A store's locks are the system's: the file stays, whoever holds it, and a process that is killed holds none."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from random_stores import IVF, Corpus, add, build

from memlm.errors import Locked
from memlm.index.store.compaction import compact
from memlm.index.store.datastore import Datastore
from memlm.index.store.lock import COMMIT_LOCK, LOCK, commit_lock, write_lock

HOLDER = """
import sys
from pathlib import Path
from memlm.index.store.lock import commit_lock, write_lock
with write_lock(Path(sys.argv[1])), commit_lock(Path(sys.argv[1])):
    print("held", flush=True)
    sys.stdin.read()
"""


def test_the_files_of_locks_are_never_removed(tmp_path: Path) -> None:
    """A lock whose file is removed and made anew is two locks."""
    path = tmp_path / "s"
    build(path, Corpus(1), IVF).close()
    inodes = {name: (path / name).stat().st_ino for name in (LOCK, COMMIT_LOCK)}
    add(path, Corpus(2, prefix="more"))
    with Datastore.open(path) as store:
        store.delete(["doc-0"])
    compact(path)
    with write_lock(path), commit_lock(path):
        pass
    assert {name: (path / name).stat().st_ino for name in (LOCK, COMMIT_LOCK)} == inodes


def test_a_killed_process_holds_no_lock(tmp_path: Path) -> None:
    path = tmp_path / "s"
    build(path, Corpus(1), IVF).close()
    command = [sys.executable, "-c", HOLDER, str(path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "held\n"
        with pytest.raises(Locked, match="another process is writing"):
            add(path, Corpus(2, prefix="more"))
        os.kill(holder.pid, signal.SIGKILL)
        holder.wait(10)
    add(path, Corpus(2, prefix="more"))
    with Datastore.open(path) as store:
        assert store.delete(["doc-0"]).num_documents == 1
        assert store.snapshot.verify() == []
