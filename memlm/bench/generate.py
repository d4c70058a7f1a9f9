"""Time per token with a datastore of a million entries, at batch 1."""

from __future__ import annotations

import statistics
from pathlib import Path
from typing import Any

from memlm.base.progress import Progress
from memlm.bench.texts import alternately, library_texts, median_ratio, model_for, time_per_token, workplace
from memlm.data.corpus import Corpus
from memlm.indexing.build import build_index
from memlm.language_model import load

BYTES_PER_ENTRY = 3.6  # of text: a token of the tiny preset's vocabulary, with some to spare


def bench_generate(model: Path | None, *, entries: int, repeats: int, progress: Progress) -> dict[str, Any]:
    """`with_store_over_without` is the time per token with a datastore over the time per token without, at its
    defaults.
    """
    with workplace() as folder:
        texts = library_texts(folder / "texts", int(entries * BYTES_PER_ENTRY))
        path = model_for(model, folder / "model", texts)
        built = build_index(path, Corpus([texts]), folder / "store", keys="now", progress=progress)
        with load(path, [folder / "store"]) as lm:
            for use_store in (True, False):
                time_per_token(lm.generate, 0, use_store=use_store)
            seeds = iter(range(2, 10**6))
            count = 0

            def measured(use_store: bool) -> float:
                nonlocal count
                count += 1
                progress("generate", count, 2 * repeats)
                return time_per_token(lm.generate, next(seeds) // 2, use_store=use_store)

            with_store, without = alternately(repeats, lambda: measured(True), lambda: measured(False))
            k, nprobe = lm.stores[0].k, lm.engine.stores.model_store().datastore.manifest.segments[0].nprobe
    ratio, least, most = median_ratio(with_store, without)
    assert built.quality is not None  # its keys are kept
    return {
        "with_store_over_without": ratio,
        "with_store_over_without_least": least,
        "with_store_over_without_most": most,
        "ms_per_token_with": statistics.median(with_store),
        "ms_per_token_without": statistics.median(without),
        "entries": built.entries,
        "index": built.index,
        "nprobe": nprobe,
        "k": k,
        "recall": built.quality.recall,
    }
