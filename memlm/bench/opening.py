"""Seconds from a cold start to a datastore's first answer, in a new process with an empty page cache."""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np

from memlm.base.progress import Progress, silent
from memlm.index.store.datastore import Datastore

# Python and its libraries are loaded first, because they do not depend on the datastore.
_OPEN = """
import sys, time
import numpy as np
from memlm.index.store.datastore import Datastore
query = np.load(sys.argv[2])
begin = time.perf_counter()
with Datastore.open(sys.argv[1]) as store:
    opened = time.perf_counter()
    found = store.search(query, 32)
    store.snapshot.locate(found.ids_QK[0, :8])
    print(opened - begin, time.perf_counter() - begin)
"""


def bench_opening(
    store: str | Path, work: str | Path, *, repeats: int = 5, progress: Progress = silent
) -> dict[str, Any]:
    """Seconds to open a datastore, and to its first answer with eight places. Leaves a query file in `work`."""
    query_path, store = Path(work) / "query.npy", Path(store)
    times = []
    with Datastore.open(store) as datastore:
        snapshot = datastore.snapshot
        facts = {"entries": snapshot.num_entries, "index": snapshot.index_kind, "bytes": snapshot.bytes_on_disk}
        ids = snapshot.sample(repeats, 0)
        queries_QD = snapshot.keys(ids)
    for number in range(repeats):
        np.save(query_path, queries_QD[number % len(queries_QD)][None])
        dropped = _forget(store)
        answer = subprocess.run(
            [sys.executable, "-c", _OPEN, str(store), str(query_path)], check=True, capture_output=True, text=True
        )
        times.append([float(each) for each in answer.stdout.split()])
        progress("open", number + 1, repeats)
    return {
        **facts,
        "dropped_from_memory": dropped,
        "open_s": statistics.median(each[0] for each in times),
        "first_answer_s": statistics.median(each[1] for each in times),
        "slowest_first_answer_s": max(each[1] for each in times),
    }


def _forget(store: Path) -> bool:
    """Drops a datastore's files from the page cache. Returns whether the system can do that."""
    if not hasattr(os, "posix_fadvise"):
        return False
    for path in store.rglob("*"):
        if path.is_file():
            descriptor = os.open(path, os.O_RDONLY)
            try:
                os.fsync(descriptor)
                os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            finally:
                os.close(descriptor)
    return True
