"""Speed of a build relative to bare passes over the same windows, and growth of its RAM with the corpus."""

from __future__ import annotations

import itertools
import json
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch

from memlm.base.progress import Progress, silent
from memlm.bench.texts import alternately, library_texts, median_ratio, model_for, workplace
from memlm.data.corpus import Corpus
from memlm.data.tokenizer import Tokenizer
from memlm.data.windows import Window, blocks_of
from memlm.errors import InvalidInput
from memlm.indexing.build import BuildReport, build_index
from memlm.indexing.keys import windows_at_once
from memlm.model.files.checkpoint import Checkpoint, load_checkpoint
from memlm.retrieval.encoder import Encoder, batches_of, text_windows

CORPUS_BYTES = 900_000
POLL_S = 0.02


def bench_build(
    model: Path | None,
    given: Corpus | None = None,
    *,
    entries: int | None = None,
    dtype: str = "auto",
    device: str = "auto",
    repeats: int,
    progress: Progress = silent,
) -> dict[str, Any]:
    """Tokens/s of the whole build relative to two bare passes that discard the keys.

    `build_over_forward` is relative to forward passes in batches that torch spreads over the cores,
    `build_over_reading` to the build's encoder, with a batch on each core. The text is the first documents of the
    `given` corpus that have `entries` tokens. Without a corpus it is part of the standard library, and RAM is measured
    too, in float32. Raises InvalidInput if the corpus has fewer tokens.
    """
    with workplace() as folder:
        texts = folder / "texts"
        if given is None or model is None:
            library_texts(texts, CORPUS_BYTES)
        path = model_for(model, folder / "model", texts)
        checkpoint = load_checkpoint(path, dtype=dtype, device=device)
        if given is not None:
            texts = _first_documents(given, checkpoint.tokenizer, entries, folder / "given.jsonl")
        figures = _rates(checkpoint, texts, folder / "store", repeats, progress)
        return figures if given is not None else figures | _memory(path, texts, folder, progress)


def _first_documents(corpus: Corpus, tokenizer: Tokenizer, entries: int | None, path: Path) -> Path:
    """Writes the first documents with this many tokens together, or all, to one file."""
    found = 0
    with path.open("w") as file:
        for document in corpus:
            file.write(json.dumps({"id": document.id, "text": document.text}) + "\n")
            found += len(tokenizer.encode(document.text))
            if entries is not None and found >= entries:
                break
    if found < (entries or 0):
        raise InvalidInput(f"entries is {entries:,}; the texts have {found:,} tokens: give more text", field="entries")
    return path


def _rates(checkpoint: Checkpoint, texts: Path, store: Path, repeats: int, progress: Progress) -> dict[str, Any]:
    reports: list[BuildReport] = []
    count = itertools.count(1)

    def bare(work: Callable[[Checkpoint, list[list[Window]]], float]) -> float:
        progress("passes and builds", next(count), 3 * repeats)
        return _pace(checkpoint, texts, work)

    def whole() -> float:
        progress("passes and builds", next(count), 3 * repeats)
        shutil.rmtree(store, ignore_errors=True)
        reports.append(build_index(checkpoint, Corpus([texts]), store, keys="now"))
        return reports[-1].tokens_per_s

    forward, reading, build = alternately(repeats, partial(bare, _forward), partial(bare, _read), whole)
    figures: dict[str, Any] = {"entries": reports[-1].entries}
    for name, alone in (("forward", forward), ("reading", reading)):
        ratio, least, most = median_ratio(build, alone)
        figures |= {
            f"build_over_{name}": ratio,
            f"build_over_{name}_least": least,
            f"build_over_{name}_most": most,
            f"{name}_tokens_per_s": statistics.median(alone),
        }
    return figures | {
        "build_tokens_per_s": statistics.median(build),
        "check_seconds_not_counted": statistics.median(report.check_seconds for report in reports),
    }


def _memory(model: Path, texts: Path, folder: Path, progress: Progress) -> dict[str, Any]:
    progress("memory at 1x and 4x", 0, 2)
    small, small_entries = _peak_memory(model, texts, folder / "store-1x")
    progress("memory at 1x and 4x", 1, 2)
    more = library_texts(folder / "more", 4 * CORPUS_BYTES)
    large, large_entries = _peak_memory(model, more, folder / "store-4x")
    progress("memory at 1x and 4x", 2, 2)
    return {
        "entries_1x": small_entries,
        "entries_4x": large_entries,
        "peak_memory_mib_1x": small / 2**20,
        "peak_memory_mib_4x": large / 2**20,
        "peak_memory_4x_over_1x": large / small,
    }


def _pace(checkpoint: Checkpoint, texts: Path, work: Callable[[Checkpoint, list[list[Window]]], float]) -> float:
    """Tokens/s of a pass over the windows of a build, in its blocks."""
    windows = [window for document in Corpus([texts]) for window in text_windows(checkpoint, document.text)]
    seconds = work(checkpoint, list(blocks_of(windows, windows_at_once(checkpoint.decoder.config.context_length))))
    return sum(len(window.targets_N) for window in windows) / seconds


def _forward(checkpoint: Checkpoint, blocks: list[list[Window]]) -> float:
    """Seconds to compute all keys, in batches that torch spreads over the cores."""
    batches = [[tokens_BT for _, tokens_BT in batches_of(block, checkpoint.decoder.device)] for block in blocks]
    begin = time.perf_counter()
    with torch.inference_mode():
        for tokens_BT in itertools.chain.from_iterable(batches):
            checkpoint.decoder.keys(tokens_BT)
    return time.perf_counter() - begin


def _read(checkpoint: Checkpoint, blocks: list[list[Window]]) -> float:
    """Seconds to compute all keys with the encoder of a build."""
    begin = time.perf_counter()
    for _ in Encoder(checkpoint.decoder).keys_of_blocks(blocks):
        pass
    return time.perf_counter() - begin


def _peak_memory(model: Path, texts: Path, store: Path) -> tuple[int, int]:
    """Peak of anonymous memory of a build in a process of its own, in bytes, and the number of its entries.

    Pages of mapped files do not count, because the system can drop them.
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
