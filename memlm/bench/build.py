"""How much of the bare forward pass a whole build keeps, and whether its memory grows with the corpus."""

from __future__ import annotations

import itertools
import json
import shutil
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch

from memlm.bench.texts import alternately, library_texts, median_ratio, model_for, workplace
from memlm.build import BLOCK_WINDOWS, build_index
from memlm.checkpoint import Checkpoint, load_checkpoint
from memlm.corpus import Corpus
from memlm.keys import batches_of
from memlm.progress import Progress
from memlm.scoring import document_windows
from memlm.windows import blocks_of

CORPUS_BYTES = 900_000
POLL_S = 0.02


def bench_build(model: Path | None, *, repeats: int, progress: Progress) -> dict[str, Any]:
    """`build_over_forward` is tokens/s of the whole build over tokens/s of the same windows' bare forward pass."""
    with workplace() as folder:
        texts = library_texts(folder / "texts", CORPUS_BYTES)
        more = library_texts(folder / "more", 4 * CORPUS_BYTES)
        path = model_for(model, folder / "model", texts)
        checkpoint, count = load_checkpoint(path), 0
        check_seconds: list[float] = []

        def bare() -> float:
            nonlocal count
            count += 1
            progress("forward and build", count, 2 * repeats)
            return _forward_rate(checkpoint, texts)

        def whole() -> float:
            nonlocal count
            count += 1
            progress("forward and build", count, 2 * repeats)
            shutil.rmtree(folder / "store", ignore_errors=True)
            report = build_index(checkpoint, Corpus([texts]), folder / "store")
            check_seconds.append(report.check_seconds)
            return report.tokens_per_s

        forward, build = alternately(repeats, bare, whole)
        ratio, least, most = median_ratio(build, forward)
        progress("memory at 1x and 4x", 0, 2)
        small, small_entries = _peak_memory(path, texts, folder / "store-1x")
        progress("memory at 1x and 4x", 1, 2)
        large, large_entries = _peak_memory(path, more, folder / "store-4x")
        progress("memory at 1x and 4x", 2, 2)
    return {
        "build_over_forward": ratio,
        "build_over_forward_least": least,
        "build_over_forward_most": most,
        "forward_tokens_per_s": statistics.median(forward),
        "build_tokens_per_s": statistics.median(build),
        "check_seconds_not_counted": statistics.median(check_seconds),
        "entries_1x": small_entries,
        "entries_4x": large_entries,
        "peak_memory_mib_1x": small / 2**20,
        "peak_memory_mib_4x": large / 2**20,
        "peak_memory_4x_over_1x": large / small,
    }


def _forward_rate(checkpoint: Checkpoint, texts: Path) -> float:
    """Tokens/s of the keys of the very windows that a build reads, in batches that torch spreads over the cores, and
    thrown away.
    """
    windows = [window for document in Corpus([texts]) for window in document_windows(checkpoint, document.text)]
    blocks = [[tokens_BT for _, tokens_BT in batches_of(block)] for block in blocks_of(windows, BLOCK_WINDOWS)]
    begin = time.perf_counter()
    with torch.inference_mode():
        for tokens_BT in itertools.chain.from_iterable(blocks):
            checkpoint.decoder.keys(tokens_BT)
    return sum(len(window.targets_N) for window in windows) / (time.perf_counter() - begin)


def _peak_memory(model: Path, texts: Path, store: Path) -> tuple[int, int]:
    """The most anonymous memory that a build in a process of its own ever had, in bytes, and the entries it made.

    Pages of mapped files do not count: the system drops them when it wants to.
    """
    command = [sys.executable, "-m", "memlm", "index", "build", str(texts), "--model", str(model.resolve())]
    command += ["--out", str(store)]
    process = subprocess.Popen(
        [*command, "--json"], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, cwd=store.parent
    )
    peak = 0
    while process.poll() is None:
        peak = max(peak, _anonymous_bytes(process.pid))
        time.sleep(POLL_S)
    answer = process.stdout.read() if process.stdout else ""
    return peak, int(json.loads(answer)["entries"])


def _anonymous_bytes(pid: int) -> int:
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("RssAnon:")), 0)
